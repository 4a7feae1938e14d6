"""Which pixel centres lie inside polygons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

SNAP = 4  # decimals of a pixel: a centre on the outline is inside or not by a rule, not by rounding

ALIKE = 2  # decimals of a pixel in which the corners of a polygon that was drawn twice agree


def distinct(polygons: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Polygons ``(n, 2)`` of corners without those that are the outline of an earlier one again, from any corner and in
    either direction."""
    found: dict[frozenset[tuple[frozenset[tuple[float, ...]], int]], np.ndarray] = {}
    for polygon in polygons:
        corners = [tuple(p) for p in (np.round(polygon, ALIKE) + 0.0).tolist()]
        edges = Counter(frozenset(e) for e in zip(corners, corners[1:] + corners[:1], strict=True) if e[0] != e[1])
        found.setdefault(frozenset(edges.items()), polygon)
    return list(found.values())


def beside(polygon: np.ndarray, shape: tuple[int, int]) -> bool:
    """Whether a polygon of (column, row) lies wholly beside the pixels of an image of ``shape`` (rows, columns)."""
    rows, columns = shape
    low, high = polygon.min(0), polygon.max(0)
    return bool((high < -0.5).any() or low[0] > columns - 0.5 or low[1] > rows - 0.5)


def inside(polygons: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Mask ``(rows, columns)`` of the pixel centres inside an odd number of closed polygons ``(n, 2)`` of (column, row).

    So an inner outline is a hole, and the two ways through a keyhole undo each other. Of centres on an outline, those on
    its left and upper edges are inside and those on its right and lower edges are not: neighbours that share an edge share
    no pixel.
    """
    rows, columns = shape
    toggled = np.zeros((rows, columns + 1), dtype=np.int64)
    for polygon in polygons:
        points = np.round(polygon, SNAP)
        for (x1, y1), (x2, y2) in zip(points, np.roll(points, -1, axis=0), strict=True):
            low, high = min(y1, y2), max(y1, y2)
            ys = np.arange(max(0, int(np.ceil(low))), min(rows, int(np.ceil(high))))
            if not len(ys):
                continue
            crossing = np.round(x1 + (ys - y1) * ((x2 - x1) / (y2 - y1)), SNAP)
            first = np.clip(np.ceil(crossing), 0, columns).astype(np.int64)
            toggled[ys, first] += 1  # every centre from here to the right changes sides
    return (np.cumsum(toggled[:, :columns], axis=1) & 1).astype(bool)
