"""Tables of known faults: what techniques find of them, and which mutants their tests kill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import mean

from themis.experiments.evaluation.summary import Evaluation, Record, themis_first
from themis.experiments.table import NONE, Table, format_count, format_estimate, plural
from themis.runs.run import percent

KNOWN_FAULTS = "Known faults"
"""The title of the section with these tables."""
SHARES = {"seeds": "failing seeds", "regions": "regions", "cells": "cells", "planted": "planted"}


def truth_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Recall and mutation scores, one table of each per model and perturbation."""
    for truth in evaluation.content.get("truth", []):
        cell = f"{truth['model']} {truth['perturbation']} {truth['magnitude']:.3g}"
        rows = {name: truth["techniques"][name] for name in themis_first(truth["techniques"])}
        if truth["maps"]:
            yield _recall_table(cell, truth["maps"], rows)
        if truth["mutants"] is not None:
            yield _score_table(cell, truth["mutants"], rows)


def _recall_table(cell: str, maps: list[Record], techniques: dict[str, Record]) -> Table:
    rows = [
        (
            name,
            format_count(mean(row["recall_tests"])),
            *(_spread([recall[share] for recall in row["recall"]]) for share in SHARES),
        )
        for name, row in techniques.items()
        if "recall" in row
    ]
    texts = [
        f"{own['operator']} (accuracy {percent(own['accuracy'])}, the model {percent(own['model_accuracy'])}): "
        f"{own['failing_cells']:,} cells in {plural(own['failing_regions'], 'region')} of "
        f"{own['failing_seeds']:,} among {plural(own['seeds'], 'seed')} fail, {own['planted_cells']:,} of them, of "
        f"{plural(own['planted_seeds'], 'seed')}, only because of the mutation"
        for own in maps
    ]
    notes = [
        "Shares that techniques find at equal passes: means over mutants, with the lowest and the highest. A mutant "
        f"was tried at the centre of each of {maps[0]['cells']:,} cells of theta, on every seed. A region is a set of "
        "neighbouring cells that fail; a fault in any of them finds it. Planted: seeds that fail in cells in which the "
        "model itself does not, found by a fault in one of these.",
        *(f"{text}." for text in texts),
    ]
    return Table(f"Known faults found, {cell}", ("technique", "tests", *SHARES.values()), rows, notes)


def _score_table(cell: str, mutants: Record, techniques: dict[str, Record]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            name,
            format_count(mean(score["tests"] for score in row["scores"])),
            _spread([score["score"] for score in row["scores"]]),
            _spread([score["killed"] for score in row["scores"]]),
        )
        for name, row in techniques.items()
        if "scores" in row
    ]
    rows.append(("the clean seeds", NONE, _spread([mutants["clean_score"]]), _spread([mutants["clean_killed"]])))
    dropped = mutants["dropped"]
    refused = f" {' and '.join(mutants['refused'])} cannot be applied." if mutants["refused"] else ""
    notes = [
        f"DeepMutation's mutation score: the share of pairs of one of {plural(mutants['mutants'], 'mutant')} and a "
        "class for which some test of the class is answered correctly by the model and wrongly by the mutant. Killed: "
        "the share of mutants for which that holds for any class. Means over campaigns at equal passes, with the "
        f"lowest and the highest. Not kept: {dropped['trivial']} trivial and {dropped['equivalent']} equivalent "
        f"mutants.{refused}"
    ]
    return Table(f"Mutation score, {cell}", ("technique", "tests", "score", "killed"), rows, notes)


def _spread(values: Sequence[float | None]) -> str:
    """The mean, with the lowest and the highest value if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    return format_estimate([mean(known), min(known), max(known)] if len(known) > 1 else [known[0], None, None])


def summarise_known_faults(evaluation: Evaluation) -> Iterator[str]:
    """Which of the known faults of mutants each technique finds, and which mutants its tests kill, over all cells."""
    truth = evaluation.content.get("truth", [])
    recalls: dict[str, dict[str, list[float]]] = {}
    scores: dict[str, list[float]] = {}
    for cell in truth:
        for name, row in cell["techniques"].items():
            for recall in row.get("recall", []):
                for share, value in recall.items():
                    if value is not None:
                        recalls.setdefault(share, {}).setdefault(name, []).append(value)
            if own := [score["score"] for score in row.get("scores", []) if score["score"] is not None]:
                scores.setdefault(name, []).extend(own)
    if recalls:
        seeds, regions = ({name: mean(own) for name, own in recalls[share].items()} for share in ("seeds", "regions"))
        texts = [f"{name} {percent(seeds[name], 0)} and {percent(regions[name], 0)}" for name in _ranked(seeds)]
        yield (
            f"**Known faults.** Of mutants whose failing seeds and regions of theta are all known, techniques find "
            f"these shares of the {SHARES['seeds']} and {SHARES['regions']} at equal passes, on average: "
            f"{', '.join(texts)}."
        )
    if scores:
        means = {name: mean(own) for name, own in scores.items()}
        clean = [cell["mutants"]["clean_score"] for cell in truth if cell["mutants"]]
        yield (
            f"**Mutation score.** The tests of each technique tell these shares of mutants and classes from the model: "
            f"{', '.join(f'{name} {means[name]:.2f}' for name in _ranked(means))}; the clean seeds {mean(clean):.2f}. "
            "A test that is a fault of the model kills nothing, so that a search for faults is not rewarded."
        )


def _ranked(values: dict[str, float]) -> list[str]:
    """Names from the highest value to the lowest."""
    return sorted(values, key=lambda name: -values[name])
