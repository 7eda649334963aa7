"""Suites on published files, which grade a model on corrupted pictures made by others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from themis.campaign.series import open_series, refuse_changes
from themis.campaign.setup import CampaignPlan, TestedModel
from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.chunk import padded
from themis.measure.clean import within_bounds
from themis.measure.tests import Ints
from themis.perturb import choose_perturbation
from themis.runs.environment import as_plain_data
from themis.search import choose_policy
from themis.settings import Settings
from themis.suites.folder import SuiteFolder, new_record, signed
from themis.suites.grades import LevelGrade, grade_clean, grade_outputs, graded_rows, plain_grade
from themis.suites.options import SuiteOptions
from themis.suites.result import SuiteRun
from themis.target.alignment import align_seeds
from themis_integrations.published.files import CORRUPTIONS, READERS, SEVERITIES, corruptions_in


def grade_published(
    tested: TestedModel,
    source: str,
    options: SuiteOptions,
    settings: Settings,
    out: str | Path,
    on_grades: Callable[[str, Sequence[LevelGrade]], None],
) -> SuiteRun:
    """Grade a model on all corruptions of published files, and store the grades in the folder `out`.

    The seeds are the clean pictures, in the order of the files. The same call with the same `out` grades what is left.
    on_grades: called with a corruption and its grades.
    """
    if options.decide is not None:
        raise UsageError("decide must be left out for published files, which are all graded: set a limit with a gate")
    reader, _, path = source.partition(":")
    files, began = Path(path).absolute(), perf_counter()
    names = corruptions_in(files)
    if not names:
        raise DataError(f"{files} must hold corruptions such as {CORRUPTIONS[0]}, but it has none: check the path")
    plan = CampaignPlan(choose_perturbation("gaussian"), choose_policy(settings.policy), settings)  # for the sweep
    with closing(SuiteFolder(out)) as folder, open_series(tested, plan) as series:
        series = series.with_sweep(plan)
        assert series.sweep is not None
        calculator, stored = series.sweep.calculator, folder.read()
        rows = graded_rows(len(tested.seeds), options.level_seeds, settings.random_seed)
        stated = _stated(reader, files, names, settings)
        stated["options"] = {
            "max_tests": len(rows) * SEVERITIES * len(names), "share": 1.0, "level_seeds": options.level_seeds
        }  # fmt: skip
        record = stored or new_record(tested, series.environment | series.hashes, calculator, stated)
        if any(record[key] != stated[key] for key in ("name", "perturbation", "members", "options")):
            raise UsageError(f"{folder.path} holds another suite: pass the same options, or choose another folder")
        refuse_changes(series.hashes, record["environment"], "suite")
        record["clean"] = plain_grade(grade_clean(calculator, rows))
        record["graded"] = hashlib.sha256(tested.seeds.seed_id.numpy()[rows].tobytes()).hexdigest()
        record["state"] = "failed"
        try:
            for name in names:
                if name not in record["grades"]:
                    pictures = align_seeds(tested.target, READERS[reader](files, corruption=name))
                    grades = _grade_files(calculator, pictures, rows, name)
                    record["grades"][name] = [plain_grade(grade) for grade in grades]
                    on_grades(name, grades)
            record["state"] = "ended"
        except KeyboardInterrupt:
            record["state"] = "interrupted"
        finally:
            record["seconds"] += perf_counter() - began
            folder.write(signed(record))
    return SuiteRun(out)


def _stated(reader: str, files: Path, names: list[str], settings: Settings) -> dict[str, Any]:
    """The content of `suite.json` for a suite on published files."""
    missing = [name for name in CORRUPTIONS if name not in names]
    return {
        "name": reader,
        "members": [
            {
                "name": name,
                "perturb": f"{reader}:{files}?corruption={name}",
                "magnitude": None,
                "weight": 1.0,
                "max_tests": None,
                "levels": list(range(1, SEVERITIES + 1)),
                "note": "same: the published files",
                "range": f"severity 1 to {SEVERITIES}",
            }
            for name in names
        ],
        "notes": [f"Not in the folder, and left out: {', '.join(missing)}."] if missing else [],
        "settings": {name: as_plain_data(value) for name, value in asdict(settings).items()},
        "perturbation": f"{reader}:{files}",
    }


def _grade_files(calculator: Calculator, files: Seeds, rows: Ints, name: str) -> list[LevelGrade]:
    """The grades of the seeds `rows` on a corruption at each severity."""
    n, labels = len(calculator.seeds), calculator.clean.labels
    if len(files) != n * SEVERITIES or files.shape[1:] != calculator.seeds.shape[1:]:
        raise DataError(
            f"{name} must have each of the {n:,} clean pictures {list(calculator.seeds.shape[1:])} at five severities, "
            f"got {len(files):,} pictures {list(files.shape[1:])}: --data must be all the pictures that were corrupted"
        )
    if labels is not None and files.labels is not None and not torch.equal(files.labels[:n], labels.cpu()):
        raise DataError(f"{name} must have the labels of the clean pictures: --data must be those, in the same order")
    grades = []
    for severity in range(SEVERITIES):
        outputs = []
        for first in range(0, len(rows), calculator.chunk):
            at = torch.from_numpy(rows[first : first + calculator.chunk]) + severity * n
            inputs = within_bounds(files.take(at), calculator.target.bounds, at)
            with torch.no_grad():
                answers = calculator.target.forward(padded(inputs, calculator.chunk).to(calculator.device))
            outputs.append(answers[: len(at)].float())
        grades.append(grade_outputs(calculator, rows, torch.cat(outputs), f"severity {severity + 1}"))
    return grades
