"""Every way to judge a model by what it was trained on that we can think of, tried for real: each one is refused."""

import copy
import hashlib
import json
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import themis
from themis import BlackBox, Callback, DataError, StoreError, Target, UsageError
from themis.data.seeds import Seeds, from_arrays, from_reader, read_seeds
from themis.models import load_weights
from themis.oracle import choose_oracle
from themis.perturb import choose_perturbation
from themis.replay import Replayer
from themis.retraining.examine import examine
from themis.retraining.ledger import Ledger, ledger_of, read_ledger, searching_seen, write_weights
from themis.retraining.material import of_faults
from themis.retraining.parts import Parts, check_disjoint, read_parts, split
from themis.retraining.recipe import Recipe
from themis.retraining.tune import tune
from themis.store import Reader
from themis.zoo import lenet5

SHARES = (0.4, 0.3, 0.3)
NOISE = choose_perturbation("gaussian", 0.3)
REFUSED = r"judge seeds must be seeds that the weights were not trained on, [\d,]+ of [\d,]+ were \(seed"
SPLIT = "the data must be the one that was split before the campaign"


@pytest.fixture(scope="module")
def case(trained, tmp_path_factory):
    """A campaign on split digits, in a folder; its data, its parts and its model."""
    model, digits = trained
    data, out = digits[:400], tmp_path_factory.mktemp("leak") / "run"
    result = themis.run(Target(model), data, NOISE, out=out, split=SHARES, max_tests=1280)
    return result, out, data, read_parts(out, data), Target(model, oracle="wrong")


@pytest.fixture(scope="module")
def tuned(case):
    """The model after one epoch on its faults."""
    return retrained(case)


def retrained(case, target=None, parts=None):
    """One epoch on the case's faults; or of another target, on those that a campaign on other parts finds."""
    result, _, _, own, first = case
    target, oracle = target or first, choose_oracle("wrong")
    with searching_seen():
        found = result if parts is None else themis.run(target, parts.search, NOISE, max_tests=640)
    parts = parts or own
    material = of_faults(found.faults, parts.search, NOISE, target, clean=parts.train, oracle=oracle)
    return tune(target, material, NOISE, Recipe(epochs=1), oracle=oracle)


def judge(target, seeds, ledger):
    return examine(target, seeds, NOISE, ledger=ledger, draws=1, passes=0)


def test_what_is_no_leak_is_judged(case, tuned):
    """Else a guard that refuses everything would pass."""
    _, _, data, parts, target = case
    for model, ledger in ((target, Ledger()), (tuned.target, tuned.ledger), (tuned.target, Ledger())):
        reading = judge(model, parts.judge, ledger)
        assert reading.seed_id.tolist() == parts.judge.seed_id.tolist()
        assert 0.5 < reading.clean_score <= 1
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
    material = of_faults(result.faults, parts.search, NOISE, target, clean=parts.train, oracle=choose_oracle("wrong"))
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
    assert judge(again.target, unseen, carried).clean_score > 0.5


def test_a_round_in_memory_carries_the_round_before(case, tuned):
    parts = case[3]
    result, target = case[0], tuned.target
    oracle = choose_oracle("wrong")
    rest = parts.judge[: len(parts.judge) // 2]
    material = of_faults(result.faults, parts.search, NOISE, target, limit=20, clean=rest, oracle=oracle)
    again = tune(target, material, NOISE, Recipe(epochs=1), oracle=oracle)
    for seen in (parts.train, rest):  # the first round's, and this one's
        with pytest.raises(DataError, match=REFUSED):
            judge(again.target, seen, again.ledger)


# Parts that are not as recorded


def test_parts_made_by_hand_must_share_nothing(case):
    parts = case[3]
    for mixed in (
        Parts(parts.search, parts.train, parts.search),
        Parts(parts.search, parts.train, under_other_indices(parts.train)),
        Parts(parts.search, from_bytes(parts.judge), parts.judge),
        Parts(parts.search, parts.search, parts.judge),
        Parts(parts.search, parts.train, one_of_many(parts.train)),
    ):
        with pytest.raises(DataError, match="the parts must share no seed"):
            check_disjoint(mixed)
    check_disjoint(parts)


def changed(path):
    """The recorded parts, with judge and train seeds exchanged."""
    arrays = load((path / "parts.safetensors").read_bytes())
    arrays["part"] = torch.where(arrays["part"] == 0, 0, 3 - arrays["part"]).to(torch.uint8)
    content = save(arrays)
    (path / "parts.safetensors").write_bytes(content)
    return content


def test_a_parts_file_that_was_edited_is_refused(case, tmp_path):
    _, out, data, _, target = case
    copied = shutil.copytree(out, tmp_path / "run")
    changed(copied)
    with pytest.raises(StoreError, match=r"parts\.safetensors must be as the run wrote it, it has been changed"):
        read_parts(copied, data)
    with pytest.raises(StoreError, match="it has been changed"):
        themis.resume(copied, target, data)
    with closing(Reader(copied)) as run, pytest.raises(StoreError, match="it has been changed"):
        assert Replayer(run, target, data).seeds


def test_nor_does_it_help_to_edit_the_hash_in_the_record(case, tmp_path):
    _, out, data, _, _ = case
    copied = shutil.copytree(out, tmp_path / "run")
    sha256 = hashlib.sha256(changed(copied)).hexdigest()
    with closing(sqlite3.connect(copied / "run.sqlite")) as database:
        (text,) = database.execute("SELECT value FROM run WHERE name = 'parts'").fetchone()
        text = json.dumps({**json.loads(text), "sha256": sha256})
        database.execute("UPDATE run SET value = ? WHERE name = 'parts'", (text,))
        database.commit()
    with pytest.raises(StoreError, match="must hold the split that the run's settings make, it holds another"):
        read_parts(copied, data)


def test_nor_to_edit_the_split_in_the_settings(case, tmp_path):
    _, out, data, _, target = case
    for name, value in (("split_seed", 5), ("split", [0.3, 0.3, 0.4]), ("split", None)):
        copied = shutil.copytree(out, tmp_path / f"{name}-{value}")
        with closing(sqlite3.connect(copied / "run.sqlite")) as database:
            (text,) = database.execute("SELECT value FROM run WHERE name = 'settings'").fetchone()
            text = json.dumps({**json.loads(text), name: value})
            database.execute("UPDATE run SET value = ? WHERE name = 'settings'", (text,))
            database.commit()
        with pytest.raises((StoreError, UsageError), match=r"must hold the split|must have been split"):
            read_parts(copied, data)
        with pytest.raises((StoreError, DataError)):
            themis.resume(copied, target, data)


def exchanged(data, parts):
    """Data in which pictures of the train part stand where judges did."""
    inputs = data.inputs.clone()
    rows = torch.isin(data.seed_id, parts.judge.seed_id).nonzero()[:, 0][: len(parts.train)]
    inputs[rows] = parts.train.inputs[: len(rows)]
    return Seeds(inputs, data.labels, data.seed_id)


@pytest.mark.parametrize("how", ["another order", "fewer", "more", "exchanged", "one value"])
def test_other_data_than_the_split_is_refused(case, how):
    result, out, data, parts, target = case
    judges = torch.isin(data.seed_id, parts.judge.seed_id).nonzero()[:, 0]
    other = {
        "another order": Seeds(data.inputs.flip(0), data.labels.flip(0), data.seed_id),
        "fewer": data[:390],
        "more": from_arrays(torch.cat([data.inputs, data.inputs[:5]]), torch.cat([data.labels, data.labels[:5]])),
        "exchanged": exchanged(data, parts),
        "one value": Seeds(data.inputs.clone(), data.labels, data.seed_id),
    }[how]
    if how == "one value":
        other.inputs[judges[0], 0, 0, 0] = 1.0
    with pytest.raises(DataError, match=SPLIT):
        read_parts(out, other)
    with pytest.raises(DataError, match="the data must"):
        themis.resume(out, target, other)
    if how == "exchanged":  # content says which part a picture is in: these are not judges any more
        found = read_parts(result, other)
        check_disjoint(found)
        assert not Ledger.of(parts.search, parts.train).knows(found.judge).any()
    elif how != "one value":
        with pytest.raises(DataError, match=SPLIT):
            read_parts(result, other)


def test_another_split_seed_between_campaign_and_judging_is_refused(case, tmp_path):
    _, out, data, _, target = case
    with pytest.raises(UsageError, match="resume cannot change 'split_seed'"):
        themis.resume(out, target, data, split_seed=3)
    other = themis.run(target, data, NOISE, out=tmp_path / "run", split=SHARES, split_seed=3, max_tests=640)
    theirs = read_parts(tmp_path / "run", data)
    assert theirs.judge.seed_id.tolist() == read_parts(other, data).judge.seed_id.tolist()
    assert theirs.judge.seed_id.tolist() != read_parts(out, data).judge.seed_id.tolist()
    with pytest.raises(DataError):  # faults of one split, seeds of another
        of_faults(case[0].faults, theirs.search, NOISE, target, clean=theirs.train, oracle=choose_oracle("wrong"))


def test_a_run_that_was_not_split_has_no_judges(case, tmp_path):
    _, _, data, _, target = case
    result = themis.run(target, data, NOISE, out=tmp_path / "run", max_tests=640)
    for run in (result, tmp_path / "run", str(tmp_path / "run")):
        with pytest.raises(UsageError, match="must have been split before its campaign, all were searched"):
            read_parts(run, data)


def test_a_folder_is_not_retrained_with_other_pictures_under_its_seed_ids(case, trained, tmp_path):
    """Else inputs that the run kept would be material while the pictures they are made of judge."""
    _, _, data, _, target = case
    others = trained[1][400:800]
    fakes = Seeds(others.inputs, others.labels, data.seed_id)
    themis.run(target, data, "gaussian", magnitude=0.3, out=tmp_path / "run", max_tests=640)
    how = {"random_seeds": 1, "epochs": 1, "batches": 2, "draws": 1, "passes": 600}
    for given in (fakes, Seeds(data.inputs, (data.labels + 1) % 10, data.seed_id), data[:390]):
        with pytest.raises(DataError, match="the data must be the one that the run searched"):
            themis.retrain(tmp_path / "run", target=target, data=given, judge=data, **how)
    with pytest.raises(DataError, match="not trained on, 400 of 400 were"):
        themis.retrain(tmp_path / "run", target=target, data=data, judge=data, **how)
    result = themis.retrain(tmp_path / "run", target=target, data=data, judge=others, **how)  # no leak
    assert result.seeds["judge"] == 400


def test_weights_that_are_loaded_bring_their_ledger(case, tuned, tmp_path):
    """A module of the user's own, loaded from a file, is refused seeds that it has seen without a word of the file."""
    data, parts, path = case[2], case[3], tmp_path / "new.safetensors"
    write_weights(path, tuned.target.module, tuned.ledger, {})
    net = lenet5()
    load_weights(net, path)
    assert np.array_equal(ledger_of(net).hashes, tuned.ledger.hashes)
    with pytest.raises(DataError, match=REFUSED):
        judge(Target(net, oracle="wrong"), parts.train, Ledger())
    with pytest.warns(RuntimeWarning, match=r"(\d+) of \1 seeds are ones that the weights were retrained on"):
        themis.run(Target(net, oracle="wrong"), parts.search, NOISE, max_tests=640)
    again = themis.run(Target(net, oracle="wrong"), data, NOISE, split=SHARES, split_seed=7, max_tests=640)
    with pytest.raises(DataError, match=r"judge .*not trained on"):
        themis.retrain(again, data=data, random_seeds=1, epochs=1)
    plain = tmp_path / "plain.pt"
    torch.save(lenet5().state_dict(), plain)
    other = lenet5()
    load_weights(other, plain)
    assert not len(ledger_of(other))


def test_resuming_with_other_data_searches_nothing(case, tmp_path):
    _, _, data, parts, target = case

    class Stop(Callback):
        def on_round(self, round):
            raise KeyboardInterrupt

    themis.run(target, data, NOISE, out=tmp_path / "run", split=SHARES, max_tests=1280, callbacks=[Stop()])
    with closing(Reader(tmp_path / "run")) as run:
        before = run.count()
    for other in (exchanged(data, parts), parts.judge, data.inputs.flip(0)):
        with pytest.raises(DataError, match="the data must"):
            themis.resume(tmp_path / "run", target, other)
    with closing(Reader(tmp_path / "run")) as run:
        assert run.count() == before
        assert set(run.faults().columns["seed_id"].tolist()) <= set(parts.search.seed_id.tolist())


def test_a_black_box_is_split_too_and_never_written(case, tmp_path):
    _, _, data, parts, target = case

    def predict(inputs):
        with torch.no_grad():
            return target.module.eval()(torch.from_numpy(inputs)).numpy()

    box = BlackBox(predict, oracle="wrong")
    result = themis.run(box, data, NOISE, out=tmp_path / "run", split=SHARES, max_tests=640)
    assert set(result.faults.columns["seed_id"].tolist()) <= set(parts.search.seed_id.tolist())
    assert read_parts(tmp_path / "run", data).judge.seed_id.tolist() == parts.judge.seed_id.tolist()
    with pytest.raises(UsageError, match=r"must be those of an nn\.Module, got BlackBox"):
        write_weights(tmp_path / "new.safetensors", box, Ledger(), {})
    with pytest.raises(DataError, match=REFUSED):  # it knows nothing, so the ledger must be given
        Ledger.of(parts.search).refuse(parts.search, "judge seeds")
