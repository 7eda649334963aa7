"""Material holds exactly the inputs that a campaign tested, with the labels of their seeds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from table_rows import features, rows
from torch import nn

import themis
from themis.data.seeds import read_seeds
from themis.errors import DataError
from themis.measure.tests import Tests
from themis.perturb import choose_perturbation, disturb
from themis.retraining.material import of_faults, of_tests
from themis.runs.store.reader import Reader

pytestmark = pytest.mark.xdist_group("material")

QUICK = {"coverage": None, "plateau": None}


@pytest.fixture(scope="module")
def case(trained):
    module, held_out = trained
    return themis.Target(module), held_out[torch.arange(0, 1000, 10)]


def found(target, seeds, name, magnitude, tests=300, **options):
    perturbation = choose_perturbation(name, magnitude)
    return perturbation, themis.run(target, seeds, perturbation, max_tests=tests, **QUICK, **options)


@pytest.mark.parametrize(
    ("name", "magnitude"),
    [("gaussian", 0.8), ("rotate+shift+brightness", 2.0), ("fog", 1.5), ("fgsm", 0.2), ("pgd", 0.1)],
)
def test_inputs_are_identical_to_those_of_the_campaign(case, name, magnitude):
    target, seeds = case
    perturbation, run = found(target, seeds, name, magnitude, tests=100)
    material = of_faults(run.faults, seeds, perturbation, target)
    assert len(material) == len(run.faults) > 3
    for k in np.linspace(0, len(material) - 1, 3).astype(int).tolist():
        fault = run.faults[k]
        replayed = fault.replay()
        assert torch.equal(material.disturbed[k], replayed.inputs)
        assert int(material.pool.seed_id[material.seed[k]]) == fault.seed_id
        assert int(material.disturbed_labels[k]) == fault.label


def test_stored_inputs_of_an_attack_are_read_from_the_folder(case, tmp_path):
    target, seeds = case
    perturbation, run = found(target, seeds, "fgsm", 0.2, out=tmp_path / "run")
    reader = Reader(tmp_path / "run")
    ids = run.faults.columns["id"]
    kept = reader.tensors(ids.tolist())
    weaker = themis.Target(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))  # whose attacks are others
    material = of_faults(run.faults, seeds, perturbation, weaker, run=reader)
    assert len(kept) == len(ids)
    assert all(torch.equal(material.disturbed[k], kept[id].inputs[0]) for k, id in enumerate(ids.tolist()))
    reader.close()


def test_a_table_is_edited_as_in_the_campaign():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 2))
    target = themis.Target(module, oracle="wrong")
    inputs = rows(80)
    with torch.no_grad():
        seeds = read_seeds((inputs, module(inputs).argmax(1))).with_features(features)
    perturbation, run = found(target, seeds, "edit", None)
    material = of_faults(run.faults, seeds, perturbation, target)
    assert len(material) > 3
    for k in range(min(6, len(material))):
        assert torch.equal(material.disturbed[k], run.faults[k].replay().inputs)


@pytest.mark.parametrize("task", ["regression", "multilabel", "segmentation", "threshold"])
def test_material_has_the_labels_of_every_task(task):
    torch.manual_seed(1)
    inputs = torch.rand(40, 1, 8, 8)
    heads = {
        "regression": nn.Sequential(nn.Flatten(), nn.Linear(64, 1)),
        "threshold": nn.Sequential(nn.Flatten(), nn.Linear(64, 1)),
        "multilabel": nn.Sequential(nn.Flatten(), nn.Linear(64, 5)),
        "segmentation": nn.Conv2d(1, 3, 3, padding=1),
    }
    oracles = {"regression": "off:0.3", "multilabel": "multilabel:0.0", "segmentation": "segmentation:0.1"}
    target = themis.Target(heads[task], oracle=oracles.get(task, "threshold:0.0"))
    with torch.no_grad():
        outputs = target.forward(inputs)
    labels = {
        "regression": outputs[:, 0] + 0.01,
        "threshold": (outputs[:, 0] >= 0).long(),
        "multilabel": (outputs >= 0).long(),
        "segmentation": outputs.argmax(1) if task == "segmentation" else None,
    }[task]
    seeds = read_seeds((inputs, labels))
    perturbation, run = found(target, seeds, "gaussian", 1.0)
    material = of_faults(run.faults, seeds, perturbation, target, clean=seeds[torch.arange(5)])
    assert torch.equal(material.disturbed_labels, labels[material.seed])
    assert torch.equal(material.clean.labels, labels[:5])
    k = len(material) - 1
    assert torch.equal(material.disturbed[k], run.faults[k].replay().inputs)


def test_a_run_without_labels_is_refused_unless_the_clean_answer_is_the_label(case):
    target, seeds = case
    bare = read_seeds(seeds.inputs)
    other = themis.Target(target.module, oracle="top2")
    perturbation, run = found(other, bare, "gaussian", 0.8)
    with pytest.raises(DataError, match="needs labels, but some seeds have none and oracle 'top2'"):
        of_faults(run.faults, bare, perturbation, other)
    perturbation, run = found(target, bare, "gaussian", 0.8)
    with pytest.warns(RuntimeWarning, match="own clean answers are used as labels"):
        material = of_faults(run.faults, bare, perturbation, target, clean=bare[torch.arange(3)])
    with target.opened(), torch.no_grad():
        answers = target.forward(bare.inputs).argmax(1)
    assert torch.equal(material.disturbed_labels, answers[material.seed])
    assert torch.equal(material.clean.labels, answers[:3])


def test_material_can_be_made_from_any_tests(case):
    target, seeds = case
    noise = choose_perturbation("gaussian", 0.5)
    theta, noise_seed = np.full((6, 1), 0.3, np.float32), np.arange(6)
    tests = Tests(noise_seed, np.arange(6), theta, noise_seed, noise_seed.astype(str))
    material = of_tests(tests, seeds, noise, target)
    again = disturb(noise, seeds.inputs[:6], {noise.theta[0].name: 0.3})
    assert torch.equal(material.disturbed, again)
    assert torch.equal(material.disturbed_labels, seeds.labels[:6])
    pgd = choose_perturbation("pgd", 0.1)
    alone = of_tests(replace(tests, theta=np.full((6, 1), 0.05, np.float32)), seeds, pgd, target)
    assert bool(((alone.disturbed - seeds.inputs[:6]).abs() <= 0.0501).all())


def test_inconsistent_material_is_refused(case):
    target, seeds = case
    perturbation, run = found(target, seeds, "gaussian", 0.8)
    with pytest.raises(DataError, match="pool must hold the seed of every fault"):
        of_faults(run.faults, seeds[torch.arange(2)], perturbation, target)
    _, none = found(target, seeds, "gaussian", 1e-6)
    with pytest.raises(DataError, match="needs faults to learn from"):
        of_faults(none.faults, seeds, perturbation, target)
