"""Edits of tables: rows stay valid, and only as many of the changeable features change as requested."""

import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import themis
from themis import DataError, Features, Target, UsageError
from themis.cli import main
from themis.data import read_seeds
from themis.oracle.classes import class_loss
from themis.perturb import Context, perturb
from themis.perturb.table import TABLE
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader

EDIT, WORST, NOISE = TABLE
KINDS, CHANGES = ("binary", "integer", "number"), ("any", "raise", "lower", "fixed")


class Logs:
    """Axes like those of the zoo: each feature on a logarithmic axis."""

    def __init__(self, low, high):
        self.low, self.reach = low, torch.log1p(high - low)

    def place(self, raw):
        return torch.log1p(raw - self.low.to(raw)) / self.reach.to(raw)

    def value(self, places):
        return self.low.to(places) + torch.expm1(places * self.reach.to(places))


@st.composite
def tables(draw):
    """Features of any kind and direction of change, with valid rows."""
    n, rng = draw(st.integers(1, 9)), np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds, changes = tuple(rng.choice(KINDS, n)), tuple(rng.choice(CHANGES, n))
    low = torch.tensor([0.0 if kind == "binary" else rng.integers(-20, 20) for kind in kinds])
    reach = [1.0 if kind == "binary" else float(rng.choice([1, 3, 50, 1000])) for kind in kinds]
    high = low + torch.tensor(reach)
    axes = Logs(low, high) if draw(st.booleans()) else None
    features = Features(tuple(map(str, range(n))), kinds, low, high, changes, axes)
    share = torch.from_numpy(rng.choice([0.0, 1.0, 0.3, 0.77], (5, n))).float()
    raw = low + share * (high - low)
    raw = torch.where(torch.tensor([kind == "number" for kind in kinds]), raw, raw.round())
    return features, features.place(raw.double()).float()


def linear(weights, bounds=(-30.0, 1030.0)):
    """Class 0 scores 0, class 1 the weighted sum; all rows belong to class 0."""
    net = nn.Linear(len(weights), 2)
    with torch.no_grad():
        net.weight.copy_(torch.stack([torch.zeros_like(weights), weights]))
        net.bias.zero_()
    return Context(bounds, Target(net, bounds=bounds), features=None)


def apply(perturbation, rows, theta, features, seed=0, context=None):
    theta = torch.tensor([theta], dtype=torch.float32).expand(len(rows), -1)
    context = context or Context((-30.0, 1030.0))
    context = replace(context, features=features, reference=torch.zeros(len(rows), dtype=torch.long))
    return perturb(perturbation, rows, theta, torch.arange(len(rows)) + seed, context)


def n_changeable(features, rows, amount):
    """How many features of each row have another valid value, by the rules as written."""
    limits = features.limits(dtype=torch.float64)
    raw = features.value(rows.double())
    nearest = torch.where(limits.is_number, raw, raw.round())
    moves = ~limits.is_number | (amount > 0)
    can_rise = limits.may_rise & (nearest < limits.high - 1e-3)
    can_fall = limits.may_fall & (nearest > limits.low + 1e-3)
    return (moves & (can_rise | can_fall)).sum(1)


thetas = st.tuples(st.floats(0, 12), st.sampled_from([0.0, 0.05, 0.3, 1.0]))


@pytest.mark.parametrize("perturbation", [EDIT, WORST], ids=lambda each: each.name)
@settings(max_examples=60)
@given(table=tables(), theta=thetas, seed=st.integers(0, 2**40))
def test_the_result_is_always_a_valid_row(perturbation, table, theta, seed):
    features, rows = table
    weights = torch.linspace(-1, 1, len(features))
    made = apply(perturbation, rows, theta, features, seed, linear(weights))
    features.check(made, torch.arange(5))
    change = torch.tensor([CHANGES.index(each) for each in features.change])
    assert torch.equal(made[:, change == 3], rows[:, change == 3]), "fixed"
    assert bool((made >= rows)[:, change == 1].all()), "raised"
    assert bool((made <= rows)[:, change == 2].all()), "lowered"
    differs = made != rows
    before, after = (features.value(each.double()) for each in (rows, made))
    is_whole = torch.tensor([kind != "number" for kind in features.kind])
    assert bool(((after - before).abs() > 0.5)[differs & is_whole].all()), "by one at the least"
    n_most = torch.tensor(theta[0], dtype=torch.float32).add(0.5).floor()
    expected = n_changeable(features, rows, theta[1]).clamp(max=n_most)
    if perturbation is EDIT:
        assert torch.equal(differs.sum(1), expected.long())
    else:
        assert bool((differs.sum(1) <= expected).all())


@pytest.mark.parametrize("perturbation", TABLE, ids=lambda each: each.name)
@given(table=tables())
def test_nothing_changes_if_the_count_is_zero(perturbation, table):
    features, rows = table
    theta = (0.0,) if perturbation is NOISE else (0.49, 0.3)
    made = apply(perturbation, rows, theta, features, context=linear(torch.ones(len(features))))
    if perturbation is NOISE:
        torch.testing.assert_close(made, rows, atol=1e-6, rtol=0)
    else:
        assert torch.equal(made, rows)


@given(table=tables(), theta=thetas)
def test_a_row_on_axes_is_the_same_in_any_batch(table, theta):
    features, rows = table
    rows = rows.repeat(5, 1)
    whole = apply(EDIT, rows, theta, features)
    for part in (slice(0, 1), slice(3, 10), slice(7, 24)):
        assert torch.equal(apply(EDIT, rows[part], theta, features, part.start), whole[part])


def of(kinds, low, high, changes="any"):
    n = len(kinds)
    changes = (changes,) * n if isinstance(changes, str) else changes
    return Features(tuple(map(str, range(n))), kinds, torch.tensor(low), torch.tensor(high), changes)


def test_an_amount_is_a_share_of_the_range_and_stays_inside_it():
    features = of(("number", "integer", "integer", "binary"), [0.0, 0, 0, 0], [10.0, 100, 10, 1], "raise")
    row = torch.tensor([[2.0, 30.0, 9.0, 0.0]])
    assert apply(EDIT, row, (4, 0.25), features).tolist() == [[4.5, 55.0, 10.0, 1.0]]
    assert apply(EDIT, row, (4, 0.001), features).tolist() == [[pytest.approx(2.01), 31.0, 10.0, 1.0]]
    down = replace(features, change=("lower",) * 4)
    assert apply(EDIT, row, (4, 0.25), down).tolist() == [[0.0, 5.0, 6.0, 0.0]]


def test_a_category_takes_every_other_value_with_equal_chance():
    features = of(("category", "category", "category"), [2, 0, 0], [5, 0, 1])
    rows = torch.tensor([[3.0, 0, 1]]).repeat(3000, 1)
    changed = apply(EDIT, rows, (3, 0.02), features)
    values, counts = changed[:, 0].unique(return_counts=True)
    assert values.tolist() == [2, 4, 5]
    assert counts.min() > 900
    assert (changed[:, 1] == 0).all()
    assert (changed[:, 2] == 0).all()


def test_integers_too_large_for_a_step_of_one_take_larger_steps_or_none():
    features = of(("integer", "integer"), [0.0, 0.0], [2.0**31, 1000.0])
    row, context = torch.tensor([[2.0**30 + 64, 7.0]]), Context((0.0, 2.0**31))
    assert bool((apply(EDIT, row, (2, 0.02), features, context=context) != row).all())
    made = torch.cat([apply(EDIT, row, (1, 0.0), features, seed, context) for seed in range(20)])
    assert (made - row).abs().tolist() == [[0.0, 1.0]] * 20, "another takes its turn"


def test_every_changeable_feature_changes_in_both_directions():
    features = of(("integer",) * 8, [0.0] * 8, [10.0] * 8, ("any",) * 7 + ("fixed",))
    made = apply(EDIT, torch.full((4000, 8), 5.0), (2, 0.1), features)
    assert (made != 5).sum(1).tolist() == [2] * 4000
    rises, falls = ((made == to).float().mean(0)[:7] for to in (6, 4))
    torch.testing.assert_close(rises, torch.full((7,), 1 / 7), atol=0.02, rtol=0)
    torch.testing.assert_close(falls, torch.full((7,), 1 / 7), atol=0.02, rtol=0)


def test_the_gradient_is_that_of_the_relaxed_change():
    features = of(("number", "integer", "binary"), [0.0, 0.0, 0.0], [4.0, 100.0, 1.0], "raise")
    rows = torch.tensor([[1.0, 20.0, 0.0]]).double()
    theta = torch.tensor([[3.0, 0.113]], dtype=torch.float64, requires_grad=True)
    made = perturb(EDIT, rows, theta, torch.zeros(1).long(), Context((0.0, 100.0), features=features))
    slopes = [torch.autograd.grad(made[0, k], theta, retain_graph=True)[0][0, 1].item() for k in range(3)]
    assert made.tolist() == [[pytest.approx(1.452), 31.0, 1.0]], "the integer is rounded"
    assert slopes == [4.0, 100.0, 0.0], "as if it were not; a flip does not depend on the amount"


def test_the_feature_that_ranks_next_fades_in():
    features = of(("integer",) * 5, [0.0] * 5, [10.0] * 5, "raise")
    rows = torch.full((1, 5), 3.0)
    made = {}
    for count in (2.0, 2.3, 2.6, 3.0):
        theta = torch.tensor([[count, 0.4]], requires_grad=True)
        made[count] = perturb(EDIT, rows, theta, torch.zeros(1).long(), Context((0.0, 10.0), features=features))
        slope = torch.autograd.grad(made[count].sum(), theta)[0][0, 0].item()
        if count not in (2.0, 3.0):
            assert slope == 4.0, "what one feature more would change"
    assert [int((each != rows).sum()) for each in made.values()] == [2, 2, 3, 3]


def test_a_disturbance_before_an_edit_keeps_its_gradient():
    features = of(("number",) * 3, [0.0] * 3, [1.0] * 3)
    both = NOISE + EDIT
    theta = torch.tensor([[0.05, 1.0, 0.2]], requires_grad=True)
    made = perturb(both, torch.full((1, 3), 0.5), theta, torch.zeros(1).long(), Context(features=features))
    assert bool((torch.autograd.grad(made.sum(), theta)[0] != 0).all())


def test_the_worst_edit_of_a_linear_model_is_known():
    weights = torch.tensor([5.0, -4.0, 3.0, -2.0, 9.0, 0.5, 0.0])
    changes = ("any", "any", "lower", "raise", "fixed", "any", "any")
    kinds = ("number", "integer", "number", "number", "number", "binary", "number")
    features = of(kinds, [0.0] * 7, [1.0, 10.0, 1.0, 1.0, 1.0, 1.0, 1.0], changes)
    row = torch.tensor([[0.5, 5.0, 0.5, 0.5, 0.5, 0.0, 0.5]])
    # At an amount of 0.2, the expected gains are 5 * 0.2, -4 * -2, -3 * 0.2, -2 * 0.2, fixed, 0.5 * 1, and 0.
    expected = {1: {1: 3.0}, 2: {1: 3.0, 0: 0.7}, 3: {1: 3.0, 0: 0.7, 5: 1.0}, 9: {1: 3.0, 0: 0.7, 5: 1.0}}
    for count, change in expected.items():
        made = apply(WORST, row, (count, 0.2), features, context=linear(weights))
        differs = {k: pytest.approx(made[0, k].item()) for k in (made != row)[0].nonzero().flatten().tolist()}
        assert differs == change


def test_the_worst_edit_raises_the_loss_more_than_a_random_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
    rows = torch.rand(200, 20).mul(2).round()
    rows[:, :10] = rows[:, :10].clamp(max=1)
    features = Features.of(rows).set("1?", high=4)
    target = Target(net, bounds=(0.0, 4.0))
    reference = target.forward(rows).argmax(1).detach()
    context = Context((0.0, 4.0), target, reference, features=features)

    def loss(perturbation):
        made = perturb(perturbation, rows, torch.tensor([[4.0, 0.25]]).expand(200, 2), torch.arange(200), context)
        features.check(made, torch.arange(200))
        with torch.no_grad():
            return float(class_loss(target.forward(made), reference).mean())

    assert loss(WORST) > 1.2 * loss(EDIT)


def test_the_papers_noise_leaves_the_valid_rows_but_not_the_ranges():
    features = of(("binary", "integer", "number", "number"), [0.0, 0, -5, 2], [1.0, 200, 5, 2], ("any", "fixed") * 2)
    rows = torch.tensor([0.0, 100.0, 0.0, 2.0]).repeat(4000, 1)
    made = apply(NOISE, rows, (0.05,), features)
    assert bool((made != made.round())[:, 1].any()), "between whole numbers, even where fixed"
    assert made[:, 0].min() == 0
    torch.testing.assert_close(made.std(0)[1:3], torch.tensor([10.0, 0.5]), rtol=0.05, atol=0)
    assert bool((made[:, 3] == 2).all()), "a range of no width"


def test_a_table_without_features_is_rejected():
    with pytest.raises(UsageError, match="the features of the table must be known, got none"):
        apply(EDIT, torch.rand(2, 3), (1, 0.1), None)


# In a campaign

COLUMNS = ("opened", "closed", "n_files", "size", "age")


def table(n=120):
    draw = torch.Generator().manual_seed(0)
    flags = torch.randint(0, 2, (n, 2), generator=draw)
    counts = torch.randint(0, 9, (n, 2), generator=draw)
    return torch.cat([flags, counts, 4 * torch.rand(n, 1, generator=draw)], 1)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))


FEATURES = Features.of(table(), COLUMNS).set("*", change="raise").set("size", change="fixed").set("age", change="any")


@pytest.mark.parametrize("perturbation", [EDIT, WORST], ids=lambda each: each.name)
@pytest.mark.parametrize("policy", ["scheduled", "paper"])
def test_faults_are_valid_rows_and_replay_to_the_bit(tmp_path, perturbation, policy):
    target, out = Target(net(), bounds=(0.0, 8.0)), tmp_path / "run"
    run = themis.run(target, table(), perturbation, features=FEATURES, out=out, max_tests=400, policy=policy)
    assert len(run.faults) > 5
    with closing(Reader(out)) as reader:
        data = read_seeds(table()).with_features(FEATURES)
        for fault in reader.faults(handle=Replayer(reader, target, data, perturbation))[:8]:
            replay = fault.replay()
            assert replay.is_same
            assert replay.input_gap == 0
            FEATURES.check(replay.inputs[None], torch.tensor([fault.seed_id]))
            clean = table()[fault.seed_id]
            assert replay.inputs[3] == clean[3]
            assert bool((replay.inputs[:4] >= clean[:4]).all())


def test_a_run_is_resumed_only_with_its_own_features(tmp_path):
    target, out = Target(net(), bounds=(0.0, 8.0)), tmp_path / "run"
    how = {"perturbation": EDIT, "max_tests": 300}
    first = themis.run(target, table(), EDIT, features=FEATURES, out=out, max_tests=150, tolerance=1e-12)
    with pytest.raises(DataError, match="features must be the same as in the run"):
        themis.resume(out, target, table(), **how)
    with pytest.raises(UsageError, match="features must come with the data they describe"):
        themis.resume(out, target, features=FEATURES, **how)
    gone_on = themis.resume(out, target, table(), features=FEATURES, **how)
    assert gone_on.rounds[-1].tests == 300
    assert len(gone_on.faults) >= len(first.faults)


def test_features_beyond_the_bounds_are_rejected_before_anything_runs(tmp_path):
    with pytest.raises(
        DataError, match=r"'n_files' must stay in the input's bounds \(0, 8\), but it ranges from 0 to 20"
    ):
        themis.run(Target(net(), bounds=(0, 8)), table(), EDIT, features=FEATURES.set("n_files", high=20))
    with pytest.raises(DataError, match="seed 0 has"):
        themis.run(Target(net(), bounds=(0, 8)), table(), EDIT, features=FEATURES.set("n_files", low=8))


MODULE = """
import torch
from torch import nn

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
"""


def test_a_table_and_its_features_on_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "tabular.py").write_text(MODULE)
    lines = [",".join(f"{value:.9g}" for value in row) for row in table().tolist()]
    (tmp_path / "apps.csv").write_text("\n".join([",".join(COLUMNS), *lines]))
    (tmp_path / "features.csv").write_text("name,change,high\n*,raise,\nsize,fixed,\nage,any,5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    words = ["--model", "tabular:net", "--data", "csv:apps.csv", "--features", "features.csv", "--bounds", "0,8"]
    assert main(["run", *words, "--perturb", "edit", "--max-tests", "200", "--quiet", "--out", "run"]) == 0
    with closing(Reader("run")) as reader:
        ids = [str(fault.id) for fault in reader.faults()[:3]]
    assert main(["replay", "run", *ids]) == 0
    assert capsys.readouterr().out.count("input   identical, bit for bit") == 3
    assert main(["resume", "run", "--max-tests", "300", "--quiet"]) == 0
    (tmp_path / "features.csv").write_text("name,change\n*,raise\n")
    assert main(["resume", "run", "--max-tests", "400", "--quiet"]) == 3
    assert "features must be the same as in the run" in capsys.readouterr().err
    (tmp_path / "features.csv").write_text("name,change\nsiz,fixed\n")
    assert main(["run", *words, "--perturb", "edit"]) == 3
    assert "did you mean 'size'" in capsys.readouterr().err
