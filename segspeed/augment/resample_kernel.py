"""The compiled loop of `segspeed.augment.resample`. Functions of a module of their own: numba keeps what it compiled on disk
only for those (closures are compiled anew by every process)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, njit, uint32

HAIR = 0.01  # voxels; more than float32 can be wrong, so that the fast loop never reads outside
FAST: dict[str, Any] = {"cache": True, "nogil": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy"}


@njit(**FAST)
def between(first, last, start, slope, low, high):  # type: ignore[no-untyped-def]
    """The part of [first, last) in which start + slope * w lies in [low, high]."""
    if high < low:
        return first, first
    if abs(slope) < 1e-9:
        return (first, last) if low <= start <= high else (first, first)
    a, b = (low - start) / slope, (high - start) / slope
    if a > b:
        a, b = b, a
    first = max(first, int(np.ceil(min(a, last))))
    last = min(last, int(np.floor(max(b, -1.0))) + 1)
    return first, max(first, last)


@njit(**FAST)
def pair(place, length):  # type: ignore[no-untyped-def]
    """The two voxels a place lies between and their weights; one that lies outside weighs nothing."""
    below = int(np.floor(place))
    share = np.float32(place - below)
    first = np.float32(1) - share if 0 <= below < length else np.float32(0)
    second = share if -1 <= below < length - 1 else np.float32(0)
    return min(max(below, 0), length - 1), min(max(below + 1, 0), length - 1), first, second


@njit(**FAST)
def border(image, label, z, y, x, out, out_label, d, h, w):  # type: ignore[no-untyped-def]
    """One voxel with neighbours that may lie outside, which count as 0."""
    channels, depth, height, width = image.shape
    k, o, wk, wo = pair(z, depth)
    j, m, wj, wm = pair(y, height)
    i, n, wi, wn = pair(x, width)
    for c in range(channels):
        v = image[c]
        front = wj * (wi * v[k, j, i] + wn * v[k, j, n]) + wm * (wi * v[k, m, i] + wn * v[k, m, n])
        back = wj * (wi * v[o, j, i] + wn * v[o, j, n]) + wm * (wi * v[o, m, i] + wn * v[o, m, n])
        out[c, d, h, w] = wk * front + wo * back
    a, b, e = int(np.rint(z)), int(np.rint(y)), int(np.rint(x))
    within = 0 <= a < depth and 0 <= b < height and 0 <= e < width
    out_label[d, h, w] = label[a, b, e] if within else 0


@njit(**FAST)
def fill(image, label, m, t, out, out_label, first, last):  # type: ignore[no-untyped-def]
    """Planes ``first`` to ``last`` of ``out (C, d, h, w)`` and ``out_label (d, h, w)`` from ``image (C, D, H, W)`` and ``label
    (D, H, W)``: an output voxel reads at ``m (3, 3)`` times its index plus ``t (3,)``, in input voxels."""
    channels, depth, height, width = image.shape
    rows, columns = out_label.shape[1], out_label.shape[2]
    flat_label = label.ravel()
    row, slab = uint32(width), uint32(width * height)
    sz, sy, sx = float32(m[0, 2]), float32(m[1, 2]), float32(m[2, 2])
    half = float32(0.5)
    for d in range(first, last):
        for h in range(rows):
            z0 = m[0, 0] * d + m[0, 1] * h + t[0]
            y0 = m[1, 0] * d + m[1, 1] * h + t[1]
            x0 = m[2, 0] * d + m[2, 1] * h + t[2]
            # zeros | border | inside | border | zeros
            touch, leave = between(0, columns, z0, m[0, 2], -1.0, depth)
            touch, leave = between(touch, leave, y0, m[1, 2], -1.0, height)
            touch, leave = between(touch, leave, x0, m[2, 2], -1.0, width)
            low, high = between(touch, leave, z0, m[0, 2], HAIR, depth - 1 - HAIR)
            low, high = between(low, high, y0, m[1, 2], HAIR, height - 1 - HAIR)
            low, high = between(low, high, x0, m[2, 2], HAIR, width - 1 - HAIR)
            for w in range(touch):
                out_label[d, h, w] = 0
                for c in range(channels):
                    out[c, d, h, w] = 0
            for w in range(leave, columns):
                out_label[d, h, w] = 0
                for c in range(channels):
                    out[c, d, h, w] = 0
            for w in range(touch, low):
                border(image, label, z0 + m[0, 2] * w, y0 + m[1, 2] * w, x0 + m[2, 2] * w, out, out_label, d, h, w)
            for w in range(high, leave):
                border(image, label, z0 + m[0, 2] * w, y0 + m[1, 2] * w, x0 + m[2, 2] * w, out, out_label, d, h, w)
            fz, fy, fx = float32(z0), float32(y0), float32(x0)
            for c in range(channels):
                v, line = image[c].ravel(), out[c, d, h]
                for w in range(low, high):
                    z, y, x = fz + sz * float32(w), fy + sy * float32(w), fx + sx * float32(w)
                    k, j, i = int32(z), int32(y), int32(x)
                    az, ay, ax = z - float32(k), y - float32(j), x - float32(i)
                    p = uint32(k) * slab + uint32(j) * row + uint32(i)
                    q = p + slab
                    one = uint32(1)
                    a = v[p] + (v[p + one] - v[p]) * ax
                    b = v[p + row] + (v[p + row + one] - v[p + row]) * ax
                    e = v[q] + (v[q + one] - v[q]) * ax
                    f = v[q + row] + (v[q + row + one] - v[q + row]) * ax
                    a, e = a + (b - a) * ay, e + (f - e) * ay
                    line[w] = a + (e - a) * az
            line = out_label[d, h]
            for w in range(low, high):
                z, y, x = fz + sz * float32(w), fy + sy * float32(w), fx + sx * float32(w)
                k, j, i = int32(z + half), int32(y + half), int32(x + half)
                line[w] = flat_label[uint32(k) * slab + uint32(j) * row + uint32(i)]
