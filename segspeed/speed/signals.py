"""Ctrl-C and SIGTERM end a run after the step at hand, so that it can be saved and resumed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Handler that ends the process through its finally blocks, which take half-written files away."""
    sys.exit(128 + number)


@dataclass
class StopRequest:
    """The signal that asked for the end of the run, if one did."""

    signal: int | None = None


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Within the block the first SIGINT or SIGTERM is only noted; a second one acts as it did before.

    Handlers that were installed before (submitit's, say) are called as well and come back at the end.
    """
    request = StopRequest()
    before: dict[int, object] = {}

    def note(number: int, frame: FrameType | None) -> None:
        earlier = before[number]
        if request.signal is not None:
            signal.signal(number, earlier)  # type: ignore[arg-type]
            signal.raise_signal(number)
            return
        request.signal = number
        if callable(earlier) and earlier not in (signal.default_int_handler, leave):
            earlier(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, note)
        except ValueError:  # not in the main thread (a notebook's worker): signals go where they went
            continue
    try:
        yield request
    finally:
        for installed, handler in before.items():
            signal.signal(installed, handler)  # type: ignore[arg-type]
