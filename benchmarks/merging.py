"""Summaries put together: what a part of an evaluation has finished replaces what was known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from themis.errors import UsageError
from themis_lab.evaluation.plan import EvaluationPlan, Kind
from themis_lab.evaluation.summary import Evaluation, Record

Subject = tuple[str, str, str]
"""A model, a perturbation, and the kind of cells that were run on them."""
RESULTS = {
    Kind.CAMPAIGNS: "pairs",
    Kind.DONE: "done",
    Kind.THEORY: "theory",
    Kind.VARIANT: "variants",
    Kind.RETRAINING: "retraining",
}
"""Where the results of each kind of cells are."""
QUESTIONS = {**{kind: kind for kind in RESULTS}, Kind.CAMPAIGNS: "faults"}
"""The question that each kind of cells answers."""


def merge_evaluations(stored: Record, part: Record, plan: EvaluationPlan, environment: Record) -> Evaluation:
    """The stored results with those that `part`, an evaluation of some of the cells, has finished; all else stays.

    plan: that of the whole, whose options both must have been measured with. environment: where the part was run.
    Whole entries are replaced, except for variants, which know their machines: techniques are compared by their time
    only within an entry, or between variants of one machine.
    """
    finished = _list_finished(stored, part)
    if not finished:
        raise UsageError("the part has finished nothing: run it until all techniques of a pair have had a campaign")
    _check_options(plan, part, finished)
    _check_options(plan, stored, _list_known(stored) - finished)
    content = {**stored, "plan": plan.as_dict(), "environment": _without_device(stored["environment"])}
    for kind, name in RESULTS.items():
        content[name] = _ordered(plan, kind, _merge_results(stored[name], part[name], kind, finished))
    _check_magnitudes(content, finished)
    begun = {pair["model"] for pair in content["pairs"]}
    missing = {name: reason for name, reason in stored["missing"].items() if name not in begun}
    content |= {
        "rows": {model.name: model.row or model.name for model in plan.models},
        "missing": missing,
        "unfinished": [model.name for model in plan.models if model.name not in {*begun, *missing}],
        "failed": [record for record in stored["failed"] if _subject(record) not in finished] + part["failed"],
        "progress": _merge_progress(plan, content, stored["progress"], part["progress"], finished),
        "merged": _merge_origins(stored.get("merged", []), part, environment, finished),
    }
    return Evaluation(content)


def _subject(record: Record) -> Subject:
    return record["model"], record["perturbation"], record["kind"]


def _pair(record: Record) -> tuple[str, str]:
    return record["model"], record["perturbation"]


def _list_known(content: Record) -> set[Subject]:
    """All that there are results of."""
    return {(*_pair(record), kind) for kind, name in RESULTS.items() for record in content[name]}


def _list_finished(stored: Record, part: Record) -> set[Subject]:
    """What a part has finished: all techniques had a campaign, and theory has no fewer campaigns than were known."""
    finished = _list_known(part)
    finished -= {(*_pair(pair), Kind.CAMPAIGNS) for pair in part["pairs"] if not _has_all(pair)}
    counts = {(*_pair(record), record["magnitude"]): record["campaigns"] for record in part["theory"]}
    for record in stored["theory"]:
        if counts.get((*_pair(record), record["magnitude"]), 0) < record["campaigns"]:
            finished.discard((*_pair(record), Kind.THEORY))
    return finished


def _has_all(pair: Record) -> bool:
    """Whether every technique of a pair had a campaign at every magnitude."""
    grids = [grid for grids in pair["budgets"].values() for grid in grids]
    return bool(grids) and all(len(grid["rows"]) == pair["limits"]["techniques"] for grid in grids)


def _check_options(plan: EvaluationPlan, content: Record, subjects: Iterable[Subject]) -> None:
    """Raise if results were measured with other options than the plan has."""
    own = EvaluationPlan.of(content["plan"])
    for model, perturbation, kind in sorted(subjects):
        if (model, perturbation) not in plan.pairs():
            raise UsageError(f"the plan must ask about {model} under {perturbation}, which was measured: add it")
        kinds = (Kind.RATES, Kind.CAMPAIGNS) if kind == Kind.CAMPAIGNS else (kind,)
        identities = [
            [other.cell(name, model, perturbation).digest for name in map(Kind, kinds)]
            + [getattr(other.pair(model, perturbation), name) for name in ("techniques", "campaigns")]
            for other in (plan, own)
        ]
        if identities[0] != identities[1]:
            raise UsageError(
                f"{kind} of {model} under {perturbation} must have the options of the plan, but were measured with "
                "others: change the plan, or measure them again"
            )


def _check_magnitudes(content: Record, finished: set[Subject]) -> None:
    """Raise if a result is at a magnitude that its pair does not have: the grid was chosen again, and differs."""
    known = {
        _pair(pair): {magnitude for grid in pair["grids"] for magnitude in grid["magnitudes"]}
        for pair in content["pairs"]
    }
    for kind in (Kind.DONE, Kind.THEORY, Kind.VARIANT, Kind.RETRAINING):
        for record in content[RESULTS[kind]]:
            if (*_pair(record), kind) not in finished:
                continue
            for magnitude in record.get("magnitudes", [record.get("magnitude")]):
                if magnitude not in known.get(_pair(record), ()):
                    raise UsageError(
                        f"{kind} of {' under '.join(_pair(record))} must be at a magnitude of its campaigns, got "
                        f"{magnitude:g}: pass the magnitudes of the stored grid in the plan of the part"
                    )


def _merge_results(stored: list[Record], part: list[Record], kind: str, finished: set[Subject]) -> list[Record]:
    """The results of one kind; a variant replaces only the same campaign of the same variant."""
    new = [record for record in part if (*_pair(record), kind) in finished]
    key: Callable[[Record], Any] = _variant if kind == Kind.VARIANT else _pair
    replaced = {key(record) for record in new}
    return [record for record in stored if key(record) not in replaced] + new


def _variant(record: Record) -> tuple[Any, ...]:
    return (*_pair(record), record["technique"], record["magnitude"], record["campaign"])


def _ordered(plan: EvaluationPlan, kind: str, records: list[Record]) -> list[Record]:
    """Results in the order in which an evaluation has them."""
    models, perturbations = [model.name for model in plan.models], plan.perturbations

    def place(record: Record) -> tuple[int, ...]:
        model, perturbation = models.index(record["model"]), perturbations.index(record["perturbation"])
        return (model, perturbation) if kind == Kind.CAMPAIGNS else (record.get("campaign", 0), perturbation, model)

    return sorted(records, key=place)


def _merge_progress(
    plan: EvaluationPlan, content: Record, stored: list[Record], part: list[Record], finished: set[Subject]
) -> list[Record]:
    """What is finished of all that the plan asks about."""
    records = {_subject(record): record for record in stored}
    for record in part:
        subject, before = _subject(record), records.get(_subject(record), record)
        if subject in finished:
            n = sum((*_pair(own), Kind.VARIANT) == subject for own in content["variants"])
            records[subject] = {**before, "finished": n} if subject[2] == Kind.VARIANT else record
    asked = [
        record for record in records.values() if plan.pair(*_pair(record)).asks(QUESTIONS.get(record["kind"], "truth"))
    ]
    by_kind = {kind: [record for record in asked if record["kind"] == kind] for kind in Kind}
    return [record for kind, own in by_kind.items() for record in _ordered(plan, "", own)]


def _merge_origins(stored: list[Record], part: Record, environment: Record, finished: set[Subject]) -> list[Record]:
    """Which results were measured where, the latest last; what has been measured again since is left out."""
    origins = [
        {
            **origin,
            "environment": _without_device(origin["environment"]),
            "cells": [cell for cell in origin["cells"] if _subject(cell) not in finished],
        }
        for origin in stored
    ]
    devices = {_pair(pair): pair["device"] for pair in part["pairs"]}
    names = sorted(finished, key=lambda subject: (list(Kind).index(Kind(subject[2])), *subject))
    cells = [
        {"model": model, "perturbation": perturbation, "kind": kind, "device": devices.get((model, perturbation))}
        for model, perturbation, kind in names
    ]
    new = {"version": part["version"], "environment": _without_device(environment)}
    for origin in origins:
        if all(origin[name] == value for name, value in new.items()):
            cells, origin["cells"] = origin["cells"] + cells, []
    return [origin for origin in [*origins, {**new, "cells": cells}] if origin["cells"]]


def _without_device(environment: Record) -> Record:
    """An environment as evaluations record it: earlier versions named a CPU, also if the pairs ran on a GPU."""
    return {name: value for name, value in environment.items() if name not in ("device", "device_name")}
