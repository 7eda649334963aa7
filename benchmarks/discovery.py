"""Discovery curves of real campaigns, run to four times their usual budget, and how well they are forecast.

    THEMIS_DATA=FOLDER python benchmarks/discovery.py --record [--processes 14] [--random-seeds 5] [--json FILE]
    python benchmarks/discovery.py [--json FILE]

With `--record`, each campaign that the file does not have is run to 80,000 tests without a coverage goal. Kept are the
tests that found something for the first time, what the uniform stream saw, and the coverage after each round. Without
it, the estimators are judged on the curves of the file, which takes seconds: what they say after T tests is compared
with what had been found after 4 T, for T up to 20,000 or a quarter of `--tests`. The last table shows when campaigns
stop, and the share of what four times the tests find that they have found by then, with the rule that coverage is
enough and with the present one.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from searching.campaigns import are_uniform
from searching.files import write_results

import themis
from themis.campaign.loop import is_little_left
from themis.judge.estimate import Estimate
from themis.judge.risk import REACH_FACTOR, forecast, residual_risk
from themis_lab.zoo import data, load

RESULTS = Path(__file__).parent / "results" / "discovery.json"
BUDGET = 20_000
"""The default of `max_tests`."""
SIX = "rotate + shift + brightness + contrast + gaussian_blur(sigma=0:0.02)"
ROWS: dict[str, tuple[str, str, float | None, int]] = {
    **{
        f"{model} gaussian {sigma}": (f"{model}-mnist", "gaussian", sigma, 600)
        for model in ("lenet5", "lenet1")
        for sigma in (0.05, 0.3, 0.6)
    },
    "lenet5 rotate": ("lenet5-mnist", "rotate", 1.0, 1000),
    "lenet1 rotate": ("lenet1-mnist", "rotate", 0.5, 300),
    "lenet5 brightness": ("lenet5-mnist", "brightness", 1.0, 600),
    "lenet5 fgsm 0.1": ("lenet5-mnist", "fgsm", 0.1, 600),
    "lenet1 fgsm 0.03": ("lenet1-mnist", "fgsm", 0.03, 300),
    "lenet4 six, half range": ("lenet4-mnist", SIX, 0.5, 600),
    "pdf edit": ("mlp-pdf", "edit", None, 1000),
    "pdf table_noise": ("mlp-pdf", "table_noise", None, 1000),
    "drebin edit": ("mlp-drebin", "edit", None, 1000),
    "digits gaussian 0.5": ("digits", "gaussian", 0.5, 500),
}
"""Model, perturbation, magnitude and seeds."""
HELD_OUT: dict[str, tuple[str, str, float | None, int]] = {
    "lenet4 gaussian 0.4": ("lenet4-mnist", "gaussian", 0.4, 500),
    "lenet4 salt_and_pepper": ("lenet4-mnist", "salt_and_pepper", 0.2, 600),
    "lenet5 occlusion": ("lenet5-mnist", "occlusion", 1.0, 800),
    "lenet1 motion_blur": ("lenet1-mnist", "motion_blur(length=0:0.08)", 1.2, 500),
    "lenet1 contrast + shot": ("lenet1-mnist", "contrast + shot", 1.0, 400),
    "drebin table_noise": ("mlp-drebin", "table_noise", None, 800),
    "pdf edit, 300 seeds": ("mlp-pdf", "edit", None, 300),
    "digits shift": ("digits", "shift", 0.4, 400),
}
"""The same for campaigns that the constants of the estimator were not chosen on."""
OTHERS = [
    (policy, row) for policy in ("random", "corners", "paper", "fuzz") for row in ("lenet5 gaussian 0.3", "pdf edit")
]
"""Other policies than the default, one campaign each."""
Record = dict[str, Any]


# Recording


@cache
def subject(model: str) -> tuple[Any, Any]:
    if model != "digits":
        return load(model), data(model)
    from sklearn.datasets import load_digits
    from torch import nn

    pictures, labels = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(pictures).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer, order = torch.optim.Adam(net.parameters(), 1e-3), torch.randperm(len(inputs))
    train, test = order[:1200], order[1200:]
    for _ in range(20):
        for batch in torch.split(torch.randperm(len(train)), 64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs[train[batch]]), labels[train[batch]])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return themis.Target(net.eval()), (inputs[test], labels[test])


def record(row: str, policy: str, random_seed: int, n_tests: int) -> Record:
    """The discovery curve of one campaign."""
    torch.set_num_threads(1)
    model, perturbation, magnitude, n_seeds = (ROWS | HELD_OUT)[row]
    target, seeds = subject(model)
    criterion: dict[str, Any] = {"criterion": "kmnc"} if policy == "fuzz" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = themis.run(
            target, seeds, perturbation, magnitude=magnitude, max_seeds=n_seeds, policy=policy, max_tests=n_tests,
            coverage=None, plateau=None, random_seed=random_seed, **criterion,
        )  # fmt: skip
    first: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int, int], int] = {}
    search: dict[tuple[int, int], int] = {}
    seed_first: dict[int, int] = {}
    first_uniform, uniform = [], []
    columns = run.faults.columns if len(run.faults) else {"id": np.zeros(0, int)}
    place = are_uniform(run).cumsum() - 1
    for k in np.argsort(columns["id"], kind="stable").tolist():
        fault = (int(columns["seed_id"][k]), int(columns["answer"][k]))
        test, is_uniform = int(columns["id"][k]), columns["stream"][k] == "uniform"
        if fault not in first:
            first[fault], numbers[fault] = test, len(first)
            first_uniform.append(int(is_uniform))
        seed_first.setdefault(fault[0], test)
        if is_uniform:
            uniform.append([test, numbers[fault], int(place[test])])
        else:
            search.setdefault(fault, test)
    return {
        "row": row,
        "policy": policy,
        "random_seed": random_seed,
        "seeds": run.start.n_usable,
        "found_at": list(first.values()),
        "found_by_uniform": first_uniform,
        "searched_at": [search.get(fault, -1) for fault in first],
        "uniform": uniform,
        "failing_at": sorted(seed_first.values()),
        "rounds": [[each.tests, round(each.coverage.sampled, 5)] for each in run.rounds],
    }


def record_all(curves: list[Record], processes: int, random_seeds: int, n_tests: int) -> list[Record]:
    """The curves of all campaigns; those that are there are not run again."""
    known = {(each["row"], each["policy"], each["random_seed"]): each for each in curves}
    tasks = [(row, "scheduled", k) for k in range(random_seeds) for row in ROWS]
    tasks += [(row, policy, 0) for policy, row in OTHERS]
    tasks += [(row, "scheduled", 100 + k) for k in range(random_seeds) for row in HELD_OUT]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as executor:
        jobs = {task: executor.submit(record, *task, n_tests) for task in tasks if task not in known}
        return [known[task] if task in known else jobs[task].result() for task in tasks]


# Estimators: what is within reach, from a curve of tests that found something


def last_doubling(found_at: np.ndarray, n_tests: int) -> float:
    """Each doubling finds what the last one has found."""
    return float(len(found_at) + 2 * (found_at >= n_tests / 2).sum())


def ratio_of_doublings(found_at: np.ndarray, n_tests: int) -> float:
    """The ratio of the last two doublings continues."""
    recent, before = (found_at >= n_tests / 2).sum(), ((found_at >= n_tests / 4) & (found_at < n_tests / 2)).sum()
    ratio = (recent + 0.5) / (before + 0.5)
    return float(len(found_at) + recent * (ratio + ratio**2))


def power_law(found_at: np.ndarray, n_tests: int) -> float:
    """A straight line through the last doubling, both axes logarithmic."""
    half = (found_at < n_tests / 2).sum()
    return float(len(found_at) * ((len(found_at) + 0.5) / (half + 0.5)) ** 2)


def hyperbola(found_at: np.ndarray, n_tests: int) -> float:
    """a t / (b + t) through the findings at T / 2 and T."""
    half, found = (found_at < n_tests / 2).sum(), len(found_at)
    if not half or 2 * half <= found:
        return 4.0 * found
    b = n_tests * (found - half) / (2 * half - found)
    return float(found * (b + n_tests) / n_tests * 4 * n_tests / (b + 4 * n_tests))


def chao(times_seen: np.ndarray, n_tests: int) -> float:
    """The factor by which Chao1's extrapolation (iNEXT) to four times the uniform tests raises what they have seen."""
    seen, once, twice = len(times_seen), (times_seen == 1).sum(), (times_seen == 2).sum()
    unseen = once * (once - 1) / (2 * (twice + 1)) if twice == 0 else once**2 / (2 * twice)
    if not unseen:
        return 1.0
    return float(1 + unseen * (1 - (1 - once / (n_tests * unseen + once)) ** (3 * n_tests)) / seen)


CURVE_ESTIMATORS = {
    "last doubling": last_doubling,
    "ratio of doublings": ratio_of_doublings,
    "power law": power_law,
    "hyperbola": hyperbola,
}


# Evaluation


def uniform_places(curve: Record) -> np.ndarray:
    """For each fault that the uniform stream saw: test, fault, and its place among the uniform tests.

    Older curves do not have the place; their uniform tests were the first of each round.
    """
    if curve["uniform"] and len(curve["uniform"][0]) == 3:
        return np.array(curve["uniform"], dtype=int)
    starts, n_before, placed = [0] + [tests for tests, _ in curve["rounds"]], 0, []
    for start, end in pairwise(starts):
        n = round(end * 0.2) - n_before
        placed.append((start, n_before, n))
        n_before += n
    table, sightings = np.array(placed), np.array(curve["uniform"], dtype=int).reshape(-1, 2)
    at = np.searchsorted(table[:, 0], sightings[:, 0], side="right") - 1
    place = table[at, 1] + np.minimum(sightings[:, 0] - table[at, 0], table[at, 2] - 1)
    return np.column_stack([sightings, place])


def risk_at(curve: Record, places: np.ndarray, n_tests: int) -> Estimate:
    """The residual risk after so many tests, at the end of a round."""
    seen = places[places[:, 0] < n_tests]
    faults, first, times = np.unique(seen[:, 1], return_index=True, return_counts=True)
    searched = np.array(curve["searched_at"], dtype=int)[faults]
    is_new = np.array(curve["found_by_uniform"], dtype=bool)[faults]
    is_searched = (searched >= 0) & (searched < n_tests)
    risk = residual_risk(times, seen[first, 2], is_new, is_searched, round(0.2 * n_tests))
    assert risk is not None
    return risk


def judge_estimators(curves: list[Record]) -> tuple[dict[str, Any], dict[str, Any]]:
    """How far estimators are off by ratio, rows weighted alike, and how often the stated interval holds."""
    errors: dict[str, dict[str, list[float]]] = {}
    held: dict[str, dict[str, list[tuple[bool, bool, bool]]]] = {"distinct faults": {}, "failing seeds": {}}
    for curve in curves:
        name = f"{curve['row']}, {curve['policy']}"
        places = uniform_places(curve) if curve["policy"] != "paper" else None
        for n_tests in (int(BUDGET / 2 ** (k / 2)) for k in range(9)):
            if REACH_FACTOR * n_tests > curve["rounds"][-1][0]:
                continue
            for kind, key in (("distinct faults", "found_at"), ("failing seeds", "failing_at")):
                all_found = np.array(curve[key])
                found, truth = all_found[all_found < n_tests], int((all_found < REACH_FACTOR * n_tests).sum())
                stated = forecast(found, n_tests, None if kind == "distinct faults" else curve["seeds"]).estimate
                held[kind].setdefault(name, []).append(
                    (stated.low <= truth <= stated.high, truth < stated.low, truth > stated.high)
                )
                if kind == "failing seeds":
                    continue
                values = {"stated": stated.value}
                values |= {name: estimator(found, n_tests) for name, estimator in CURVE_ESTIMATORS.items()}
                if places is not None:
                    times = np.array(list(Counter(places[places[:, 0] < n_tests, 1].tolist()).values()))
                    values["Chao1 of the uniform stream"] = len(found) * chao(times, round(0.2 * n_tests))
                for estimator, value in values.items():
                    error = np.log((value + 1) / (truth + 1))
                    errors.setdefault(estimator, {}).setdefault(name, []).append(float(error))
    off = {
        estimator: {
            "mean_error": round(float(np.mean([np.mean(row) for row in rows.values()])), 3),
            "mean_absolute_error": round(float(np.mean([np.mean(np.abs(row)) for row in rows.values()])), 3),
            "within_10_percent": round(float(np.mean([np.mean(np.abs(row) < 0.1) for row in rows.values()])), 3),
        }
        for estimator, rows in errors.items()
    }
    holds = {
        kind: dict(
            zip(
                ("holds", "truth_below", "truth_above"),
                (round(float(each), 3) for each in np.mean([np.mean(row, 0) for row in rows.values()], 0)),
                strict=True,
            )
        )
        for kind, rows in held.items()
    }
    return off, holds


def stop_at(curve: Record, recall: float | None) -> int | None:
    """The number of tests after which a campaign stops; None if the budget stops it."""
    found_at, places = np.array(curve["found_at"]), uniform_places(curve)
    for n_tests, coverage in curve["rounds"]:
        if n_tests > BUDGET:
            break
        if coverage < 1:
            continue
        reach = forecast(found_at[found_at < n_tests], n_tests)
        if is_little_left(recall, reach.recall, risk_at(curve, places, n_tests)):
            return int(n_tests)
    return None


def judge_stops(curves: list[Record], recall: float) -> dict[str, Any]:
    """By row and rule, one item per campaign: its tests, the share of what is within reach that it found, and why."""
    rows: dict[str, Any] = {}
    for curve in curves:
        if curve["policy"] != "scheduled" or curve["rounds"][-1][0] < REACH_FACTOR * BUDGET:
            continue
        found_at = np.array(curve["found_at"])
        for rule, goal in (("coverage", None), ("coverage and recall", recall)):
            stop = stop_at(curve, goal)
            n_tests = stop or BUDGET
            found, truth = (int((found_at < factor * n_tests).sum()) for factor in (1, REACH_FACTOR))
            figures = {
                "tests": n_tests,
                "recall": round(found / max(truth, 1) if truth else 1.0, 3),
                "by_budget": stop is None,
            }
            rows.setdefault(curve["row"], {}).setdefault(rule, []).append(figures)
    return rows


def evaluate(curves: list[Record], recall: float, console: Console) -> dict[str, Any]:
    """The figures of all curves, and apart from them those of the rows that are held out."""
    chosen_on, held_out = ([each for each in curves if (each["row"] in HELD_OUT) is is_out] for is_out in (False, True))
    console.rule("curves that the constants were chosen on")
    figures = evaluate_curves(chosen_on, recall, console)
    if held_out:
        console.rule("curves that were held out")
        figures["held_out"] = evaluate_curves(held_out, recall, console)
    return figures


def evaluate_curves(curves: list[Record], recall: float, console: Console) -> dict[str, Any]:
    off, holds = judge_estimators(curves)
    table = Table(title="Distinct faults within reach: logarithm of estimate over truth")
    for head in ("estimator", "mean", "mean absolute", "within 10%"):
        table.add_column(head, justify="left" if head == "estimator" else "right")
    for estimator, figures in off.items():
        table.add_row(estimator, *(f"{each:.3f}" for each in figures.values()))
    console.print(table)
    for kind, figures in holds.items():
        console.print(f"{kind}: the 95% interval holds {figures['holds']:.1%}", figures)
    stops = judge_stops(curves, recall)
    table = Table(
        title="Recall at the stop of each campaign, and the mean number of tests; B: one that the budget stopped"
    )
    for head in ("row", "coverage: tests", "recall", "coverage and recall: tests", "recall"):
        table.add_column(head, justify="left" if head == "row" else "right")
    for row, rules in stops.items():
        cells = []
        for campaigns in rules.values():
            mark = "B" * sum(each["by_budget"] for each in campaigns)
            cells.append(f"{np.mean([each['tests'] for each in campaigns]):,.0f} {mark}")
            cells.append(" ".join(f"{each['recall']:.2f}" for each in campaigns))
        table.add_row(row, *cells)
    console.print(table)
    shares = {}
    for rule in ("coverage", "coverage and recall"):
        every = [each for rules in stops.values() for each in rules[rule]]
        ended, spent = ([each for each in every if each["by_budget"] is by] for by in (False, True))
        shares[rule] = {
            "stopped": len(ended),
            "recall_at_least_0.9": round(float(np.mean([each["recall"] >= 0.9 for each in ended])), 3)
            if ended
            else None,
            "least_recall": min((each["recall"] for each in ended), default=None),
            "stopped_by_budget": len(spent),
            "mean_recall_at_budget": round(float(np.mean([each["recall"] for each in spent])), 3) if spent else None,
        }
        console.print(rule, shares[rule])
    return {"estimators": off, "intervals": holds, "stops": stops, "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the campaigns, and write the file")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--random-seeds", type=int, default=3)
    parser.add_argument("--tests", type=int, default=REACH_FACTOR * BUDGET)
    parser.add_argument("--recall", type=float, default=0.9)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    console = Console(width=140)
    curves = json.loads(arguments.json.read_text())["results"]["curves"] if arguments.json.exists() else []
    if arguments.record:
        curves = record_all(curves, arguments.processes, arguments.random_seeds, arguments.tests)
        results = {"evaluation": evaluate(curves, arguments.recall, console), "curves": curves}
        write_results(str(arguments.json), "cpu", results)
    else:
        evaluate(curves, arguments.recall, console)


if __name__ == "__main__":
    main()
