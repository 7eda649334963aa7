"""A campaign as text: its opening, one line per round, the summary, and the verdict in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from themis.judge.estimate import Estimate, describe_share
from themis.settings import least_similarity, policy_name
from themis.text import counted, memory_size, percent, wrapped

if TYPE_CHECKING:
    from themis.judge.calibration import Calibration
    from themis.runs.run import Round, Run, Start

UNREACHABLE_TESTS = 10**10
"""A goal that needs this many tests or more is called out of reach."""
N_WORST_SLICES = 3
REQUESTS = "{inputs:,} inputs in {calls:,} calls, {repeated:,} repeated after an error"
RANDOM_LABEL, UNBROKEN_LABEL = "correct under a random disturbance", "seeds that the search could not break"
"""Labels in figures and tables of robustness by strength."""


def summary_lines(run: Run, *, is_verbose: bool = False) -> list[str]:
    """The results of a campaign as printed: the verdict, the figures and why the campaign stopped."""
    rows = [wrapped(f"{name:<13}  {text}", 15) for name, text in summary_rows(run, is_verbose=is_verbose)]
    return [wrapped(run.verdict.text), *rows, wrapped(run.stop)]


def summary_rows(run: Run, *, is_verbose: bool = False) -> list[tuple[str, str]]:
    """The figures of a campaign as (name, text): those about the model or, if verbose, all."""
    last, start = run.rounds[-1], run.start
    faults = f"{last.faults:,} raw, {last.distinct_faults:,} distinct, on {last.failing_seeds:,} of "
    rate = _estimate(run.fault_rate, "in operation" if start.profile else "on average over seeds")
    subject = "no neuron has moved" if start.covers_neurons else "no output has moved"
    is_still = last.coverage.n_unseen + last.coverage.n_dead >= start.n_neurons and last.tests > last.dropped
    rows = [
        ("faults", faults + counted(start.n_usable, "seed")),
        ("decision", run.decision and run.decision.clause),
        (
            "fault rate",
            rate
            + (", an interval that holds however often it is looked at" if start.settings.tests_each_seed_once else ""),
        ),
        ("worst slices", _worst_slices(run)),
        ("valid faults", run.review and run.review.text),
        ("left to find", None if last.reachable_faults is None else left_to_find(last)),
        ("coverage", f"{_coverage(run)} of the neurons" if start.covers_neurons else None),
        ("criterion", None if start.criterion is None else _criterion(run)),
        ("dropped", _dropped(run) if least_similarity(vars(start.settings)) else None),
        ("attention", f"{subject}: the perturbation changes nothing, so widen its range" if is_still else None),
        ("attention", run.coverage_caution if run.stop_reason == "coverage" else None),
        *(_details(run) if is_verbose else ()),
    ]
    return [(name, text) for name, text in rows if text]


def describe_calibration(calibration: Calibration | None) -> str | None:
    """The gap between confidence and correctness, in words; None if it is not known."""
    errors = calibration and [
        describe_share(error, f"on {inputs}")
        for inputs, error in (
            ("clean inputs", calibration.clean),
            ("random disturbances of the tested seeds", calibration.disturbed),
        )
        if error is not None
    ]
    return f"confidence and share of correct answers are apart by {' and '.join(errors)}" if errors else None


def _worst_slices(run: Run) -> str:
    """The slices that fail clearly more often than all seeds; empty if none does."""
    worst = run.worst_slices
    more = f", and {len(worst) - N_WORST_SLICES:,} more" if len(worst) > N_WORST_SLICES else ""
    shown = [f"{each.name} {describe_share(each.fault_rate)}" for each in worst[:N_WORST_SLICES] if each.fault_rate]
    return "; ".join(shown) + more


def _details(run: Run) -> list[tuple[str, str | None]]:
    """The figures about the campaign itself."""
    last, start, spent, coverage = run.rounds[-1], run.start, run.seconds, run.rounds[-1].coverage
    kinds = sorted(run.kinds.items(), key=lambda kind: -kind[1]["tests"])
    rivals = forecast = None
    if "differences" in run.policy:
        n, n_rivals = run.policy["differences"], run.policy["rivals"]
        rivals = f"the target and {counted(n_rivals, 'rival')} differ on {n:,} tests of the search"
    if run.stop_reason != "coverage" and coverage.forecast and start.covers_neurons:
        tests = f"{about(coverage.forecast)} more test{'s' * (coverage.forecast != 1)}"
        is_reachable = coverage.forecast < UNREACHABLE_TESTS
        forecast = f"{tests} to reach the coverage goal" if is_reachable else "the coverage goal is out of reach"
    risk = _estimate(run.residual_risk, "that the next uniform test finds a distinct fault that no test has found")
    sampled = f"coverage is {percent(coverage.sampled)} of the sampled neurons"
    neurons = f"{start.n_neurons:,} in {counted(len(start.layers), 'layer')}; {coverage.n_dead:,} dead, "
    tests = f"{last.tests:,} ({counted(last.passes, 'pass', 'passes')}) in {spent.total:.1f} s, "
    more = last.forecast_faults_tests
    return [
        ("residual risk", risk),
        ("calibration", describe_calibration(run.calibration)),
        ("sampled", sampled if start.covers_neurons else None),
        ("neurons", f"{neurons}{coverage.n_unseen:,} not yet moved" if start.covers_neurons else None),
        ("rivals", rivals),
        ("tests", f"{tests}{last.tests / max(spent.total, 1e-9):,.0f} per second"),
        (
            "proposals",
            "; ".join(f"{name} {kind['faults']:,} faults in {kind['tests']:,} tests" for name, kind in kinds),
        ),
        ("requests", None if run.requests is None else REQUESTS.format(**run.requests)),
        ("time", f"measure {spent.measure:.1f} s, judge {spent.judge:.1f} s, search {spent.search:.1f} s"),
        ("forecast", forecast),
        ("forecast", f"{about(more)} more tests to find 95% of the distinct faults within reach" if more else None),
        ("attention", None if run.stop_reason == "coverage" else run.coverage_caution),
        ("normality", run.normality.verdict if run.normality is not None and start.covers_neurons else None),
    ]


def left_to_find(round: Round) -> str:
    """In words, how many more distinct faults four times the tests would find."""
    faults = round.reachable_faults
    assert faults is not None
    value, low, high = (max(0, end - round.distinct_faults) for end in (faults.value, faults.low, faults.high))
    if not round.distinct_faults:
        return f"at most {high:,.0f} distinct faults (95%) with four times the tests"
    return f"about {value:,.0f} distinct faults (95%: {low:,.0f} to {high:,.0f}) with four times the tests"


def about(forecast: int) -> str:
    """A forecast as text, with two significant digits."""
    return f"about {int(float(f'{forecast:.2g}')):,}"


def opening(start: Start) -> str:
    """A description of what the campaign will test, in a few lines."""
    shows_units = len(start.theta) <= 2  # more units would hide the rest
    ranges = []
    for each in start.theta:
        unit = each.unit if shows_units else each.pixels
        ranges.append(f"{each.name} {each.low:g} to {each.high:g}{f' ({unit})' if unit else ''}")
    kept = "all" if start.n_kept >= start.n_seeds else f"{start.n_kept:,}"
    layers = f"{counted(start.n_neurons, 'neuron')} in {counted(len(start.layers), 'layer')},"
    size = "" if start.kept_bytes is None else f" in {memory_size(start.kept_bytes)} of memory"
    memory = f"; clean activations of {kept} seeds are kept{size}"
    if not start.covers_neurons:
        layers, memory = "no hidden layers, so no coverage goal;", ""
    n_left_out, left_out = start.n_seeds - start.n_usable, ""
    if n_left_out and start.left_out:
        left_out = f"; {counted(n_left_out, 'is', 'are')} left out: {start.left_out}"
    oracle = start.oracle_asked
    if oracle == "auto":
        other = "; if the outputs are numbers, name regression" if start.task == "changed" else ""
        oracle = f"{start.task}, chosen from the outputs and labels{other}"
    lines = [
        f"{layers} {start.n_usable:,} of {counted(start.n_seeds, 'seed')} to test{_grade(start)}{left_out}",
        f"a fault is {start.fault} (oracle {oracle})",
        f"{start.perturbation} with {', '.join(ranges)}; policy {policy_name(start.settings.policy)}, on {start.device}"
        f"{memory}",
    ]
    lines += [] if start.perturbed is None else [start.perturbed]
    lines += [] if start.entry is None else [f"the scores are {start.entry}"]
    if (criterion := start.criterion) is not None:
        role = "guides the search" if criterion["leads"] else "is only measured"
        source = (
            f", learned from {criterion['inputs']:,} inputs of {criterion['source']}" if criterion["source"] else ""
        )
        lines.append(f"criterion {criterion['name']} {role}{source}")
    lines += [f"resumed after {counted(start.tests_before, 'test')}"] if start.tests_before else []
    return "\n".join(lines)


def _criterion(run: Run) -> str:
    criterion = run.criterion()
    assert criterion is not None
    score = percent(criterion["score"]) if criterion["is_share"] else f"{criterion['score']:,.4g}"
    reachable = criterion.get("score_reachable")
    score += "" if reachable is None else f" ({percent(reachable)} of what this number of tests can reach)"
    return (
        f"{criterion['name']} {score}; raised by {criterion['raised']:,} tests, including "
        f"{criterion['faults_selected']:,} faults ({criterion['distinct_faults_selected']:,} distinct)"
    )


def _grade(start: Start) -> str:
    if start.clean_accuracy is not None:
        return f" ({percent(start.clean_accuracy)} answered correctly)"
    score = describe_clean(start.clean)
    return f" (clean {score})" if score else ""


def round_line(
    round: Round, *, is_share: bool = True, covers_neurons: bool = True, max_tests: int | None = None
) -> str:
    """The progress after a round; `is_share`: whether the score of the criterion is a share.

    It ends with the tests forecast for the coverage goal, or those left in the budget `max_tests` if they are fewer.
    The campaign goes on after the coverage goal if much is left to find.
    """
    forecast = round.coverage.forecast if covers_neurons else None
    more = "" if not forecast or forecast >= UNREACHABLE_TESTS else f", {about(forecast)} to the coverage goal"
    if forecast and max_tests is not None and forecast > (left := max_tests - round.tests):
        more = f", {left:,} left in the budget" if left > 0 else ""
    score = round.criterion_score
    reachable = round.reachable_faults
    reach = f" of about {reachable.value:,.0f}" if reachable is not None and round.distinct_faults else ""
    criterion = "" if score is None else f"criterion {percent(score) if is_share else f'{score:,.4g}'}, "
    coverage = f"{percent(round.coverage.sampled)}, " if covers_neurons else ""
    return (
        f"{coverage}{criterion}{counted(round.distinct_faults, 'distinct fault')}{reach}, "
        f"{counted(round.tests, 'test')}, {round.tests / max(round.seconds, 1e-9):,.0f}/s{more}"
    )


def _estimate(estimate: Estimate | None, meaning: str) -> str:
    return "unknown: no uniform tests" if estimate is None else describe_share(estimate, meaning)


def _coverage(run: Run) -> str:
    interval, share = run.coverage_interval, percent(run.judged.all)
    return share if interval is None else f"{share} (95%: {percent(interval.low)} to {percent(interval.high)})"


def _dropped(run: Run) -> str:
    last, limits = run.rounds[-1], least_similarity(vars(run.start.settings))
    least = " or ".join(f"{name.upper()} below {least:g}" for name, least in limits.items())
    share = percent(last.dropped / max(last.tests, 1))
    advice = "; a smaller magnitude or range would waste fewer" if 2 * last.dropped > last.tests else ""
    return f"{counted(last.dropped, 'test')} ({share}) too dissimilar from the seed: {least}{advice}"


JUDGED_BY_LABEL = ("wrong", "threshold", "top")
"""Tasks in which labels, if there are any, are the right answers; seeds with another clean answer are left out."""
COMPARED_TASKS = ("changed", *JUDGED_BY_LABEL)
"""Tasks in which an answer either agrees with the clean answer or does not."""


@dataclass(frozen=True)
class Counts:
    """The numbers of tests, faults, seeds and neurons of a run."""

    tests: int
    dropped: int
    passes: int
    faults: int
    distinct_faults: int
    failing_seeds: int
    seeds: int
    seeds_given: int
    neurons: int
    layers: int

    @staticmethod
    def of(round: Round | None, start: Mapping[str, Any]) -> Counts:
        """Count from the last round, if there is one, and from the start of its run."""
        names = ("tests", "dropped", "passes", "faults", "distinct_faults", "failing_seeds")
        totals: dict[str, int] = {name: getattr(round, name, 0) for name in names}
        seeds, given, neurons = (start.get(name, 0) for name in ("n_usable", "n_seeds", "n_neurons"))
        return Counts(**totals, seeds=seeds, seeds_given=given, neurons=neurons, layers=len(start.get("layers", ())))


@dataclass(frozen=True)
class CleanScores:
    """How well the model answers clean inputs; scores that do not fit the task are None."""

    accuracy: float | None
    error: float | None
    iou: float | None
    map: float | None


@dataclass(frozen=True)
class RunVerdict:
    """The result of a campaign in one sentence, and its tone: broken, standing or open."""

    tone: str
    text: str


def write_verdict(
    perturbation: str,
    task: str,
    counts: Counts,
    clean: CleanScores,
    fault_rate: Estimate | None,
    *,
    constant: str | None = None,
    is_running: bool = False,
) -> RunVerdict:
    """Say which share of answers is correct: clean, under random disturbance and at worst.

    constant: why a low fault rate would mean nothing, in words.
    """
    if not counts.tests and not counts.faults:
        return RunVerdict("open", "No test has been counted yet." if is_running else "No test was counted.")
    if counts.tests == counts.dropped and not counts.faults:
        text = (
            f"All {counts.tests:,} tests were dropped as too dissimilar from their seeds: lower min_ssim, min_vif or "
            "the magnitude."
        )
        return RunVerdict("open", text)
    shares = _shares(task, counts, clean, fault_rate)
    says_nothing = f" But {constant}, so that a low fault rate says nothing." if constant else ""
    if counts.faults:
        finding = "the model and its reference disagree" if task == "against" else "the model breaks"
        breaks = f"So far, {finding} under {perturbation}" if is_running else f"Under {perturbation}, {finding}"
        return RunVerdict("broken", f"{breaks}: {shares}.{says_nothing}")
    text = "So far, no fault" if is_running else "No fault"
    text += f" in {counts.tests:,} test{'s' * (counts.tests != 1)} on {counts.seeds:,} seeds under {perturbation}"
    return RunVerdict("open" if constant else "standing", f"{text}: {shares}.{says_nothing}")


def describe_clean(clean: CleanScores, task: str = "wrong") -> str:
    """The quality of the clean answers in words; empty if it is not known."""
    if clean.accuracy is not None:
        return f"{accuracy_name(task)} {percent(clean.accuracy)}"
    if clean.error is not None:
        return f"error {clean.error:.3g} on average"
    if clean.map is not None:
        return f"mAP {clean.map:.3g}"
    return "" if clean.iou is None else f"mean IoU {clean.iou:.3g}"


def accuracy_name(task: str) -> str:
    """The name of the share of right answers in a task."""
    if task == "multilabel":
        return "accuracy of the labels"
    return f"top-{task[3:]} accuracy" if task.startswith("top") else "accuracy"


def _shares(task: str, counts: Counts, clean: CleanScores, fault_rate: Estimate | None) -> str:
    """The share of correct answers: clean, under random disturbance and at worst, named as in the task.

    An answer that is wrong without a disturbance counts as wrong under every disturbance.
    """
    kind = "top" if task.startswith("top") else task
    whole = clean.accuracy if clean.accuracy is not None and kind in JUDGED_BY_LABEL else None
    most = 1.0 if whole is None else whole
    parts = [] if whole is None else [f"{percent(whole)} clean"]
    if fault_rate is not None:
        random = f"{percent(most * (1 - fault_rate.value))} under random disturbance"
        least = percent(math.floor(1000 * most * (1 - fault_rate.high)) / 1000)
        parts.append(random if fault_rate.value else f"{random} (95%: at least {least})")
    failing = counts.failing_seeds / max(counts.seeds, 1)
    if fault_rate is not None and failing < fault_rate.value:  # a search of all seeds would have found more
        parts.append(f"at most that at worst ({counts.tests:,} tests are few for {counts.seeds:,} seeds)")
    else:
        parts.append(f"{'at most ' * (failing < 1)}{percent(most * (1 - failing))} at worst, as searched")
    shares = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    if whole is not None:
        return f"{accuracy_name(task)} is {shares}"
    subject = "agreement with the clean answer" if kind in COMPARED_TASKS else "the share of answers without a fault"
    score = describe_clean(clean, task)
    return f"{subject} is {shares}" + (f" (clean {score})" if score else "")
