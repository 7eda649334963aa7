"""Retraining models with several inputs per example, one of which is perturbed."""

import torch
from torch import nn

import themis
from themis.data.seeds import read_seeds
from themis.oracle import Wrong
from themis.retraining.batches import Disturber


class Both(nn.Module):
    """A picture, and a number that tells which of two ways to read it."""

    def __init__(self):
        super().__init__()
        self.picture, self.way = nn.Linear(64, 16), nn.Linear(1, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, picture, way):
        return self.out(torch.relu(self.picture(picture.flatten(1)) + self.way(way)))


def examples(n, random_seed):
    rng = torch.Generator().manual_seed(random_seed)
    picture, way = 0.3 * torch.rand(n, 1, 8, 8, generator=rng), torch.randint(2, (n, 1), generator=rng).float()
    is_bright = torch.rand(n, generator=rng) < 0.5
    picture[is_bright] += 0.3
    return {"picture": picture, "way": way}, (is_bright ^ way[:, 0].bool()).long()


def trained_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, (inputs, labels) = Both(), examples(600, 1)
        optimiser = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(200):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(**inputs), labels).backward()
            optimiser.step()
    return net.eval()


def test_a_model_with_several_inputs_is_retrained_with_the_other_inputs_of_each_seed(tmp_path):
    data, net = examples(400, 2), trained_net()
    run = themis.run(net, data, "gaussian", magnitude=0.8, max_tests=600, split=(0.4, 0.3, 0.3), coverage=None)
    options = {"random_seeds": 1, "epochs": 4, "batches": 40, "draws": 4, "passes": 400, "learning_rate": 3e-3}
    result = themis.retrain(run, data=data, out=tmp_path / "better", **options)
    [outcome] = result.outcomes
    assert outcome.before.clean.mean() > 0.95  # the other inputs are those of the seed
    assert outcome.after[0].clean.mean() > 0.95
    assert outcome.change.disturbed.difference > 0.01
    assert outcome.before.old_row is not None
    assert outcome.change.mended[0] > 0.1


def test_the_other_inputs_of_seeds_in_two_parts_are_joined():
    data, net = examples(10, 2), trained_net()
    seeds, target = read_seeds(data), themis.Target(net)
    parts = [(seeds[:6], torch.tensor([5, 1])), (seeds[6:], torch.tensor([3]))]
    disturber = Disturber(target, parts, Wrong())
    rows = torch.tensor([2, 0])
    with target.opened(), torch.no_grad():
        outputs = disturber.forward(target, disturber.take(rows), rows)
        expected = net(**{name: tensor[[9, 5]] for name, tensor in data[0].items()})
    assert torch.equal(outputs, expected)
