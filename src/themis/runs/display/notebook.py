"""The HTML representation of results in a notebook: text, tables and small pictures. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from themis.runs.display.fault import answers, describe_theta, pictures

if TYPE_CHECKING:
    from themis.runs.display.fault import Pixels
    from themis.runs.fault import Fault
    from themis.runs.faults import Faults
    from themis.runs.run import Run

N_PICTURES = 3
"""Faults that are drawn for a run."""
N_ROWS = 10
"""Faults that are listed for a collection of faults."""
SIDE = 112
"""Height of a picture in pixels."""
TITLES = ("clean", "disturbed", "difference, amplified")


def show_run(run: Run) -> str:
    """The verdict, the figures, why the campaign stopped, the most telling faults, and how it went, folded."""
    from themis.runs.display.text import summary_rows

    faults = "".join(_figure(fault, _pictures(fault)) for fault in run.faults.most_telling(N_PICTURES))
    rows = [(name, escape(text)) for name, text in summary_rows(run, is_verbose=True)]
    n = len(summary_rows(run))
    details = f"<details><summary>How the campaign went</summary>{_pairs(rows[n:])}</details>"
    head = f"<p><b>{escape(run.verdict.text)}</b></p>{_pairs(rows[:n])}<p>{escape(run.stop)}</p>"
    return f"<div>{head}{faults}{details}</div>"


def show_fault(fault: Fault) -> str:
    """The pictures of the fault, the answers of the model, theta, and how to replay it."""
    before, after = answers(fault)
    rows = [
        ("answer", f"{escape(before)} becomes <b>{escape(after)}</b>"),
        *([] if fault.label is None else [("label", str(fault.label))]),
        (escape(fault.perturbation), escape(describe_theta(fault))),
        ("distance", f"{fault.distance:.4g}" + ("" if fault.ssim is None else f", SSIM {fault.ssim:.3f}")),
        ("found in", escape(f"round {fault.round}, {fault.stream} stream, {fault.kind}")),
        ("replay", f"<code>run.faults.by_id({fault.id}).replay()</code>"),
    ]
    title = f"fault {fault.id} of seed {fault.seed_id}"
    return f"<div><p><b>{title}</b></p>{_strip(_pictures(fault))}{_pairs(rows)}</div>"


def show_faults(faults: Faults) -> str:
    """The most telling faults as a table."""
    telling = faults.most_telling(N_ROWS)
    if not telling:
        return "<div><p>No fault was found.</p></div>"
    head = ["id", "seed", "answer", "becomes", *faults.theta, "distance", "SSIM"]
    rows = [
        [
            str(fault.id),
            str(fault.seed_id),
            *answers(fault),
            *(f"{value:.4g}" for value in fault.theta.values()),
            f"{fault.distance:.4g}",
            "" if fault.ssim is None else f"{fault.ssim:.3f}",
        ]
        for fault in telling
    ]
    part = f", of which the {len(telling)} most telling are shown" if len(faults) > len(telling) else ""
    text = f"{len(faults):,} faults by {faults.perturbation}{part}; to_pandas() returns all."
    return f"<div><p>{escape(text)}</p>{_table(head, rows)}</div>"


def _pictures(fault: Fault) -> list[Pixels]:
    """The pictures of a fault; none if they are not stored or fail, so that a notebook still shows the rest."""
    try:
        shown = fault.shown()
        return [] if shown is None else pictures(shown)
    except Exception:
        return []


def _figure(fault: Fault, drawn: Sequence[Pixels]) -> str:
    before, after = answers(fault)
    text = f"seed {fault.seed_id}: {before} becomes {after}; {describe_theta(fault)}"
    return f'<div style="display:inline-block;margin:4px 16px 4px 0">{_strip(drawn)}<small>{escape(text)}</small></div>'


def _strip(drawn: Iterable[Pixels]) -> str:
    from themis.runs.display.fault import data_uri

    style = f"height:{SIDE}px;image-rendering:pixelated;margin-right:4px;display:inline"
    images = "".join(
        f'<img src="{data_uri(pixels)}" alt="{title}" title="{title}" style="{style}">'
        for pixels, title in zip(drawn, TITLES, strict=False)
    )
    return f"<div>{images}</div>" if images else ""


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and texts, which must be HTML."""
    left = 'style="text-align:left;vertical-align:top"'
    lines = "".join(f"<tr><th {left}>{name}</th><td {left}>{text}</td></tr>" for name, text in rows)
    return f"<table>{lines}</table>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
