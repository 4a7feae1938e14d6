"""Augmentation on the CPU in compiled passes: the same function as the torch backend, several times cheaper.

torch spends a pass over memory on each arithmetic operation; on a CPU, where augmentation shares its cores with the network,
those passes are what augmentation costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segspeed.augment.draw import Params
from segspeed.augment.intensity import add_noise, blur_taps, low_resolution_tables
from segspeed.augment.spatial import centre_of_patch, is_turned, swap_table, voxel_matrices
from segspeed.types import Shape3, Triple

FAR = np.float32(3e38)
UNCHANGED = (-FAR, FAR, np.float32(0), np.float32(1))


def augment_on_cpu(
    image: Tensor,
    label: Tensor,
    params: Params,
    *,
    norm: Tensor | None,
    patch: Shape3,
    spacing: Triple,
    swap_on_flip: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """`segspeed.augment.torch_backend.augment` for tensors in RAM: ``image (B, C, D, H, W)``, ``label (B, D, H, W)``,
    ``norm (B, C, 4)``, ``spacing`` in mm. All of torch's threads work on one volume at a time."""
    batch, channels = image.shape[:2]
    out = torch.empty((batch, channels, *patch))
    placed = torch.empty((batch, *patch), dtype=label.dtype)
    constants = None if norm is None else norm.numpy()
    turned, matrices = is_turned(params), voxel_matrices(params, spacing)
    for row in range(batch):
        table = swap_table(swap_on_flip) if params.flip[row, 2] else np.zeros(0, np.int16)
        norms = [
            UNCHANGED if constants is None else tuple(c)
            for c in (constants[row] if constants is not None else image[row])
        ]
        turn = matrices[row] if turned[row] else None
        _place(
            image[row].numpy(),
            label[row].numpy(),
            norms,
            turn,
            params.flip[row],
            table,
            out[row].numpy(),
            placed[row].numpy(),
        )
        add_noise(out[row : row + 1], params.noise[row : row + 1], params.noise_seed[row : row + 1])
        for channel in range(channels):
            volume = out[row, channel].numpy()
            _blur(volume, float(params.blur[row, channel]))
            if params.brightness[row, channel] != 1:
                out[row, channel].mul_(float(np.float32(params.brightness[row, channel])))
            _contrast(volume, float(params.contrast[row, channel]))
            _low_resolution(volume, float(params.zoom[row, channel]))
            _gamma(volume, float(params.gamma[row]), bool(params.invert[row]))
    return out, placed


def _place(
    image: np.ndarray,
    label: np.ndarray,
    norms: Sequence[tuple[np.float32, ...]],
    matrix: np.ndarray | None,
    flip: np.ndarray,
    table: np.ndarray,
    out: np.ndarray,
    placed: np.ndarray,
) -> None:
    """Normalise, and turn, mirror or cut one sample ``image (C, D, H, W)`` into ``out (C, d, h, w)``."""
    from segspeed.augment.intensity_kernels import place, place_label
    from segspeed.augment.resample_kernel import fill

    size, patch = np.array(label.shape), np.array(placed.shape)
    start = tuple(int(v) for v in (size - patch) // 2)
    flips = tuple(bool(f) for f in flip)
    if matrix is None:
        for channel, norm in enumerate(norms):
            in_slabs(lambda a, b: place(image[channel], start, flips, norm, out[channel], a, b), len(placed))  # noqa: B023
        in_slabs(lambda a, b: place_label(label, start, flips, table, placed, a, b), len(placed))
        return
    source = image
    if any(norm is not UNCHANGED for norm in norms):
        source = np.empty(image.shape, np.float32)
        nothing = (False, False, False)
        for channel, norm in enumerate(norms):
            in_slabs(lambda a, b: place(image[channel], (0, 0, 0), nothing, norm, source[channel], a, b), len(label))  # noqa: B023
    shift = centre_of_patch(size, patch) - matrix @ ((patch - 1) / 2)
    in_slabs(lambda a, b: fill(source, label, matrix, shift, out, placed, a, b), len(placed))
    if len(table):
        placed[...] = table[placed]


def _blur(x: np.ndarray, sigma: float) -> None:
    if sigma == 0:
        return
    from segspeed.augment.intensity_kernels import blur_plane, blur_rows

    at, weights = zip(*(blur_taps(n, sigma) for n in x.shape), strict=True)
    between = np.empty_like(x)
    in_slabs(lambda a, b: blur_rows(x, at[0], weights[0], between, a, b), len(x))
    in_slabs(lambda a, b: blur_plane(between, at[1], at[2], weights[0], x, a, b), len(x))


def _contrast(x: np.ndarray, factor: float) -> None:
    if factor == 1:
        return
    from segspeed.augment.intensity_kernels import affine_clipped

    low, high, mean, _ = _moments(x)
    f = np.float32(factor)
    in_slabs(lambda a, b: affine_clipped(x, f, np.float32(mean * (1 - factor)), low, high, a, b), len(x))


def _low_resolution(x: np.ndarray, zoom: float) -> None:
    if zoom == 1:
        return
    from segspeed.augment.intensity_kernels import low_resolution

    (kd, bd, ad, sd), (kh, bh, ah, sh), (kw, bw, aw, sw) = (low_resolution_tables(n, zoom) for n in x.shape)
    longest = max(x.shape[:2])

    def both(one: np.ndarray, other: np.ndarray, kind: Any) -> np.ndarray:
        table = np.zeros((2, longest), kind)
        table[0, : len(one)], table[1, : len(other)] = one, other
        return table

    below, above = both(kd[bd], kh[bh], np.int64), both(kd[ad], kh[ah], np.int64)
    share, source = both(sd, sh, np.float32), x.copy()
    in_slabs(lambda a, b: low_resolution(source, below, above, share, kw, bw, aw, sw, x, a, b), len(x))


def _gamma(x: np.ndarray, exponent: float, invert: bool) -> None:
    if exponent == 1:
        return
    from segspeed.augment.intensity_kernels import affine_clipped, affine_power

    sign = -1.0 if invert else 1.0
    low, high, mean, spread = _moments(x)
    if invert:
        low, high, mean = -high, -low, -mean
    span = max(float(high) - float(low), 1e-7)
    scale, offset = np.float32(sign / span), np.float32(-float(low) / span)
    in_slabs(lambda a, b: affine_power(x, scale, offset, np.float32(exponent), a, b), len(x))
    _, _, middle, after = _moments(x)
    factor = spread / max(after, 1e-7)
    f, shift = np.float32(sign * factor), np.float32(sign * (mean - middle * factor))
    in_slabs(lambda a, b: affine_clipped(x, f, shift, -FAR, FAR, a, b), len(x))


def _moments(x: np.ndarray) -> tuple[np.float32, np.float32, float, float]:
    """Smallest and largest value, mean, and root of the sum of squared differences from it."""
    from segspeed.augment.intensity_kernels import moments

    parts = in_slabs(lambda a, b: moments(x, a, b), len(x))
    low, high = min(p[0] for p in parts), max(p[1] for p in parts)
    total, squares = sum(p[2] for p in parts), sum(p[3] for p in parts)
    mean = total / x.size
    return np.float32(low), np.float32(high), mean, max(squares - total * mean, 0.0) ** 0.5


def in_slabs(work: Callable[[int, int], Any], length: int) -> list[Any]:
    """``work(first, last)`` over ``range(length)``, cut into one slab a thread of torch's."""
    threads = max(1, min(torch.get_num_threads(), length))
    if threads == 1:
        return [work(0, length)]
    cuts = np.linspace(0, length, threads + 1).astype(int).tolist()
    return list(_pool(threads).map(work, cuts[:-1], cuts[1:]))


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="augment")
