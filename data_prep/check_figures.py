"""Histograms of a cohort, outliers marked by name, for the page of `data_prep.check`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import numpy as np

from data_prep.check_outliers import INTENSITY, RULE, Measure
from segspeed.record import figures
from segspeed.scoring.page import _figure
from segspeed.types import CaseFacts, Cohort

LINE = "The line is the median of the cases; outliers are marked in red."
NAMES = 30  # outliers named under a figure; the problems name all
NAMED = 3  # outliers written into one histogram; the table under it names all
PLOTS = 24  # classes with a histogram of their own; a hundred would take longer than all else
MARK = "#dc2626"
WIDE = 20.0  # largest over smallest value from which an axis is logarithmic
POOLED = 200_000  # foreground intensities drawn of all cases together


def sections(cohort: Cohort, facts: Sequence[CaseFacts], found: Sequence[Measure]) -> str:
    """All figures with their headings and captions, and what an outlier is, as HTML."""
    if not facts:
        return ""

    def of(group: str) -> list[Measure]:
        return [m for m in found if m.group == group]

    place = {f"volume of {name}": n for n, name in enumerate(cohort.class_names)}
    volumes = sorted(of("volume"), key=lambda m: not m.outliers)[:PLOTS]
    most = (
        f" {PLOTS} of {len(place)} classes are drawn, those with outliers first." if len(of("volume")) > PLOTS else ""
    )
    codes = orientation_counts(facts)
    counted = ", ".join(f"{code} {n}" for code, n in codes.items())
    return "".join(
        (
            _figure(
                "Spacing",
                histograms(of("spacing")),
                _caption(
                    f"In mm an axis: D from foot to head, H from back to front, W from left to right. {LINE}",
                    of("spacing"),
                ),
            ),
            _figure("Shape", histograms(of("shape")), _caption(f"Voxels an axis. {LINE}", of("shape"))),
            _figure(
                "Orientation",
                orientation_bars(codes),
                f"How the files store their axes; all are turned the same way when they are read. Cases: {counted}.",
            ),
            _figure(
                "Volume of each class",
                histograms(volumes, lambda n: figures.colour(place[volumes[n].name])),
                _caption(f"In ml, of the cases that have the class. {LINE}{most}", of("volume")),
            ),
            _figure(
                "Intensity of the foreground",
                intensities(of("intensity"), facts, cohort.channels),
                _caption(
                    "All labelled voxels together, a plot a channel, in the files' own units; a tick under the axis is the "
                    f"median of one case. {LINE}",
                    of("intensity"),
                ),
            ),
            f"<h2>What an outlier is</h2><p class='soft'>{escape(RULE)}</p>",
        )
    )


def _caption(text: str, found: Sequence[Measure]) -> str:
    counted = Counter(case for m in found for case in m.outliers)
    names = sorted(counted)
    if not names:
        return f"{text} No outliers."
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{text} Outliers: {', '.join(names[:NAMES])}{more}."


def histograms(found: Sequence[Measure], tints: Callable[[int], str] = lambda _: figures.COLOURS[0]) -> str | None:
    """A histogram a measure, three in a row; None without any. ``tints`` gives the colour of measure number n."""
    if not found:
        return None
    with _drawing():
        figure, axes = _grid(len(found))
        for number, (axis, measure) in enumerate(zip(axes, found, strict=False)):
            values = np.array(list(measure.values.values()))
            scale = _scale(axis, values.min(), values.max())
            axis.hist(values, bins=_bins(values, scale), color=tints(number), alpha=0.75)
            axis.set_ylabel("cases", fontsize=9)
            axis.yaxis.get_major_locator().set_params(integer=True, nbins=5)
            unit = f" ({measure.unit})" if measure.unit else ""
            _finish(axis, measure, plain(measure.name[0].upper() + measure.name[1:]) + unit)
        return figures.svg_text(figure)


def intensities(found: Sequence[Measure], facts: Sequence[CaseFacts], channels: Sequence[str]) -> str | None:
    """The foreground's intensities of all cases together, a plot a channel; a tick below is the median of one case."""
    drawn = [
        (m, name, _pooled(facts, n))
        for n, name in enumerate(channels)
        for m in found
        if m.name == f"{INTENSITY}, {name}"
    ]
    if not drawn:
        return None
    with _drawing():
        figure, axes = _grid(len(drawn))
        for number, (axis, (measure, channel, values)) in enumerate(zip(axes, drawn, strict=False)):
            medians = np.array(list(measure.values.values()))
            low, high = np.percentile(values, (0.5, 99.5))
            low, high = min(low, medians.min()), max(high, medians.max())
            scale = _scale(axis, low, high)
            kept = values[(values >= low) & (values <= high)]
            axis.hist(kept, _bins(kept, scale, 60), color=figures.colour(number), alpha=0.75,
                      weights=np.full(len(kept), 100 / len(values)))  # fmt: skip
            axis.yaxis.set_major_formatter(lambda v, _: f"{v:.3g} %")
            axis.yaxis.get_major_locator().set_params(nbins=5)
            axis.plot(medians, np.full(len(medians), -0.05), "|", color=figures.INK, ms=7, alpha=0.6, clip_on=False,
                      transform=axis.get_xaxis_transform())  # fmt: skip
            axis.set_ylabel("voxels", fontsize=9)
            axis.tick_params(axis="x", pad=10)
            _finish(axis, measure, plain(channel))
        return figures.svg_text(figure)


def orientation_bars(codes: Mapping[str, int]) -> str | None:
    """A bar an orientation code with its number of cases, in the order of ``codes``."""
    if not codes:
        return None
    rows = list(codes.items())
    with _drawing():
        figure, (axis,) = figures.blank(6.5, 0.34 * len(rows) + 0.8)
        axis.barh(range(len(rows)), [n for _, n in rows], color=figures.colour(0), alpha=0.75, height=0.6)
        for place, (_, count) in enumerate(rows):
            axis.annotate(str(count), (count, place), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=9, color=figures.INK)  # fmt: skip
        axis.set_yticks(range(len(rows)), [code for code, _ in rows])
        axis.set(xlabel="cases", ylim=(len(rows) - 0.4, -0.6), xlim=(0, max(codes.values()) * 1.08))
        axis.grid(visible=False, axis="y")
        return figures.svg_text(figure)


def orientation_counts(facts: Sequence[CaseFacts]) -> dict[str, int]:
    """Cases an orientation code, most first."""
    counted = Counter(f.orientation for f in facts)
    return dict(sorted(counted.items(), key=lambda pair: (-pair[1], pair[0])))


def plain(name: str) -> str:
    """A name that matplotlib takes for no formula, short enough to stand in a picture."""
    return (name if len(name) <= 28 else f"{name[:27]}…").replace("$", r"\$")


def _finish(axis: Any, measure: Measure, title: str) -> None:
    """Title, median, and the outliers farthest out by name."""
    axis.set_title(title, fontsize=9.5)
    axis.axvline(measure.median, color=figures.INK, linewidth=1.4)
    left, right = axis.get_xlim()
    for place, case in enumerate(measure.outliers):
        value = measure.values[case]
        axis.axvline(value, ymax=0.06, color=MARK, linewidth=2.2)
        if place < NAMED:
            more = len(measure.outliers) - NAMED if place == NAMED - 1 else 0
            share = _place(axis, value, left, right)
            axis.annotate(
                plain(case) + (f" and {more} more" if more > 0 else ""), (value, 0.06), xycoords=axis.get_xaxis_transform(),
                xytext=(share, 0.94 - 0.13 * place), textcoords="axes fraction", fontsize=7.5, color=MARK,
                ha="left" if share < 0.34 else "right" if share > 0.66 else "center", va="top",
                arrowprops={"arrowstyle": "-", "color": MARK, "lw": 0.6, "alpha": 0.6},
            )  # fmt: skip


def _place(axis: Any, value: float, left: float, right: float) -> float:
    """Where a value lies on the axis, 0 to 1."""
    if axis.get_xscale() == "log":
        value, left, right = (float(np.log(max(v, 1e-300))) for v in (value, left, right))
    return float(np.clip((value - left) / (right - left), 0.02, 0.98))


def _grid(count: int) -> tuple[Any, list[Any]]:
    """Axes three in a row, in a figure of one width whatever their number, so that all text has one size on the page."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure, axes = figures.blank(9.3, 2.3 * rows, columns, rows)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes


def _scale(axis: Any, low: float, high: float) -> str:
    """Make the axis logarithmic where the values are far apart, with numbers that people write. Returns its scale."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if low <= 0 or high / low <= WIDE:
        return "linear"
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high / low < 1000 else (1,)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="x", which="minor", length=0)
    return "log"


def _bins(values: np.ndarray, scale: str, count: int | None = None) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    count = count or int(np.clip(np.sqrt(len(values)) * 2, 10, 40))
    if high - low <= 1e-6 * abs(high):
        room = abs(high) * 0.1 or 1.0
        return np.linspace(low - room, high + room, 12)
    return np.geomspace(low, high, count + 1) if scale == "log" else np.linspace(low, high, count + 1)


def _pooled(facts: Sequence[CaseFacts], channel: int) -> np.ndarray:
    parts = [np.asarray(f.foreground[channel]) for f in facts if channel < len(f.foreground) and f.foreground[channel]]
    if not parts:
        return np.array([])
    every = max(1, sum(map(len, parts)) // POOLED)
    return np.concatenate([p[::every] for p in parts])


@contextmanager
def _drawing() -> Iterator[None]:
    """Text stays text (small, found by a search) and the same data give the same bytes; letters that matplotlib's font
    lacks are the browser's to draw."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "segspeed"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
