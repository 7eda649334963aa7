"""`themis completion`: let the shell complete commands, options, file names and known names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from themis.cli import COMMANDS, DONE, configure_parser
from themis.cli.options import Parser
from themis.errors import MissingExtraError, UsageError, nearest
from themis.plugins import added
from themis.text import print_text

if TYPE_CHECKING:
    from argparse import Namespace

HELP = (
    "Print a script that completes commands, options, file names and known names. Load it from the start-up file of "
    "your shell."
)
EXAMPLES = """
echo 'eval "$(themis completion bash)"' >> ~/.bashrc
themis completion zsh > ~/.zsh/_themis    (a folder in fpath)
"""
NAMES = {
    "perturb": (
        *("gaussian", "shot", "speckle", "impulse", "salt_and_pepper"),
        *("gaussian_blur", "motion_blur", "defocus_blur", "zoom_blur", "brightness", "contrast", "saturation"),
        *("hue", "gamma", "exposure", "vignette", "jpeg", "pixelate", "dead_pixels", "stripes", "occlusion"),
        *("rolling_shear",),
        *("rain", "snow", "raindrops", "fog", "frost", "glare", "shadow", "low_light"),
        *("rotate", "shift", "scale", "shear", "perspective", "elastic"),
        *("fgsm", "pgd", "pgd_l2", "apgd", "cw"),
        *("edit", "edit_worst", "table_noise"),
        *("signal_noise", "gain", "clipping", "low_pass", "high_pass", "band_stop", "time_shift", "time_stretch"),
        *("dropouts", "drift"),
    ),
    "policy": ("random", "corners", "paper", "scheduled", *added("themis.policies")),
    "preset": ("paper",),
    "judge": ("exact", "gibbs", "pymc"),
    "scale": ("absolute", "relative"),
    "neurons": ("element", "channel"),
    "oracle": (
        *("auto", "wrong", "changed", "top5", "threshold", "multilabel", "regression", "euclidean"),
        *("off", "segmentation", "keypoints", "detection"),
    ),
    "output": ("logits", "torchvision", "yolo", "yolov5", "detr", "rows"),
    "autocast": ("bfloat16", "float16"),
    "device": ("cpu", "cuda"),
    "zoo": (
        *("lenet1-mnist", "lenet4-mnist", "lenet5-mnist", "mlp-pdf", "mlp-drebin", "vgg19-imagenet"),
        *("resnet50-imagenet", "dave2-udacity", "resnet56-cifar10", "densenet121-cifar10"),
        "efficientnet-lite0-imagenet",
    ),
    "optimiser": ("sgd", "adam", "adamw"),
    "schedule": ("constant", "cosine", "step", "one-cycle"),
    "statistics": ("keep", "update"),
}
"""The names that an option accepts. They are repeated here because importing their tables would load torch."""
FILES, FOLDERS = ("FILE",), ("FOLDER", "RUN", "RUN_A", "RUN_B", "SUITE")
"""Placeholders in the help for paths."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or tcsh")


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError('completion needs shtab: pip install "themis-dl[completion]"') from error
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        known = nearest(arguments.shell, shtab.SUPPORTED_SHELLS)
        raise UsageError(f"unknown shell {arguments.shell!r}: {known}")
    print_text(shtab.complete(_parser_of_all_commands(shtab), arguments.shell))
    return DONE


def _parser_of_all_commands(shtab: Any) -> Parser:
    """A parser of every command, whose options know how they are completed."""
    parser = Parser(prog="themis")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name in (*COMMANDS, *added("themis.commands")):
        command = commands.add_parser(name, help=COMMANDS.get(name))
        configure_parser(command, name)
        for action in command._actions:
            _set_completion(action, shtab)
    return parser


def _set_completion(action: Any, shtab: Any) -> None:
    if action.metavar in FILES:
        action.complete = shtab.FILE
    elif action.metavar in FOLDERS:
        action.complete = shtab.DIRECTORY
    elif action.metavar == "SHELL":
        action.choices = shtab.SUPPORTED_SHELLS
    elif action.dest in NAMES:
        action.choices = NAMES[action.dest]
