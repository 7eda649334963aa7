"""The paper's claims beside what was measured, and whether they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import geometric_mean, mean, median

from themis.experiments.evaluation.cells import RETRAINED
from themis.experiments.evaluation.summary import STRONG, THEMIS, Evaluation, Record
from themis.experiments.evaluation.theory import CLOSE, describe_shares, list_shares
from themis.experiments.evaluation.truth_tables import SHARES
from themis.experiments.table import Table, plural
from themis.experiments.techniques import BASELINES, PRESET
from themis.runs.run import percent

GRIDS = {"paper": "the paper's magnitudes", "grid": "magnitudes chosen in advance"}
CHOOSERS = {own: technique for technique, own in RETRAINED.items()}
"""Techniques by what they are called where they choose inputs to train on."""
HOLDS, IN_PART, FAILS, OPEN = "holds", "holds in part", "does not hold", "cannot be checked"
NEARLY_ALL, FEW = 0.9, 0.5
"""Shares of the cells in which a technique must have strong correlations, and in which baselines may have them."""
PAPER_FAULTS, PAPER_TIME = 3.78, 1.271
"""The paper's faults and time until done, relative to the mean of the four baselines."""
MORE, MUCH_MORE = 1.1, 3.0
"""Ratios from which on a technique finds more faults than baselines, and about as many as the paper says."""
SLOWER = 1.5
"""The ratio up to which a technique takes about as long as the paper says."""
SAMPLED = 0.005
"""How far the coverage of a sample may be from that of all neurons."""
SEEN = 0.95
"""The share of the faults that must have been seen at coverage 100%."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and what became of it."""

    text: str
    paper: str
    """What the paper says."""
    measured: str
    verdict: str
    why: str = ""
    """Whole sentences, or nothing."""


def judge_claims(evaluation: Evaluation) -> list[Claim]:
    """Every claim of the paper that the evaluation has measured."""
    content = evaluation.content
    return [
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


def claims_table(evaluation: Evaluation) -> Table | None:
    """All claims that were measured; None if there is none."""
    claims = judge_claims(evaluation)
    rows: list[tuple[str, ...]] = [(claim.text, claim.paper, claim.measured, claim.verdict) for claim in claims]
    notes = [
        f"Strong: r of at least {STRONG}, under either definition of the error rate. Ratios are geometric means over "
        "cells, with the lowest and the highest. Verdicts are about paper-preset, the paper's own method."
    ]
    columns = ("claim", "the paper", "measured here", "verdict")
    return Table("The paper's claims", columns, rows, notes) if rows else None


def summarise_claims(evaluation: Evaluation) -> list[str]:
    """What holds and what does not, as one paragraph of Markdown per claim, and what is known of known faults."""
    paragraphs = []
    for claim in judge_claims(evaluation):
        sentences = f"The paper: {claim.paper}. Measured: {claim.measured}. {claim.why}"
        paragraphs.append(f"**{claim.text}: {claim.verdict}.** {sentences.strip()}")
    return [*paragraphs, *_known_faults(evaluation.content.get("truth", []))]


def _capability(pairs: list[Record]) -> Iterator[Claim]:
    """How often correlations are strong, at equal passes."""
    for name, title in GRIDS.items():
        scored = [grid for pair in pairs for grid in pair["budgets"]["passes"] if grid["name"] == name]
        if not scored:
            continue
        names = {**{technique: [technique] for technique in THEMIS}, "the four baselines": BASELINES}
        found = {label: _correlations(scored, own) for label, own in {**names, "random": ["random"]}.items()}
        strong = {label: sum(r >= STRONG for r in own) for label, own in found.items()}
        texts = [f"{strong[label]} of {len(own)} for {label}" for label, own in found.items()]
        cells = [grid for pair in pairs for grid in pair["grids"] if grid["name"] == name]
        n_flat, n_flat_box = (sum(grid[why] is not None for grid in cells) for why in ("degenerate", "box_degenerate"))
        share = {label: strong[label] / len(own) if own else 0.0 for label, own in found.items()}
        if n_flat > len(cells) / 2:
            verdict = OPEN
            why = (
                f"In {n_flat} of {plural(len(cells), 'cell')}, the error rate at full strength hardly changes with the "
                f"magnitude or depends on one magnitude, and in {n_flat_box} that over the whole range: a "
                "correlation with it says nothing."
            )
        elif share["the four baselines"] >= share[PRESET]:
            verdict = FAILS
            why = "Faults rise with the error rate under every technique, so that r does not tell them apart."
        else:
            is_rare = share["the four baselines"] <= FEW
            verdict, why = HOLDS if share[PRESET] >= NEARLY_ALL and is_rare else IN_PART, ""
        yield Claim(
            f"Themis correlates strongly, baselines rarely ({title})",
            "r of 0.70 to 0.95 for Themis, and of -0.89 to 0.79 for baselines",
            f"strong in {', '.join(texts)}",
            verdict,
            why,
        )


def _correlations(grids: list[Record], techniques: Iterable[str]) -> list[float]:
    """The r of distinct faults under both definitions of the error rate, where it is defined."""
    return [
        row[key]["distinct"][0]
        for grid in grids
        for row in grid["rows"]
        if row["technique"] in techniques
        for key in ("r", "r_box")
        if row[key].get("distinct") and row[key]["distinct"][0] is not None
    ]


def _faults(content: Record) -> Iterator[Claim]:
    """Faults relative to the mean of the four baselines: when done, and at equal passes."""
    if done := _compare_faults("when done", [pair["ratios"] for pair in content["done"]]):
        yield replace(done, paper=f"{PAPER_FAULTS} times as many", why=f"{done.why} {_unfinished(content['done'])}")
    grids = [grid["ratios"] for pair in content["pairs"] for grid in pair["budgets"]["passes"]]
    if equal := _compare_faults("at equal passes", grids):
        yield equal


def _compare_faults(when: str, ratios: list[Record]) -> Claim | None:
    """The claim about faults over cells with these ratios; None if the preset has none."""
    texts, best = {}, {}
    for technique in THEMIS:
        own = [ratio[technique] for ratio in ratios if technique in ratio]
        if values := [ratio["over_four"] for ratio in own if ratio["over_four"]]:
            n_without = sum(ratio["over_four"] == 0 for ratio in own)
            none = f", and none in {plural(n_without, 'cell')} in which baselines found some" if n_without else ""
            texts[technique] = (geometric_mean(values), f"{technique} {_spread(values)}{none}")
        if values := [ratio["over_best"] for ratio in own if ratio["over_best"]]:
            best[technique] = f"{technique} {_spread(values)}"
    if PRESET not in texts:
        return None
    ratio = texts[PRESET][0]
    return Claim(
        f"Themis finds more faults than the mean of the four baselines, {when}",
        "not measured",
        "; ".join(text for _, text in texts.values()),
        FAILS if ratio < MORE else HOLDS if ratio >= MUCH_MORE else IN_PART,
        f"Against the best rival of each cell: {'; '.join(best.values())}.",
    )


def _unfinished(done: list[Record]) -> str:
    """How many campaigns of baselines were not done."""
    rows = [pair["techniques"][name] for pair in done for name in BASELINES if name in pair["techniques"]]
    n_stopped = sum(row["stops"].get("tests", 0) for row in rows)
    n_campaigns = sum(row["campaigns"] for row in rows)
    return f"Their budget stopped {n_stopped} of {plural(n_campaigns, 'campaign')} of baselines before they were done."


def _spread(ratios: list[float]) -> str:
    return f"{geometric_mean(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"


def _gains(retraining: list[Record]) -> Iterator[Claim]:
    """What retraining regains, in points, and how often Themis leads."""
    gains: dict[str, list[float]] = {}
    leads = []
    for record in retraining:
        for standing in record["standings"]:
            if shift := standing["shifts"].get("disturbed"):
                gains.setdefault(standing["technique"], []).append(100 * (shift["after"] - shift["before"]))
            lead = (standing.get("lead") or {}).get("combined")
            if standing["technique"] in BASELINES and lead:
                leads.append(lead["low"] > 0)
    if "themis" not in gains:
        return
    means = ", ".join(f"{CHOOSERS.get(name, name)} {mean(own):+.2f}" for name, own in gains.items())
    regains, is_ahead = min(gains["themis"]) > 0, bool(leads) and sum(leads) > len(leads) / 2
    yield Claim(
        "Retraining regains accuracy, more than with baselines",
        "0.21 to 11.56 points for Themis",
        f"{min(gains['themis']):+.2f} to {max(gains['themis']):+.2f} points for {CHOOSERS['themis']} in "
        f"{plural(len(retraining), 'cell')}; "
        f"means: {means}",
        HOLDS if regains and is_ahead else IN_PART if regains else FAILS,
        f"The lead of {CHOOSERS['themis']} over a baseline exceeds its interval in {sum(leads)} of {len(leads)} "
        "comparisons.",
    )


def _time(done: list[Record]) -> Iterator[Claim]:
    """Time until done, relative to the mean of the four baselines."""
    ratios = {
        technique: [
            row[technique]["seconds_total"] / mean(row[name]["seconds_total"] for name in BASELINES)
            for row in (pair["techniques"] for pair in done)
            if {technique, *BASELINES} <= set(row)
        ]
        for technique in THEMIS
    }
    if not ratios[PRESET]:
        return
    own = [pair["techniques"][PRESET] for pair in done if PRESET in pair["techniques"]]
    judging = sum(row["seconds_judge"] for row in own) / sum(row["seconds_total"] for row in own)
    yield Claim(
        "Themis takes about as long as baselines, until done",
        f"{PAPER_TIME:.2f} times as long",
        "; ".join(f"{technique} {_spread(values)}" for technique, values in ratios.items() if values),
        HOLDS if geometric_mean(ratios[PRESET]) <= SLOWER else FAILS,
        f"{percent(judging, 0)} of the time of {PRESET} goes into Markov chains.",
    )


def _sampler(variants: list[Record]) -> Iterator[Claim]:
    """How far the coverage of the sample is from that of all neurons, and what judging all of them costs."""
    gaps = [
        abs(record[f"{when}coverage"] - record[f"{when}coverage_all"])
        for record in variants
        if record["technique"] == "paper"
        for when in ("first_", "")
    ]
    if not gaps:
        return
    why = []
    if costs := _judging(variants, "exact-sample-all", "paper"):
        why.append(
            f"It is no longer needed: the closed form judges all neurons in {percent(median(costs), 0)} of the time "
            f"that Markov chains take for the sample (median of {plural(len(costs), 'cell')})."
        )
    if costs := _judging(variants, "pymc-sample-50", "sample-50"):
        why.append(f"For the same 50 neurons, PyMC takes {median(costs):.0f} times as long as these chains.")
    yield Claim(
        "1,000 sampled neurons give the coverage of all",
        "equal",
        f"at most {percent(max(gaps), 2)} from that of all neurons, in {plural(len(gaps), 'round')}",
        HOLDS if max(gaps) <= SAMPLED else FAILS,
        " ".join(why),
    )


def _judging(variants: list[Record], one: str, other: str) -> list[float]:
    """The seconds per test that one variant takes to judge, relative to another, in cells that have both."""
    seconds: dict[tuple[str, str], dict[str, float]] = {}
    for record in variants:
        cell = seconds.setdefault((record["model"], record["perturbation"]), {})
        cell[record["technique"]] = record["seconds_judge"] / record["tests"]
    return [cell[one] / cell[other] for cell in seconds.values() if {one, other} <= set(cell)]


def _completeness(theory: list[Record]) -> Iterator[Claim]:
    """What had been found when coverage reached 100%."""
    shares = list_shares(theory, "preset")
    if shares:
        low = sum(share < SEEN for share in shares)
        yield Claim(
            "At coverage 100%, fault-inducing behaviour has been seen",
            "with a probability of 95%",
            f"the median share of a reference run's distinct faults was {'; '.join(describe_shares(theory))}",
            HOLDS if low == 0 else FAILS if low > len(shares) / 2 else IN_PART,
            f"In {low} of the {plural(len(shares), 'cell')} in which {PRESET} reached 100%, it had missed more than "
            f"{percent(1 - SEEN, 0)} of the faults: a mean sensitivity is known long before rare faults show. "
            f"{_advise(theory)}",
        )


def _advise(theory: list[Record]) -> str:
    """What to stop on instead, and what that had found."""
    advice = (
        "Stop on what is left to find instead, as the default does: coverage of 100%, an estimated 90% of the distinct "
        "faults within reach found, and a residual risk of at most 1%."
    )
    if stopped := list_shares(theory, "rule"):
        advice += (
            f" That rule stopped in {len(stopped)} of {plural(len(theory), 'cell')} and had found {_least(stopped)}."
        )
    if stopped := list_shares(theory, "enough"):
        n_tests = median(record["enough"]["tests"] for record in theory if record.get("enough"))
        advice += (
            f" Without its first condition, as with --coverage 0.01, it would have stopped in {len(stopped)}, after "
            f"{n_tests:,.0f} tests (median), and had found {_least(stopped)}."
        )
    return advice


def _least(shares: list[float]) -> str:
    return "all faults" if min(shares) >= 1 else f"at least {percent(min(shares), 0)} of the faults"


def _stability(theory: list[Record]) -> Iterator[Claim]:
    """How much inferred means differ between sets of seeds."""
    found = [record["stability"] for record in theory if record["stability"]["model_deviation"] is not None]
    if found:
        whole = [stability["model_deviation"] for stability in found]
        close = median(stability["within_10_percent"] for stability in found)
        is_close = max(whole) < CLOSE and close >= NEARLY_ALL
        yield Claim(
            "Inferred means deviate by less than 10% between sets of seeds",
            "less than 10%",
            f"a model's mean by {percent(median(whole))} ({percent(min(whole))} to {percent(max(whole))}, "
            f"{plural(len(whole), 'cell')}); {percent(close, 0)} of single neurons by at most 10% (median)",
            HOLDS if is_close else IN_PART if median(whole) < CLOSE else FAILS,
            "" if is_close else "Means are stable for a model, but not for its neurons, or not for every model.",
        )


def _normality(theory: list[Record]) -> Iterator[Claim]:
    """How many neurons have normal differences."""
    found = [record["normality"] for record in theory if record["normality"]]
    if found:
        signed, absolute = ([normality[f"compatible_{kind}"] for normality in found] for kind in ("signed", "absolute"))
        yield Claim(
            "Differences of activations are normally distributed",
            "often",
            f"close to normal for {percent(median(signed), 0)} of the neurons ({percent(min(signed), 0)} to "
            f"{percent(max(signed), 0)}), sensitivities for {percent(median(absolute), 0)} (medians)",
            HOLDS if median(signed) > FEW else FAILS,
            "Coverage is about the precision of a mean, which does not need normality; a claim of 95% does.",
        )


def _sensitivity(pairs: list[Record]) -> Iterator[Claim]:
    """Whether sensitivity rises with the error rate."""
    found = [pair["sensitivity"]["r"] for pair in pairs if pair["sensitivity"] and pair["sensitivity"]["r"] is not None]
    if found:
        n_strong = sum(r >= STRONG for r in found)
        yield Claim(
            "Greater sensitivity comes with a higher error rate",
            "yes",
            f"r of at least {STRONG} in {n_strong} of {plural(len(found), 'cell')}, median {median(found):.2f}, lowest "
            f"{min(found):.2f}",
            HOLDS if n_strong >= NEARLY_ALL * len(found) else IN_PART if n_strong > len(found) / 2 else FAILS,
        )


def _known_faults(truth: list[Record]) -> Iterator[str]:
    """Which of the known faults of mutants each technique finds, over all cells, in one paragraph."""
    recalls: dict[str, dict[str, list[float]]] = {}
    scores: dict[str, list[float]] = {}
    for cell in truth:
        for name, row in cell["techniques"].items():
            for recall in row.get("recall", []):
                for share, value in recall.items():
                    if value is not None:
                        recalls.setdefault(name, {}).setdefault(share, []).append(value)
            scores.setdefault(name, []).extend(score["score"] for score in row.get("scores", []))
    if recalls:
        ranked = sorted(recalls, key=lambda name: -mean(recalls[name]["seeds"]))
        texts = [
            f"{name} {percent(mean(recalls[name]['seeds']), 0)} and {percent(mean(recalls[name]['regions']), 0)}"
            for name in ranked
        ]
        yield (
            f"**Known faults.** Of mutants whose failing seeds and regions of theta are all known, techniques find "
            f"these shares of the {SHARES['seeds']} and {SHARES['regions']} at equal passes, on average: "
            f"{', '.join(texts)}."
        )
    if any(scores.values()):
        ranked = sorted((name for name, own in scores.items() if own), key=lambda name: -mean(scores[name]))
        clean = [cell["mutants"]["clean_score"] for cell in truth if cell["mutants"]]
        yield (
            f"**Mutation score.** The tests of each technique tell these shares of mutants and classes from the model: "
            f"{', '.join(f'{name} {mean(scores[name]):.2f}' for name in ranked)}; the clean seeds {mean(clean):.2f}. A "
            "test that is a fault of the model kills nothing, so that a search for faults is not rewarded."
        )
