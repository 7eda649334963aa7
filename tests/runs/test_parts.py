"""Seeds are split by content before the campaign, which searches one part; the run records all three."""

import json
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from leaks import assert_disjoint

import themis
from themis import Callback, DataError, StoreError, Target, UsageError
from themis.cli import main
from themis.data.groups import seed_hashes
from themis.data.seeds import from_arrays, from_reader, read_seeds
from themis.runs.analysis.shrink import robustness, shrink
from themis.runs.parts import PARTS, Parts, SeedSplit, choose_part, read_parts, read_split, split
from themis.runs.replay import Replayer, read_run
from themis.runs.store.reader import Reader
from themis.settings import Settings
from themis.target.fingerprint import hash_seeds

pytestmark = pytest.mark.xdist_group("parts")

SHARES = (0.5, 0.2, 0.3)
OPTIONS = {"magnitude": 0.3, "max_tests": 1280, "max_seeds": 400, "split": SHARES}


def ids(parts: Parts) -> dict[str, set[int]]:
    return {name: set(getattr(parts, name).seed_id.tolist()) for name in PARTS}


@pytest.fixture(scope="module")
def digits(trained):
    """200 of them."""
    return read_seeds(trained[1], 200)


@pytest.fixture(scope="module")
def run_of(trained, tmp_path_factory):
    """A campaign on split seeds: the result, its folder, the target and all of the data."""
    model, digits = trained
    out = tmp_path_factory.mktemp("split") / "run"
    return themis.run(Target(model), digits, "gaussian", out=out, **OPTIONS), out, Target(model), digits


# The split


def test_the_parts_cover_all_seeds_in_about_the_requested_shares(trained):
    digits = trained[1]
    parts = split(digits, SHARES)
    of_each = ids(parts)
    assert set.union(*of_each.values()) == set(digits.seed_id.tolist())
    assert sum(map(len, of_each.values())) == len(digits)
    for name, share in zip(PARTS, SHARES, strict=True):
        spread = (len(digits) * share * (1 - share)) ** 0.5
        assert abs(len(of_each[name]) - share * len(digits)) < 4 * spread
        part = getattr(parts, name)
        rows = torch.searchsorted(digits.seed_id, part.seed_id)
        assert torch.equal(part.inputs, digits.inputs[rows])
        assert torch.equal(part.labels, digits.labels[rows])
    assert_disjoint(parts)


def test_two_copies_of_a_picture_are_in_the_same_part(digits):
    twice = from_arrays(torch.cat([digits.inputs, digits.inputs.flip(0)]))
    of_each = ids(split(twice, SHARES))
    n = len(digits)
    for some in of_each.values():
        assert {2 * n - 1 - k for k in some} == some
    assert_disjoint(split(twice, SHARES))


@given(st.lists(st.integers(0, 199), min_size=60, max_size=200), st.integers(0, 2**63 - 1))
def test_the_part_of_a_seed_depends_neither_on_order_nor_on_selection(rows, random_seed):
    inputs = np.random.default_rng(0).random((200, 5), np.float32)
    whole = SeedSplit.of(from_arrays(inputs), (1 / 3, 1 / 3, 1 / 3), random_seed).part
    hashes = seed_hashes(from_arrays(inputs[rows]))
    assert choose_part(hashes, (1 / 3, 1 / 3, 1 / 3), random_seed).tolist() == whole[rows].tolist()


def test_the_split_has_its_own_random_seed(digits):
    first, again, other = (ids(split(digits, SHARES, k)) for k in (0, 0, 1))
    assert first == again != other
    shared = len(first["judge"] & other["judge"]) / len(other["judge"])
    assert 0.1 < shared < 0.5  # as many as chance puts there
    moved = ids(split(digits, (0.3, 0.4, 0.3)))
    assert moved["judge"] == first["judge"]
    assert moved["search"] < first["search"]


@pytest.mark.parametrize(
    "shares",
    [(0.5, 0.5), (0.5, 0.2, 0.4), (0.5, -0.2, 0.7), (1, 0, 0), (0.7, 0.3, 0.0), "abc", (0.5, None, 0.5), (True, 0, 0)],
)
def test_invalid_shares_are_refused(digits, shares):
    with pytest.raises(UsageError, match="split must be three shares"):
        split(digits, shares)
    with pytest.raises(UsageError, match="split must be three shares"):
        Settings(split=shares)
    with pytest.raises(UsageError, match="split must be three shares"):
        split(digits, (float("nan"), 0.5, 0.5))


def test_an_empty_part_is_refused(digits):
    with pytest.raises(DataError, match=r"train got none of 4 seeds with a split of 0\.49, 0\.02, 0\.49"):
        split(digits[:4], (0.49, 0.02, 0.49))
    with pytest.raises(DataError, match="every part must hold a seed"):
        split(from_arrays(torch.zeros(50, 3)), SHARES)  # one picture fifty times


def test_no_group_is_divided_and_the_parts_have_about_the_requested_shares(digits):
    for size in (5, 20):
        groups = np.arange(200) // size
        part = SeedSplit.of(digits, SHARES, 3, groups).part
        assert all(len(np.unique(part[groups == group])) == 1 for group in groups)
        assert np.allclose(np.bincount(part) / 200, SHARES, atol=size / 200)
    assert not np.array_equal(part, SeedSplit.of(digits, SHARES, 4, groups).part)


def test_groups_that_share_a_picture_are_in_the_same_part(digits):
    twice = from_arrays(torch.cat([digits.inputs, digits.inputs.flip(0)]))
    groups = np.arange(400) // 8
    part = SeedSplit.of(twice, SHARES, 0, groups).part
    assert part.tolist() == part[::-1].tolist()
    assert all(len(np.unique(part[groups == group])) == 1 for group in groups)


def test_too_few_groups_are_refused(digits):
    with pytest.raises(
        DataError, match=r"train got none of 200 seeds in 2 groups .*: give more seeds or smaller groups"
    ):
        split(digits, SHARES, 0, np.arange(200) // 100)
    assert {len(part) for part in ids(split(digits[:150], SHARES, 0, np.arange(150) // 50)).values()} == {50}


@pytest.mark.parametrize("split_by", [1, "0", "-5", True, 2.5, "", ["a"]])
def test_invalid_groups_are_refused(split_by):
    with pytest.raises(UsageError, match="split_by must be a number of consecutive seeds that stay together"):
        Settings(split_by=split_by)


# The campaign


def test_a_run_keeps_groups_together_and_refuses_others_later(trained, tmp_path, monkeypatch):
    model, digits = trained
    data, names = from_arrays(digits.inputs[:300], digits.labels[:300]), np.random.default_rng(0).integers(0, 30, 300)
    (tmp_path / "patients.txt").write_text("".join(f"patient {name}\n" for name in names))
    monkeypatch.chdir(tmp_path)
    options = {"max_tests": 640, "split": SHARES, "split_by": "patients.txt", "out": "run"}
    result = themis.run(Target(model), data, "gaussian", **options)
    monkeypatch.chdir("/")  # the file is found from anywhere
    for run in (result, tmp_path / "run"):
        parts = [set(names[part.seed_id.numpy()]) for part in vars(read_parts(run, data)).values()]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 30
    themis.resume(tmp_path / "run", Target(model), data, max_tests=700)
    (tmp_path / "patients.txt").write_text("".join(f"patient {name}\n" for name in names[::-1]))
    with pytest.raises(StoreError, match=r"from a copy, or the file of the groups"):
        themis.resume(tmp_path / "run", Target(model), data, max_tests=800)
    (tmp_path / "patients.txt").unlink()
    (tmp_path / "patients.txt").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="it is a device, not a regular file"):
        themis.resume(tmp_path / "run", Target(model), data, max_tests=800)


def test_the_campaign_searches_only_its_part(run_of):
    result, out, target, digits = run_of
    parts = read_parts(out, digits)
    searched = ids(parts)["search"]
    assert len(result.faults) > 20
    assert set(result.faults.columns["seed_id"].tolist()) <= searched
    assert result.start.n_seeds == len(searched)
    alone = themis.run(target, parts.search, "gaussian", **{**OPTIONS, "split": None})
    assert {**alone.summary(), "seconds": 0} == {**result.summary(), "seconds": 0}


def test_the_run_records_the_parts(run_of):
    result, out, _, digits = run_of
    with closing(Reader(out)) as run:
        recorded = run.record
        written = read_split(run)
        parts = read_parts(run, digits)
    assert recorded["settings"]["split"] == list(SHARES)
    assert {name: recorded["parts"][name] for name in PARTS} == {name: len(some) for name, some in ids(parts).items()}
    assert recorded["environment"]["data_sha256"] == hash_seeds(parts.search)
    sample = read_seeds(digits, 400)
    assert written.seed_id.tolist() == sample.seed_id.tolist()
    np.testing.assert_array_equal(written.hashes, seed_hashes(sample))
    assert ids(parts) == ids(split(sample, SHARES)) == ids(read_parts(result, digits)) == ids(read_parts(out, sample))
    assert "split:" in (out / "config.yaml").read_text()


def test_replay_shrink_and_the_curve_find_their_seeds(run_of):
    result, out, target, digits = run_of
    with closing(Reader(out)) as run:
        replayer = Replayer(run, target, digits)
        assert replayer.seeds.seed_id.tolist() == read_parts(run, digits).search.seed_id.tolist()
        for fault in run.faults(limit=5):
            again = replayer.replay(fault)
            assert again.is_same
            assert again.input_gap in (None, 0)
            assert again.changes == []
        shrunk = shrink(read_run(replayer), run.faults(limit=3))
        assert len(shrunk) == 3
        assert robustness(read_run(replayer)).n_seeds == result.start.n_usable


def test_an_interrupted_campaign_resumes_to_the_same_end(run_of, tmp_path):
    whole, _, target, digits = run_of

    class Stop(Callback):
        def on_round(self, round):
            raise KeyboardInterrupt

    themis.run(target, digits, "gaussian", out=tmp_path / "run", callbacks=[Stop()], **OPTIONS)
    resumed = themis.resume(tmp_path / "run", target, digits)
    assert {**resumed.summary(), "seconds": 0} == {**whole.summary(), "seconds": 0}
    for name, column in whole.faults.columns.items():
        np.testing.assert_array_equal(column, resumed.faults.columns[name])
    with pytest.raises(UsageError, match="resume cannot change 'split'"):
        themis.resume(tmp_path / "run", target, digits, split=(0.4, 0.3, 0.3))


def test_data_larger_than_memory_gives_the_same_campaign(run_of, monkeypatch):
    whole, _, target, digits = run_of
    monkeypatch.setattr("themis.data.rows.MAX_HELD_BYTES", 1000)
    lazy = from_reader(lambda k: digits.inputs[k], (1, 28, 28), len(digits), digits.labels)
    lazy = replace(lazy, seed_id=digits.seed_id)
    result = themis.run(target, lazy, "gaussian", **OPTIONS)
    assert {**result.summary(), "seconds": 0} == {**whole.summary(), "seconds": 0}


def test_a_run_that_failed_before_its_first_test_leaves_nothing(trained, tmp_path):
    model, digits = trained
    with pytest.raises(UsageError, match="max_passes must leave room"):
        themis.run(Target(model), digits, "gaussian", out=tmp_path / "run", **{**OPTIONS, "max_passes": 1})
    assert not (tmp_path / "run").exists()
    themis.run(Target(model), digits, "gaussian", out=tmp_path / "run", **{**OPTIONS, "split": None, "max_tests": 640})
    assert not (tmp_path / "run" / "parts.safetensors").exists()


def test_the_command_line_splits_resumes_replays_and_groups(trained, tmp_path, monkeypatch, capsys):
    model, digits = trained
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    np.savez(tmp_path / "data.npz", inputs=digits.inputs[:300].numpy(), labels=digits.labels[:300].numpy())
    monkeypatch.chdir(tmp_path)
    words = ["--model", "themis_lab.cli.demo:lenet5", "--weights", "weights.pt", "--data", "npz:data.npz", "--perturb"]
    how = ["gaussian", "--magnitude", "0.3", "--max-tests", "640", "--json", "--split", "0.5,0.2,0.3"]
    assert main(["run", *words, *how, "--out", "a"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert main(["resume", "a", "--max-tests", "1280", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 1280
    with closing(Reader("a")) as run:
        fault = run.faults(limit=1)[0]
        assert summary["seeds_given"] == run.record["parts"]["search"] < 200
    assert main(["replay", "a", str(fault.id)]) == 0
    assert main(["shrink", "a", str(fault.id), "--json"]) == 0
    assert main(["groups", "a", "--json"]) == 0
    capsys.readouterr()
    assert main(["run", "--config", "a/config.yaml", "--max-tests", "640", "--json", "--out", "b"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == summary["faults"]
    assert main(["run", *words, *how[:-1], "0.5,0.5,0.5", "--out", "c"]) == 2
    assert "split must be three shares above 0 that sum to 1" in capsys.readouterr().err


def test_a_missing_record_is_reported(run_of, tmp_path):
    _, out, _, digits = run_of
    copy = shutil.copytree(out, tmp_path / "run")
    (copy / "parts.safetensors").unlink()
    with pytest.raises(StoreError, match="belongs to the run, but it does not exist: restore the run folder"):
        read_parts(copy, digits)
