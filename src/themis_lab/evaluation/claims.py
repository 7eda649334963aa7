"""The paper's claims, what was measured, and whether the claims hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import mean, median

from themis.report.table import Table
from themis.settings import Settings
from themis.text import counted, percent
from themis_lab.evaluation.cells import CHOOSERS
from themis_lab.evaluation.plan import UNVARIED
from themis_lab.evaluation.plans import PAPER_FAULTS, PAPER_TIME
from themis_lab.evaluation.summary import OURS, STRONG_R, Evaluation, Record, with_times
from themis_lab.evaluation.tables import (
    AT_EQUAL_PASSES,
    MIN_CELLS,
    WHEN_DONE,
    compare_seconds,
    describe_ratios,
    fault_ratios,
    list_ratios,
    median_interval,
)
from themis_lab.evaluation.theory import CLOSE_DEVIATION, count_reached, list_shares
from themis_lab.techniques import BASELINES, PRESET

GRIDS = {"paper": "the paper's magnitudes", "grid": "magnitudes chosen in advance"}
UPHELD, PARTLY_UPHELD, REFUTED, UNDECIDED = "holds", "holds in part", "does not hold", "undecided"
COMMON_SHARE, RARE_SHARE = 0.9, 0.5
"""Least share of cases for what holds in general, and largest share for what is rare."""
SAMPLING_ERROR = 0.005
"""Largest difference between the coverage of a sample and that of all neurons."""
SEEN_SHARE = 0.95
"""The share of the faults that must have been seen at coverage 100%."""
COST_NOTE = f"A test of {PRESET} takes two passes more than one of a baseline, since it follows a gradient."
"""The note on what equal numbers of passes mean for the paper's preset."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and its verdict."""

    text: str
    paper: str
    """What the paper says."""
    headline: str
    """What was measured, in a few words."""
    measured: str
    """What was measured, with intervals."""
    verdict: str
    rule: str
    """When it holds."""
    why: str = ""
    """Whole sentences, or nothing."""
    of_default: str = ""
    """The verdict on the default of Themis, if it is another."""


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
    rows: list[tuple[str, ...]] = [
        (claim.text, claim.paper, claim.headline, claim.verdict, claim.rule) for claim in claims
    ]
    notes = [
        f"Strong: r of at least {STRONG_R}. There is one correlation per cell and definition of the error rate, in the "
        f"cells that have {PRESET} and all four baselines. Ratios are medians over cells, with 95% intervals by the "
        f"sign test, which needs at least {MIN_CELLS} cells and takes them to be independent. At equal budgets, they "
        "are on magnitudes chosen in advance, or else on the paper's, unless these are degenerate. Verdicts are about "
        f"{PRESET}, the paper's own method; that on retraining is about {CHOOSERS['themis']}."
    ]
    columns = ("claim", "the paper", "measured here", "verdict", "it holds if")
    return Table("The paper's claims", columns, rows, notes) if rows else None


def list_verdicts(evaluation: Evaluation) -> str:
    """A list in Markdown of the claims that hold, hold in part or do not hold; empty if none was measured."""
    words = {
        UPHELD: (UPHELD, "hold"),
        PARTLY_UPHELD: (PARTLY_UPHELD, "hold in part"),
        REFUTED: (REFUTED, "do not hold"),
        UNDECIDED: ("is undecided", "are undecided"),
    }
    claims = judge_claims(evaluation)
    groups = {
        verdict: [
            claim.text + (f" (for {OURS[1]}, it {claim.of_default})" if claim.of_default else "")
            for claim in claims
            if claim.verdict == verdict
        ]
        for verdict in words
    }
    lines = [
        f"- **{len(own)} {words[verdict][len(own) > 1]}.** {'. '.join(own)}." for verdict, own in groups.items() if own
    ]
    judged = f"judged by {PRESET}, the paper's own method (retraining by {CHOOSERS['themis']})"
    return "\n".join([f"Of {counted(len(claims), 'claim')}, {judged}:", "", *lines]) if lines else ""


def summarise_claims(evaluation: Evaluation) -> list[str]:
    """What was measured, and why a claim holds or does not, as one paragraph of Markdown per claim."""
    return [
        f"**{claim.text}: {claim.verdict}.** Measured: {claim.measured}. {claim.why}".strip()
        for claim in judge_claims(evaluation)
    ]


def _capability(pairs: list[Record]) -> Iterator[Claim]:
    groups = {**{technique: [technique] for technique in OURS}, "the four baselines": BASELINES, "random": ["random"]}
    for name, title in GRIDS.items():
        cells = [grid for pair in pairs for grid in pair["grids"] if grid["name"] == name]
        scored = [grid for pair in pairs for grid in pair["budgets"]["passes"] if grid["name"] == name]
        whole = [grid for grid in scored if {PRESET, *BASELINES} <= {row["technique"] for row in grid["rows"]}]
        n_flat, n_flat_box = (sum(grid[why] is not None for grid in cells) for why in ("degenerate", "box_degenerate"))
        is_flat = n_flat > len(cells) / 2
        if not scored or not (whole or is_flat):
            continue
        found = {label: own for label, names in groups.items() if (own := _correlations(whole, names))}
        strong = {label: sum(r >= STRONG_R for r in own) for label, own in found.items()}
        texts = [f"{strong[label]} of {len(own)} for {label}" for label, own in found.items()]
        themis, baselines = (
            strong[label] / len(found[label]) if label in found else 0.0 for label in (PRESET, "the four baselines")
        )
        why, headline = "", f"strong: {', '.join(text for text in texts if text.endswith((PRESET, 'baselines')))}"
        if is_flat:
            verdict, headline = UNDECIDED, f"{n_flat} of {counted(len(cells), 'cell')} are degenerate"
            why = (
                f"In {n_flat} of {counted(len(cells), 'cell')}, the error rate at full strength hardly changes with "
                f"the magnitude, or only at one of the magnitudes; in {n_flat_box}, the same is true of the rate over "
                "the whole range. A correlation with such a rate says nothing."
            )
        elif baselines >= themis:
            verdict = REFUTED
            if baselines >= COMMON_SHARE:
                why = "Faults rise with the error rate under every technique, so that r does not tell them apart."
        else:
            verdict = UPHELD if themis >= COMMON_SHARE and baselines <= RARE_SHARE else PARTLY_UPHELD
        yield Claim(
            f"Themis correlates strongly, baselines rarely ({title})",
            "r of 0.70 to 0.95 for Themis, and of -0.89 to 0.79 for baselines",
            headline,
            f"the share of strong correlations is {', '.join(texts)}" if texts else "nothing that can be scored",
            verdict,
            f"at least {percent(COMMON_SHARE, 0)} of the correlations of {PRESET} are strong, and at most "
            f"{percent(RARE_SHARE, 0)} of those of the baselines; in part, more of its own than of theirs; undecided, "
            "if most cells are degenerate",
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
    for when, ratios in fault_ratios(content).items():
        if claim := _compare_faults(when, ratios, PAPER_FAULTS if when == WHEN_DONE else None):
            reason = _unfinished(content["done"]) if when == WHEN_DONE else COST_NOTE if when == AT_EQUAL_PASSES else ""
            yield replace(claim, why=f"{claim.why} {reason}".strip())


def _compare_faults(when: str, ratios: list[Record], paper: float | None) -> Claim | None:
    """The claim about faults over cells with these ratios; None if the preset has none."""
    over = {
        key: {technique: list_ratios(ratios, technique, key) for technique in OURS}
        for key in ("over_four", "over_best")
    }
    if not over["over_four"][PRESET]:
        return None
    verdict, other = (_judge_ratios(over["over_four"][technique], paper) for technique in OURS)
    of_default = other if other not in (verdict, UNDECIDED) else ""
    why = [f"For {OURS[1]}, it {of_default}."] if of_default else []
    texts = {key: _describe_all(by) for key, by in over.items()}
    if texts["over_best"]:
        why.append(f"Against the best rival of each cell, they are {texts['over_best']}.")
    return Claim(
        f"Themis finds more faults than the mean of the four baselines, {when}",
        "not measured" if paper is None else f"{paper} times as many",
        _medians(over["over_four"]),
        f"ratios with 95% intervals are {texts['over_four']}",
        verdict,
        "the interval of the ratio is above 1" + ("" if paper is None else f" and reaches {paper}; in part, above 1"),
        " ".join(why),
        of_default,
    )


def _judge_ratios(ratios: list[float], paper: float | None) -> str:
    """Whether more faults were found, and by about the factor that the paper states, if it states one."""
    interval = median_interval(ratios)
    if interval is None:
        return UNDECIDED
    if interval[0] <= 1:
        return REFUTED
    return UPHELD if paper is None or interval[1] >= paper else PARTLY_UPHELD


def _describe_all(ratios: dict[str, list[float]]) -> str:
    return ", ".join(f"{describe_ratios(values)} for {technique}" for technique, values in ratios.items() if values)


def _medians(ratios: dict[str, list[float]]) -> str:
    return ", ".join(f"{technique} {median(values):.2f} times" for technique, values in ratios.items() if values)


def _unfinished(done: list[Record]) -> str:
    rows = [pair["techniques"][name] for pair in done for name in BASELINES if name in pair["techniques"]]
    n_stopped = sum(row["stops"].get("tests", 0) for row in rows)
    n_campaigns = sum(row["campaigns"] for row in rows)
    preset = [pair["techniques"][PRESET]["tests"] for pair in done if PRESET in pair["techniques"]]
    return (
        f"{n_stopped} of {counted(n_campaigns, 'campaign')} of baselines reached the limit of tests before they were "
        f"done, and count with what they had found by then, after {mean(row['tests'] for row in rows):,.0f} tests on "
        f"average; {PRESET} took {mean(preset):,.0f}."
    )


def _gains(retraining: list[Record]) -> Iterator[Claim]:
    gains: dict[str, list[float]] = {}
    leads, is_sure = [], []
    for record in retraining:
        for standing in record["standings"]:
            if shift := standing["shifts"].get("disturbed"):
                gains.setdefault(standing["technique"], []).append(100 * (shift["after"] - shift["before"]))
                if standing["technique"] == "themis":
                    is_sure.append((shift["combined"] or {"low": 0.0})["low"] > 0)
            lead = (standing.get("lead") or {}).get("combined")
            if standing["technique"] in BASELINES and lead:
                leads.append(lead["low"] > 0)
    if "themis" not in gains:
        return
    own, chooser = gains["themis"], CHOOSERS["themis"]
    complete = {name: values for name, values in gains.items() if len(values) == len(own)}
    four = [complete[name] for name in BASELINES if name in complete]
    rivals = ""
    if len(four) == len(BASELINES):
        rivals = f", the mean of the four baselines {median(mean(cell) for cell in zip(*four, strict=True)):+.2f}"
    medians = ", ".join(f"{CHOOSERS.get(name, name)} {median(values):+.2f}" for name, values in complete.items())
    verdict = UNDECIDED if min(own) > 0 else REFUTED
    if all(is_sure):
        verdict = UPHELD if sum(leads) > len(leads) / 2 else PARTLY_UPHELD
    yield Claim(
        "Retraining regains accuracy, more than with baselines",
        "0.21 to 11.56 points for Themis",
        f"{chooser} {median(own):+.2f} points{rivals}, in the median over cells",
        f"{min(own):+.2f} to {max(own):+.2f} points for {chooser} in {counted(len(own), 'cell')}; medians: {medians}",
        verdict,
        f"{chooser} regains in every cell and leads in most comparisons, with intervals above 0; in part, it regains "
        "in every cell, with intervals above 0; undecided, if it regains in every cell, but not all intervals are "
        "above 0",
        f"With {_count_trainings(retraining)} per technique, the interval of the gain of {chooser} "
        f"is above 0 in {sum(is_sure)} of {counted(len(own), 'cell')}, and that of its lead over a baseline in "
        f"{sum(leads)} of {counted(len(leads), 'comparison')}.",
    )


def _count_trainings(retraining: list[Record]) -> str:
    """The number of trainings per technique, such as "5 trainings", or "3 to 5 trainings" if cells differ."""
    counts = {int(standing["n_runs"]) for record in retraining for standing in record["standings"]}
    return f"{min(counts)} to {max(counts)} trainings" if len(counts) > 1 else counted(max(counts), "training")


def _time(done: list[Record]) -> Iterator[Claim]:
    whole = [pair["techniques"] for pair in with_times(done) if set(BASELINES) <= set(pair["techniques"])]
    ratios, per_test = (
        {
            technique: [row[technique][cost] / mean(row[name][cost] for name in BASELINES) for row in own]
            for technique in OURS
            if (own := [row for row in whole if technique in row])
        }
        for cost in ("seconds_total", "seconds_per_test")
    )
    if PRESET not in ratios:
        return
    preset = [row[PRESET] for row in whole if PRESET in row]
    judging = sum(row["seconds_judge"] for row in preset) / sum(row["seconds_total"] for row in preset)
    interval = median_interval(ratios[PRESET])
    verdict = UNDECIDED
    if interval is not None and not interval[0] <= PAPER_TIME < interval[1]:
        verdict = UPHELD if interval[1] <= PAPER_TIME else REFUTED
    yield Claim(
        "Themis takes about as long as baselines, until done",
        f"{PAPER_TIME:.2f} times as long",
        _medians(ratios),
        f"ratios with 95% intervals are {_describe_all(ratios)}",
        verdict,
        f"the interval of the ratio ends at {PAPER_TIME:.2f} or below; undecided, if {PAPER_TIME:.2f} is within it",
        f"Per test, they are {_describe_all(per_test)}. {percent(judging, 0)} of the time of {PRESET} goes into Markov "
        "chains.",
    )


def _sampler(variants: list[Record]) -> Iterator[Claim]:
    k = Settings().sample
    larger = [record for record in variants if record["neurons"] > k]
    preset, exact = ([record for record in larger if record["technique"] == name] for name in (UNVARIED, "judge-exact"))
    if not preset:
        return
    gap, n_models = _widest_gap(preset), len({record["model"] for record in preset})
    why: list[str] = []
    if exact:
        why.append(
            "The preset judges its sample by Markov chains, and the closed form all neurons. Where the closed form "
            f"judges both, they differ by at most {100 * _widest_gap(exact):.2f} points."
        )
    if costs := compare_seconds(variants, "exact-sample-all", UNVARIED):
        why.append(
            f"The closed form judges all neurons in {percent(median(costs.values()), 0)} of the time that Markov "
            f"chains take for the sample (median of {counted(len(costs), 'cell')})."
        )
    if costs := compare_seconds(variants, "pymc-sample-50", "sample-50"):
        why.append(
            f"For the same 50 neurons, PyMC takes {median(costs.values()):.0f} times as long as these chains (median "
            f"of {counted(len(costs), 'cell')})."
        )
    yield Claim(
        f"{k:,} sampled neurons give the coverage of all",
        "equal",
        f"within {100 * gap:.2f} points",
        f"the two differ by at most {100 * gap:.2f} points, in the first and last rounds of "
        f"{counted(len(preset), 'campaign')} on {counted(n_models, 'model')} with more neurons",
        UPHELD if gap <= SAMPLING_ERROR else REFUTED,
        f"they differ by at most {100 * SAMPLING_ERROR} points",
        " ".join(why),
    )


def _widest_gap(variants: list[Record]) -> float:
    """The largest difference between the coverage of the sample and of all neurons, in first and last rounds."""
    pairs = (("first_coverage", "first_coverage_all"), ("coverage", "coverage_all"))
    return max(abs(float(record[sampled] - record[of_all])) for record in variants for sampled, of_all in pairs)


def _completeness(theory: list[Record]) -> Iterator[Claim]:
    shares = list_shares(theory, "preset")
    if shares:
        low = sum(share < SEEN_SHARE for share in shares)
        known = [record["reference"]["distinct_faults"] for record in theory if record.get("preset")]
        why = (
            f"In {low} of the {counted(len(shares), 'cell')} in which the reference run found faults "
            f"({min(filter(None, known)):,} to {max(known):,} of them) and {PRESET} reached 100%, it had missed more "
            f"than {percent(1 - SEEN_SHARE, 0)}"
        )
        if low:
            why += f": a mean sensitivity is known long before rare faults show. {_advise(theory)}"
        yield Claim(
            "At coverage 100%, fault-inducing behaviour has been seen",
            "with a probability of 95%",
            f"at least {percent(SEEN_SHARE, 0)} of the faults in {len(shares) - low} of {counted(len(shares), 'cell')}",
            f"{PRESET} reached 100% in {count_reached(theory, 'preset')} of {counted(len(theory), 'cell')}, and had by "
            f"then found {percent(median(shares), 0)} of a reference run's distinct faults (median, from "
            f"{percent(min(shares), 0)} to {percent(max(shares), 0)})",
            UPHELD if low == 0 else REFUTED if low > len(shares) / 2 else PARTLY_UPHELD,
            f"{PRESET} has found {percent(SEEN_SHARE, 0)} of the faults in every cell; in part, in at least half",
            why if low else f"{why}.",
        )


def _advise(theory: list[Record]) -> str:
    advice = (
        "Stop on what is left to find instead, as the default does: coverage of 100%, an estimated 90% of the distinct "
        "faults within reach found, and a residual risk of at most 1%."
    )
    if shares := list_shares(theory, "rule"):
        n_stopped = count_reached(theory, "rule")
        advice += f" That rule stopped in {n_stopped} of {counted(len(theory), 'cell')}, having found {_least(shares)}."
        missed = [record for record in theory if any(share < SEEN_SHARE for share in list_shares([record], "preset"))]
        advice += (
            f" It stopped in {count_reached(missed, 'rule') or 'none'} of the {counted(len(missed), 'cell')} in which "
            f"{PRESET} had missed more than {percent(1 - SEEN_SHARE, 0)}."
        )
    if shares := list_shares(theory, "enough"):
        n_tests = median(record["enough"]["tests"] for record in theory if record.get("enough"))
        advice += (
            f" Without its first condition, as with --coverage 0.01, it would have stopped in "
            f"{count_reached(theory, 'enough')}, after {n_tests:,.0f} tests (median), having found {_least(shares)}."
        )
    return advice


def _least(shares: list[float]) -> str:
    return "all faults" if min(shares) >= 1 else f"at least {percent(min(shares), 0)} of the faults"


def _stability(theory: list[Record]) -> Iterator[Claim]:
    found = [record["stability"] for record in theory if record["stability"]["model_deviation"] is not None]
    if found:
        whole = [stability["model_deviation"] for stability in found]
        farthest = max(theory, key=lambda record: record["stability"]["model_deviation"] or 0.0)
        n_close = sum(deviation < CLOSE_DEVIATION for deviation in whole)
        close = median(stability["within_10_percent"] for stability in found)
        holds = n_close == len(whole) and close >= COMMON_SHARE
        yield Claim(
            "Inferred means deviate by less than 10% between sets of seeds",
            "less than 10%",
            f"in {n_close} of {counted(len(whole), 'cell')}, and for {percent(close, 0)} of the single neurons",
            f"the mean over all neurons does in {n_close} of {counted(len(whole), 'cell')} (median "
            f"{percent(median(whole))}, at most {percent(max(whole))}, for {farthest['model']} under "
            f"{farthest['perturbation']}), and the means of {percent(close, 0)} of the single neurons do (median over "
            "cells)",
            UPHELD if holds else PARTLY_UPHELD if n_close > len(whole) / 2 else REFUTED,
            f"the mean of every model and {percent(COMMON_SHARE, 0)} of its neurons' means do (median over cells); in "
            "part, the mean of most models",
        )


def _normality(theory: list[Record]) -> Iterator[Claim]:
    found = [record["normality"] for record in theory if record["normality"]]
    if found:
        signed, absolute = ([normality[f"compatible_{kind}"] for normality in found] for kind in ("signed", "absolute"))
        yield Claim(
            "Differences of activations are normally distributed",
            "often",
            f"for {percent(median(signed), 0)} of the neurons",
            f"they are close to normal for {percent(median(signed), 0)} of the neurons (from {percent(min(signed), 0)} "
            f"to {percent(max(signed), 0)}), and sensitivities for {percent(median(absolute), 0)} (medians over "
            f"{counted(len(found), 'cell')})",
            UPHELD if median(signed) > RARE_SHARE else REFUTED,
            "they are for most neurons, in the median over cells",
            "The precision of a mean, which coverage is about, does not need it.",
        )


def _sensitivity(pairs: list[Record]) -> Iterator[Claim]:
    found = [pair["sensitivity"]["r"] for pair in pairs if pair["sensitivity"] and pair["sensitivity"]["r"] is not None]
    if found:
        n_strong = sum(r >= STRONG_R for r in found)
        yield Claim(
            "Greater sensitivity comes with a higher error rate",
            "yes",
            f"r of at least {STRONG_R} in {n_strong} of {counted(len(found), 'cell')}",
            f"r of at least {STRONG_R} in {n_strong} of {counted(len(found), 'cell')}, median {median(found):.2f}, "
            f"lowest {min(found):.2f}",
            UPHELD
            if n_strong >= COMMON_SHARE * len(found)
            else PARTLY_UPHELD
            if n_strong > len(found) / 2
            else REFUTED,
            f"r is strong in {percent(COMMON_SHARE, 0)} of the cells; in part, in most",
        )
