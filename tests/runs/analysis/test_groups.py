"""Groups: planted causes come back as groups, and a group says what its faults share."""

import json

import numpy as np
import pytest
import torch
from planted import MARKED, Cause, cause_of, digits, planted
from sklearn.metrics import adjusted_rand_score

import themis
from themis import UsageError, cli
from themis.runs.analysis.groups import bins, find_classes, find_groups, group, growth_chance, interval
from themis.runs.faults import Faults
from themis.runs.store.reader import Reader

pytestmark = pytest.mark.xdist_group("groups")

TWO_WAYS = (Cause(0, 0.7, 0.85, 0, 3), Cause(1, 0.1, 0.2, 2, 7))  # other layers, other answers
ONE_ANSWER = (Cause(0, 0.7, 0.85, 0, 3), Cause(1, 0.1, 0.2, 2, 3))  # told apart by layer and theta alone
THREE = (Cause(0, 0.7, 0.8, 1, 3), Cause(0, 0.1, 0.2, 1, 7), Cause(1, 0.8, 0.9, 2, 5))  # two in one layer
CASES = [
    (net, causes, policy, random_seed)
    for k, (net, causes) in enumerate((n, c) for n in ("mlp", "deep", "conv") for c in (TWO_WAYS, ONE_ANSWER, THREE))
    for policy, random_seed in (("random", k), ("scheduled", 20 + k))
]


def campaign(net, causes, policy="random", random_seed=0, tests=3000, **options):
    inputs, labels = digits()
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(random_seed))[:400]
    target = themis.Target(planted(net, causes))
    limits = {"max_tests": tests, "tolerance": 1e-9, "plateau": None}
    return themis.run(
        target, (inputs[rows], labels[rows]), MARKED, policy=policy, random_seed=random_seed, **limits, **options
    )


@pytest.mark.parametrize("cases", [CASES[::3], pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_groups_recover_planted_causes(cases):
    """Noise breaks these nets too: its faults are a cause of their own, a third to nine tenths of all."""
    found = []
    for net, causes, policy, random_seed in cases:
        columns = campaign(net, causes, policy, random_seed).faults.columns
        found.append(adjusted_rand_score(cause_of(causes, columns["theta"]), find_groups(columns)))
    print("adjusted Rand index:", " ".join(f"{each:.2f}" for each in found))
    assert np.mean(found) >= 0.9
    assert sum(each >= 0.8 for each in found) >= 0.8 * len(found)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A campaign with a folder."""
    out = tmp_path_factory.mktemp("runs") / "first"
    return out, campaign("mlp", TWO_WAYS, "random", 3, out=out)


def test_a_group_describes_what_its_faults_share(found):
    groups = group(found[1].faults)
    by_answer = {each.outcomes[0].answer: each for each in groups if each.theta and "answered as" in each.text}
    first, second = by_answer[3], by_answer[7]
    assert first.theta["angle"].low == pytest.approx(-8 + 0.7 * 16, abs=0.4)
    assert first.theta["angle"].high == pytest.approx(-8 + 0.85 * 16, abs=0.4)
    assert first.theta["angle"].share > 0.9 > 0.3 > first.theta["angle"].elsewhere
    assert second.theta["light"].low == pytest.approx(-0.08 + 0.1 * 0.16, abs=0.004)
    assert "answered as 7, " in second.text
    assert f"{len(second):,} faults on {second.n_seeds} seeds" in second.text


def test_groups_partition_the_faults_and_are_reproducible_also_from_the_folder(found):
    out, run = found
    groups = group(run.faults)
    ids = [id for each in groups for id in each.ids]
    assert sorted(ids) == run.faults.columns["id"].tolist()
    assert [len(each) for each in groups] == sorted(map(len, groups), reverse=True)
    again = group(Reader(out).faults())
    assert [each.ids for each in again] == [each.ids for each in groups]
    assert [each.text for each in again] == [each.text for each in groups]


def test_representatives_are_few_and_telling_with_different_seeds_and_outcomes(found):
    for each in group(found[1].faults, most=20):
        shown = each.representatives
        assert {fault.id for fault in shown} <= set(each.ids)
        assert len({fault.seed_id for fault in shown}) == len(shown)
    largest = group(found[1].faults)[0].representatives
    assert len({(fault.clean_answer, fault.answer) for fault in largest}) == len(largest)
    assert sum(len(each.representatives) for each in group(found[1].faults, most=20)) <= 20


def test_there_are_at_most_as_many_groups_as_requested(found):
    assert len(group(found[1].faults, most=2)) == 2
    (only,) = group(found[1].faults, most=1)
    assert len(only) == len(found[1].faults)
    with pytest.raises(UsageError, match="most must be 1 or more groups, got 0"):
        group(found[1].faults, most=0)


def test_a_smaller_apart_gives_more_groups(found):
    counts = [len(group(found[1].faults, apart=each)) for each in (0.1, 0.5, 0.75, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2 > counts[-1]  # two planted causes and noise; 5 groups and 1
    with pytest.raises(UsageError, match="apart must lie in 0 to 1, got 2"):
        group(found[1].faults, apart=2)


def made(n, answer, theta, signature, clean=None):
    faults = Faults("p", ("a",), ("first", "last"), None)
    zeros = np.zeros(n, dtype=np.float32)
    clean = np.arange(n) % 10 if clean is None else clean
    whole = dict.fromkeys(("noise_seed", "round", "position"), np.zeros(n, dtype=np.int64))
    texts = dict.fromkeys(("stream", "kind"), np.full(n, "uniform"))
    reals = dict.fromkeys(("clean_value", "value", "margin", "linf", "ssim"), zeros)
    faults.add(
        id=np.arange(n), seed_id=np.arange(n) // 2, answer=answer, clean_answer=clean, label=clean,
        theta=theta.astype(np.float32)[:, None], signature=np.stack([signature, 1 - signature], 1).astype(np.float32),
        confidence=zeros + 0.9, distance=zeros + 1, chunk=np.full(n, 8), raised=np.zeros(n, dtype=bool),
        **whole, **texts, **reals,
    )  # fmt: skip
    return faults


def test_ten_thousand_faults_are_grouped_by_a_sample():
    rng = np.random.default_rng(0)
    cause = rng.integers(0, 3, 12_000)
    answer = np.where(cause == 2, rng.integers(0, 10, 12_000), 4 + cause)
    theta = np.where(cause == 2, rng.random(12_000), 0.2 + 0.4 * cause + 0.05 * rng.random(12_000))
    signature = 0.2 + 0.25 * cause + 0.05 * rng.standard_normal(12_000)
    groups = group(made(12_000, answer, theta, signature))
    classes = np.empty(12_000, dtype=int)
    for k, each in enumerate(groups):
        classes[list(each.ids)] = k
    assert adjusted_rand_score(cause, classes) > 0.95
    (fourth,) = (each for each in groups if "answered as 4" in each.text)
    assert next(iter(fourth.layers)) == "last"
    assert "change concentrated in last (80% of it, elsewhere " in fourth.text


def test_an_outcome_too_rare_for_the_sample_joins_a_group():
    rng = np.random.default_rng(0)
    cause = rng.integers(0, 2, 8000)
    answer = np.where(np.arange(8000) == 1, 9, 4 + cause)  # the sample has every fourth fault
    columns = {
        "id": np.arange(8000),
        "answer": answer,
        "theta": (0.5 * cause + 0.1 * rng.random(8000)).astype(np.float32)[:, None],
        "signature": np.full((8000, 1), 1.0, dtype=np.float32),
    }
    with np.errstate(all="raise"):
        groups = find_groups(columns)
    assert groups.max() == 1
    assert adjusted_rand_score(cause, groups) > 0.99


def test_a_difference_in_one_view_does_not_separate_groups():
    rng = np.random.default_rng(1)
    answer = rng.integers(0, 10, 1500)
    groups = group(made(1500, answer, rng.random(1500), 0.5 + 0.05 * rng.standard_normal(1500)))
    assert len(groups) == 1
    assert groups[0].theta == groups[0].layers == {}
    assert "several outcomes" in groups[0].text


def test_no_fault_one_fault_and_equal_faults():
    assert group(Faults("p", ("a",), ("first",), None)) == []
    for n in (1, 2, 5):
        (only,) = group(made(n, np.full(n, 3), np.ones(n), np.full(n, 0.5), np.full(n, 7)))
        assert only.text.startswith("7 answered as 3; ")
    (broken,) = group(made(4, np.full(4, -1), np.ones(4), np.zeros(4), np.full(4, -2)))
    assert broken.text == "answered as not finite; 4 faults on 2 seeds"
    assert broken.outcomes[0].clean_answer is None


def test_bins_find_where_the_density_changes():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.random(500), 0.37 + 0.1 * rng.random(500)])
    found = bins(values, 0.0, 1.0)
    edges = [values[found == k].min() for k in range(1, found.max() + 1)]
    assert min(abs(each - 0.37) for each in edges) < 0.015
    assert min(abs(each - 0.47) for each in edges) < 0.015
    assert bins(np.ones(9), 1.0, 1.0).tolist() == [0] * 9


def test_the_interval_that_separates_two_samples():
    gap, low, high = interval(np.array([4.0, 5.0, 5.5]), np.array([1.0, 2.0, 4.5, 9.0]))
    assert (gap, low, high) == (0.75, 4.0, 5.5)
    assert interval(np.array([1.0]), np.array([1.0]))[0] == 0


def test_independent_columns_have_one_class_and_dependent_ones_two():
    rng = np.random.default_rng(0)
    independent = [rng.integers(0, 5, 1000) for _ in range(4)]
    assert find_classes(independent).max() == 0
    side = rng.integers(0, 2, 1000)
    crossed = [np.where(rng.random(1000) < 0.9, side, 1 - side) for _ in range(5)]
    classes = find_classes(crossed)
    assert classes.max() == 1
    assert adjusted_rand_score(side, classes) > 0.9


@pytest.fixture
def groups_command(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "groups", "faults as a few stories")

    def ask(*words):
        code = cli.main(["groups", *map(str, words)])
        return code, capsys.readouterr()

    return ask


def test_the_command_lists_groups_and_their_faults(found, groups_command):
    out, run = found
    code, said = groups_command(out)
    groups = group(run.faults)
    assert code == 0
    assert f"{len(run.faults):,} faults in {len(groups)} groups" in said.out
    assert f"themis replay {out} FAULT" in said.out
    plain = " ".join(said.out.split())
    for each in groups:
        assert each.text in plain
        assert " ".join(str(fault.id) for fault in each.representatives) in said.out


def test_the_command_says_if_no_structure_was_found(found, groups_command, tmp_path):
    run = campaign("mlp", (), "random", 5, tests=600, out=tmp_path / "noise")
    _, said = groups_command(tmp_path / "noise")
    assert f"{len(run.faults)} faults in 1 group, " in said.out
    assert "No structure found: no two sets of these faults differ in two of outcome, theta and layers" in said.out
    assert "No structure" not in groups_command(found[0])[1].out
    assert "No structure" not in groups_command(found[0], "--most", 1)[1].out


def test_the_command_prints_json_and_refuses_options_without_effect(found, groups_command):
    code, said = groups_command(found[0], "--json", "--most", 3)
    listed = json.loads(said.out)
    assert code == 0
    assert len(listed) <= 3
    assert sum(each["faults"] for each in listed) == len(found[1].faults)
    assert listed[0]["outcomes"][0]["share"] > 0
    code, said = groups_command(found[0], "--device", "cpu")
    assert code == 2
    assert "--device must be combined with another --by" in said.err
    code, said = groups_command(found[0], "--most", 0)
    assert code == 2
    assert "most must be 1 or more groups, got 0" in said.err


def test_grouping_by_content_needs_the_model_of_a_run_started_from_python(found, groups_command):
    code, said = groups_command(found[0], "--by", "content")
    assert code == 2
    assert "does not record how to create its" in said.err


def test_the_chance_of_growth_is_that_of_welchs_test():
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(0)
    shares, is_member, seed_id = rng.random((40, 3)), np.arange(40) < 15, np.arange(40)
    shares[:15, 1] += 0.2
    expected = ttest_ind(shares[:15], shares[15:], axis=0, equal_var=False, alternative="greater").pvalue
    assert np.allclose(growth_chance(shares, is_member, seed_id), expected, rtol=1e-9)
    assert (growth_chance(np.ones((8, 2)), np.arange(8) < 4, np.arange(8)) == 1).all()
