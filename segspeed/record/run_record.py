"""run.jsonl: what happened in a run, one JSON line an event, only ever appended to."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from segspeed.types import RunStopped


class RunRecord:
    """Append events to ``path``, or nowhere without one. ``t`` is seconds since the record began, over all sessions of the
    run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # each hears every event once it is written
        earlier = read_record(path) if path is not None else []
        offset = float(earlier[-1]["t"]) if earlier else 0.0
        self._begin = time.monotonic() - offset
        if path is not None:
            _end_torn_line(path)

    def write(self, kind: str, **fields: Any) -> None:
        """One event. Numbers that JSON lacks (NaN, infinity) are written as null.

        Raises RunStopped when the disk does not take it; a part of a line that it did take is cut off by the next session.
        """
        if self.path is None:
            return
        line = {"t": round(time.monotonic() - self._begin, 3), "kind": kind, **_plain(fields)}
        left = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                while left:  # a disk that fills up takes a part first, and says no to the rest
                    left = left[os.write(handle, left) :]
            finally:
                os.close(handle)
        except OSError as error:
            raise RunStopped(
                f"{self.path} could not be written ({error.strerror}); is the disk full? What was saved before is intact"
            ) from error
        for listener in list(self.listeners):
            listener(line)


def read_record(path: Path) -> list[dict[str, Any]]:
    """All events of a record; a line torn by a kill is skipped."""
    if not path.exists():
        return []
    events = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # written halfway when the process was killed
            if isinstance(event, dict) and "kind" in event and "t" in event:
                events.append(event)
    return events


def _end_torn_line(path: Path) -> None:
    """Take away what a kill or a full disk left of a last line, so that every line is an event; one that lacks its end alone
    gets it."""
    if not path.exists():
        return
    whole = path.read_bytes()
    last = whole[whole.rfind(b"\n") + 1 :]
    if not last:
        return
    try:
        torn = not isinstance(json.loads(last), dict)
    except ValueError:
        torn = True
    with open(path, "rb+") as file:
        if torn:
            file.truncate(len(whole) - len(last))
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
