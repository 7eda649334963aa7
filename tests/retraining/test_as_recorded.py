"""Parts, data and records that are not as they were when the campaign was split: all are refused."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch
from leaks import NOISE, REFUSED, SHARES, assert_disjoint, searched
from safetensors.torch import load, save

import themis
from themis import BlackBox, Callback, DataError, StoreError, UsageError
from themis.data.seeds import Seeds, from_arrays
from themis.retraining.material import of_faults
from themis.runs.parts import read_parts
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader
from themis.target.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("as_recorded"), pytest.mark.usefixtures("few_held_out_tests")]

SPLIT = "the data must be the data that was split before the campaign"


@pytest.fixture(scope="module")
def case(trained, tmp_path_factory):
    return searched(trained, tmp_path_factory.mktemp("leak") / "run")


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
    with pytest.raises(
        StoreError, match=r"parts\.safetensors must be the file that the run wrote, but it has been changed"
    ):
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
    with pytest.raises(
        StoreError, match="must hold the split that follows from the run's settings, but it holds a different one"
    ):
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
        assert_disjoint(found)
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
        of_faults(case[0].faults, theirs.search, NOISE, target, clean=theirs.train)


def test_a_run_that_was_not_split_has_no_judges(case, tmp_path):
    _, _, data, _, target = case
    result = themis.run(target, data, NOISE, out=tmp_path / "run", max_tests=640)
    for run in (result, tmp_path / "run", str(tmp_path / "run")):
        with pytest.raises(UsageError, match="must have been split before its campaign, but all of them were searched"):
            read_parts(run, data)


def test_a_folder_is_not_retrained_with_other_pictures_under_its_seed_ids(case, trained, tmp_path):
    """Else inputs that the run kept would be material while the pictures they are made of judge."""
    _, _, data, _, target = case
    others = trained[1][400:800]
    fakes = Seeds(others.inputs, others.labels, data.seed_id)
    themis.run(target, data, "gaussian", magnitude=0.3, out=tmp_path / "run", max_tests=640)
    how = {"random_seeds": 1, "epochs": 1, "batches": 2, "draws": 1, "passes": 600}
    for given in (fakes, Seeds(data.inputs, (data.labels + 1) % 10, data.seed_id), data[:390]):
        with pytest.raises(DataError, match="the data must be the same as in the run"):
            themis.retrain(tmp_path / "run", target=target, data=given, judge=data, **how)
    with pytest.raises(DataError, match="not trained on, but 400 of 400 were"):
        themis.retrain(tmp_path / "run", target=target, data=data, judge=data, **how)
    result = themis.retrain(tmp_path / "run", target=target, data=data, judge=others, **how)  # no leak
    assert result.seeds["judge"] == 400


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
    with pytest.raises(DataError, match=REFUSED):  # it knows nothing, so the ledger must be given
        Ledger.of(parts.search).refuse(parts.search, "judge seeds")
