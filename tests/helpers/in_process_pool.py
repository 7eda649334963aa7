"""A pool whose workers live in this process: calls are executed in random order, and workers are lost at random."""

import pickle
import random
from functools import cache, partial


class InProcessPool:
    """As a pool on a cluster behaves; what goes in and out is pickled, so that nothing is shared by accident."""

    def __init__(self, make, n_workers, *, random_seed=0, loss=0.1):
        self.make, self.loss, self.random = make, loss, random.Random(random_seed)
        self.workers, self.broadcasts = [make() for _ in range(n_workers)], []
        self.waiting, self.done, self.n_calls, self.n_lost, self.n_hastened = {}, {}, 0, 0, 0
        self.n_discarded = 0

    @property
    def n_workers(self):
        return len(self.workers)

    def share(self, value):
        return value

    def broadcast(self, method, *values):
        self.broadcasts.append((method, pickle.dumps(values)))
        for worker in self.workers:
            getattr(worker, method)(*pickle.loads(self.broadcasts[-1][1]))

    def combine_all(self, method, combine, *values):
        answer = cache(partial(self._combine_all, method, combine, *values))
        if self.random.random() < 0.5:  # else calls that are made later are executed before
            answer()
        return answer

    def combined(self, answer):
        if self.waiting and self.random.random() < 0.5:
            self.run_one()
        return answer()

    def _combine_all(self, method, combine, *values):
        answers = [pickle.loads(pickle.dumps(getattr(worker, method)(*values))) for worker in self.workers]
        for k in range(len(self.workers)):
            if self.random.random() < self.loss:  # it has died with what it has taken
                self.workers[k], answers = self.replacement(), []
        while len(answers) > 1:
            first, second, *answers = answers
            answers.append(getattr(self.workers[0], combine)(first, second))
        return answers[0] if answers else None

    def submit(self, label, method, *values, is_urgent=True):
        assert label
        self.waiting[self.n_calls] = (method, pickle.dumps(values))
        self.n_calls += 1
        return self.n_calls - 1

    def hasten(self, call):
        assert call in self.waiting or call in self.done
        self.n_hastened += 1

    def result(self, call):
        while call not in self.done:
            self.run_one()
        return pickle.loads(self.done.pop(call))

    def run_one(self):
        number = self.random.choice([*self.waiting])
        method, values = self.waiting.pop(number)
        k = self.random.randrange(len(self.workers))
        answer = pickle.dumps(getattr(self.workers[k], method)(*pickle.loads(values)))
        if self.random.random() < self.loss:  # it has died before its answer arrived
            self.waiting[number] = (method, values)
            self.workers[k] = self.replacement()
        else:
            self.done[number] = answer

    def replacement(self):
        self.n_lost += 1
        worker = self.make()
        for method, values in self.broadcasts:
            getattr(worker, method)(*pickle.loads(values))
        return worker

    def discard(self, call):
        self.n_discarded += 1
        self.waiting.pop(call, None)
        self.done.pop(call, None)
