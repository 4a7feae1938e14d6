"""Patches from the cache into device batches through torch's DataLoader."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from segspeed.data.sampling import PatchSampler, Turn
from segspeed.data.wholeness import refuse_shortened
from segspeed.speed.descriptors import ensure_open_files, too_many_open_files
from segspeed.types import Batch, DataError, RunStopped

PARTS = 4  # tensors of a batch that travel through shared memory, a file each


class PatchDataset(Dataset[Batch]):
    """Sample numbers in, one `Batch` of raw patches on the CPU out."""

    def __init__(self, sampler: PatchSampler) -> None:
        self.sampler = sampler

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Reads a whole batch into one array, so that no second copy is made to collate it."""
        images = np.empty((len(indices), len(self.sampler.norms[0]), *self.sampler.patch), dtype=np.float32)
        labels = np.empty((len(indices), *self.sampler.patch), dtype=np.int16)
        refuse_shortened(self.sampler.entries[self.sampler.draw(index)[0]] for index in indices)
        numbers = [self.sampler.read_into(index, images[row], labels[row]) for row, index in enumerate(indices)]
        norm = np.stack([self.sampler.norms[n] for n in numbers])
        return Batch(
            torch.from_numpy(images),
            torch.from_numpy(labels),
            torch.from_numpy(norm),
            torch.tensor(list(indices)),
            tuple(self.sampler.entries[n].case_id for n in numbers),
        )


class BatchIndices(Sampler[list[int]]):
    """Sample numbers of one batch after the other, without end."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    def __iter__(self) -> Iterator[list[int]]:
        for place in count():
            yield list(self.turn.numbers(place))


def outlive_signals(worker: int) -> None:
    """In a loader process: a scheduler sends SIGTERM to every process of a job, and the main one still needs batches until its
    step is done and saved. Only the main process's own SIGTERM ends this one."""
    if not hasattr(signal, "sigwaitinfo"):  # macOS; no scheduler there
        return
    parent = os.getppid()  # which blocked the signal for us, see `held_back`

    def answer() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=answer, daemon=True, name="signals").start()


@contextmanager
def held_back() -> Iterator[None]:
    """SIGTERM waits until the block is over. Processes begun within have it blocked in all their threads from the first on, also
    in those that libraries start before `outlive_signals` has its turn."""
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_is(batch: Batch) -> Batch:
    return batch


def worker_death(error: RuntimeError) -> RunStopped | None:
    """What to tell when ``error`` is torch's notice of a dead loader process; it may come up anywhere in a step, since a
    signal brings it. None for any other error."""
    if "DataLoader worker" not in str(error):
        return None
    return RunStopped(
        f"a loader process died ({str(error).splitlines()[0]}). Often the machine ran out of memory or of /dev/shm: "
        "lower loader.workers or loader.prefetch, or give the container --shm-size=8g"
    )


class TorchLoader:
    """Endless batches from sample ``first`` on; the same batches for any number of workers. Process ``rank`` of ``ranks``
    makes every ``ranks``-th of them."""

    def __init__(
        self,
        sampler: PatchSampler,
        *,
        batch: int,
        first: int = 0,
        workers: int = 1,
        prefetch: int = 4,
        pin_memory: bool = False,
        timeout: float = 60.0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """``timeout``: seconds without a batch after which the run stops instead of hanging. Raises DataError when
        shared memory is too small for the batches that workers keep ready."""
        self.sampler, self.turn = sampler, Turn(batch, first, rank, ranks)
        self.workers, self.timeout = workers, timeout
        if workers:
            _room_in_shared_memory(sampler, batch * prefetch * workers)
            ensure_open_files(PARTS * prefetch * workers, "lower loader.workers or loader.prefetch")
        self.loader = DataLoader(
            self.dataset(),
            batch_sampler=BatchIndices(self.turn),
            num_workers=workers,
            generator=torch.Generator(),  # its own: the network's random numbers (dropout) stay those of the run
            collate_fn=_as_is,  # type: ignore[arg-type]
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=outlive_signals,
            timeout=timeout if workers else 0,
        )

    def dataset(self) -> Dataset[Batch]:
        """What the loader processes read from."""
        return PatchDataset(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        place = 0
        try:
            with held_back():
                batches = iter(self.loader)
            for made in batches:
                yield made
                place += 1
        except DataError as error:  # torch hangs the worker's whole traceback on the message
            last = str(error).strip().splitlines()[-1]
            raise type(error)(re.sub(r"^segspeed\.types\.\w+: ", "", last)) from error
        except (RuntimeError, OSError) as error:
            if too_many_open_files(error):
                raise RunStopped(
                    f"too many open files: each batch that is kept ready holds {PARTS} of them. Raise the limit "
                    "(ulimit -n 4096), or lower loader.workers or loader.prefetch"
                ) from error
            if isinstance(error, OSError):
                raise
            if "timed out" in str(error):
                raise RunStopped(
                    f"no batch within {self.timeout:g} s; a loader process hangs, reading one of the cases "
                    f"{', '.join(self._cases(self.turn.numbers(place)))}. Look at that disk, or raise loader.timeout"
                ) from error
            raise worker_death(error) or error from error

    def _cases(self, samples: Sequence[int]) -> list[str]:
        """Cases that these samples are cut from."""
        numbers = {self.sampler.draw(i)[0] for i in samples}
        return sorted(self.sampler.entries[n].case_id for n in numbers)


def _room_in_shared_memory(sampler: PatchSampler, patches: int) -> None:
    """Workers hand batches over in /dev/shm, of which a container has 64 MB by default; a bus error tells nobody that."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    channels = sampler.norms[0].shape[0]
    needed = patches * int(np.prod(sampler.patch)) * (4 * channels + 2)
    free = shutil.disk_usage(shared).free
    if needed > free:
        raise DataError(
            f"the batches kept ready need {needed / 1e6:.0f} MB of shared memory and /dev/shm has {free / 1e6:.0f} MB free: "
            "lower loader.workers or loader.prefetch, or give the container --shm-size=8g"
        )
