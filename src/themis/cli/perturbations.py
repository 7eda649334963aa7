"""List the perturbations with the range and the unit of their theta. --sheet draws them on a picture or a signal, with
increasing strength from left to right. Perturbations can be combined and restricted as in --perturb:
'rain(angle=-10:10) + fog'.

themis perturbations
themis perturbations rain fog
themis perturbations --family weather --sheet weather.png
themis perturbations 'rain + motion_blur' --sheet mine.png --data images:photos --index 3
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import FORCE_HELP, CommandLine, Parser, add_option, check_file
from themis.errors import UsageError, nearest
from themis.runs.source import Origin
from themis.runs.store.files import fresh_file
from themis.text import counted, print_json, print_text

if TYPE_CHECKING:
    from torch import Tensor

    from themis.perturb import Perturbation

FAMILIES = ("noise", "camera", "weather", "geometry", "corruption", "attack", "table", "signal")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="perturbations to show (default: all)")
    add_option(parser, "family", str | None, None, f"show only one family: {', '.join(FAMILIES)}")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    sheet = parser.add_argument_group("contact sheet")
    add_option(sheet, "sheet", str | None, None, "picture to write (.png, .pdf or .svg), with one row per perturbation")
    text = "inputs to perturb, as in themis run (default: a portrait, or heartbeats)"
    add_option(sheet, "data", str | None, None, text)
    add_option(sheet, "index", int, 0, "index of the input in the data")
    add_option(sheet, "bounds", tuple[float, float], (0.0, 1.0), "range of a raw input, such as 0,255")
    add_option(sheet, "magnitude", float | None, None, "largest strength of the perturbations, as in themis run")
    add_option(sheet, "random_seed", int, 0, "seed of the drops, flakes and noise")
    sheet.add_argument("--force", action="store_true", help=FORCE_HELP)


def execute(arguments: CommandLine) -> int:
    if arguments.sheet is not None:
        check_file("--sheet", Path(arguments.sheet), (".png", ".pdf", ".svg"), replaces=arguments.force)
    chosen = _choose(arguments)
    if arguments.json:
        print_json([_as_object(perturbation) for perturbation in chosen])
    elif arguments.sheet is None:
        print_text(_format_list(chosen))
    if arguments.sheet is not None:
        _draw(chosen, arguments)
    return DONE


def _choose(arguments: CommandLine) -> list[Perturbation]:
    from themis.perturb import PERTURBATIONS, choose_perturbation

    if arguments.family not in (None, *FAMILIES):
        raise UsageError(f"unknown family {arguments.family!r}: {nearest(arguments.family, FAMILIES)}")
    names = arguments.names or PERTURBATIONS
    with Origin().in_folder():  # perturbations of the user are looked up in the current folder
        chosen = [choose_perturbation(name) for name in names]
    in_family = [perturbation for perturbation in chosen if arguments.family in (None, perturbation.family)]
    if not in_family:
        raise UsageError(f"none of the named perturbations is in family {arguments.family!r}: leave out --family")
    return [perturbation.at(arguments.magnitude) for perturbation in in_family]


def _format_list(perturbations: list[Perturbation]) -> str:
    lines: list[str] = []
    family = ""
    width = max((len(perturbation.name) for perturbation in perturbations), default=0)
    for perturbation in perturbations:
        if perturbation.family != family:
            family = perturbation.family
            lines += ["", family] if lines else [family]
        cost = f" {counted(perturbation.passes, 'pass', 'passes')} per test." if perturbation.passes else ""
        channels = f" Needs {counted(perturbation.channels, 'channel')}." if perturbation.channels else ""
        about = wrap(perturbation.about + channels + cost, 96 - width)
        names = [perturbation.name] + [""] * (len(about) - 1)
        lines += [f"  {name:<{width}}  {text}" for name, text in zip(names, about, strict=True)]
        for theta in perturbation.theta:
            unit = f" ({theta.unit})" if theta.unit else ""
            limits = f"{theta.low:g} to {theta.high:g}{unit}, weakest at {theta.identity:g}"
            lines.append(f"  {'':<{width}}    {theta.name}: {limits}")
    return "\n".join(lines)


def _as_object(perturbation: Perturbation) -> dict[str, Any]:
    names = ("name", "family", "about", "inputs", "channels", "is_random", "passes", "needs_gradient", "is_smooth")
    theta = [
        {**dimension.as_dict(), "limits": [str(end) for end in dimension.limits]} for dimension in perturbation.theta
    ]
    return {**{name: getattr(perturbation, name) for name in names}, "theta": theta}


def _draw(perturbations: list[Perturbation], arguments: CommandLine) -> None:
    import torch

    from themis.measure.clean import within_bounds
    from themis.report.sheet import can_draw, draw_sheet
    from themis.target.target import check_bounds

    has_signals = all(perturbation.inputs == "signal" for perturbation in perturbations)
    picture, bounds = _picture(arguments, has_signals=has_signals), arguments.bounds
    shape = tuple(picture.shape)
    if len(shape) not in (2, 3):
        raise UsageError(
            f"--data must be pictures [channels, height, width] or signals [channels, samples], got {list(shape)}"
        )
    picture = within_bounds(picture[None], check_bounds(bounds), torch.zeros(1))[0]
    drawn = [perturbation for perturbation in perturbations if can_draw(perturbation, shape)]
    skipped = [perturbation.name for perturbation in perturbations if perturbation not in drawn]
    path = Path(arguments.sheet)
    if not drawn:
        raise UsageError(
            f"cannot draw {', '.join(skipped)} on an input {list(shape)}: attacks need a model, perturbations of "
            "tables cannot be drawn, those of pictures, clips and signals need such inputs, and some need 3 channels"
        )
    with fresh_file(path, replaces=arguments.force) as part, part.open("wb") as file:
        seed, ending = arguments.random_seed, path.suffix[1:].lower()
        draw_sheet(picture, drawn, file, bounds=bounds, noise_seed=seed, format=ending)
    print_text(f"Drew {counted(len(drawn), 'perturbation')} in {path}")
    if skipped:
        print_text(f"Not drawn, because they need a model or other inputs: {', '.join(skipped)}")


def _picture(arguments: CommandLine, *, has_signals: bool) -> Tensor:
    if arguments.data is None:
        return _heartbeats() if has_signals else _portrait()
    from themis.data.seeds import read_seeds

    seeds = read_seeds(Origin(data=arguments.data).read())
    if not 0 <= arguments.index < len(seeds):
        raise UsageError(f"--index must lie in 0..{len(seeds) - 1}, got {arguments.index}")
    return seeds.inputs[arguments.index]


def _heartbeats() -> Tensor:
    """A signal that resembles three beats of an electrocardiogram, `[1, 600]` in 0..1."""
    import torch

    beat = torch.linspace(-1, 1, 200)
    waves = ((-0.35, 0.12, 0.12), (-0.06, 0.02, -0.12), (0.0, 0.025, 0.8), (0.06, 0.02, -0.2), (0.4, 0.15, 0.22))
    shape = sum(height * (-((beat - place) ** 2) / (2 * (width / 2) ** 2)).exp() for place, width, height in waves)
    return 0.3 + 0.7 * torch.as_tensor(shape).repeat(3)[None]


def _portrait() -> Tensor:
    """The photograph of Grace Hopper that comes with matplotlib; it is in the public domain."""
    import matplotlib

    from themis.data.pictures import picture_seeds

    path = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
    return picture_seeds([path], None, size=224).inputs[0]
