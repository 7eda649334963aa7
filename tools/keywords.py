"""Write the TypedDicts of keyword options, `src/themis/keywords.py` and `src/themis_lab/keywords.py`.

They are made from the dataclasses of options, which are their only source: `python tools/keywords.py` writes them again
after a change, and tests/test_keywords.py notices if that was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import Any

from themis.campaign.api import CHANGEABLE
from themis.retraining.recipe import Recipe, RetrainingPlan
from themis.settings import Settings
from themis.suites.options import UNSUPPORTED_OPTIONS, SuiteOptions
from themis_lab.comparison.plan import ComparisonPlan
from themis_lab.contest.plan import ContestPlan

SOURCE = Path(__file__).resolve().parents[1] / "src"
HEAD = '''"""The keyword options of functions, for editors and type checkers; written by tools/keywords.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from themis.criteria import Criterion
    from themis.search.policy import Policy
'''
LISTS = {"also", "techniques", "magnitudes", "criteria"}
"""Options that are text on the command line, and may be a list in Python."""
TYPES = {"policy": "str | Policy", "criterion": "str | Criterion | None", "split": "Sequence[float] | None"}
"""What is accepted in Python, where the field does not say it."""


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def members(kinds: Iterable[Any], names: Iterable[str] | None = None, without: Iterable[str] = ()) -> Iterator[str]:
    """The lines of a TypedDict with the fields of dataclasses, each with its help."""
    seen = set(without)
    for kind in kinds:
        for field in fields(kind):
            if "help" not in field.metadata or field.name in seen or (names is not None and field.name not in names):
                continue
            seen.add(field.name)
            type_ = TYPES.get(field.name, str(field.type))
            type_ = f"{type_} | Sequence[Any]" if field.name in LISTS else type_
            text = str(field.metadata["help"]).replace("null", "None")
            text = text[0].upper() + text[1:] + "." * (not text.endswith("."))
            default = "" if field.default is None else f" Default: {field.default!r}."
            yield f"    {field.name}: {type_}"
            yield fill(f'"""{text}{default}"""', 119, initial_indent="    ", subsequent_indent="    ")


def typed_dict(name: str, summary: str, lines: Iterable[str], base: str = "TypedDict") -> str:
    shown = [*lines]
    return "\n".join(
        [f"\n\nclass {name}({base}, total=False):", f'    """{summary}"""', *([""] if shown else []), *shown, ""]
    )


def product() -> str:
    of_suites = {*UNSUPPORTED_OPTIONS, *names(SuiteOptions)}
    budget, stop = of_suites.intersection(CHANGEABLE), {*CHANGEABLE} - of_suites
    return "".join(
        [
            HEAD,
            typed_dict("BudgetOptions", "How long a campaign runs.", members([Settings], budget)),
            typed_dict("StopOptions", "What else a resumed campaign may change.", members([Settings], stop)),
            typed_dict(
                "CampaignOptions",
                "Options of a campaign, alone or in a suite.",
                members([Settings], without=of_suites | stop),
                "StopOptions",
            ),
            typed_dict(
                "RunOptions",
                "Options of `themis.run`.",
                members([Settings], of_suites - budget),
                "CampaignOptions, BudgetOptions",
            ),
            typed_dict("SuiteKeywords", "Options of `themis.run_suite`.", members([SuiteOptions]), "CampaignOptions"),
            typed_dict("ResumeOptions", "Limits that `themis.resume` may change.", [], "StopOptions, BudgetOptions"),
            typed_dict("RecipeOptions", "How models are trained.", members([Recipe])),
            typed_dict(
                "RetrainOptions",
                "Options of `themis.retrain`.",
                members([RetrainingPlan], without=names(Recipe)),
                "RecipeOptions",
            ),
        ]
    )


def laboratory() -> str:
    return "".join(
        [
            HEAD.partition("\nif TYPE")[0].replace("TYPE_CHECKING, ", ""),
            "\nfrom themis.keywords import RecipeOptions\n",
            typed_dict("CompareOptions", "Options of `themis_lab.compare`.", members([ComparisonPlan])),
            typed_dict(
                "ContestOptions",
                "Options of `themis_lab.contest_run`.",
                members([ContestPlan], without={"techniques", *names(Recipe)}),
                "RecipeOptions",
            ),
        ]
    )


TEXTS = {"themis": product, "themis_lab": laboratory}


def main() -> None:
    for package, text in TEXTS.items():
        (SOURCE / package / "keywords.py").write_text(text())


if __name__ == "__main__":
    main()
