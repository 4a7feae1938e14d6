"""The ladder as a table: on the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from segspeed.config import LadderConfig
from segspeed.proof.rows import Row


def duration(seconds: float) -> str:
    """A time of so many seconds as text."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def size(number: float) -> str:
    """A number of bytes as text, in GB."""
    return f"{number / 1e9:.2f} GB"


def share_of_first(row: Row, first: Row) -> str:
    """How long the rung takes for the same patches, in per cent of the first rung."""
    ours, theirs = row.median("samples_per_s"), first.median("samples_per_s")
    return f"{theirs / ours:.0%}" if ours and theirs else ""


def difference(row: Row) -> str:
    """Dice against the first rung with its 95 % interval."""
    if row.against is None:
        return ""
    text = f"{row.against.mean_difference:+.3f}"
    if row.against.interval is not None:
        text += " ({:+.3f} to {:+.3f})".format(*row.against.interval)
    return text


def verdict(row: Row) -> str:
    """Non-inferiority in a word, or why there is none; "" where nothing is to be said."""
    return row.against.verdict if row.against is not None else row.note.split(":")[0] if not row.done else ""


def dice(row: Row) -> str:
    """Mean Dice over seeds, with the interval over cases where there is one seed."""
    if row.mean_dice is None:
        return ""
    text = f"{row.mean_dice:.3f}"
    if len(row.done) == 1 and row.done[0].interval is not None:
        text += " ({:.3f} to {:.3f})".format(*row.done[0].interval)
    return text


def numbers(row: Row, first: Row, classes: Sequence[str], quick: bool) -> list[str]:
    """The cells of a rung after its name."""
    if not row.done:
        return []
    seconds, rate, wait = row.median("seconds"), row.median("samples_per_s"), row.median("wait_share")
    tree, gpu = row.median("tree_bytes"), row.median("gpu_percent")
    cells = [f"{rate or 0:.2f}", share_of_first(row, first), f"{wait or 0:.0%}", size(tree or 0)]
    if first.median("gpu_percent") is not None:
        cells.append(f"{gpu or 0:.0f} %")
    if quick:
        return cells
    by_class = [row.class_dice(name) for name in classes]
    return [
        duration(seconds or 0), *cells, dice(row), *("" if d is None else f"{d:.3f}" for d in by_class), difference(row),
        verdict(row),
    ]  # fmt: skip


def headings(first: Row, classes: Sequence[str], quick: bool) -> list[str]:
    """Heads of the columns after the rung's name."""
    gpu = ["GPU"] if first.median("gpu_percent") is not None else []
    cells = ["patches/s", "time, % of first", "waiting", "memory", *gpu]
    return cells if quick else ["training", *cells, "Dice", *classes, "against first", "verdict"]


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def markdown(rows: Sequence[Row], classes: Sequence[str], ladder: LadderConfig) -> str:
    """A row a rung, then what to know about it."""
    first = rows[0]
    heads = headings(first, classes, ladder.quick)
    table = []
    for row in rows:
        cells = numbers(row, first, classes, ladder.quick) or [row.note, *[""] * (len(heads) - 1)]
        table.append([f"{row.name}{'' if row.kept else ' (left out)'}", *cells])
    return "\n".join([*markdown_table(["rung", *heads], table), "", *(f"- {text}" for text in notes(rows, ladder))])


def notes(rows: Sequence[Row], ladder: LadderConfig) -> list[str]:
    """What the figures mean, and what was seen on the way."""
    seeds = len(ladder.seeds)
    found = [f"{row.name}: {row.title}" + (f"; {row.note}" if row.note else "") for row in rows]
    found += [
        f"{row.name}: seed {attempt.seed} failed ({attempt.reason}); its figures are of {len(row.done)} of {seeds} seeds"
        for row in rows
        if row.done
        for attempt in row.lost
    ]
    if ladder.quick:
        found.append(f"throughput alone, over {ladder.quick_time:g} s a rung (n = {seeds}); Dice was not measured")
        return found
    length = f"{ladder.samples} patches" if ladder.equal == "samples" else "the same training time"
    found.append(f"every rung: {length}, the same cases and seeds, n = {seeds}; times are medians over the seeds")
    widths = [
        r.against.interval[1] - r.against.interval[0] for r in rows if r.against is not None and r.against.interval
    ]
    if widths:
        found.append(
            f"non-inferior at {ladder.margin:g} Dice: the 95 % interval of the difference, paired over cases, lies above it. These "
            f"cases and seeds tell differences of about {max(widths) / 2:.3f} apart"
        )
    found.append("memory: of all processes together, shared pages once; times do not hold preparation and evaluation")
    return found


def terminal_table(rows: Sequence[Row], ladder: LadderConfig) -> Table:
    """What fits a hundred columns: classes and intervals stand in the other tables."""
    first = rows[0]
    table = Table(box=None, pad_edge=False)
    heads = ("training", "patches/s", "% of first", "waiting", "memory", "Dice", "against", "verdict")
    for head in ("rung", *(heads[1:5] if ladder.quick else heads)):
        table.add_column(head, justify="left" if head in ("rung", "verdict") else "right", no_wrap=head != "verdict")
    for row in rows:
        name = row.name if row.kept else f"({row.name})"
        table.add_row(
            name, *(_short(row, first, ladder.quick) if row.done else ["", row.note.split(":")[0]][ladder.quick :])
        )
    return table


def _short(row: Row, first: Row, quick: bool) -> list[str]:
    cells = [
        f"{row.median('samples_per_s') or 0:.2f}",
        share_of_first(row, first),
        f"{row.median('wait_share') or 0:.0%}",
        size(row.median("tree_bytes") or 0),
    ]
    if quick:
        return cells
    against = f"{row.against.mean_difference:+.3f}" if row.against is not None else ""
    dice = "" if row.mean_dice is None else f"{row.mean_dice:.3f}"
    return [duration(row.median("seconds") or 0), *cells, dice, against, verdict(row)]
