"""A small picture of a case: three slices through its foreground, with the classes outlined."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segspeed.types import Triple

FORMAT = 1  # raise it when pictures are drawn otherwise, so that old ones are not shown again
WIDTH, HEIGHT, GAP = 288, 104, 3  # pixels of the whole picture and between its slices
GREYS = 22  # shades: few enough for a small file, enough for the eye
SAMPLES = 64  # voxels an axis that the window and the centre are measured on
# As in segspeed.record.figures, which this room may not import.
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")


def save_thumbnail(path: Path, image: np.ndarray, label: np.ndarray | None, spacing: Triple) -> None:
    """Write a PNG of ``WIDTH x HEIGHT`` pixels: axial, coronal and sagittal slice on one scale in mm.

    ``image (D, H, W)`` raw intensities of one channel, ``label (D, H, W)`` class indices or None (a label of another
    shape is left out), ``spacing`` mm. The file appears whole or not at all. Raises OSError where it cannot be written.
    """
    from PIL import Image

    picture = draw(image, label, spacing)
    made = Image.fromarray(picture)
    made.putpalette(_palette())  # makes indices of what were shades
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        made.save(temporary, format="PNG")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def draw(image: np.ndarray, label: np.ndarray | None, spacing: Triple) -> np.ndarray:
    """Palette indices ``(HEIGHT, WIDTH)`` uint8: below GREYS a shade, from there on the colours of the classes.

    Superior or anterior is up and the patient's right is on the right, as `(D, H, W)` arrays lie. The sagittal slice
    looks to the right. ``spacing`` in mm.
    """
    assert image.ndim == 3, f"an image has three axes, not {image.shape}"
    if label is not None and label.shape != image.shape:
        label = None
    centre = slices(label) if label is not None else None
    cuts = centre or tuple(n // 2 for n in image.shape)
    low, high = window(image, label)
    canvas = np.zeros((HEIGHT, WIDTH), np.uint8)
    at = 0
    sizes = panel_sizes(image.shape, spacing)
    left = (WIDTH - sum(w for _, w in sizes) - 2 * GAP) // 2
    for axis, (cut, (height, width)) in enumerate(zip(cuts, sizes, strict=True)):
        plane = _shades(_plane(image, axis, cut), low, high, height, width)
        if label is not None:
            classes = _fit_label(_plane(label, axis, cut), height, width)
            edge = outline(classes)
            plane[edge] = GREYS + (classes[edge] - 1) % len(COLOURS)
        top = (HEIGHT - height) // 2
        canvas[top : top + height, left + at : left + at + width] = plane[::-1]  # rows of the array go upwards
        at += width + GAP
    return canvas


def panel_sizes(shape: Sequence[int], spacing: Triple) -> tuple[tuple[int, int], ...]:
    """(height, width) in pixels of the axial, coronal and sagittal slice: one scale for all, as large as fits. ``spacing``
    in mm."""
    d, h, w = (n * s for n, s in zip(shape, spacing, strict=True))
    planes = ((h, w), (d, w), (d, h))
    scale = min((WIDTH - 2 * GAP - 3) / sum(p[1] for p in planes), HEIGHT / max(p[0] for p in planes))
    return tuple((max(1, min(HEIGHT, round(a * scale))), max(1, round(b * scale))) for a, b in planes)


def slices(label: np.ndarray) -> tuple[int, int, int] | None:
    """The plane an axis of ``label (D, H, W)`` that lies nearest to the foreground's centre of mass and holds foreground;
    None without any.

    Two kidneys have their centre of mass in the spine, where no plane from front to back shows either.
    """
    steps = [max(1, n // SAMPLES) for n in label.shape]
    start = [(n - 1) % s // 2 for n, s in zip(label.shape, steps, strict=True)]
    sample = label[tuple(slice(a, None, s) for a, s in zip(start, steps, strict=True))] > 0
    if not sample.any():  # a lesion between the samples, or nothing
        planes = [n for n, plane in enumerate(label) if plane.any()]
        if not planes:
            return None
        sample, steps, start = label[planes[0] : planes[-1] + 1] > 0, [1, 1, 1], [planes[0], 0, 0]
    found = []
    for axis in range(3):
        line = sample.sum(axis=tuple(a for a in range(3) if a != axis))
        centre = (line * np.arange(len(line))).sum() / line.sum()
        filled = np.flatnonzero(line)
        nearest = filled[np.abs(filled - centre).argmin()]
        found.append(int(start[axis] + steps[axis] * nearest))
    return (found[0], found[1], found[2])


def window(image: np.ndarray, label: np.ndarray | None) -> tuple[float, float]:
    """(low, high) intensity shown as black and white.

    The percentiles 1 and 99 of the image; where there is foreground, those of the box around it and as much again to every
    side: air and bone far away would leave soft tissue one grey.
    """
    step = tuple(slice(None, None, max(1, n // SAMPLES)) for n in image.shape)
    sample = image[step]
    finite = np.isfinite(sample)
    if not finite.any():
        return 0.0, 1.0
    low, high = (float(v) for v in np.percentile(sample[finite], (1, 99)))
    if label is not None:
        where = np.argwhere(label[step] > 0)
        if len(where) >= 10:
            first, last = where.min(0), where.max(0) + 1
            room = last - first
            box = tuple(slice(max(0, a - r), b + r) for a, b, r in zip(first, last, room, strict=True))
            near = sample[box][finite[box]]
            tissue = near[near > low + 0.1 * (high - low)]  # without the air beside it
            if tissue.size >= 10:
                a, b = (float(v) for v in np.percentile(tissue, (1, 99.5)))
                margin = 0.15 * (b - a)
                narrow = max(low, a - margin), min(high, b + margin)
                if narrow[1] > narrow[0]:
                    low, high = narrow
    return (low, high) if high > low else (low - 1, low + 1)


def outline(classes: np.ndarray) -> np.ndarray:
    """True on the pixels ``(h, w)`` of a class that have a neighbour (up, down, left, right) of another, or lie on the
    picture's edge."""
    padded = np.pad(classes, 1, constant_values=0)
    middle = padded[1:-1, 1:-1]
    differs = np.zeros(middle.shape, bool)
    for near in (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]):
        differs |= near != middle
    return differs & (middle > 0)


def _plane(array: np.ndarray, axis: int, cut: int) -> np.ndarray:
    return np.moveaxis(array, axis, 0)[cut]  # a view, whatever the array's layout


def _shades(plane: np.ndarray, low: float, high: float, height: int, width: int) -> np.ndarray:
    """A slice as shades below GREYS, resized to (height, width)."""
    from PIL import Image

    thin = plane[:: max(1, plane.shape[0] // (4 * height)), :: max(1, plane.shape[1] // (4 * width))]
    scaled = np.nan_to_num((thin.astype(np.float64) - low) / (high - low), nan=0.0, posinf=1.0, neginf=0.0)
    bytes_ = Image.fromarray((scaled.clip(0, 1) * 255).astype(np.uint8))
    smaller = height < thin.shape[0] or width < thin.shape[1]
    resized = bytes_.resize((width, height), Image.Resampling.BOX if smaller else Image.Resampling.BILINEAR)
    return (np.asarray(resized).astype(np.uint16) * GREYS // 256).astype(np.uint8)


def _fit_label(plane: np.ndarray, height: int, width: int) -> np.ndarray:
    """Class indices ``(height, width)``: nearest neighbours, and every class of the slice has a pixel at least."""
    n, m = plane.shape
    rows = ((np.arange(height) + 0.5) * n / height).astype(np.intp)
    columns = ((np.arange(width) + 0.5) * m / width).astype(np.intp)
    fitted = plane[np.ix_(rows, columns)].astype(np.int64)
    for lost in np.setdiff1d(np.unique(plane), np.unique(fitted)):
        y, x = np.nonzero(plane == lost)
        fitted[y * height // n, x * width // m] = lost
    return fitted


def _palette() -> list[int]:
    greys = [round(255 * n / (GREYS - 1)) for n in range(GREYS)]
    colours = [int(c[i : i + 2], 16) for c in COLOURS for i in (1, 3, 5)]
    return [v for g in greys for v in (g, g, g)] + colours
