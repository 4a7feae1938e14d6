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
        number = _epoch_order(self.seed, len(self.entries), index // len(self.entries))[index % len(self.entries)]
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
        number, start = self.draw(index)
        image, label = read_patch(self.entries[number], start, self.patch, fill=self.norms[number][:, 2])
        return number, image, label


def _start_range(shape: Sequence[int], patch: Shape3) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest start an axis; an axis shorter than the patch is centred in it."""
    room = np.asarray(shape) - np.asarray(patch)
    low = np.where(room < 0, -((-room) // 2), 0)
    return low, np.where(room < 0, low, room)


@lru_cache(maxsize=8)
def _epoch_order(seed: int, cases: int, epoch: int) -> tuple[int, ...]:
    return tuple(int(i) for i in stream(seed, epoch, ORDER).permutation(cases))


def read_patch(
    entry: CacheEntry | ResidentEntry, start: Shape3, patch: Shape3, fill: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``image (C, *patch)`` float32 and ``label (*patch)`` at ``start``.

    What lies outside the volume is filled as at prediction: the image with ``fill (C,)``, the value that
    normalises to zero, the label with background.
    """
    source, label = entry.image, entry.label
    where, there = overlap(start, patch, label.shape)
    if all(s.stop - s.start == size for s, size in zip(where, patch, strict=True)):
        return np.array(source[(slice(None),) + where], dtype=np.float32), np.array(label[where])
    image = np.empty((source.shape[0], *patch), dtype=np.float32)
    image[:] = fill.reshape(-1, 1, 1, 1)
    out = np.zeros(patch, dtype=label.dtype)
    image[(slice(None),) + there] = source[(slice(None),) + where]
    out[there] = label[where]
    return image, out


def overlap(start: Shape3, patch: Sequence[int], shape: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a patch at ``start`` lies within a volume of ``shape``, and where that part lies within the patch."""
    inside, target = [], []
    for begin, size, length in zip(start, patch, shape, strict=True):
        first, last = max(begin, 0), min(begin + size, length)
        inside.append(slice(first, last))
        target.append(slice(first - begin, last - begin))
    return tuple(inside), tuple(target)
