"""Summing up made cells: every figure worked out again by hand, and the tables that show them."""

import numpy as np
import pytest

from themis.comparison.comparing import Comparison
from themis.comparison.grid import Grid
from themis.comparison.plan import Cell, Plan
from themis.comparison.summary import summarise
from themis.comparison.table import count, figure, found_table, magnitude_table, markdown, r_table

GRID = Grid("given", (0.1, 0.2, 0.3, 0.4))
NAMES = ("random", "corners", "nc", "kmnc", "idc", "lsa", "scheduled")


def made_cell(cell, counts, **other):
    """A cell whose seed s has `counts[s]` distinct faults, each seen twice; the criterion selects those of seed 0."""
    seeds = [k for k, n in enumerate(counts) if n]
    distinct = [counts[k] for k in seeds]
    chosen = [n if k == 0 else 0 for k, n in zip(seeds, distinct, strict=True)]
    by_seed = {"seed_id": seeds, "distinct": distinct, "faults": [2 * n for n in distinct]}
    by_seed |= {"selected": chosen, "selected_distinct": chosen}
    return {
        **{"technique": cell.technique, "magnitude": cell.magnitude, "campaign": cell.campaign},
        **{"passes": 100, "tests": 50, "seeds": 8, "seconds": 1.0, "coverage": 0.5, "scc": 0.5, "is_share": True},
        **{"faults": 2 * sum(counts), "distinct_faults": sum(counts), "failing_seeds": len(seeds)},
        **{"is_plateau": cell.technique == "nc", "stop_reason": "passes", "fit_inputs": 0, "fit_seconds": 0.0},
        **{"has_criterion": cell.technique in ("nc", "kmnc", "idc", "lsa"), "by_seed": by_seed, **other},
    }


@pytest.fixture
def plan():
    return Plan(techniques=",".join(NAMES[2:]), magnitudes="0.1,0.2,0.3,0.4", campaigns=2, resamples=50)


@pytest.fixture
def counts(plan):
    generator = np.random.default_rng(0)
    return {
        cell: generator.poisson(4 * cell.magnitude * (1 + NAMES.index(cell.technique)), 8).tolist()
        for cell in plan.cells((GRID,))
    }


@pytest.fixture
def errors():
    generator = np.random.default_rng(1)
    return {each: (generator.random(30) < 2 * each).astype(float) for each in GRID.magnitudes}


def test_every_figure_by_hand(plan, counts, errors):
    summary = summarise(GRID, errors, plan, {cell: made_cell(cell, each) for cell, each in counts.items()})
    rates = [errors[each].mean() for each in GRID.magnitudes]
    assert summary.rates == pytest.approx(rates)
    assert summary.degenerate is None
    r = {}
    for row in summary.rows:
        by_campaign = [
            sum(sum(counts[Cell(row.technique, each, campaign)]) for each in GRID.magnitudes) for campaign in (0, 1)
        ]
        assert row.total["distinct_faults"] == [sum(by_campaign) / 2, min(by_campaign), max(by_campaign)]
        assert row.total["faults"][0] == sum(by_campaign)
        means = [
            sum(sum(counts[Cell(row.technique, each, campaign)]) for campaign in (0, 1)) / 2 for each in GRID.magnitudes
        ]
        assert summary.counts[row.technique] == pytest.approx(means)
        r[row.technique] = np.corrcoef(rates, means)[0, 1]
        assert row.r["distinct"][0] == row.r["faults"][0] == pytest.approx(r[row.technique])
        if row.technique in ("nc", "kmnc", "idc", "lsa"):
            chosen = [
                sum(counts[Cell(row.technique, each, campaign)][0] for campaign in (0, 1)) / 2
                for each in GRID.magnitudes
            ]
            assert row.r["selected_distinct"][0] == pytest.approx(np.corrcoef(rates, chosen)[0, 1])
            assert row.total["selected_distinct"] == sum(chosen)
    total = {row.technique: row.total["distinct_faults"][0] for row in summary.rows}
    for row in summary.rows:
        best = max((name for name in NAMES if name != row.technique), key=total.get)
        assert row.total["rival"] == best
        assert row.total["over_rival"][0] == pytest.approx(total[row.technique] / total[best])
        best = max((name for name in NAMES if name != row.technique), key=r.get)
        assert row.r["rival"] == best
        assert row.r["over_rival"][0] == pytest.approx(r[row.technique] - r[best])
        if row.technique in ("nc", "kmnc", "idc", "lsa"):
            assert row.r["over_baselines"] is None
        else:
            mean = np.mean([r[name] for name in ("nc", "kmnc", "idc", "lsa")])
            assert row.r["over_baselines"][0] == pytest.approx(r[row.technique] - mean)


def test_without_the_four_there_is_no_mean_of_them(counts, errors):
    plan = Plan(techniques="nc,kmnc,scheduled", magnitudes="0.1,0.2,0.3,0.4", campaigns=2, resamples=50)
    records = {cell: made_cell(cell, counts[cell]) for cell in plan.cells((GRID,))}
    summary = summarise(GRID, errors, plan, records)
    assert all(row.r["over_baselines"] is None for row in summary.rows)
    assert "over the four" not in r_table(summary).columns


def test_a_degenerate_grid_is_marked_and_not_scored(plan, counts):
    same = {each: np.ones(30) for each in GRID.magnitudes}
    summary = summarise(GRID, same, plan, {cell: made_cell(cell, each) for cell, each in counts.items()})
    assert "span 0.000" in summary.degenerate
    assert all(row.r == {} and row.total for row in summary.rows)
    assert "Degenerate and not scored" in r_table(summary).notes[0]
    comparison = Comparison(plan, "gaussian", {}, (summary,), [], {})
    assert comparison.as_dict()["degenerate_grids"] == 1


def test_counts_that_never_change_have_no_r(plan, counts, errors):
    records = {
        cell: made_cell(cell, [1] + [0] * 7 if cell.technique == "nc" else each) for cell, each in counts.items()
    }
    records = {cell: each if cell.technique != "idc" else made_cell(cell, [0] * 8) for cell, each in records.items()}
    rows = {row.technique: row for row in summarise(GRID, errors, plan, records).rows}
    assert rows["nc"].r["distinct"] == rows["idc"].r["distinct"] == [None, None, None]
    assert rows["idc"].total["distinct_faults"] == [0, 0, 0]
    assert rows["scheduled"].r["over_baselines"][0] is None
    assert rows["random"].r["rival"] not in ("nc", "idc")


def test_nobody_finds_anything(plan, counts, errors):
    records = {cell: made_cell(cell, [0] * 8) for cell in counts}
    summary = summarise(GRID, errors, plan, records)
    assert all(row.total["over_rival"] == [None, None, None] for row in summary.rows)
    assert all(row.r["rival"] is None for row in summary.rows)
    assert len(found_table(summary).rows) == len(r_table(summary).rows) == 7


def test_tables_say_what_must_be_said(plan, counts, errors):
    records = {cell: made_cell(cell, each) for cell, each in counts.items()}
    some = Cell("kmnc", 0.1, 0)
    records[some] = {"technique": "kmnc", "magnitude": 0.1, "campaign": 0, "error": "OSError: no room"}
    early = Cell("random", 0.1, 1)
    records[early] = made_cell(early, counts[early], stop_reason="coverage", fit_inputs=0)
    for cell, record in records.items():
        if cell.technique == "lsa":
            record["fit_inputs"] = 60_000
    summary = summarise(Grid("grid", GRID.magnitudes, "error rates reach 60% at most, not 90%"), errors, plan, records)
    comparison = Comparison(plan, "gaussian", {}, (summary,), list(records.values()), {})
    text = markdown(comparison)
    assert "| kmnc | failed | - |" in text
    assert "kmnc failed: OSError: no room" in text
    assert "error rates reach 60% at most" in text
    assert "Stopped before all passes were spent: random in 1 campaigns." in text
    assert "lsa 60,000" in text
    assert "50.0%*" in text  # the plateaus of nc
    assert "The best rival is scheduled" in text
    assert len(comparison.failed) == comparison.as_dict()["failed_cells"] == 1
    assert magnitude_table(summary).columns == ("magnitude", "error rate", *(name for name in NAMES if name != "kmnc"))


def test_numbers_as_they_are_shown():
    assert [count(each) for each in (0.0, 3.0, 3.5, 99.5, 1234.6)] == ["0", "3", "3.5", "99.5", "1,235"]
    assert figure([0.5, 0.25, 0.75]) == "0.500 (0.250..0.750)"
    assert figure([0.5, 0.25, 0.75], 2, signed=True) == "+0.50 (+0.25..+0.75)"
    assert figure([0.5, None, None]) == "0.500"
    assert figure([None, None, None]) == figure(None) == "-"
