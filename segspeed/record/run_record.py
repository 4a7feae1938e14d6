"""run.jsonl: what happened in a run, one JSON line an event, only ever appended to."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class RunRecord:
    """Append events to ``path``, or nowhere without one. ``t`` is seconds since the record began, over all sessions of the
    run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        earlier = read_record(path) if path is not None else []
        offset = float(earlier[-1]["t"]) if earlier else 0.0
        self._begin = time.monotonic() - offset
        if path is not None:
            _end_torn_line(path)

    def write(self, kind: str, **fields: Any) -> None:
        """One event. Numbers that JSON lacks (NaN, infinity) are written as null."""
        if self.path is None:
            return
        line = {"t": round(time.monotonic() - self._begin, 3), "kind": kind, **_plain(fields)}
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, (json.dumps(line, allow_nan=False) + "\n").encode())
        finally:
            os.close(handle)


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
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
