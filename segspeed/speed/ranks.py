"""The processes of one run: one alone, or as many as torchrun started, through torch.distributed and nothing of our own.

All ranks take the same way through a run. What depends on a clock, a signal or a disk is decided by rank 0 and told to the
others (`agree`, `same`), so that none waits for a step that another does not take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from segspeed.types import RunStopped

T = TypeVar("T")
PATIENCE = timedelta(hours=6)  # a rank waits this long for another that prepares data
_control: Any = None  # group for what hosts tell each other, of gloo whatever the devices talk through


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them."""
    return dist.get_rank() if ranks() > 1 else 0


def is_main() -> bool:
    """Whether this process speaks and writes for the run."""
    return rank() == 0


def local_rank() -> int:
    """This process's number on its machine, which is its GPU's; torchrun says it before the ranks have met."""
    return int(os.environ.get("LOCAL_RANK", "0")) if _torchrun() else 0


def summed(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor (any shape) over all ranks, in place where there are several."""
    if ranks() > 1:
        dist.all_reduce(value)
    return value


def agree(*values: float) -> list[float]:
    """The values as rank 0 has them."""
    if ranks() == 1:
        return list(values)
    told = torch.tensor(values, dtype=torch.float64)
    dist.broadcast(told, 0, group=_control)
    return [float(v) for v in told]


def same(value: T) -> T:
    """An object as rank 0 has it."""
    if ranks() == 1:
        return value
    told = [value]
    dist.broadcast_object_list(told, 0, group=_control)
    return told[0]


def gather(value: T) -> list[T]:
    """Every rank's object, in the order of ranks."""
    if ranks() == 1:
        return [value]
    found: list[Any] = [None] * ranks()
    dist.all_gather_object(found, value, group=_control)
    return found


def share(items: Sequence[T]) -> Sequence[T]:
    """This rank's part of ``items``: every one is exactly one rank's, also where they do not divide."""
    return items[rank() :: ranks()]


def together(parts: Sequence[Sequence[T]]) -> list[T]:
    """The inverse of `share`: what all ranks made of their parts (`gather`), in the order of the whole."""
    whole: list[Any] = [None] * sum(map(len, parts))
    for number, part in enumerate(parts):
        whole[number :: len(parts)] = part
    return whole


def first(work: Callable[[], T]) -> T:
    """``work`` by rank 0, then by the others, who find on disk what it made. Raises RunStopped in the others when rank 0
    failed: its own error is the one to read."""
    if ranks() == 1:
        return work()
    if not is_main():
        if same(False):
            raise RunStopped(f"rank {rank()} ends, since rank 0 did; its message tells why")
        return work()
    try:
        done = work()
    except BaseException:
        same(True)
        raise
    same(False)
    return done


@contextmanager
def joined(cuda: bool) -> Iterator[None]:
    """Within the block this process is one of those that torchrun started, if it did."""
    global _control
    if not _torchrun() or ranks() > 1:
        yield
        return
    dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    _control = dist.new_group(backend="gloo", timeout=PATIENCE) if cuda else dist.group.WORLD
    try:
        yield
    finally:
        _control = None
        dist.destroy_process_group()


def _torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
