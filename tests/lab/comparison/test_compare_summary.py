"""Summaries of artificial cells: every number computed by hand, and the tables that show them."""

import re
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from themis.errors import StoreError
from themis.report.table import format_count
from themis_lab.comparison.figures import draw_correlations, draw_faults
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan, Grid
from themis_lab.comparison.statistics import format_estimate
from themis_lab.comparison.summary import (
    Comparison,
    fault_table,
    magnitude_table,
    markdown,
    opening,
    r_table,
    show,
    summarise,
)

GRID = Grid("given", (0.1, 0.2, 0.3, 0.4))
NAMES = ("random", "corners", "nc", "kmnc", "idc", "lsa", "scheduled")


def made_cell(cell, counts, **other):
    """A cell whose seed s has `counts[s]` distinct faults, each found twice; seeds 0 to 4 are selected."""
    seeds = [k for k, n in enumerate(counts) if n]
    distinct = [counts[k] for k in seeds]
    chosen = [n if k < 5 else 0 for k, n in zip(seeds, distinct, strict=True)]
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
    return ComparisonPlan(techniques=",".join(NAMES[2:]), magnitudes="0.1,0.2,0.3,0.4", campaigns=2, resamples=50)


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


def test_every_number_computed_by_hand(plan, counts, errors):
    summary = summarise(GRID, errors, errors, plan, {cell: made_cell(cell, each) for cell, each in counts.items()})
    rates = [errors[each].mean() for each in GRID.magnitudes]
    assert summary.rates == pytest.approx(rates)
    assert summary.degenerate is None
    r = {}
    for row in summary.rows:
        by_campaign = [
            sum(sum(counts[CampaignCell(row.technique, each, campaign)]) for each in GRID.magnitudes)
            for campaign in (0, 1)
        ]
        assert row.total["distinct_faults"] == [sum(by_campaign) / 2, min(by_campaign), max(by_campaign)]
        assert row.total["faults"][0] == sum(by_campaign)
        means = [
            sum(sum(counts[CampaignCell(row.technique, each, campaign)]) for campaign in (0, 1)) / 2
            for each in GRID.magnitudes
        ]
        assert summary.counts[row.technique] == pytest.approx(means)
        r[row.technique] = np.corrcoef(rates, means)[0, 1]
        assert row.r["distinct"][0] == row.r["faults"][0] == pytest.approx(r[row.technique])
        if row.technique in ("nc", "kmnc", "idc", "lsa"):
            chosen = [
                sum(sum(counts[CampaignCell(row.technique, each, campaign)][:5]) for campaign in (0, 1)) / 2
                for each in GRID.magnitudes
            ]
            assert row.r["selected_distinct"][0] == pytest.approx(np.corrcoef(rates, chosen)[0, 1])
            assert row.total["selected_distinct"] == sum(chosen)
    total = {row.technique: row.total["distinct_faults"][0] for row in summary.rows}
    for row in summary.rows:
        best = max((name for name in NAMES if name != row.technique), key=total.get)
        assert row.total["rivals"] == [best]
        assert row.total["over_rival"][0] == pytest.approx(total[row.technique] / total[best])
        best = max((name for name in NAMES if name != row.technique), key=r.get)
        assert row.r["rivals"] == [best]
        assert row.r["over_rival"][0] == pytest.approx(r[row.technique] - r[best])
        if row.technique in ("nc", "kmnc", "idc", "lsa"):
            assert row.r["over_baselines"] is None
        else:
            mean = np.mean([r[name] for name in ("nc", "kmnc", "idc", "lsa")])
            assert row.r["over_baselines"][0] == pytest.approx(r[row.technique] - mean)


def test_a_cell_that_names_another_seed_is_refused(plan, counts, errors):
    cells = {cell: made_cell(cell, n) for cell, n in counts.items()}
    changed = next(record for record in cells.values() if record["by_seed"]["seed_id"])
    changed["by_seed"]["seed_id"][-1] = 3251
    with pytest.raises(
        StoreError, match="must have faults on at most their 8 seeds, but they name 9: remove the cells"
    ):
        summarise(GRID, errors, errors, plan, cells)


def test_without_all_four_baselines_there_is_no_mean_of_them(counts, errors):
    plan = ComparisonPlan(techniques="nc,kmnc,scheduled", magnitudes="0.1,0.2,0.3,0.4", campaigns=2, resamples=50)
    records = {cell: made_cell(cell, counts[cell]) for cell in plan.cells((GRID,))}
    summary = summarise(GRID, errors, errors, plan, records)
    assert all(row.r["over_baselines"] is None for row in summary.rows)
    assert "over the four" not in r_table(summary).columns


def test_a_degenerate_grid_is_marked_and_not_scored(plan, counts):
    same = {each: np.ones(30) for each in GRID.magnitudes}
    summary = summarise(GRID, same, same, plan, {cell: made_cell(cell, each) for cell, each in counts.items()})
    assert "span 0.000" in summary.degenerate
    assert all(row.r == {} and row.total for row in summary.rows)
    assert all("Degenerate and not scored" in note for note in r_table(summary).notes[:2])
    comparison = Comparison(plan, "gaussian", {}, (summary,), [], {})
    assert comparison.as_dict()["degenerate_grids"] == comparison.as_dict()["box_degenerate_grids"] == 1


def opposite_leaders(plan):
    """Campaigns whose faults follow the rates at full strength (scheduled) or over the box (random), and both rates."""

    def failing(*rates):
        return {
            each: (np.arange(40) < 40 * rate).astype(float) for each, rate in zip(GRID.magnitudes, rates, strict=True)
        }

    full, box, neither = failing(0.9, 0.5, 0.6, 0.2), failing(0.2, 0.6, 0.5, 0.9), failing(0.4, 0.9, 0.2, 0.5)
    by, records = {"scheduled": full, "random": box}, {}
    for cell in plan.cells((GRID,)):
        rate = by.get(cell.technique, neither)[cell.magnitude].mean()
        records[cell] = made_cell(cell, [round(20 * rate) + k % 2 for k in range(8)])
    return full, box, records


def test_a_lead_that_one_definition_shows_is_not_stated(plan):
    full, box, records = opposite_leaders(plan)
    summary = summarise(GRID, full, box, plan, records)
    rows = {row.technique: row for row in summary.rows}
    assert rows["scheduled"].r["distinct"][0] > 0.95 > -0.3 > rows["scheduled"].r_box["distinct"][0]
    assert rows["random"].r_box["distinct"][0] > 0.95 > -0.3 > rows["random"].r["distinct"][0]
    assert all(row.r_lead["over_rival"] != "ahead" for row in summary.rows)
    leads = {row[0]: row[r_table(summary).columns.index("lead")] for row in r_table(summary).rows}
    assert "ahead" not in leads.values()
    plain = Comparison(plan, "gaussian", {}, (summary,), [], {}).as_dict()["grids"][0]
    assert plain["rates"] != plain["box_rates"]
    assert all(set(row) >= {"r", "r_box", "r_lead"} for row in plain["rows"])


def test_a_lead_that_both_definitions_show_is_stated(plan):
    full, _, records = opposite_leaders(plan)
    summary = summarise(GRID, full, full, plan, records)
    rows = {row.technique: row for row in summary.rows}
    assert rows["scheduled"].r_lead == {"over_rival": "ahead", "over_baselines": "ahead"}
    assert rows["random"].r_lead["over_rival"] == "behind"


def test_each_definition_has_its_own_degenerate_mark(plan, counts, errors, tmp_path):
    same = {each: np.ones(30) for each in GRID.magnitudes}
    records = {cell: made_cell(cell, each) for cell, each in counts.items()}
    for full, box in ((errors, same), (same, errors)):
        summary = summarise(GRID, full, box, plan, records)
        assert (summary.degenerate is None, summary.box_degenerate is None) == (full is errors, box is errors)
        assert all(bool(row.r) == (full is errors) and bool(row.r_box) == (box is errors) for row in summary.rows)
        assert all(row.r_lead == {"over_rival": None, "over_baselines": None} for row in summary.rows)
        notes = r_table(summary).notes
        assert ["Degenerate" in note for note in notes[:2]] == [full is same, box is same]
        assert draw_correlations(summary, "title", tmp_path / "r.png")
        assert draw_faults(summary, "title", tmp_path / "f.png")


def test_constant_counts_have_no_r(plan, counts, errors):
    records = {
        cell: made_cell(cell, [1] + [0] * 7 if cell.technique == "nc" else each) for cell, each in counts.items()
    }
    records = {cell: each if cell.technique != "idc" else made_cell(cell, [0] * 8) for cell, each in records.items()}
    rows = {row.technique: row for row in summarise(GRID, errors, errors, plan, records).rows}
    assert rows["nc"].r["distinct"] == rows["idc"].r["distinct"] == [None, None, None]
    assert rows["idc"].total["distinct_faults"] == [0, 0, 0]
    assert rows["scheduled"].r["over_baselines"][0] is None
    assert not {"nc", "idc"} & set(rows["random"].r["rivals"])


def test_no_technique_finds_a_fault(plan, counts, errors):
    records = {cell: made_cell(cell, [0] * 8) for cell in counts}
    summary = summarise(GRID, errors, errors, plan, records)
    assert all(row.total["over_rival"] is None and row.total["rivals"] == [] for row in summary.rows)
    assert all(row.r["rivals"] == [] for row in summary.rows)
    assert len(fault_table(summary).rows) == len(r_table(summary).rows) == 7


def test_tables_explain_failures_stops_and_plateaus(plan, counts, errors):
    records = {cell: made_cell(cell, each) for cell, each in counts.items()}
    some = CampaignCell("kmnc", 0.1, 0)
    records[some] = {"technique": "kmnc", "magnitude": 0.1, "campaign": 0, "error": "OSError: no room"}
    early = CampaignCell("random", 0.1, 1)
    records[early] = made_cell(early, counts[early], stop_reason="coverage", fit_inputs=0)
    for cell, record in records.items():
        if cell.technique == "lsa":
            record["fit_inputs"] = 60_000
    summary = summarise(
        Grid("grid", GRID.magnitudes, "error rates reach 60% at most, not 90%"), errors, errors, plan, records
    )
    comparison = Comparison(plan, "gaussian", {}, (summary,), list(records.values()), {})
    text = markdown(comparison)
    assert comparison._repr_markdown_() == text
    assert re.fullmatch(r"<Comparison: .*kmnc.* under gaussian, \d+ campaigns>", repr(comparison))
    assert "| kmnc | failed | - |" in text
    assert "kmnc failed: OSError: no room" in text
    assert "error rates reach 60% at most" in text
    assert "Stopped before all passes were spent: random in 1 campaign." in text
    assert "lsa 60,000" in text
    assert "50.0%*" in text
    assert "* Coverage did not rise in the last quarter of most campaigns: nc in 8 of 8." in text
    assert "The intervals tend to be too wide" in text
    assert len(comparison.failed) == comparison.as_dict()["failed_cells"] == 1
    order = [row[0] for row in fault_table(summary).rows]
    assert order[-1] == "kmnc"
    assert [row[0] for row in r_table(summary).rows] == order
    assert magnitude_table(summary).columns == ("magnitude", "error rate", "over the range", *order[:-1])
    found = [row.total["distinct_faults"][0] for row in summary.rows if row.total]
    assert found == sorted(found, reverse=True)


def test_a_variant_of_a_baseline_does_not_stand_in_for_it(counts, errors):
    plan = ComparisonPlan(
        techniques="kmnc(k=100),nc,kmnc,idc,lsa", magnitudes="0.1,0.2,0.3,0.4", campaigns=2, resamples=50
    )
    names = {"kmnc(k=100)": "scheduled"}
    records = {
        cell: made_cell(
            cell, counts[CampaignCell(names.get(cell.technique, cell.technique), cell.magnitude, cell.campaign)]
        )
        for cell in plan.cells((GRID,))
    }
    rows = {row.technique: row for row in summarise(GRID, errors, errors, plan, records).rows}
    mean = np.mean([rows[name].r["distinct"][0] for name in ("nc", "kmnc", "idc", "lsa")])
    over = rows["kmnc(k=100)"].r["over_baselines"][0]
    assert over == pytest.approx(rows["kmnc(k=100)"].r["distinct"][0] - mean)
    assert rows["kmnc"].r["over_baselines"] is None


def test_equal_rivals_are_all_named(plan, counts, errors):
    records = {cell: made_cell(cell, [3, 0, 0, 0, 0, 0, 0, 1]) for cell in counts}
    for cell in records:
        if cell.technique not in ("nc", "kmnc"):
            records[cell] = made_cell(cell, [1] + [0] * 7)
    summary = summarise(GRID, errors, errors, plan, records)
    rows = {row.technique: row for row in summary.rows}
    assert rows["random"].total["rivals"] == ["nc", "kmnc"]
    assert rows["nc"].total["rivals"] == ["kmnc"]


def test_the_only_technique_with_faults_has_no_rival(plan, counts, errors):
    records = {cell: made_cell(cell, counts[cell] if cell.technique == "nc" else [0] * 8) for cell in counts}
    rows = {row.technique: row for row in summarise(GRID, errors, errors, plan, records).rows}
    assert rows["nc"].total["rivals"] == []
    assert rows["nc"].total["over_rival"] is None
    assert rows["random"].total["rivals"] == ["nc"]


def test_too_few_selected_faults_have_no_r(plan, counts, errors):
    records = {cell: made_cell(cell, each) for cell, each in counts.items()}
    for cell, record in records.items():
        few = [int(cell.magnitude == 0.4)] * len(record["by_seed"]["seed_id"])
        record["by_seed"] |= {"selected": [50 * n for n in few], "selected_distinct": few}
    nc = next(row for row in summarise(GRID, errors, errors, plan, records).rows if row.technique == "nc")
    assert nc.r["distinct"][0] is not None
    assert 0 < nc.total["selected_distinct"] < 10
    assert nc.r["selected_distinct"] == nc.r["selected"] == [None, None, None]


def test_the_star_stands_for_most_campaigns_and_a_single_campaign_is_noted(counts, errors):
    plan = ComparisonPlan(techniques="nc", magnitudes="0.1,0.2,0.3,0.4", campaigns=1, resamples=50)
    records = {cell: made_cell(cell, counts[cell], is_plateau=cell.magnitude < 0.25) for cell in plan.cells((GRID,))}
    table = fault_table(summarise(GRID, errors, errors, plan, records))
    assert not any("*" in cell for row in table.rows for cell in row)
    assert not any("did not rise" in note for note in table.notes)
    assert "With one campaign, the intervals account for the choice of seeds only" in " ".join(table.notes)


def test_the_opening_counts_the_seeds_and_warns_if_they_are_few(plan):
    said = opening(Comparison(plan, "gaussian", {"search": 1380, "judge": 49}, (), [], {}))
    assert said[1] == "Seeds that the model answers correctly: 1,380 search, 49 judge."
    assert said[2].startswith("Warning: fewer than 50 judge seeds")
    assert len(opening(Comparison(plan, "gaussian", {"search": 50, "judge": 50}, (), [], {}))) == 2


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_the_terminal(plan, counts, errors, width):
    records = {cell: made_cell(cell, [100 * n for n in each]) for cell, each in counts.items()}
    summary = summarise(GRID, errors, errors, plan, records)
    console = Console(width=width, file=StringIO())
    show(Comparison(plan, "gaussian", {}, (summary,), [], {}), console)
    said = console.file.getvalue()
    lines = [line for line in said.splitlines() if line.startswith(" ")]
    assert max(map(len, lines)) <= width
    assert sum(line.strip().startswith(NAMES) for line in lines) == 14  # none is wrapped
    assert len([line for line in lines if line.strip()]) == 14 + 2 * 2
    assert (" seeds " in lines[1]) == (width == 100)
    assert ("table.md: seeds; raw" in said) == (width == 80)


def test_a_figure_of_correlations_is_not_squeezed_by_one_wide_interval(plan, counts, errors, tmp_path):
    records = {cell: made_cell(cell, each) for cell, each in counts.items()}
    summary = summarise(GRID, errors, errors, plan, records)
    rows = []
    for row, r in zip(summary.rows, ([0.999, 0.99, 1.0], [0.98, -0.9, 1.0], [0.97, None, None]), strict=False):
        rows.append(replace(row, r={**row.r, "distinct": r}))
    assert draw_correlations(replace(summary, rows=tuple(rows)), "title", tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_numbers_as_they_appear_in_tables():
    assert [format_count(each) for each in (0.0, 3.0, 3.5, 99.5, 1234.6)] == ["0", "3", "3.5", "99.5", "1,235"]
    assert format_estimate([0.5, 0.25, 0.75]) == "0.500 (0.250..0.750)"
    assert format_estimate([0.5, 0.25, 0.75], 2, signed=True) == "+0.50 (+0.25..+0.75)"
    assert format_estimate([0.5, None, None]) == "0.500"
    assert format_estimate([-0.0001, -0.5, 0.0001], signed=True) == "0.000 (-0.500..0.000)"
    assert format_estimate([-0.0004, None, None]) == "0.000"
    assert format_estimate([None, None, None]) == format_estimate(None) == "-"
