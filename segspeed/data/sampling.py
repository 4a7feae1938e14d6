"""Which patch is sample number n of a run: a pure function of (seed, n), whatever the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from segspeed.data.cache import CacheEntry, ResidentEntry
from segspeed.streams import ORDER, PATCH, stream
from segspeed.types import Shape3


@dataclass(frozen=True)
class PatchSampler:
    """Chooses case and position of each patch.

    Every case comes once an epoch, in an order drawn anew. A share ``foreground`` of the patches is centred on a
    voxel of a class drawn evenly among those the case has; the others lie anywhere. A case without foreground
    (healthy tissue) gives patches from anywhere.
    """

    entries: tuple[CacheEntry | ResidentEntry, ...]
    norms: tuple[np.ndarray, ...]  # one (C, 4) a case: low, high, mean, std
    patch: Shape3
    foreground: float
    seed: int

    def draw(self, index: int) -> tuple[int, Shape3]:
        """Case number and start (D, H, W) of the patch; the start may lie outside the volume (see `read_patch`)."""
        number = epoch_order(self.seed, len(self.entries), index // len(self.entries))[index % len(self.entries)]
        entry = self.entries[number]
        rng = stream(self.seed, index, PATCH)
        shape = entry.label.shape
        low, high = _start_range(shape, self.patch)
        start = rng.integers(low, high + 1)
        present = entry.class_indices
        if present and rng.random() < self.foreground:
            voxels = entry.foreground(present[rng.integers(len(present))])
            centre = voxels[rng.integers(len(voxels))].astype(np.int64)
            start = np.clip(centre - np.asarray(self.patch) // 2, low, high)
        d, h, w = (int(v) for v in start)
        return int(number), (d, h, w)

    def read(self, index: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Case number, ``image (C, D, H, W)`` in raw intensities and ``label (D, H, W)`` of sample ``index``."""
        image = np.empty((len(self.norms[0]), *self.patch), dtype=np.float32)
        label = np.empty(self.patch, dtype=np.int16)
        return self.read_into(index, image, label), image, label

    def read_into(self, index: int, image: np.ndarray, label: np.ndarray) -> int:
        """`read` into ``image (C, d, h, w)`` and ``label (d, h, w)``, a row of a batch for instance. Returns the case number."""
        number, start = self.draw(index)
        read_patch(self.entries[number], start, image, label, fill=self.norms[number][:, 2])
        return number


@dataclass(frozen=True)
class Turn:
    """Which samples are this process's: of each ``size`` consecutive batches of ``batch`` samples, number ``rank``."""

    batch: int
    first: int = 0
    rank: int = 0
    size: int = 1

    def numbers(self, place: int) -> range:
        """Sample numbers of this process's batch number ``place``."""
        start = self.first + (place * self.size + self.rank) * self.batch
        return range(start, start + self.batch)

    def number(self, index: int) -> int:
        """Sample number of the ``index``-th sample that this process makes."""
        return self.numbers(index // self.batch)[index % self.batch]


def _start_range(shape: Sequence[int], patch: Shape3) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest start an axis; an axis shorter than the patch is centred in it."""
    room = np.asarray(shape) - np.asarray(patch)
    low = np.where(room < 0, -((-room) // 2), 0)
    return low, np.where(room < 0, low, room)


@lru_cache(maxsize=8)
def epoch_order(seed: int, cases: int, epoch: int) -> tuple[int, ...]:
    """Case numbers of one pass over the cases, in the order they come."""
    return tuple(int(i) for i in stream(seed, epoch, ORDER).permutation(cases))


def read_patch(
    entry: CacheEntry | ResidentEntry, start: Shape3, image: np.ndarray, label: np.ndarray, fill: np.ndarray
) -> None:
    """Fill ``image (C, d, h, w)`` and ``label (d, h, w)`` with the patch at ``start``.

    What lies outside the volume is filled as at prediction: the image with ``fill (C,)``, the value that
    normalises to zero, the label with background.
    """
    source, mask = entry.image, entry.label
    where, there = overlap(start, label.shape, mask.shape)
    if any(s.stop - s.start < size for s, size in zip(where, label.shape, strict=True)):
        image[:] = fill.reshape(-1, 1, 1, 1)
        label[:] = 0
    whole = (slice(None),)
    image[whole + there] = source[whole + where]
    label[there] = mask[where]


def overlap(start: Shape3, patch: Sequence[int], shape: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a patch at ``start`` lies within a volume of ``shape``, and where that part lies within the patch."""
    inside, target = [], []
    for begin, size, length in zip(start, patch, shape, strict=True):
        first, last = max(begin, 0), min(begin + size, length)
        inside.append(slice(first, last))
        target.append(slice(first - begin, last - begin))
    return tuple(inside), tuple(target)
