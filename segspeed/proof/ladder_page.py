"""What a climb leaves behind: ladder.md, ladder.png, and ladder.html, one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from segspeed.config import LadderConfig
from segspeed.proof.climb import Climb
from segspeed.proof.ladder_table import headings, markdown, notes, numbers
from segspeed.proof.pictures import ladder_figure, save_png
from segspeed.proof.rows import Row
from segspeed.record.figures import svg_text
from segspeed.record.report import details, document, picture
from segspeed.record.versions import environment


@dataclass(frozen=True)
class Written:
    """Paths of what was written."""

    table: Path
    picture: Path
    page: Path


def write_ladder(climb: Climb) -> Written:
    """Draw table, picture and page from the rows. Returns their paths."""
    ladder = climb.base.ladder
    paths = Written(*(climb.folder / f"ladder.{end}" for end in ("md", "png", "html")))
    paths.table.write_text(markdown(climb.rows, climb.classes, ladder) + "\n", encoding="utf-8")
    save_png(ladder_figure(climb.rows, ladder.quick), paths.picture)
    paths.page.write_text(page(climb), encoding="utf-8")
    return paths


def page(climb: Climb) -> str:
    """The page as HTML text."""
    ladder = climb.base.ladder
    title = f"{climb.folder.parent.parent.name}: the ladder"
    caption = "Training time for the same patches in per cent of the first rung"
    if not ladder.quick:
        caption += ", and mean Dice of the whole validation volumes against minutes of training"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='soft'>{escape(_subtitle(climb.rows, ladder))}</p>",
        picture("", svg_text(ladder_figure(climb.rows, ladder.quick)), caption + "."),
        _table(climb.rows, climb.classes, ladder),
        "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in notes(climb.rows, ladder)) + "</ul>",
        details("Configuration, the Plan's values set by hand", climb.base.model_dump(mode="json", by_alias=True)),
        details("Versions and hardware", environment()),
    ]
    return document(title, body)


def _subtitle(rows: Sequence[Row], ladder: LadderConfig) -> str:
    done = [r for r in rows if r.done and r.kept]
    rates = [r.median("samples_per_s") or 0.0 for r in done]
    best = max(range(len(done)), key=lambda n: rates[n])
    text = f"{done[best].name} trains {rates[best] / rates[0]:.1f} times as fast as {done[0].name}"
    against = done[best].against
    if against is not None:
        text += f"; its Dice is {against.verdict} at a margin of {ladder.margin:g}"
    return text


def _table(rows: Sequence[Row], classes: Sequence[str], ladder: LadderConfig) -> str:
    heads = headings(rows[0], classes, ladder.quick)
    lines = ["<tr><th>rung</th>" + "".join(f"<th class='n'>{escape(h)}</th>" for h in heads) + "</tr>"]
    for row in rows:
        cells = numbers(row, rows[0], classes, ladder.quick)
        inner = (
            "".join(f"<td class='n'>{escape(c)}</td>" for c in cells)
            if cells
            else f"<td colspan='{len(heads)}'>{escape(row.note)}</td>"
        )
        lines.append(f"<tr><td>{escape(row.name)}{'' if row.kept else ' (left out)'}</td>{inner}</tr>")
    return f"<h2>Rung by rung</h2><div class='wide'><table>{''.join(lines)}</table></div>"
