"""The paper's claims beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import geometric_mean, median

from themis.experiments.evaluation.summary import STRONG, THEMIS, Evaluation, Record
from themis.experiments.evaluation.theory import describe_shares
from themis.experiments.table import Table, plural
from themis.experiments.techniques import BASELINES
from themis.runs.run import percent

GRIDS = {"paper": "the paper's magnitudes", "grid": "magnitudes chosen in advance"}


def claims_table(evaluation: Evaluation) -> Table | None:
    """Every claim of the paper that the evaluation has measured; None if there is none."""
    content = evaluation.content
    rows = [
        *_capability(content["pairs"]),
        *_faults(content),
        *_gains(content["retraining"]),
        *_time(content["done"]),
        *_sampler(content["variants"]),
        *_completeness(content["theory"]),
        *_stability(content["theory"]),
        *_normality(content["theory"]),
        *_sensitivity(content["pairs"]),
    ]
    notes = [f"Strong: r of at least {STRONG}, under either definition of the error rate. Ratios are geometric means."]
    return Table("The paper's claims", ("claim", "the paper", "measured here"), rows, notes) if rows else None


def _capability(pairs: list[Record]) -> Iterator[tuple[str, ...]]:
    """How often correlations are strong, at equal passes."""
    for name, title in GRIDS.items():
        grids = [grid for pair in pairs for grid in pair["budgets"]["passes"] if grid["name"] == name]
        if not grids:
            continue
        texts = [f"{technique} {_strong(grids, [technique])}" for technique in THEMIS]
        texts += [f"the four baselines {_strong(grids, BASELINES)}", f"random {_strong(grids, ['random'])}"]
        n_degenerate = sum(grid["degenerate"] is not None and grid["box_degenerate"] is not None for grid in grids)
        degenerate = f"{n_degenerate} of {plural(len(grids), 'cell')} cannot be scored by either error rate"
        yield (
            f"Themis correlates strongly, baselines rarely ({title})",
            "0.70 to 0.95; baselines -0.89 to 0.79",
            f"{'; '.join(texts)}; {degenerate}",
        )


def _strong(grids: list[Record], techniques: Iterable[str]) -> str:
    """Strong correlations among those that are defined."""
    values = [
        row[key]["distinct"][0]
        for grid in grids
        for row in grid["rows"]
        if row["technique"] in techniques
        for key in ("r", "r_box")
        if row[key].get("distinct") and row[key]["distinct"][0] is not None
    ]
    return f"{sum(value >= STRONG for value in values)} of {len(values)}"


def _faults(content: Record) -> Iterator[tuple[str, ...]]:
    """Faults relative to the mean of the four baselines: when done, and at equal passes."""
    paired = {
        "when done": [pair["ratios"] for pair in content["done"]],
        "at equal passes": [grid["ratios"] for pair in content["pairs"] for grid in pair["budgets"]["passes"]],
    }
    for when, ratios in paired.items():
        texts = []
        for technique in THEMIS:
            values = [own[technique]["over_four"] for own in ratios if own.get(technique, {}).get("over_four")]
            if values:
                texts.append(f"{technique} {geometric_mean(values):.2f} times ({min(values):.2f} to {max(values):.2f})")
        if texts:
            claim = f"Themis finds more faults than the mean of the four baselines, {when}"
            yield claim, "3.78 times" if when == "when done" else "not measured", "; ".join(texts)


def _gains(retraining: list[Record]) -> Iterator[tuple[str, ...]]:
    """What retraining regains, in points."""
    gains: dict[str, list[float]] = {}
    for record in retraining:
        for standing in record["standings"]:
            if shift := standing["shifts"].get("disturbed"):
                gains.setdefault(standing["technique"], []).append(100 * (shift["after"] - shift["before"]))
    if "themis" in gains:
        ends = min(gains["themis"]), max(gains["themis"])
        means = ", ".join(f"{name} {sum(own) / len(own):+.2f}" for name, own in gains.items())
        measured = f"{ends[0]:+.2f} to {ends[1]:+.2f} points; means: {means}"
        yield "Retraining regains accuracy, more than with baselines", "0.21 to 11.56 points", measured


def _time(done: list[Record]) -> Iterator[tuple[str, ...]]:
    """Time until done, relative to the mean of the four baselines."""
    texts = []
    for technique in THEMIS:
        ratios = [
            row[technique]["seconds_total"] / (sum(row[name]["seconds_total"] for name in BASELINES) / len(BASELINES))
            for row in (pair["techniques"] for pair in done)
            if {technique, *BASELINES} <= set(row)
        ]
        if ratios:
            texts.append(f"{technique} {geometric_mean(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})")
    if texts:
        yield "Themis takes about as long as baselines, until done", "1.27 times", "; ".join(texts)


def _sampler(variants: list[Record]) -> Iterator[tuple[str, ...]]:
    """How far the coverage of the sample is from that of all neurons."""
    gaps = [
        abs(record[f"{when}coverage"] - record[f"{when}coverage_all"])
        for record in variants
        if record["technique"] == "paper"
        for when in ("first_", "")
    ]
    if gaps:
        measured = f"at most {percent(max(gaps), 2)} from that of all neurons, in {plural(len(gaps), 'round')}"
        yield "1,000 sampled neurons give the coverage of all", "equal", measured


def _completeness(theory: list[Record]) -> Iterator[tuple[str, ...]]:
    """What had been found when coverage reached 100%."""
    if texts := describe_shares(theory):
        measured = f"median share of a reference run's distinct faults: {'; '.join(texts)}"
        yield "At coverage 100%, fault-inducing behaviour has been seen", "with probability 95%", measured


def _stability(theory: list[Record]) -> Iterator[tuple[str, ...]]:
    """How much inferred means differ between sets of seeds."""
    found = [record["stability"] for record in theory if record["stability"]["model_deviation"] is not None]
    if found:
        whole = [stability["model_deviation"] for stability in found]
        close = median(stability["within_10_percent"] for stability in found)
        measured = (
            f"a model's mean by {percent(median(whole))} ({percent(min(whole))} to {percent(max(whole))}); "
            f"{percent(close, 0)} of single neurons by at most 10% (median)"
        )
        yield "Inferred means deviate by less than 10% between sets of seeds", "less than 10%", measured


def _normality(theory: list[Record]) -> Iterator[tuple[str, ...]]:
    """How many neurons have normal differences."""
    found = [record["normality"] for record in theory if record["normality"]]
    if found:
        signed, absolute = (
            median(normality[f"compatible_{kind}"] for normality in found) for kind in ("signed", "absolute")
        )
        measured = f"close to normal for {percent(signed, 0)} of the neurons, sensitivities for {percent(absolute, 0)}"
        yield "Differences of activations are normally distributed", "often", f"{measured} (medians)"


def _sensitivity(pairs: list[Record]) -> Iterator[tuple[str, ...]]:
    """Whether sensitivity rises with the error rate."""
    found = [pair["sensitivity"]["r"] for pair in pairs if pair["sensitivity"] and pair["sensitivity"]["r"] is not None]
    if found:
        measured = f"r of at least {STRONG} in {sum(r >= STRONG for r in found)} of {plural(len(found), 'cell')}"
        yield "Greater sensitivity comes with a higher error rate", "yes", f"{measured}, median {median(found):.2f}"
