"""Work over cases in several processes, which ends at once when it is asked to."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from types import FrameType
from typing import Any, TypeVar

from segspeed.types import DataError

T = TypeVar("T")
AHEAD = 4  # jobs a process that are handed out before one of them is done


def run_jobs(
    function: Callable[..., T], jobs: Iterable[tuple[Any, ...]], workers: int, what: str
) -> Iterator[tuple[int, T]]:
    """(number of the job, result) as the jobs finish; in this process where ``workers`` is 1.

    Jobs are taken from ``jobs`` as there is room for them, a few a process ahead, and results are let go once they are given
    out: memory does not grow with their number. Raises DataError when a process is killed, most often for want of memory;
    ``what`` says what they do.
    """
    numbered = enumerate(jobs)
    if workers <= 1:
        for number, job in numbered:
            yield number, function(*job)
        return
    begun = next(numbered, None)
    if begun is None:
        return
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_quiet)
    try:
        todo = chain([begun], numbered)
        waiting = {pool.submit(function, *job): number for number, job in islice(todo, AHEAD * workers)}
        while waiting:
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                number = waiting.pop(done)
                waiting |= {pool.submit(function, *job): n for n, job in islice(todo, 1)}
                yield number, done.result()
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
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A parent that was killed tells nobody; its children would work on, or wait, for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one (see above) must not break the cleaning up off
    sys.exit(128 + number)
