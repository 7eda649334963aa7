"""How results show themselves in a notebook: a few lines of HTML, small pictures inside, all texts escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from themis.runs.display.fault import answers, describe_theta, pictures

if TYPE_CHECKING:
    from themis.runs.display.fault import Pixels
    from themis.runs.faults import Fault, Faults
    from themis.runs.run import Run

N_PICTURES = 3
"""Faults that a run draws of itself."""
N_ROWS = 10
"""Faults that a list of them shows."""
SIDE = 112
"""Height of a picture on the page, in pixels."""
TITLES = ("clean", "disturbed", "difference, amplified")


def show_run(run: Run) -> str:
    """Why it stopped, the figures, and the most telling faults."""
    from themis.runs.display.text import summary_rows

    faults = "".join(_figure(fault, _pictures(fault)) for fault in run.faults.most_telling(N_PICTURES))
    rows = [(name, escape(text)) for name, text in summary_rows(run)]
    return f"<div><p><b>{escape(run.stop)}</b></p>{_pairs(rows)}{faults}</div>"


def show_fault(fault: Fault) -> str:
    """Its pictures, what the model said, theta, and how to run it again."""
    before, after = answers(fault)
    rows = [
        ("answer", f"{escape(before)} becomes <b>{escape(after)}</b>"),
        *([] if fault.label is None else [("label", str(fault.label))]),
        (escape(fault.perturbation), escape(describe_theta(fault))),
        ("distance", f"{fault.distance:.4g}" + ("" if fault.ssim is None else f", SSIM {fault.ssim:.3f}")),
        ("found in", escape(f"round {fault.round}, {fault.stream} stream, {fault.kind}")),
        ("run again", f"<code>run.faults.by_id({fault.id}).replay()</code>"),
    ]
    title = f"fault {fault.id} of seed {fault.seed_id}"
    return f"<div><p><b>{title}</b></p>{_strip(_pictures(fault))}{_pairs(rows)}</div>"


def show_faults(faults: Faults) -> str:
    """The most telling ones as a table."""
    shown = faults.most_telling(N_ROWS)
    if not shown:
        return "<div><p>No fault was found.</p></div>"
    head = ["id", "seed", "answer", "becomes", *faults.theta, "distance", "SSIM"]
    rows = [
        [
            str(each.id),
            str(each.seed_id),
            *answers(each),
            *(f"{value:.4g}" for value in each.theta.values()),
            f"{each.distance:.4g}",
            "" if each.ssim is None else f"{each.ssim:.3f}",
        ]
        for each in shown
    ]
    left = f", the {len(shown)} most telling of them" if len(faults) > len(shown) else ""
    text = f"{len(faults):,} faults by {faults.perturbation}{left}; to_pandas() gives all."
    return f"<div><p>{escape(text)}</p>{_table(head, rows)}</div>"


def _pictures(fault: Fault) -> list[Pixels]:
    """The fault run again; nothing where it cannot be, a notebook must show the rest."""
    try:
        return pictures(fault.replay())
    except Exception:
        return []


def _figure(fault: Fault, shown: Sequence[Pixels]) -> str:
    before, after = answers(fault)
    text = f"seed {fault.seed_id}: {before} becomes {after}; {describe_theta(fault)}"
    return f'<div style="display:inline-block;margin:4px 16px 4px 0">{_strip(shown)}<small>{escape(text)}</small></div>'


def _strip(shown: Iterable[Pixels]) -> str:
    from themis.runs.display.png import data_uri

    style = f"height:{SIDE}px;image-rendering:pixelated;margin-right:4px;display:inline"
    drawn = "".join(
        f'<img src="{data_uri(pixels)}" alt="{title}" title="{title}" style="{style}">'
        for pixels, title in zip(shown, TITLES, strict=False)
    )
    return f"<div>{drawn}</div>" if drawn else ""


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and texts, which are HTML already."""
    left = 'style="text-align:left;vertical-align:top"'
    lines = "".join(f"<tr><th {left}>{name}</th><td {left}>{text}</td></tr>" for name, text in rows)
    return f"<table>{lines}</table>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
