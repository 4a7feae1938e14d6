"""What an augmented patch must cost on this machine: counted work times measured rates.

Counted for each transform, from its probability: voxels read and written, voxels gathered at computed places, multiplications
with additions, normal random numbers. Measured in one thread, on arrays of the patch's size: how long one of each takes when
nothing else is done. What a loop needs besides (addresses, conversions, calls) is not counted, so that no implementation
reaches the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numba import njit

from segspeed.augment.intensity import blur_radius
from segspeed.augment.spatial import rotation_matrix
from segspeed.config import AugmentConfig
from segspeed.types import Shape3

REPEATS = 15


@dataclass(frozen=True)
class Rates:
    """Seconds a voxel (or operation): float32 and int16 copied, one value gathered, one normal number, one multiply-add."""

    copy: float
    copy_label: float
    gather: float
    normal: float
    multiply_add: float


@dataclass(frozen=True)
class Work:
    """Counts a voxel of a patch, each weighted by its probability."""

    copies: float
    label_copies: float
    gathers: float
    normals: float
    multiply_adds: float

    def seconds(self, rates: Rates, voxels: int) -> float:
        """Seconds that a patch of so many voxels takes at these rates."""
        return voxels * (
            self.copies * rates.copy
            + self.label_copies * rates.copy_label
            + self.gathers * rates.gather
            + self.normals * rates.normal
            + self.multiply_adds * rates.multiply_add
        )


def counted_work(config: AugmentConfig) -> Work:
    """The least that the transforms of ``config`` do to a voxel after it was read: a copy is one read and one write, and a
    pass that only reads counts half."""
    c = config
    turned = 1 - (1 - c.rotation.probability) * (1 - c.scale.probability)
    blur = c.blur.probability * c.blur.channel_probability
    coarse = c.low_resolution.probability * c.low_resolution.channel_probability
    taps = np.mean([2 * blur_radius(s) + 1 for s in np.linspace(*c.blur.sigma, 50)])
    copies = 1 + turned  # normalise into place; a turned patch is normalised, then resampled
    copies += c.noise.probability + c.brightness.probability
    copies += 2 * blur + 2 * coarse  # along D; along H and W in the cache | a copy, the enlargement
    copies += 1.5 * c.contrast.probability  # mean and range; the map
    copies += 3 * c.gamma.probability  # range and mean; the power; mean and spread; the map
    return Work(
        copies=copies,
        label_copies=1.0,
        gathers=9 * turned,  # eight neighbours, one label
        normals=c.noise.probability,
        multiply_adds=7 * turned + 3 * taps * blur + 7 * coarse + 20 * c.gamma.probability,
    )


def measure_rates(patch: Shape3) -> Rates:
    """In one thread, medians of several turns."""
    voxels = int(np.prod(patch))
    image, out = np.random.default_rng(0).random(patch, np.float32), np.empty(patch, np.float32)
    label, label_out = np.zeros(patch, np.int16), np.empty(patch, np.int16)
    places = _turned_places(patch)
    side = 256
    a, b, product = torch.rand(side, side), torch.rand(side, side), torch.empty(side, side)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Rates(
            copy=_seconds(lambda: np.copyto(out, image)) / voxels,
            copy_label=_seconds(lambda: np.copyto(label_out, label)) / voxels,
            gather=_seconds(lambda: _gather(image.ravel(), places)) / voxels,
            normal=_seconds(lambda: torch.randn(patch)) / voxels,
            multiply_add=_seconds(lambda: torch.mm(a, b, out=product)) / side**3,
        )
    finally:
        torch.set_num_threads(threads)


def floor_text(config: AugmentConfig, patch: Shape3, read_s: float, ours_s: float | None) -> str:
    """The floor a patch in one sentence; ``read_s`` is what copying it out of a volume in RAM takes, ``ours_s`` the CPU
    time of our torch backend, None if it did not take part."""
    rates, work, voxels = measure_rates(patch), counted_work(config), int(np.prod(patch))
    floor = read_s + work.seconds(rates, voxels)
    share = "" if ours_s is None else f"; segspeed torch reaches {floor / ours_s:.0%} of it"
    return (
        f"Counted floor: {floor * 1e3:.1f} ms a patch{share}. Reading {read_s * 1e3:.2f} ms; a voxel then takes "
        f"{work.gathers:.1f} values gathered at {rates.gather * 1e9:.2f} ns, {work.copies:.1f} copies at "
        f"{rates.copy * 1e9:.2f} ns, {work.normals:.2f} normal numbers at {rates.normal * 1e9:.1f} ns, "
        f"{work.multiply_adds:.0f} multiply-adds at "
        f"{rates.multiply_add * 1e9:.3f} ns, one label copied at {rates.copy_label * 1e9:.2f} ns."
    )


def _turned_places(patch: Shape3) -> np.ndarray:
    """Flat indices (int32) of the voxels that a rotation by 15 degrees about each axis reads."""
    matrix = rotation_matrix(np.radians([15.0, 15.0, 15.0]))
    centre = (np.array(patch) - 1) / 2
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in patch), indexing="ij"), -1).reshape(-1, 3) - centre
    at = np.clip(np.rint(grid @ matrix.T + centre), 0, np.array(patch) - 1).astype(np.int64)
    return np.ravel_multi_index(tuple(at.T), patch).astype(np.int32)


@njit(cache=True, fastmath=True)
def _gather(values, places):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for n in range(len(places)):
        total += values[places[n]]
    return total


def _seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)
