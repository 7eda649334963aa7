"""Evidence about a run for auditors: a model card, an ML-BOM, and the other files that a signed statement covers."""

import uuid
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from themis.errors import UsageError
from themis.judge.estimate import Estimate
from themis.report.page import MAX_PICTURES, ReportView, read_view, render
from themis.runs.analysis.diff import escape, table
from themis.runs.analysis.review import read_review
from themis.runs.display.text import RANDOM_LABEL, accuracy_name, left_to_find
from themis.runs.estimates import SavedProgress, read_progress
from themis.runs.run import Round
from themis.runs.store.files import as_json, explained, list_folder, refuse_folder, write_file
from themis.runs.store.reader import Reader
from themis.text import counted, percent
from themis.version import __version__
from themis_integrations.evidence import statement

CONFIDENCE = 0.95
"""Of the intervals of `Estimate`."""
_NOT_SETTINGS = ("environment", "failed", "samples", "start", "tag")
_TASKS = {
    ("pictures", "detection"): "object-detection",
    ("pictures", "segmentation"): "image-segmentation",
    ("pictures", "keypoints"): "keypoint-detection",
    ("features", "regression"): "tabular-regression",
    **{("pictures", task): "image-classification" for task in ("wrong", "changed", "multilabel", "threshold")},
    **{("features", task): "tabular-classification" for task in ("wrong", "changed", "multilabel", "threshold")},
}
"""The task as the Hugging Face Hub names it, by the kind of inputs and the task of Themis; `other` for the others."""


@dataclass(frozen=True)
class StatedFigure:
    """A measured figure, for all inputs or for a slice."""

    metric: str
    """A name for programs."""
    name: str
    value: float
    interval: Estimate | None = None
    slice: str = ""
    tests: int | None = None
    is_share: bool = True

    def cells(self) -> tuple[str, str]:
        """The value and its interval."""
        ends = self.value, *(() if self.interval is None else (self.interval.low, self.interval.high))
        value, *rest = (percent(end, 2) if self.is_share else f"{end:.4g}" for end in ends)
        return value, " to ".join(rest) or "-"


@dataclass(frozen=True)
class Evidence:
    """The data for the files of evidence."""

    view: ReportView
    record: dict[str, Any]
    summary: dict[str, Any]
    progress: SavedProgress
    last: Round

    @property
    def start(self) -> dict[str, Any]:
        """What was known before the first test."""
        start: dict[str, Any] = self.record["start"]
        return start

    @property
    def data(self) -> str:
        """The inputs, by the name that the user gave."""
        origin = self.record["origin"] or {}
        return str(origin.get("zoo") or origin.get("data") or "inputs given in Python")


def write_evidence(run: str | Path, out: str | Path, *, most_pictures: int = MAX_PICTURES) -> Path:
    """Write evidence about a finished run into a new folder, and return its path."""
    path = Path(out)
    if names := list_folder(path):
        raise refuse_folder(path, names, "")
    evidence = _read(run, most_pictures)
    settings = {name: value for name, value in evidence.record.items() if name not in _NOT_SETTINGS}
    settings |= {name: evidence.start[name] for name in ("bounds", "oracle", "fault")}
    environment, gates = evidence.record["environment"], evidence.view.gates
    files = {
        statement.SUMMARY: as_json(evidence.summary, indent=2),
        statement.SETTINGS: as_json(settings, indent=2),
        statement.ENVIRONMENT: as_json(environment, indent=2),
        **({} if gates is None else {statement.GATES: as_json(gates, indent=2)}),
        statement.CARD: model_card(evidence).encode("utf-8", "replace"),
        statement.BOM: as_json(ml_bom(evidence), indent=2),
        statement.PAGE: render(evidence.view).encode("utf-8", "replace"),
    }
    digests = {name: statement.hash_bytes(content) for name, content in files.items()}
    files[statement.STATEMENT] = statement.make_statement(environment, gates, digests)
    digests[statement.STATEMENT] = statement.hash_bytes(files[statement.STATEMENT])
    files[statement.SUMS] = statement.make_sums(digests)
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_file(path / name, content)
    return path


def _read(run: str | Path, most_pictures: int) -> Evidence:
    with closing(Reader(run, is_brief=True)) as reader:
        summary, rounds, progress = reader.summary(), reader.rounds(), read_progress(reader)
        state = reader.state(summary)
        if summary is None or state == "failed" or not rounds or progress is None:
            raise UsageError(f"evidence must be about a campaign that has ended, but {run} is {state}: let it end")
        if summary["fault_rate"] is None:
            raise UsageError(f"evidence must have a fault rate, but {run} has no uniform tests: pass uniform_share=0.2")
        if (review := read_review(reader)) is not None:
            summary["review"] = review.as_dict()
        return Evidence(read_view(reader, most_pictures=most_pictures), reader.record, summary, progress, rounds[-1])


def measured(evidence: Evidence) -> list[StatedFigure]:
    """All figures: those of the whole domain first, then those of classes and strengths."""
    view, counts = evidence.view, evidence.view.counts
    clean, rate = view.clean, view.fault_rate
    figures = [
        StatedFigure(metric, f"{name} on clean inputs", value, is_share=metric == "accuracy")
        for metric, name, value in (
            ("accuracy", accuracy_name(view.task), clean.accuracy),
            ("mae", "mean absolute error", clean.error),
            ("mean_iou", "mean IoU", clean.iou),
            ("map", "mAP", clean.map),
        )
        if value is not None
    ]
    has_profile = any(theta.get("distribution") for theta in view.theta)
    is_operational = has_profile or evidence.record["settings"].get("seed_weights") is not None
    drawn = "in operation" if is_operational else "under random disturbance, averaged over inputs"
    failing = counts.failing_seeds / max(counts.seeds, 1)
    figures += [
        StatedFigure("fault_rate", f"fault rate {drawn}", rate.value, rate),
        StatedFigure("failing_inputs", "inputs that the search broke, at least", failing),
    ]
    if view.review and view.review["fault_rate"] is not None:
        valid = Estimate(**view.review["fault_rate"])
        name = f"fault rate {drawn}, of faults that people marked as valid tests"
        figures.append(StatedFigure("valid_fault_rate", name, valid.value, valid))
    if (risk := view.residual_risk) is not None:
        name = "residual risk: chance that the next random test shows a new distinct fault"
        figures.append(StatedFigure("residual_risk", name, risk.value, risk))
    if view.covers_neurons and view.coverage["interval"] is not None:
        covered = Estimate(**view.coverage["interval"])
        name = "coverage: neurons whose mean reaction to the disturbance is known"
        figures.append(StatedFigure("coverage", name, covered.value, covered))
    for each in view.slices:
        if (share := each.fault_rate) is not None:
            figures.append(StatedFigure("fault_rate", "fault rate", share.value, share, each.name, each.tests))
    for part in view.strengths:
        place, share = f"strength {part.low:g} to {part.high:g}", part.correct
        figures.append(StatedFigure("correct", RANDOM_LABEL, share.value, share, place, part.tests))
    return figures


def not_tested(evidence: Evidence) -> list[str]:
    """The limits of the figures, as sentences."""
    view, counts, start = evidence.view, evidence.view.counts, evidence.start
    left_out, coverage = counts.seeds_given - counts.seeds, evidence.last.coverage
    untried = int((evidence.progress.uniform_tests_by_seed == 0).sum())
    near_ties = len(evidence.progress.near_ties)
    lines = [
        f"Disturbances other than {view.perturbation}, and values of theta outside of the ranges above.",
        f"Inputs unlike the {counted(counts.seeds, 'input')} of the campaign: no interval says anything about them.",
    ]
    if left_out:
        why = f": {start['left_out']}" if start.get("left_out") else ""
        lines.append(f"{left_out:,} of {counted(counts.seeds_given, 'input')}, which were left out{why}.")
    if untried:
        lines.append(f"{untried:,} of the inputs under random disturbance: the rates are estimated from the others.")
    if counts.dropped:
        lines.append(f"{counted(counts.dropped, 'test')} that were too unlike their inputs (min_ssim, min_vif).")
    if view.reach:
        lines.append(f"Faults that were not found: {left_to_find(evidence.last)}.")
    lines.append("Inputs that the search could not break may break: it tries many disturbances, and proves nothing.")
    if view.covers_neurons and coverage.all < 1:
        lines.append(f"The mean reaction of {percent(1 - coverage.all)} of the neurons, which is not known yet.")
    cautions = (view.coverage["caution"] if view.covers_neurons else None, start.get("constant"), start.get("slight"))
    lines += [f"Attention: {text}." for text in cautions if text]
    if near_ties:
        lines.append(f"{counted(near_ties, 'test')} with a margin so small that another device may answer differently.")
    lines += [
        f"Other devices, precisions and versions than those in {statement.ENVIRONMENT}.",
        "The system around the model: sensors, redundancy, people, feedback loops, poisoned data or weights.",
    ]
    return lines


def model_card(evidence: Evidence) -> str:
    """A section for a model card in Markdown, under the metadata of a model card on the Hugging Face Hub."""
    import yaml

    view, environment, figures = evidence.view, evidence.record["environment"], measured(evidence)
    whole = [(each.name, *each.cells()) for each in figures if not each.slice]
    n_random = evidence.progress.counts["uniform_tests"]
    metadata = yaml.safe_dump(model_index(evidence), sort_keys=False, allow_unicode=True)
    domain = [
        ("model", view.subject),
        ("hash of its parameters", environment["model_sha256"]),
        ("inputs", f"{view.counts.seeds:,} of {view.counts.seeds_given:,} of {evidence.data}"),
        ("range of the inputs", "{:g} to {:g}".format(*evidence.start["bounds"])),
        ("hash of the inputs", environment["data_sha256"]),
        ("disturbance", view.perturbation),
        *((f"theta {theta['name']}", _describe_theta(theta)) for theta in view.theta),
        *([("weights of the inputs", weights)] if (weights := evidence.record["settings"].get("seed_weights")) else []),
        ("a fault is", str(view.fault)),
        ("random tests", f"{n_random:,}: all rates are based on these"),
        ("tests of the search", f"{view.counts.tests - n_random:,}: they look for faults, and no rate uses them"),
        ("end of the campaign", view.stop),
    ]
    of_parts = [each for each in figures if each.slice]
    rates, correct = ([each for each in of_parts if each.metric == name] for name in ("fault_rate", "correct"))
    lines = {
        "domain": table(("", ""), domain),
        "results": table(("figure", "value", f"{CONFIDENCE:.0%} interval"), whole),
        "slices": _slices("By slice", "fault rate", rates),
        "strengths": _slices("By strength of the disturbance", "correct", correct),
        "not_tested": [f"- {escape(line)}" for line in not_tested(evidence)],
        "limits": _limits(view.gates),
    }
    texts = {name: "\n".join(each) for name, each in lines.items()}
    card = (
        (files("themis_integrations.evidence") / "model-card.md")
        .read_text("utf-8")
        .format(verdict=escape(view.verdict.text), confidence=f"{100 * CONFIDENCE:.0f}", version=__version__, **texts)
    )
    return f"---\n{metadata}---\n{card}"


def _describe_theta(theta: dict[str, Any]) -> str:
    drawn = theta.get("distribution") or "uniform"
    unit = f" ({theta['unit']})" if theta["unit"] else ""
    return f"{theta['low']:g} to {theta['high']:g}{unit}, {drawn} in random tests"


def _slices(title: str, name: str, figures: list[StatedFigure]) -> Iterable[str]:
    heads = ("slice", name, f"{CONFIDENCE:.0%} interval", "random tests")
    rows = [(each.slice, *each.cells(), f"{each.tests:,}") for each in figures]
    return (f"### {title}", "", *table(heads, rows), "", "") if rows else ()


def _limits(gates: dict[str, Any] | None) -> list[str]:
    if gates is None:
        return [f"None: {statement.NO_LIMITS}, so that the statement says WARNED; `themis gate` checks some."]
    rows = [("passed" if row["has_passed"] else "FAILED", row["gate"], row["text"]) for row in gates["rows"]]
    return table(("result", "limit", "measured"), rows)


def model_index(evidence: Evidence) -> dict[str, Any]:
    """The figures as the metadata `model-index` of a model card on the Hugging Face Hub."""
    view, metrics = evidence.view, []
    for each in measured(evidence):
        metric = {"type": each.metric, "name": each.name, "value": each.value}
        if each.slice:
            metric |= {"name": f"{each.name}, {each.slice}", "config": each.slice}
        if each.interval is not None:
            metric["args"] = {"low": each.interval.low, "high": each.interval.high, "confidence": CONFIDENCE}
        metrics.append(metric)
    dataset = {
        "type": evidence.data.partition(":")[0].replace(" ", "-"),
        "name": evidence.data,
        "config": view.perturbation,
        "args": {"sha256": evidence.record["environment"]["data_sha256"], "perturbation": view.perturbation},
    }
    task = {"type": _TASKS.get((view.inputs.kind, view.task), "other")}
    result = {"task": task, "dataset": dataset, "metrics": metrics}
    return {"model-index": [{"name": view.subject, "results": [result]}]}


def ml_bom(evidence: Evidence) -> dict[str, Any]:
    """The figures, the model and the data as a CycloneDX 1.6 ML-BOM, which is always the same for a run."""
    view, environment, metrics = evidence.view, evidence.record["environment"], []
    for each in measured(evidence):
        metric: dict[str, Any] = {"type": each.name, "value": repr(each.value)}
        if each.slice:
            metric["slice"] = each.slice
        if (ends := each.interval) is not None:
            metric["confidenceInterval"] = {"lowerBound": repr(ends.low), "upperBound": repr(ends.high)}
        metrics.append(metric)
    weights = environment.get("weights_sha256")
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": view.subject,
        **({"hashes": [{"alg": "SHA-256", "content": weights}]} if weights else {}),
        "modelCard": {
            "modelParameters": {"task": view.task, "datasets": [{"ref": "data"}]},
            "quantitativeAnalysis": {"performanceMetrics": metrics},
            "considerations": {"technicalLimitations": [f"Not tested: {line}" for line in not_tested(evidence)]},
        },
        "properties": _properties(model_sha256=environment["model_sha256"], perturbation=view.perturbation),
    }
    data = {
        "type": "data",
        "bom-ref": "data",
        "name": evidence.data,
        "data": [{"type": "dataset", "name": evidence.data}],
        "properties": _properties(data_sha256=environment["data_sha256"], inputs=str(view.counts.seeds)),
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, statement.hash_bytes(as_json([evidence.summary, environment])))
    tool = {"type": "application", "name": "themis", "version": __version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}},
        "components": [model, data],
    }


def _properties(**values: str) -> list[dict[str, str]]:
    return [{"name": f"themis:{name}", "value": value} for name, value in values.items()]
