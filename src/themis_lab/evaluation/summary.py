"""The results of an evaluation: what its cells say about each question, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from themis.version import __version__
from themis_lab.comparison.api import read_errors, read_grids
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan, Grid
from themis_lab.comparison.statistics import Array, correlate, why_degenerate
from themis_lab.comparison.summary import summarise
from themis_lab.evaluation.plan import DECISIVE, EvaluationCell, EvaluationPlan, Kind
from themis_lab.evaluation.truth import summarise_truth
from themis_lab.techniques import BASELINES, PRESET

Record = dict[str, Any]
OURS = (PRESET, "scheduled")
"""The techniques under evaluation: the paper's method, and the default of this package."""
CELL_KEYS = ("model", "perturbation", "magnitude")
"""What a cell at one magnitude is told by."""
STRONG_R = 0.7
"""The least correlation that the paper calls a strong fault detection capability."""


def name_pair(pair: Record) -> str:
    """The name of a cell in tables."""
    return f"{pair['model']} {pair['perturbation']}"


def name_cell(record: Record) -> str:
    """The name of a cell at one magnitude in tables."""
    return f"{name_pair(record)} {record['magnitude']:.3g}"


def themis_first(techniques: Iterable[str]) -> list[str]:
    """Techniques in the order of tables: those under evaluation, and the others by name."""
    return sorted(techniques, key=lambda name: (OURS.index(name) if name in OURS else len(OURS), name))


def average_campaigns(records: Iterable[Record]) -> list[Record]:
    """One record per cell, with means over its campaigns and without texts.

    A campaign reached something if at least half of them did, and then the mean is over those.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in CELL_KEYS), []).append(record)
    return [
        {**_average(own), **dict(zip(CELL_KEYS, group, strict=True)), "campaigns": len(own)}
        for group, own in groups.items()
    ]


def _average(values: list[Any]) -> Any:
    """The mean of numbers, rounded if they are whole, or of dictionaries without their texts; None if most are None."""
    known = [value for value in values if value is not None]
    if 2 * len(known) < len(values) or not known:
        return None
    if isinstance(known[0], dict):
        parts = {name: [value[name] for value in known] for name in known[0] if name != "campaign"}
        return {name: _average(own) for name, own in parts.items() if not any(isinstance(value, str) for value in own)}
    mean = sum(known) / len(known)
    return round(mean) if all(isinstance(value, int) for value in known) else mean


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation, as plain data in the form of `evaluation.json`."""

    content: Record

    @property
    def n_failed(self) -> int:
        """Cells without a result."""
        return len(self.content["failed"])


def conclude_evaluation(
    plan: EvaluationPlan,
    planned: Iterable[EvaluationCell],
    records: dict[EvaluationCell, Record],
    missing: dict[str, str],
    environment: Record,
) -> Evaluation:
    """Summarise the records of the cells; `planned` are all cells except error rates, finished or not."""
    planned = list(planned)
    failed = [record for record in records.values() if "error" in record]
    kinds = {
        kind: [record for cell, record in records.items() if cell.kind == kind and "error" not in record]
        for kind in DECISIVE
    }
    campaigns: dict[tuple[str, str], dict[EvaluationCell, Record]] = {}
    for cell, record in records.items():
        if cell.kind == Kind.CAMPAIGNS:
            campaigns.setdefault((cell.model, cell.perturbation), {})[cell] = record
    begun = {record["model"] for record in kinds[Kind.RATES]}
    return Evaluation(
        {
            "version": __version__,
            "plan": plan.as_dict(),
            "rows": {model.name: model.row or model.name for model in plan.models},
            "missing": missing,
            "unfinished": [model.name for model in plan.models if model.name not in {*begun, *missing}],
            "failed": failed,
            "progress": _count_progress(planned, records),
            "pairs": [
                _summarise_pair(plan, rates, campaigns.get((rates["model"], rates["perturbation"]), {}))
                for rates in kinds[Kind.RATES]
            ],
            "done": summarise_done(kinds[Kind.DONE], [cell for cell in planned if cell.kind == Kind.DONE]),
            "theory": average_campaigns(kinds[Kind.THEORY]),
            "variants": kinds[Kind.VARIANT],
            "retraining": kinds[Kind.RETRAINING],
            "truth": summarise_truth(kinds[Kind.MAPS], kinds[Kind.RECALL], kinds[Kind.KILLS]),
            "environment": environment,
        }
    )


def _count_progress(planned: Iterable[EvaluationCell], records: dict[EvaluationCell, Record]) -> list[Record]:
    counts: dict[tuple[str, str, str], list[int]] = {}
    for cell in planned:
        own = counts.setdefault((cell.model, cell.perturbation, cell.kind), [0, 0])
        own[0] += cell in records and "error" not in records[cell]
        own[1] += 1
    return [
        {"model": model, "perturbation": perturbation, "kind": kind, "finished": finished, "planned": n}
        for (model, perturbation, kind), (finished, n) in counts.items()
    ]


def _summarise_pair(plan: EvaluationPlan, rates: Record, cells: dict[EvaluationCell, Record]) -> Record:
    options = plan.pair(rates["model"], rates["perturbation"])
    comparison = options.comparison(plan.resamples, plan.random_seed)
    errors, box_errors = read_errors(rates)
    n_techniques = len(comparison.chosen())
    complete, n_campaigns = _complete(rates, cells, comparison)
    comparison = replace(comparison, techniques=",".join(complete), campaigns=n_campaigns)
    budgets: Record = {}
    for budget in ("passes", "tests") if options.tests is not None else ("passes",):
        records = {
            CampaignCell(cell.technique, cell.magnitude, cell.campaign): (
                record if "error" in record else record["at"][budget]
            )
            for cell, record in cells.items()
        }
        budgets[budget] = [
            _with_ratios(
                summarise(grid, errors, box_errors, comparison, records).as_dict(),
                has_all=len(complete) == n_techniques,
            )
            for grid in read_grids(rates)
            if all(technique.name in complete for technique in comparison.chosen())
        ]
    return {
        "model": rates["model"],
        "perturbation": rates["perturbation"],
        "seeds": rates["seeds"],
        "grid_refused": rates["grid_refused"],
        "limits": {
            "passes": options.passes,
            "tests": options.tests,
            "campaigns": n_campaigns,
            "planned": options.campaigns,
            "techniques": n_techniques,
        },
        "device": rates["device"],
        "grids": [_describe_grid(grid, errors, box_errors) for grid in read_grids(rates)],
        "budgets": budgets,
        "sensitivity": _correlate_sensitivity(rates, cells),
    }


def _describe_grid(grid: Grid, errors: dict[float, Array], box_errors: dict[float, Array]) -> Record:
    """The error rates of a grid under both definitions, and why no correlation with them is defined."""
    rates, box_rates = (np.array([by[at].mean() for at in grid.magnitudes]) for by in (errors, box_errors))
    return {
        "name": grid.name,
        "magnitudes": list(grid.magnitudes),
        "rates": rates.tolist(),
        "degenerate": why_degenerate(rates),
        "box_rates": box_rates.tolist(),
        "box_degenerate": why_degenerate(box_rates),
    }


def _complete(rates: Record, cells: dict[EvaluationCell, Record], comparison: ComparisonPlan) -> tuple[list[str], int]:
    """The techniques that have been run at all magnitudes, and how many campaigns all of them have had.

    One that failed does not count: it runs again with the next call.
    """
    done = {(cell.technique, cell.magnitude, cell.campaign) for cell, record in cells.items() if "error" not in record}
    magnitudes = {magnitude for grid in rates["grids"] for magnitude in grid["magnitudes"]}

    def n_campaigns(technique: str) -> int:
        return next(
            (k for k in range(comparison.campaigns) if any((technique, at, k) not in done for at in magnitudes)),
            comparison.campaigns,
        )

    counts = {technique.name: n_campaigns(technique.name) for technique in comparison.chosen()}
    complete = {name: n for name, n in counts.items() if n}
    return list(complete), min(complete.values(), default=1)


def _with_ratios(grid: Record, *, has_all: bool) -> Record:
    """A grid with the distinct faults of Themis relative to those of its rivals; all must have run for a best one."""
    found = {row["technique"]: row["total"]["distinct_faults"][0] for row in grid["rows"] if row["total"]}
    unknown = {} if has_all else {"best_rival": None, "over_best": None}
    return {**grid, "ratios": {name: compare_faults(found, name) | unknown for name in OURS if name in found}}


def compare_faults(found: dict[str, float], name: str) -> Record:
    """The faults of a technique over those of the best other one, the mean of the four baselines, and random."""
    rivals = {rival: count for rival, count in found.items() if rival not in OURS}
    best = max(rivals, key=lambda rival: rivals[rival], default=None)
    four = [found[rival] for rival in BASELINES if rival in found]
    return {
        "best_rival": best,
        "over_best": None if best is None else _ratio(found[name], rivals[best]),
        "over_four": _ratio(found[name], float(np.mean(four))) if len(four) == len(BASELINES) else None,
        "over_random": _ratio(found[name], found["random"]) if "random" in found else None,
    }


def _ratio(count: float, other: float) -> float | None:
    return count / other if other > 0 else None


def _correlate_sensitivity(rates: Record, cells: dict[EvaluationCell, Record]) -> Record | None:
    """Pearson's r over magnitudes of the mean sensitivity and the error rate, by the uniform tests of `random`."""
    means: dict[float, list[float]] = {}
    for cell, record in cells.items():
        if cell.technique == "random" and record.get("mean_sensitivity") is not None:
            means.setdefault(cell.magnitude, []).append(record["mean_sensitivity"])
    if len(means) < 3:
        return None
    magnitudes = sorted(means)
    box = np.array([np.mean(rates["box_errors"][repr(magnitude)]) for magnitude in magnitudes])
    sensitivity = np.array([np.mean(means[magnitude]) for magnitude in magnitudes])
    degenerate = why_degenerate(box)
    r = float(correlate(box, sensitivity)) if degenerate is None else None
    return {
        "magnitudes": magnitudes,
        "mean_sensitivity": sensitivity.tolist(),
        "error_rates": box.tolist(),
        "degenerate": degenerate,
        "r": r,
    }


def summarise_done(records: Iterable[Record], planned: Iterable[EvaluationCell]) -> list[Record]:
    """By model and perturbation, each technique when it was done: means over magnitudes and campaigns.

    Only magnitudes and campaigns count that all planned techniques have had, so that they are compared on the same
    ones, and for times only those that all techniques had on one machine.
    """
    names: dict[tuple[str, str], set[str]] = {}
    for cell in planned:
        names.setdefault((cell.model, cell.perturbation), set()).add(cell.technique)
    by_pair: dict[tuple[str, str], dict[tuple[float, int], list[Record]]] = {}
    for record in records:
        pair = by_pair.setdefault((record["model"], record["perturbation"]), {})
        pair.setdefault((record["magnitude"], record["campaign"]), []).append(record)
    summaries = []
    for (model, perturbation), campaigns in by_pair.items():
        wanted = names[model, perturbation]
        whole = [own for own in campaigns.values() if wanted <= {record["technique"] for record in own}]
        if not whole:
            continue
        techniques: dict[str, list[Record]] = {}
        for record in (record for own in whole for record in own):
            techniques.setdefault(record["technique"], []).append(record)
        timed = [own for own in whole if own[0].get("machine") and len({record.get("machine") for record in own}) == 1]
        rows = {
            name: _describe_done(own)
            | _describe_times([record for group in timed for record in group if record["technique"] == name])
            for name, own in techniques.items()
        }
        found = {name: row["distinct_faults"] for name, row in rows.items()}
        summaries.append(
            {
                "model": model,
                "perturbation": perturbation,
                "magnitudes": sorted({record["magnitude"] for own in techniques.values() for record in own}),
                "techniques": rows,
                "ratios": {name: compare_faults(found, name) for name in OURS if name in found},
            }
        )
    return summaries


def _describe_done(records: list[Record]) -> Record:
    names = ("tests", "passes", "faults", "distinct_faults", "failing_seeds", "coverage", "scc")
    reasons = [str(record["stop_reason"]) for record in records]
    return {
        **{name: float(np.mean([record[name] for record in records])) for name in names},
        "stops": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "campaigns": len(records),
    }


def _describe_times(records: list[Record]) -> Record:
    """Mean seconds by phase and per test; empty if no campaign can be compared by its time."""
    if not records:
        return {}
    names = ("seconds_measure", "seconds_judge", "seconds_search", "seconds_total", "fit_seconds")
    means = {name: float(np.mean([record[name] for record in records])) for name in names}
    return {
        **means,
        "seconds_per_test": means["seconds_total"] / float(np.mean([record["tests"] for record in records])),
    }


def with_times(done: Iterable[Record]) -> list[Record]:
    """The cells whose techniques can be compared by their time."""
    return [pair for pair in done if all("seconds_total" in row for row in pair["techniques"].values())]
