"""Pictures of a run, as SVG or PNG text for a page. Drawn from the record and the overlays alone."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from segspeed.record.overlays import PLANES, Overlay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GRID = "#6b7280", "#9ca3af55"
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
Events = Sequence[Mapping[str, Any]]


def colour(index: int) -> str:
    """Colour of class number ``index`` (from 0), the same in every picture."""
    return COLOURS[index % len(COLOURS)]


def blank(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Any]]:
    """A figure (inches) that reads in light and dark, and its axes, row by row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel().tolist()
    figure.patch.set_alpha(0)
    for axis in axes:
        axis.patch.set_alpha(0)
        axis.grid(color=GRID, linewidth=0.8)
        axis.tick_params(colors=INK, labelsize=9)
        axis.xaxis.label.set_color(INK)
        axis.yaxis.label.set_color(INK)
        axis.title.set_color(INK)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GRID)
    return figure, axes


def svg_text(figure: Figure) -> str:
    """SVG text that scales to its box."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"(?s)<metadata>.*?</metadata>", "", out.getvalue())
    return text[text.index("<svg") :]


def legend(axis: Any) -> None:
    """A legend in the picture's own ink."""
    shown = axis.legend(frameon=False, fontsize=9)
    for text in shown.get_texts():
        text.set_color(INK)


def dice_against_time(events: Events) -> str | None:
    """Each class and the mean over the minutes of training; None before the first evaluation."""
    found = [e for e in events if e["kind"] == "evaluation"]
    if not found:
        return None
    figure, (axis,) = blank(8, 4)
    minutes = [e["train_s"] / 60 for e in found]
    for number, name in enumerate(found[-1]["dice"]):
        values = [np.nan if e["dice"].get(name) is None else e["dice"][name] for e in found]
        axis.plot(minutes, values, color=colour(number), linewidth=1.2, marker="o", markersize=3, label=name)
    means = [np.nan if e["mean_dice"] is None else e["mean_dice"] for e in found]
    axis.plot(minutes, means, color=INK, linewidth=2.4, marker="o", markersize=4, label="mean")
    axis.set(xlabel="training time (minutes)", ylabel="Dice, whole volumes", ylim=(0, 1), xlim=(0, None))
    legend(axis)
    return svg_text(figure)


def training_curves(events: Events) -> str | None:
    """Loss, learning rate, throughput, memory over the minutes of training."""
    steps = [e for e in events if e["kind"] == "step"]
    if len(steps) < 2:
        return None
    minutes = [e["train_s"] / 60 for e in steps]
    figure, axes = blank(8, 4.6, columns=2, rows=2)
    series = (
        ("loss", "loss", 1.0),
        ("lr", "learning rate", 1.0),
        ("samples_per_s", "patches / s", 1.0),
        ("memory_bytes", "peak memory (GB)", 1e-9),
    )
    for axis, (key, title, factor) in zip(axes, series, strict=True):
        values = np.array([np.nan if e.get(key) is None else e[key] * factor for e in steps], dtype=float)
        axis.plot(minutes, values, color=colour(0), linewidth=0.8, alpha=0.4 if len(values) > 40 else 1.0)
        if len(values) > 40:
            axis.plot(minutes, _smooth(values), color=colour(0), linewidth=1.8)
        axis.set_title(title, fontsize=10)
        if key in ("samples_per_s", "memory_bytes"):
            axis.set_ylim(0, None)
    for axis in axes[2:]:
        axis.set_xlabel("training time (minutes)")
    return svg_text(figure)


def _smooth(values: np.ndarray) -> np.ndarray:
    width = max(3, len(values) // 30)
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.full(width, 1 / width), mode="valid")


def dice_per_case(evaluation: Mapping[str, Any]) -> str | None:
    """One point a case and class, the median as a line, the lowest case of each class named."""
    names = list(evaluation["dice"])
    rows = [[(case, s[n]) for case, s in evaluation["cases"].items() if s.get(n) is not None] for n in names]
    if not any(rows):
        return None
    figure, (axis,) = blank(8, 0.7 * len(names) + 1.2)
    rng = np.random.default_rng(0)
    for number, points in enumerate(rows):
        if not points:
            continue
        values = np.array([v for _, v in points])
        axis.scatter(
            values, number + rng.uniform(-0.18, 0.18, len(values)), s=16, color=colour(number), alpha=0.65, lw=0
        )
        axis.plot([np.median(values)] * 2, [number - 0.3, number + 0.3], color=INK, linewidth=2)
        worst, low = min(points, key=lambda p: p[1])
        axis.annotate(
            worst, (low, number), xytext=(0, 12), textcoords="offset points", fontsize=8, color=INK, ha="left"
        )
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="Dice, one point a case; the bar is the median", xlim=(None, 1.0), ylim=(len(names) - 0.5, -0.6))
    return svg_text(figure)


def _thick(plane: np.ndarray) -> np.ndarray:
    """At least two voxels a side, which a contour needs."""
    return np.pad(plane, [(0, max(0, 2 - n)) for n in plane.shape])


def overlay_picture(overlay: Overlay) -> bytes:
    """A PNG file: axial, coronal and sagittal slice, reference filled, prediction outlined. Superior or anterior is up
    and the patient's right is on the right (neurological convention), which is how (D, H, W) arrays lie."""
    figure, axes = blank(9, 3.4, columns=3)
    low, high = np.percentile(np.concatenate([i.ravel() for i in overlay.image]), [1, 99])
    d, h, w = overlay.spacing
    aspect = (h / w, d / w, d / h)
    for plane, axis in enumerate(axes):
        axis.grid(visible=False)
        axis.imshow(
            overlay.image[plane],
            cmap="gray",
            vmin=low,
            vmax=max(high, low + 1e-6),
            aspect=aspect[plane],
            origin="lower",
        )
        reference, prediction = _thick(overlay.reference[plane]), _thick(overlay.prediction[plane])
        for index in np.unique(np.concatenate([reference.ravel(), prediction.ravel()])):
            if index == 0:
                continue
            tint = colour(int(index) - 1)
            if (reference == index).any():
                axis.contourf(reference == index, levels=[0.5, 1.5], colors=[tint], alpha=0.35, origin="lower")
            if (prediction == index).any():
                axis.contour(prediction == index, levels=[0.5], colors=[tint], linewidths=1.4, origin="lower")
        axis.set_title(PLANES[plane], fontsize=10)
        axis.set_axis_off()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
