"""Tables of known faults: what techniques find of them, and which mutants their tests kill."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean

from themis.report.table import NONE, Table, format_count, format_spread
from themis.text import counted, percent
from themis_lab.evaluation.summary import Evaluation, Record, name_cell, themis_first

KINDS_OF_FAULTS = (
    "A region is a set of neighbouring cells of theta that fail; a fault in any of them finds it. Planted: seeds that "
    "fail in cells in which the model itself does not, found by a fault in one of these."
)
SHARES = {"seeds": "failing seeds", "regions": "regions", "cells": "cells", "planted": "planted"}


def truth_tables(evaluation: Evaluation) -> Iterable[Table]:
    """What each technique finds of the known faults, and its mutation score, over all cells."""
    known = evaluation.content.get("truth", [])
    rows: list[tuple[str, ...]] = []
    for name in themis_first({name for truth in known for name in truth["techniques"]}):
        own = [truth["techniques"][name] for truth in known if name in truth["techniques"]]
        recalls = [recall for row in own for recall in row.get("recall", [])]
        scores = [score["score"] for row in own for score in row.get("scores", [])]
        rows.append(
            (
                name,
                *(format_spread([recall[share] for recall in recalls], mean) for share in SHARES),
                format_spread(scores, mean),
            )
        )
    clean = [truth["mutants"]["clean_score"] for truth in known if truth["mutants"]]
    rows += [("the clean seeds", *[NONE] * len(SHARES), format_spread(clean, mean))] if clean else []
    notes = [
        "Shares of a mutant's known faults that techniques find at equal passes, and mutation scores: means over "
        f"mutants and campaigns of all cells, with the lowest and the highest. {KINDS_OF_FAULTS} The score is the "
        "share of pairs of a mutant and a class that the tests tell from the model; a test that is a fault of the "
        "model itself kills no mutant, so that a search for faults is not rewarded."
    ]
    if rows:
        yield Table("Known faults found, and mutation score", ("technique", *SHARES.values(), "score"), rows, notes)


def truth_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Recall and mutation scores, one table of each per model and perturbation."""
    for truth in evaluation.content.get("truth", []):
        cell = name_cell(truth)
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
            *(format_spread([recall[share] for recall in row["recall"]], mean) for share in SHARES),
        )
        for name, row in techniques.items()
        if "recall" in row
    ]
    texts = [
        f"{own['operator']} (accuracy {percent(own['accuracy'])}, the model {percent(own['model_accuracy'])}): "
        f"{own['failing_cells']:,} cells in {counted(own['failing_regions'], 'region')} of "
        f"{own['failing_seeds']:,} among {counted(own['seeds'], 'seed')} fail, {own['planted_cells']:,} of them, of "
        f"{counted(own['planted_seeds'], 'seed')}, only because of the mutation"
        for own in maps
    ]
    notes = [
        "Shares that techniques find at equal passes: means over mutants, with the lowest and the highest. A mutant "
        f"was tried at the centre of each of {maps[0]['cells']:,} cells of theta, on every seed. {KINDS_OF_FAULTS}",
        *(f"{text}." for text in texts),
    ]
    return Table(f"Known faults found, {cell}", ("technique", "tests", *SHARES.values()), rows, notes)


def _score_table(cell: str, mutants: Record, techniques: dict[str, Record]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            name,
            format_count(mean(score["tests"] for score in row["scores"])),
            format_spread([score["score"] for score in row["scores"]], mean),
            format_spread([score["killed"] for score in row["scores"]], mean),
        )
        for name, row in techniques.items()
        if "scores" in row
    ]
    clean = [format_spread([mutants[name]], mean) for name in ("clean_score", "clean_killed")]
    rows.append(("the clean seeds", NONE, *clean))
    dropped = mutants["dropped"]
    refused = f" {' and '.join(mutants['refused'])} cannot be applied." if mutants["refused"] else ""
    notes = [
        f"DeepMutation's mutation score: the share of pairs of one of {counted(mutants['mutants'], 'mutant')} and a "
        "class for which some test of the class is answered correctly by the model and wrongly by the mutant. Killed: "
        "the share of mutants for which that holds for any class. Means over campaigns at equal passes, with the "
        f"lowest and the highest. Not kept: {dropped['trivial']} trivial and {dropped['equivalent']} equivalent "
        f"mutants.{refused}"
    ]
    return Table(f"Mutation score, {cell}", ("technique", "tests", "score", "killed"), rows, notes)
