"""Every way to judge a model by what it was trained on that we can think of, tried for real: each one is refused."""

import copy

import numpy as np
import pytest
import torch
from leaks import NOISE, REFUSED, SHARES, judge, retrained, searched
from torch import nn

import themis
from themis import DataError, Target
from themis.data.seeds import Seeds, from_arrays, from_reader, read_seeds
from themis.retraining.material import of_faults
from themis.retraining.recipe import Recipe
from themis.retraining.tune import tune
from themis.runs.parts import split
from themis.runs.store.tensors import write_weights
from themis.target.ledger import Ledger, ledger_of, read_ledger
from themis.target.loaders import load_weights
from themis_lab.cli.demo import lenet5

pytestmark = [pytest.mark.xdist_group("no_leak"), pytest.mark.usefixtures("few_held_out_tests")]


@pytest.fixture(scope="module")
def case(trained, tmp_path_factory):
    return searched(trained, tmp_path_factory.mktemp("leak") / "run")


@pytest.fixture(scope="module")
def tuned(case):
    """The model after one epoch on its faults."""
    return retrained(case)


def test_what_is_no_leak_is_judged(case, tuned):
    """Else a guard that refuses everything would pass."""
    _, _, data, parts, target = case
    for model, ledger in ((target, Ledger()), (tuned.target, tuned.ledger), (tuned.target, Ledger())):
        reading = judge(model, parts.judge, ledger)
        assert reading.seed_id.tolist() == parts.judge.seed_id.tolist()
        assert 0.5 < reading.clean.mean() <= 1
    assert tuned.ledger.knows(data).sum() == len(parts.search) + len(parts.train)
    assert not tuned.ledger.knows(parts.judge).any()


# Seeds that were seen, under a disguise


def as_they_are(seeds):
    return seeds


def one_of_many(seeds):
    fresh = from_arrays(torch.rand(300, 1, 28, 28, generator=torch.Generator().manual_seed(1)), torch.zeros(300).long())
    inputs, labels = torch.cat([fresh.inputs, seeds.inputs[:1]]), torch.cat([fresh.labels, seeds.labels[:1]])
    return from_arrays(inputs, labels)


def under_other_indices(seeds):
    return Seeds(seeds.inputs, seeds.labels, seeds.seed_id + 10_000)


def in_another_order(seeds):
    return seeds[torch.randperm(len(seeds), generator=torch.Generator().manual_seed(0))]


def in_another_object(seeds):
    return from_arrays(seeds.inputs.numpy().copy(), seeds.labels.numpy())


def in_float64(seeds):
    return from_arrays(seeds.inputs.double().numpy(), seeds.labels)


def in_float64_a_little_off(seeds):
    return from_arrays(seeds.inputs.double().numpy() + 1e-13, seeds.labels)


def from_bytes(seeds):
    return from_arrays((seeds.inputs * 255).round().to(torch.uint8).numpy(), seeds.labels, divisor=255)


def with_other_last_bits(seeds):
    pixels = (seeds.inputs * 255).round()
    return from_arrays(pixels * np.float32(1 / 255), seeds.labels)


def with_negative_zeros(seeds):
    return from_arrays(torch.where(seeds.inputs == 0, -0.0, seeds.inputs), seeds.labels)


def with_other_labels(seeds):
    return from_arrays(seeds.inputs, (seeds.labels + 1) % 10)


def read_when_asked_for(seeds):
    return from_reader(lambda k: seeds.inputs[k], tuple(seeds.shape[1:]), len(seeds), seeds.labels)


def of_a_data_set(seeds):
    return read_seeds([(seeds.inputs[k], int(seeds.labels[k])) for k in range(20)])


DISGUISES = [
    as_they_are,
    one_of_many,
    under_other_indices,
    in_another_order,
    in_another_object,
    in_float64,
    in_float64_a_little_off,
    from_bytes,
    with_other_last_bits,
    with_negative_zeros,
    with_other_labels,
    read_when_asked_for,
    of_a_data_set,
]


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("part", ["search", "train"])
def test_seeds_that_were_seen_judge_nothing_in_any_disguise(case, tuned, part, disguise):
    seeds = disguise(getattr(case[3], part))
    with pytest.raises(DataError, match=REFUSED):
        judge(tuned.target, seeds, tuned.ledger)


def test_seeds_that_were_held_out_to_choose_the_epoch_were_seen(case, tuned):
    parts = case[3]
    assert tuned.ledger.knows(parts.search).all()
    assert tuned.ledger.knows(parts.train).all()


def test_disturbed_inputs_that_were_trained_on_judge_nothing(case, tuned):
    result, _, _, parts, target = case
    material = of_faults(result.faults, parts.search, NOISE, target, clean=parts.train)
    with pytest.raises(DataError, match=REFUSED):
        judge(tuned.target, from_arrays(material.disturbed, material.disturbed_labels), tuned.ledger)


# A ledger that was left behind


def test_a_ledger_that_is_not_given_is_known_to_the_model(case, tuned):
    parts = case[3]
    wrapped = nn.Sequential(copy.deepcopy(tuned.target.module), nn.Identity())
    for target in (tuned.target, Target(wrapped, oracle="wrong"), Target(nn.DataParallel(wrapped), oracle="wrong")):
        with pytest.raises(DataError, match=REFUSED):
            judge(target, parts.train, Ledger())


def test_a_ledger_goes_through_the_file_of_weights(case, tuned, tmp_path):
    parts, path = case[3], tmp_path / "new.safetensors"
    write_weights(path, tuned.target.module, Ledger(), {})  # the module knows
    net = lenet5()
    load_weights(net, path)
    with pytest.raises(DataError, match=REFUSED):
        judge(Target(net, oracle="wrong"), parts.search, read_ledger(path))
    with pytest.raises(DataError, match=REFUSED):
        judge(Target(net, oracle="wrong"), parts.search, ledger_of(Target(net), path))
    judge(Target(net, oracle="wrong"), parts.judge, read_ledger(path))


def test_weights_that_are_loaded_bring_their_ledger(case, tuned, tmp_path):
    """A module of the user's own, loaded from a file, is refused seeds that it has seen without a word of the file."""
    data, parts, path = case[2], case[3], tmp_path / "new.safetensors"
    write_weights(path, tuned.target.module, tuned.ledger, {})
    net = lenet5()
    load_weights(net, path)
    assert np.array_equal(ledger_of(net).hashes, tuned.ledger.hashes)
    with pytest.raises(DataError, match=REFUSED):
        judge(Target(net, oracle="wrong"), parts.train, Ledger())
    with pytest.warns(RuntimeWarning, match=r"the weights were retrained on (\d+) of \1 seeds"):
        themis.run(Target(net, oracle="wrong"), parts.search, NOISE, max_tests=640)
    with pytest.warns(RuntimeWarning, match=r"the weights were retrained on [\d,]+ of [\d,]+ seeds"):
        again = themis.run(Target(net, oracle="wrong"), data, NOISE, split=SHARES, split_seed=7, max_tests=640)
    with pytest.raises(DataError, match=r"judge .*not trained on"):
        themis.retrain(again, data=data, random_seeds=1, epochs=1)
    plain = tmp_path / "plain.pt"
    torch.save(lenet5().state_dict(), plain)
    other = lenet5()
    load_weights(other, plain)
    assert not len(ledger_of(other))


# More than one split


def test_a_second_split_does_not_make_judges_of_what_was_trained_on(case, tuned):
    data = case[2]
    other = split(data, SHARES, random_seed=1)
    assert tuned.ledger.knows(other.judge).any()
    with pytest.raises(DataError, match=REFUSED):
        judge(tuned.target, other.judge, tuned.ledger)


def test_what_was_trained_on_in_round_1_does_not_judge_in_round_2(case, tuned, trained, tmp_path):
    parts, digits = case[3], trained[1]
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    write_weights(first, tuned.target.module, tuned.ledger, {"round": "1"})
    net = lenet5()
    load_weights(net, first)
    others = split(digits[200:600], SHARES, random_seed=1)  # of data that half of round 1 is in
    again = retrained(case, Target(net, oracle="wrong"), others)
    write_weights(second, again.target.module, read_ledger(first).merge(again.ledger), {"round": "2"})
    carried = read_ledger(second)
    for seen in (parts.search, parts.train, others.search, others.train, others.judge):
        with pytest.raises(DataError, match=REFUSED):
            judge(again.target, seen, carried)
    unseen = others.judge[torch.from_numpy(~carried.knows(others.judge)).nonzero()[:, 0]]
    assert 0 < len(unseen) < len(others.judge)
    assert judge(again.target, unseen, carried).clean.mean() > 0.5


def test_a_round_in_memory_carries_the_round_before(case, tuned):
    parts = case[3]
    result, target = case[0], tuned.target
    rest = parts.judge[: len(parts.judge) // 2]
    material = of_faults(result.faults, parts.search, NOISE, target, clean=rest)
    again = tune(target, material, NOISE, Recipe(epochs=1))
    for seen in (parts.train, rest):  # the first round's, and this one's
        with pytest.raises(DataError, match=REFUSED):
            judge(again.target, seen, again.ledger)
