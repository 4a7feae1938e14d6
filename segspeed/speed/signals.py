"""Ctrl-C and SIGTERM end a run after the step at hand, so that it can be saved and resumed."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

ECHO_SECONDS = (
    2.0  # a second signal within them repeats the first: srun and torchrun pass on what every process got already
)


def leave(number: int, frame: FrameType | None) -> None:
    """Handler that ends the process through its finally blocks, which take half-written files away."""
    sys.exit(128 + number)


class Interrupted(Exception):
    """Work that changes nothing was broken off, since the end of the run is asked for by the signal in ``args``."""


@dataclass
class StopRequest:
    """The signal that asked for the end of the run, if one did, and when (`time.monotonic`)."""

    signal: int | None = None
    since: float = 0.0

    def check(self) -> None:
        """Raises Interrupted once the end is asked for: long work that may be broken off calls this between its parts."""
        if self.signal is not None:
            raise Interrupted(self.signal)


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Within the block the first SIGINT or SIGTERM is only noted; one more than two seconds later acts as it did before.

    Handlers that were installed before are called as well and come back at the end. A handler of SIGUSR2 (submitit's, which puts
    a job of SLURM back into the queue and ends it) is called when the block is over, and all is saved.
    """
    request = StopRequest()
    before: dict[int, object] = {}

    def note(number: int, frame: FrameType | None) -> None:
        earlier = before[number]
        if request.signal is not None:
            if time.monotonic() - request.since < ECHO_SECONDS:
                return
            signal.signal(number, earlier)  # type: ignore[arg-type]
            signal.raise_signal(number)
            return
        request.signal, request.since = number, time.monotonic()
        if callable(earlier) and earlier not in (signal.default_int_handler, leave) and number != signal.SIGUSR2:
            earlier(number, frame)

    requeues = callable(signal.getsignal(signal.SIGUSR2))
    for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR2] if requeues else [])):
        try:
            before[number] = signal.signal(number, note)
        except ValueError:  # not in the main thread (a notebook's worker): signals go where they went
            continue
    try:
        yield request
    finally:
        for installed, handler in before.items():
            signal.signal(installed, handler)  # type: ignore[arg-type]
        if request.signal == signal.SIGUSR2:
            signal.raise_signal(signal.SIGUSR2)
