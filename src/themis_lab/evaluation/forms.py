"""What is stored of each kind of cell: a record that was damaged or edited is refused before it is summarised."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from themis.reading import (
    Form,
    all_of,
    anything,
    either,
    flag,
    items,
    number,
    optional,
    record,
    text,
    values_of,
    whole,
)
from themis_lab.comparison.api import RATES_FORM
from themis_lab.comparison.cells import CAMPAIGN, MEASURED, MOST
from themis_lab.evaluation.plan import (
    CAMPAIGNS,
    DONE,
    KILLS,
    MAPS,
    RATES,
    RECALL,
    RETRAINING,
    THEORY,
    VARIANT,
    EvaluationCell,
    PairOptions,
)
from themis_lab.evaluation.theory import WAYS_TO_STOP

COUNT, SHARE, AMOUNT, FIGURE = whole(0, MOST), number(0, 1), number(0, MOST), number(-MOST, MOST)
PHASES = ("seconds_measure", "seconds_judge", "seconds_search")
COST: dict[str, Form] = {**dict.fromkeys(PHASES, AMOUNT), "seconds_total": number(1e-9, MOST)}
OTHER_COST: dict[str, Form] = {
    "machine": optional(text(100)),
    **dict.fromkeys(("all_tests", "all_passes"), COUNT),
    "mean_sensitivity": optional(FIGURE),
    "fault_rate": optional(SHARE),
}
"""What earlier versions did not store."""


def form_of(cell: EvaluationCell, options: PairOptions) -> Form:
    """What is stored of a cell that has not failed."""
    identity = {name: value for name, value in asdict(cell).items() if value != ""}

    def is_of_cell(value: Any, place: str) -> None:
        record(dict.fromkeys(identity, anything))(value, place)
        for name, own in identity.items():
            if value[name] != own:
                raise ValueError(f"{place} must be that of the cell, whose {name} is {own!r}, but it is of another")

    if cell.kind == CAMPAIGNS:
        campaign = all_of(CAMPAIGN, record({"seeds": whole(0, options.seeds)}))
        budgets = ("passes",) if options.tests is None else ("passes", "tests")
        return all_of(is_of_cell, record({"at": record(dict.fromkeys(budgets, campaign)), **COST}, OTHER_COST))
    if cell.kind in CLOSED:
        closed = record({**CLOSED[cell.kind], **dict.fromkeys(identity, anything)}, OTHER_COST, is_closed=True)
        return all_of(is_of_cell, closed)
    return all_of(is_of_cell, FORMS[cell.kind])


def _columns(**forms: Form) -> Form:
    """Columns of one length."""

    def check(value: Any, place: str) -> None:
        record({name: items(form) for name, form in forms.items()})(value, place)
        if len({len(value[name]) for name in forms}) > 1:
            raise ValueError(f"{place} must have columns of one length")

    return check


def _is_measured(value: Any, place: str) -> None:
    """Error rates at all magnitudes of at least one grid."""
    grids = value["grids"]
    if not grids or not all(grid["magnitudes"] for grid in grids):
        raise ValueError(f"{place}.grids must be grids with magnitudes, but one has none")
    for grid in grids:
        for magnitude in grid["magnitudes"]:
            for name in ("errors", "box_errors"):
                if not value[name].get(repr(float(magnitude))):
                    raise ValueError(f"{place}.{name} must have the rates at magnitude {magnitude!r}")


_FOUND = record(
    {
        **dict.fromkeys(("tests", "distinct_faults"), COUNT),
        **dict.fromkeys(("of_faults", "of_seeds", "of_groups"), optional(SHARE)),
    },
    is_closed=True,
)
CLOSED: dict[str, dict[str, Form]] = {
    THEORY: {
        "reference": record(
            dict.fromkeys(("tests", "distinct_faults", "failing_seeds", "groups", "seeds"), COUNT), is_closed=True
        ),
        **dict.fromkeys(WAYS_TO_STOP, optional(_FOUND)),
        "stability": record(
            {
                **dict.fromkeys(("median_deviation", "within_10_percent", "model_deviation"), optional(FIGURE)),
                **dict.fromkeys(("neurons", "sets", "tests"), COUNT),
            },
            is_closed=True,
        ),
        "normality": optional(
            record(
                {
                    **dict.fromkeys(("skewness_signed", "kurtosis_signed"), FIGURE),
                    **dict.fromkeys(("skewness_absolute", "kurtosis_absolute"), FIGURE),
                    **dict.fromkeys(("compatible_signed", "compatible_absolute"), SHARE),
                    **dict.fromkeys(("n_neurons", "n_unmoved"), COUNT),
                    **dict.fromkeys(("verdict", "sentence"), text()),
                },
                is_closed=True,
            )
        ),
    },
    VARIANT: {
        **dict.fromkeys(("neurons", "rounds", "first_tests", "distinct_faults"), COUNT),
        **dict.fromkeys(("first_coverage", "first_coverage_all", "coverage", "coverage_all"), SHARE),
        "tests": whole(1, MOST),
        "tests_to_coverage": optional(COUNT),
        **COST,
    },
}
"""Kinds of cells whose means are taken over all that is stored: nothing else may be there."""
_SCORES = ("clean", "disturbed")
_INTERVAL = record(dict.fromkeys(("value", "low", "high"), FIGURE))
_SHIFT = record({"before": FIGURE, "after": FIGURE, "combined": optional(_INTERVAL)})
_STANDING = record(
    {"technique": text(), "n_runs": COUNT, "shifts": values_of(_SHIFT)},
    {"lead": optional(record({"combined": optional(_INTERVAL)}))},
)
FORMS: dict[str, Form] = {
    RATES: all_of(
        RATES_FORM,
        record(
            {
                **dict.fromkeys(("grids", "errors", "box_errors", "judge", "seeds"), anything),
                "grid_refused": text(),
                "device": text(),
            }
        ),
        _is_measured,
    ),
    DONE: record({**MEASURED, "tests": whole(1, MOST), **COST}, OTHER_COST),
    RETRAINING: either(
        record({"untrained": text(), "standings": items(anything, 0)}),
        record(
            {"inputs": COUNT, "before": record(dict.fromkeys(_SCORES, FIGURE)), "standings": items(_STANDING)},
        ),
    ),
    MAPS: record(
        {
            "operator": text(),
            **dict.fromkeys(("accuracy", "model_accuracy"), SHARE),
            **dict.fromkeys(("seeds", "cells"), COUNT),
            "failing": _columns(seed_id=COUNT, cell=COUNT, region=COUNT, is_planted=flag),
        }
    ),
    RECALL: record({"tests": COUNT, "passes": COUNT, "found": _columns(seed_id=COUNT, cell=COUNT)}),
    KILLS: record(
        {
            **dict.fromkeys(("tests", "passes", "mutants"), COUNT),
            "dropped": record(dict.fromkeys(("trivial", "equivalent"), COUNT)),
            "refused": items(text()),
            **dict.fromkeys(("score", "killed", "clean_score", "clean_killed"), optional(SHARE)),
        }
    ),
}
"""The other kinds, beside campaigns."""
