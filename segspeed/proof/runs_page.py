"""Several runs as one page and one picture: Dice against time, the table, the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from segspeed.proof.pictures import curves, save_png
from segspeed.proof.runs_table import Entry, cells, differences, headings, notes
from segspeed.record.figures import blank, svg_text
from segspeed.record.report import details, document, picture
from segspeed.types import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "<!-- a comparison of runs -->"  # by which a page of ours is known again


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise DataError where the page or its picture would take the place of another file, or cannot be written there."""
    if target.suffix != ".html":
        raise DataError(f"target={target} must end with .html; the picture gets the same name with .png")
    if not target.parent.is_dir():
        raise DataError(f"target={target}: there is no folder {target.parent}")
    image = target.with_suffix(".png")
    there = [p for p in (target, image) if p.exists()]
    if not there:
        return
    ours = target.is_file() and MARK in target.read_text(encoding="utf-8", errors="replace")
    if not ours:
        raise DataError(f"{there[0]} is another file, which nothing here replaces; choose another target=FILE.html")
    if not overwrite:
        raise DataError(f"{target} is there already; overwrite=true makes it anew, target=FILE.html another one")


def write_comparison(entries: Sequence[Entry], target: Path) -> Path:
    """Write the page and, beside it, the picture, whose path is returned."""
    image = target.with_suffix(".png")
    save_png(overlay(entries), image)
    target.write_text(page(entries), encoding="utf-8")
    return image


def overlay(entries: Sequence[Entry]) -> Figure:
    """Mean Dice of every run against minutes of training."""
    figure, (axis,) = blank(9, 4.6)
    curves(axis, {e.name + ("" if e.finished else " (not finished)"): e.curve for e in entries})
    return figure


def page(entries: Sequence[Entry]) -> str:
    """The page as HTML text."""
    cohorts = ", ".join(dict.fromkeys(str(e.start.get("cohort", "run")) for e in entries))
    title = f"{cohorts}: {len(entries)} runs"
    caption = "Mean Dice of whole validation volumes on their original grid, against minutes of training, a line a run."
    body = [
        MARK,
        f"<h1>{escape(title)}</h1>",
        *(f"<p class='soft'>{escape(text)}</p>" for text in notes(entries)),
        picture("Dice against wall clock", svg_text(overlay(entries)), caption),
        "<h2>Run by run</h2>" + _table(headings(entries), [cells(e, entries) for e in entries]),
        _differences(entries),
        *(details(f"Versions and hardware of {e.name}", e.start.get("versions")) for e in entries),
    ]
    return document(title, body, "main{max-width:76rem}")


def _differences(entries: Sequence[Entry]) -> str:
    found = differences(entries)
    head = "<h2>Settings in which they differ</h2>"
    if not found:
        return head + "<p>None.</p>"
    return head + _table(["setting", *(e.name for e in entries)], [[key, *row] for key, row in found.items()])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(h)}</th>" for h in heads) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    return f"<div class='wide'><table>{''.join(lines)}</table></div>"
