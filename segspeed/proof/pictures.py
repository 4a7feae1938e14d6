"""The ladder and several runs as pictures: time a rung, and Dice against the wall clock on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segspeed.proof.rows import Row
from segspeed.record.figures import INK, blank, colour, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]  # seconds of training, mean Dice


def ladder_figure(rows: Sequence[Row], quick: bool) -> Figure:
    """Bars of the time for the same patches, in per cent of the first rung, beside the curves of Dice; in quick mode the bars
    alone."""
    done = [r for r in rows if r.done]
    figure, axes = blank(10 if quick else 13, 0.5 * len(done) + 2.2 if quick else 4.6, columns=1 if quick else 2)
    _bars(axes[0], done)
    if not quick:
        curves(axes[1], {f"{r.name}, seed {a.seed}" if len(r.done) > 1 else r.name: a.curve for r in done for a in r.done},
               group=[n for n, r in enumerate(done) for _ in r.done])  # fmt: skip
    return figure


def _bars(axis: Any, rows: Sequence[Row]) -> None:
    first = rows[0].median("samples_per_s") or 1.0
    for place, row in enumerate(rows):
        percent = 100 * first / (row.median("samples_per_s") or first)
        axis.barh(place, percent, color=colour(place), alpha=1.0 if row.kept else 0.35, height=0.62)
        axis.annotate(
            f"{percent:.0f} %",
            (percent, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    axis.set_yticks(range(len(rows)), [r.name if r.kept else f"{r.name} (left out)" for r in rows])
    axis.set(xlabel="training time for the same patches, % of the first rung", ylim=(len(rows) - 0.4, -0.6))
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.15)


def curves(axis: Any, found: Mapping[str, Curve], group: Sequence[int] | None = None) -> None:
    """Mean Dice against minutes of training, a line a run; runs of one ``group`` share a colour."""
    for place, (name, curve) in enumerate(found.items()):
        tint = colour(group[place] if group is not None else place)
        axis.plot(
            [t / 60 for t, _ in curve],
            [d for _, d in curve],
            color=tint,
            linewidth=1.8,
            marker="o",
            markersize=3.5,
            label=name,
        )
    axis.set(xlabel="training time (minutes)", ylabel="mean Dice, whole volumes", ylim=(0, 1), xlim=(0, None))
    if found:
        legend(axis)


def save_png(figure: Figure, path: Path) -> None:
    """On white, for pages that do not know of dark and light."""
    figure.savefig(path, format="png", dpi=130, facecolor="white")
