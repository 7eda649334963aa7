"""A campaign in words: its opening, a line a round, and the summary."""

from __future__ import annotations

from themis.judge.estimate import Estimate
from themis.runs.run import Round, Run, Start, name_of, percent

MANY = 10**10
"""Tests that nobody will run."""


def summary_rows(run: Run) -> list[tuple[str, str]]:
    """What a campaign found, for a person: names and texts."""
    last, start = run.rounds[-1], run.start
    rows: list[tuple[str, str]] = [
        (
            "faults",
            f"{last.faults:,} raw, {last.distinct_faults:,} distinct, on {last.failing_seeds:,} of "
            f"{start.n_usable:,} seeds",
        ),
        ("fault rate", _estimate(run.fault_rate, "mean over seeds")),
        ("residual risk", _estimate(run.residual_risk, "that the next uniform test shows a new distinct fault")),
        (
            "coverage",
            f"{percent(last.coverage.sampled)} of the sampled neurons; {_estimate_all(run)}",
        ),
        (
            "neurons",
            f"{start.n_neurons:,} in {len(start.layers)} layers; {last.coverage.n_dead:,} dead, "
            f"{last.coverage.n_unseen:,} not yet moved",
        ),
        *([("criterion", _criterion(run))] if start.criterion is not None else []),
        *([("rivals", _rivals(run))] if "differences" in run.policy else []),
        (
            "tests",
            f"{last.tests:,} ({last.passes:,} passes) in {run.seconds.total:.1f} s, "
            f"{last.tests / max(run.seconds.total, 1e-9):,.0f} a second",
        ),
        *([("dropped", _dropped(run))] if start.settings.min_ssim is not None else []),
        ("time", _times(run)),
    ]
    if run.stop_reason != "coverage" and last.coverage.forecast:
        more = last.coverage.forecast
        text = f"about {more:,} more tests to the coverage goal" if more < MANY else "the coverage goal is out of reach"
        rows.append(("forecast", text))
    if last.coverage.n_unseen + last.coverage.n_dead >= start.n_neurons and last.tests > last.dropped:
        rows.append(("attention", "no neuron has moved: the perturbation changes nothing, widen its range"))
    if run.normality is not None:
        rows.append(("normality", run.normality.verdict))
    return rows


def opening(start: Start) -> str:
    """What is about to be tested, in three lines."""
    few = len(start.theta) <= 2  # more of them, each with its unit, would hide the rest
    theta = ", ".join(f"{t.name} {t.low:g} to {t.high:g}{' ' + t.unit if t.unit and few else ''}" for t in start.theta)
    kept = "all" if start.n_kept >= start.n_seeds else f"{start.n_kept:,}"
    return (
        f"{start.n_neurons:,} neurons in {len(start.layers)} layers, {start.n_usable:,} of {start.n_seeds:,} seeds to "
        f"test{_grade(start)}\n"
        f"a fault is {start.fault} (oracle {_oracle(start)})\n"
        f"{start.perturbation} ({theta}), policy {name_of(start.settings.policy)}, on {start.device}, "
        f"clean activations kept for {kept} seeds"
        + _guide(start)
        + (f"\ngoing on after {start.tests_before:,} tests" if start.tests_before else "")
    )


def _guide(start: Start) -> str:
    criterion = start.criterion
    if criterion is None:
        return ""
    does = "guides the search" if criterion["leads"] else "watches the search"
    source = f", learnt from {criterion['inputs']:,} inputs of {criterion['source']}" if criterion["source"] else ""
    return f"\n{criterion['name']} {does}{source}"


def _criterion(run: Run) -> str:
    found = run.criterion()
    assert found is not None
    score = percent(found["score"]) if found["is_share"] else f"{found['score']:,.4g}"
    reachable = found.get("score_reachable")
    score += "" if reachable is None else f" ({percent(reachable)} of what so many tests can reach)"
    return (
        f"{found['name']} {score}; {found['raised']:,} tests raised it, among them {found['faults_selected']:,} faults "
        f"({found['distinct_faults_selected']:,} distinct)"
    )


def _rivals(run: Run) -> str:
    n, rivals = run.policy["differences"], run.policy["rivals"]
    return f"{n:,} tests of the search on which the target and {rivals} rival{'s' if rivals > 1 else ''} differ"


def _grade(start: Start) -> str:
    if start.clean_accuracy is not None:
        return f" ({percent(start.clean_accuracy)} answered rightly)"
    if start.clean_error is not None:
        return f" (clean error {start.clean_error:.3g} on average)"
    return "" if start.clean_iou is None else f" (clean mean IoU {start.clean_iou:.3g})"


def _oracle(start: Start) -> str:
    if start.oracle_asked != "auto":
        return start.oracle_asked
    return f"{start.oracle.partition(':')[0]}, chosen by outputs and labels"


def round_line(round: Round, *, is_share: bool = True) -> str:
    """Where the campaign stands; `is_share` says so of its criterion's score."""
    forecast = round.coverage.forecast
    more = "" if not forecast or forecast >= MANY else f", ~{forecast:,} to go"
    score = round.criterion_score
    led = "" if score is None else f"criterion {percent(score) if is_share else f'{score:,.4g}'}, "
    return (
        f"{percent(round.coverage.sampled)}, {led}{round.distinct_faults:,} distinct faults, {round.tests:,} tests, "
        f"{_rate(round):,.0f}/s{more}"
    )


def _rate(round: Round) -> float:
    return round.tests / max(round.seconds, 1e-9)


def _estimate(estimate: Estimate | None, of: str) -> str:
    if estimate is None:
        return "unknown: no uniform stream"
    return f"{percent(estimate.value, 2)} {of} (95%: {percent(estimate.low, 2)} to {percent(estimate.high, 2)})"


def _estimate_all(run: Run) -> str:
    text = f"{percent(run.judged.all)} of all"
    interval = run.coverage_interval
    return text if interval is None else f"{text} (95%: {percent(interval.low)} to {percent(interval.high)})"


def _dropped(run: Run) -> str:
    last, least = run.rounds[-1], run.start.settings.min_ssim
    share = percent(last.dropped / max(last.tests, 1))
    advice = "; a smaller magnitude or range wastes fewer" if 2 * last.dropped > last.tests else ""
    return f"{last.dropped:,} tests ({share}) that were no longer the same picture: SSIM under {least:g}{advice}"


def _times(run: Run) -> str:
    s = run.seconds
    return f"measure {s.measure:.1f} s, judge {s.judge:.1f} s, search {s.search:.1f} s"
