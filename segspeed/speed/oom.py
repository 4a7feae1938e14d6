"""Out of memory: how it shows, and how a batch is cut so that the step fits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from segspeed.types import Batch


class OutOfMemory(Exception):
    """A forward or backward pass found no memory; no weight has changed and no gradient is left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch (CUDA, or its CPU allocator) or Python found no memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "not enough memory" in text)


def cut(batch: Batch, parts: int) -> Iterator[Batch]:
    """``batch`` in at most ``parts`` micro-batches of nearly equal size, none of them empty."""
    size = -(-len(batch.cases) // parts)
    for first in range(0, len(batch.cases), size):
        rows = slice(first, first + size)
        yield Batch(batch.image[rows], batch.label[rows], batch.norm[rows], batch.index[rows], batch.cases[rows])
