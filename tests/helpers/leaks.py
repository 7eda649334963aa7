"""A campaign on split digits, its model retrained, and the judge that must refuse what either has seen."""

import themis
from themis import Target
from themis.data.groups import seed_hashes
from themis.perturb import choose_perturbation
from themis.retraining.examine import Exam, examine
from themis.retraining.material import of_faults
from themis.retraining.recipe import Recipe
from themis.retraining.tune import tune
from themis.runs.parts import PARTS, read_parts
from themis.target.ledger import allow_trained_seeds

SHARES = (0.4, 0.3, 0.3)
NOISE = choose_perturbation("gaussian", 0.3)
REFUSED = r"judge seeds must be seeds that the weights were not trained on, but [\d,]+ of [\d,]+ were \(seed"


def searched(trained, out):
    """A campaign on split digits, in the folder `out`; its data, its parts and its model."""
    model, digits = trained
    data = digits[:400]
    result = themis.run(Target(model), data, NOISE, out=out, split=SHARES, max_tests=1280)
    return result, out, data, read_parts(out, data), Target(model, oracle="wrong")


def retrained(case, target=None, parts=None):
    """One epoch on the case's faults; or of another target, on those that a campaign on other parts finds."""
    result, _, _, own, first = case
    target = target or first
    with allow_trained_seeds():
        found = result if parts is None else themis.run(target, parts.search, NOISE, max_tests=640)
    parts = parts or own
    material = of_faults(found.faults, parts.search, NOISE, target, clean=parts.train)
    return tune(target, material, NOISE, Recipe(epochs=1))


def judge(target, seeds, ledger):
    return examine(target, seeds, NOISE, Exam(draws=1, passes=0), ledger=ledger)


def assert_disjoint(parts):
    """No two parts share a picture."""
    of_each = [set(seed_hashes(getattr(parts, name)).tolist()) for name in PARTS]
    assert sum(map(len, of_each)) == len(set.union(*of_each)) > 0
