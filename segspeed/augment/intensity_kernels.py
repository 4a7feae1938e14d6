"""Compiled loops over single volumes ``(D, H, W)`` float32, as few passes over memory as each transform needs.

A volume is worked on in slabs ``first`` to ``last`` along D, so that several threads can share it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, njit

FAST: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "nsz", "reassoc", "nnan"},
}


TINY, ONE, HALF, LOWEST = np.float32(1.2e-38), np.float32(1), np.float32(0.5), np.float32(-126)
ROOT_HALF = np.int32(0x3F3504F3)  # the bits of sqrt(0.5)
L0, L1, L2, L3, L4 = (np.float32(2 / np.log(2) / n) for n in (1, 3, 5, 7, 9))
E1, E2, E3, E4, E5, E6 = (np.float32(v) for v in np.cumprod(np.log(2) / np.arange(1, 7)))


@njit(**FAST)
def place(x, start, flip, norm, out, first, last):  # type: ignore[no-untyped-def]
    """``out (d, h, w)`` from ``x`` at ``start``, mirrored along ``flip``: clipped, minus mean, over std (``norm``)."""
    depth, rows, columns = out.shape
    low, high, mean, std = norm
    for d in range(first, last):
        z = start[0] + (depth - 1 - d if flip[0] else d)
        for h in range(rows):
            source = x[z, start[1] + (rows - 1 - h if flip[1] else h), start[2] : start[2] + columns]
            line = out[d, h]
            if flip[2]:
                for w in range(columns):
                    line[w] = (min(max(source[columns - 1 - w], low), high) - mean) / std
            else:
                for w in range(columns):
                    line[w] = (min(max(source[w], low), high) - mean) / std


@njit(**FAST)
def place_label(x, start, flip, table, out, first, last):  # type: ignore[no-untyped-def]
    """The same for a label, its classes renamed by ``table``."""
    depth, rows, columns = out.shape
    rename = len(table) > 0
    for d in range(first, last):
        z = start[0] + (depth - 1 - d if flip[0] else d)
        for h in range(rows):
            source = x[z, start[1] + (rows - 1 - h if flip[1] else h), start[2] : start[2] + columns]
            line = out[d, h]
            for w in range(columns):
                line[w] = source[columns - 1 - w if flip[2] else w]
            if rename:
                for w in range(columns):
                    line[w] = table[line[w]]


@njit(**FAST)
def moments(x, first, last):  # type: ignore[no-untyped-def]
    """Smallest and largest value, sum, and sum of squares; rows are added up in single, their sums in double precision."""
    low, high = x[first, 0, 0], x[first, 0, 0]
    total, squares = float64(0), float64(0)
    for d in range(first, last):
        for h in range(x.shape[1]):
            line = x[d, h]
            a, b, s, q = line[0], line[0], float32(0), float32(0)
            for w in range(len(line)):
                v = line[w]
                a, b = min(a, v), max(b, v)
                s += v
                q += v * v
            low, high = min(low, a), max(high, b)
            total += s
            squares += q
    return low, high, total, squares


@njit(**FAST)
def affine_clipped(x, factor, offset, low, high, first, last):  # type: ignore[no-untyped-def]
    """x * factor + offset, clipped to [low, high], in place."""
    for d in range(first, last):
        for h in range(x.shape[1]):
            line = x[d, h]
            for w in range(len(line)):
                line[w] = min(max(line[w] * factor + offset, low), high)


@njit(**FAST)
def affine_power(x, factor, offset, exponent, first, last):  # type: ignore[no-untyped-def]
    """(x * factor + offset) to the power ``exponent``, in place, for arguments in [0, 1]; 2e-7 of the value at most off.

    Logarithm and exponential are polynomials, so that the loop uses vector units: log2 of the mantissa by the series of
    atanh, 2**fraction by its Taylor series; both are cut where single precision ends.
    """
    columns = x.shape[2]
    # Loops of their own, each from some rows to others: where a loop reads what it writes under another type it stays scalar.
    # int32 at every step, too: numba widens to 64 bits, for which most CPUs lack vector instructions.
    reals, whole = np.empty((3, columns), np.float32), np.empty((3, columns), np.int32)
    value, exponents, powers = reals[0], reals[1], reals[2]
    mantissas, shifts, results = whole[0], whole[1], whole[2]
    bits, mantissa = value.view(np.int32), mantissas.view(np.float32)
    power_bits, result = powers.view(np.int32), results.view(np.float32)
    for d in range(first, last):
        for h in range(x.shape[1]):
            line = x[d, h]
            for w in range(columns):
                value[w] = max(line[w] * factor + offset, TINY)
            for w in range(columns):
                e = int32(int32(bits[w] - ROOT_HALF) >> 23)
                mantissas[w] = int32(bits[w] - int32(e << 23))
                exponents[w] = float32(e)
            for w in range(columns):
                t = (mantissa[w] - ONE) / (mantissa[w] + ONE)
                u = t * t
                series = L0 + u * (L1 + u * (L2 + u * (L3 + u * L4)))
                y = max(exponent * (exponents[w] + t * series), LOWEST)
                n = np.floor(y + HALF)
                f = y - n
                powers[w] = ONE + f * (E1 + f * (E2 + f * (E3 + f * (E4 + f * (E5 + f * E6)))))
                shifts[w] = int32(int32(n) << 23)
            for w in range(columns):
                results[w] = int32(power_bits[w] + shifts[w])
            for w in range(columns):
                line[w] = result[w] if value[w] > TINY else float32(0)


@njit(**FAST)
def blur_rows(x, at, weights, out, first, last):  # type: ignore[no-untyped-def]
    """Along D and H: ``out[d, h] = sum over taps``; ``at (2, taps, length)`` says which row a tap reads."""
    taps = len(weights)
    columns = x.shape[2]
    line = np.empty(columns, np.float32)
    for d in range(first, last):
        for h in range(x.shape[1]):
            for w in range(columns):
                line[w] = 0
            for t in range(taps):
                source, weight = x[at[t, d], h], weights[t]
                for w in range(columns):
                    line[w] += weight * source[w]
            out[d, h] = line


@njit(**FAST)
def blur_plane(x, at_rows, at_columns, weights, out, first, last):  # type: ignore[no-untyped-def]
    """Along H, then W, of each plane."""
    taps, (rows, columns) = len(weights), x.shape[1:]
    reach = taps // 2
    padded = np.empty(columns + 2 * reach, np.float32)
    line = np.empty(columns, np.float32)
    for d in range(first, last):
        for h in range(rows):
            for w in range(columns):
                line[w] = 0
            for t in range(taps):
                source, weight = x[d, at_rows[t, h]], weights[t]
                for w in range(columns):
                    line[w] += weight * source[w]
            for w in range(columns):
                padded[reach + w] = line[w]
            for t in range(reach):
                padded[t] = line[at_columns[t, 0]]
                padded[reach + columns + t] = line[at_columns[reach + 1 + t, columns - 1]]
            target = out[d, h]
            for w in range(columns):
                target[w] = 0
            for t in range(taps):
                weight, source = weights[t], padded[t : t + columns]
                for w in range(columns):
                    target[w] += weight * source[w]


@njit(**FAST)
def low_resolution(x, below, above, share, kept_w, below_w, above_w, share_w, out, first, last):  # type: ignore[no-untyped-def]
    """Linear enlargement of the voxels kept; ``below``, ``above (2, n)`` give rows of ``x`` along D and H, ``kept_w`` the
    columns kept, and the tables ending in _w which of those each column lies between."""
    few = len(kept_w)
    small = np.empty(few, np.float32)
    for d in range(first, last):
        a0, a1, sd = below[0, d], above[0, d], share[0, d]
        for h in range(x.shape[1]):
            b0, b1, sh = below[1, h], above[1, h], share[1, h]
            p, q, r, s = x[a0, b0], x[a0, b1], x[a1, b0], x[a1, b1]
            for j in range(few):
                k = kept_w[j]
                front = p[k] + (q[k] - p[k]) * sh
                back = r[k] + (s[k] - r[k]) * sh
                small[j] = front + (back - front) * sd
            line = out[d, h]
            for w in range(x.shape[2]):
                v = small[below_w[w]]
                line[w] = v + (small[above_w[w]] - v) * share_w[w]
