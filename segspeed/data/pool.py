"""Work over cases in several processes, which ends at once when it is asked to."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import Any, TypeVar

from segspeed.types import DataError

T = TypeVar("T")


def run_jobs(
    function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], workers: int, what: str
) -> Iterator[tuple[int, T]]:
    """(number of the job, result) as the jobs finish; in this process where ``workers`` is 1.

    Raises DataError when a process is killed, most often for want of memory; ``what`` says what they do.
    """
    if workers <= 1:
        for number, job in enumerate(jobs):
            yield number, function(*job)
        return
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_quiet)
    try:
        waiting = {pool.submit(function, *job): number for number, job in enumerate(jobs)}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
        pool.shutdown()
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that {what} was killed, most often for want of memory; set cache.workers=1. What is done stays"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()


def _quiet() -> None:
    """In a worker: Ctrl-C is the parent's to answer; SIGTERM leaves through the finally blocks, which clean up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
