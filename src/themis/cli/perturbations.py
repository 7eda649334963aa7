"""`themis perturbations`: what a model can be disturbed with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import Parser, add_option
from themis.errors import UsageError, nearest
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

    from torch import Tensor

    from themis.perturb import Perturbation, Theta

HELP = (
    "List the perturbations with their theta, its range and unit; --sheet draws them on a picture, stronger from left "
    "to right. Names may be combined and narrowed as in --perturb: 'rain(angle=-10:10) + fog'."
)
EXAMPLES = """
themis perturbations
themis perturbations rain fog
themis perturbations --family weather --sheet weather.png
themis perturbations 'rain + motion_blur' --sheet mine.png --data images:photos --index 3
"""
FAMILIES = ("noise", "camera", "weather", "geometry", "attack", "table")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="perturbations to show; by default all")
    add_option(parser, "family", str | None, None, f"only one family: {', '.join(FAMILIES)}")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    sheet = parser.add_argument_group("contact sheet")
    add_option(sheet, "sheet", str | None, None, "picture to write (.png, .pdf, .svg): a row a perturbation")
    add_option(sheet, "data", str | None, None, "pictures to disturb, as in themis run; by default a portrait")
    add_option(sheet, "index", int, 0, "which of them")
    add_option(sheet, "bounds", tuple[float, float], (0.0, 1.0), "range of a raw input, as 0,255")
    add_option(sheet, "magnitude", float | None, None, "reach of the perturbations, as in themis run")
    add_option(sheet, "random_seed", int, 0, "another one gives other drops, flakes and noise")


def execute(arguments: Namespace, said: set[str]) -> int:
    chosen = _chosen(arguments)
    if arguments.json:
        print(json.dumps([_plain(each) for each in chosen], indent=2, default=str))
    elif arguments.sheet is None:
        print(_listed(chosen))
    if arguments.sheet is not None:
        _draw(chosen, arguments)
    return DONE


def _chosen(arguments: Namespace) -> list[Perturbation]:
    from themis.perturb import PERTURBATIONS, choose_perturbation

    if arguments.family not in (None, *FAMILIES):
        remedy = nearest(arguments.family, FAMILIES)
        raise UsageError(f"--family must be a known one, got {arguments.family!r}: {remedy}")
    names = arguments.names or PERTURBATIONS
    with Origin().at_home():  # the user's own are looked up here
        chosen = [choose_perturbation(name) for name in names]
    chosen = [each.at(arguments.magnitude) for each in chosen if arguments.family in (None, each.family)]
    if not chosen:
        raise UsageError(f"--family must fit the names, none of them is in {arguments.family!r}: leave one of both out")
    return chosen


def _listed(perturbations: list[Perturbation]) -> str:
    lines: list[str] = []
    family = ""
    wide = max((len(each.name) for each in perturbations), default=0)
    for each in perturbations:
        if each.family != family:
            lines += ["", each.family] if lines else [each.family]
            family = each.family
        cost = f" {each.passes} passes a test." if each.passes else ""
        channels = f" Needs {each.channels} channels." if each.channels else ""
        about = wrap(each.about + channels + cost, 96 - wide)
        lines += [f"  {name:<{wide}}  {text}" for name, text in zip([each.name] + [""] * 9, about, strict=False)]
        lines += [f"  {'':<{wide}}    {_range(theta)}" for theta in each.theta]
    return "\n".join(lines)


def _range(theta: Theta) -> str:
    return f"{theta.name} {theta.low:g} to {theta.high:g} {theta.unit}; {theta.identity:g} changes least"


def _plain(perturbation: Perturbation) -> dict[str, Any]:
    names = ("name", "family", "about", "inputs", "channels", "is_random", "passes", "needs_gradient", "is_smooth")
    theta = [{**asdict(each), "limits": [str(end) for end in each.limits]} for each in perturbation.theta]
    return {**{name: getattr(perturbation, name) for name in names}, "theta": theta}


def _draw(perturbations: list[Perturbation], arguments: Namespace) -> None:
    import torch

    from themis.measure.inputs import check_bounds
    from themis.report.sheet import can_draw, draw_sheet
    from themis.target.target import check_options

    picture, bounds = _picture(arguments), arguments.bounds
    shape = tuple(picture.shape)
    if len(shape) != 3:
        raise UsageError(f"--data must hold pictures [channels, height, width], got inputs {list(shape)}")
    check_bounds(picture[None], check_options(bounds, "element", "auto"), torch.zeros(1))
    drawn = [each for each in perturbations if can_draw(each, shape)]
    left = [each.name for each in perturbations if each not in drawn]
    path = Path(arguments.sheet)
    if not drawn:
        raise UsageError(
            f"{', '.join(left)} cannot be drawn on a picture {list(shape)} alone: attacks need a model, tables have no "
            "picture, and some need 3 channels"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--sheet must be in a folder that exists, {path.parent} does not: make it")
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--sheet must end in .png, .pdf or .svg, got {arguments.sheet!r}")
    draw_sheet(picture, drawn, path, bounds=(bounds[0], bounds[1]), noise_seed=arguments.random_seed)
    print(f"{len(drawn)} {'perturbation' if len(drawn) == 1 else 'perturbations'} drawn: {path}")
    if left:
        print(f"Not drawn, since they need a model, a table or other channels: {', '.join(left)}")


def _picture(arguments: Namespace) -> Tensor:
    if arguments.data is None:
        return _portrait()
    from themis.data.seeds import read_seeds

    seeds = read_seeds(Origin(data=arguments.data).read())
    if not 0 <= arguments.index < len(seeds):
        raise UsageError(f"--index must lie in 0..{len(seeds) - 1}, got {arguments.index}")
    return seeds.inputs[arguments.index]


def _portrait() -> Tensor:
    """The photograph that comes with matplotlib: Grace Hopper, in the public domain."""
    import matplotlib

    from themis.data.pictures import picture_seeds

    path = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
    return picture_seeds([path], None, size=224, what=str(path)).inputs[0]
