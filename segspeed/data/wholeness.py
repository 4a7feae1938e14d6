"""What faults do to a cache: maps longer than their files, and what killed builders leave behind.

Reading a map beyond the end of its file is no error that Python could catch: the system ends the process (SIGBUS). A look at
the length before each read costs microseconds and turns that into a text.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from segspeed.types import DataError

ABANDONED = (
    3600.0  # seconds since anything changed in a half-built entry: its builder is gone, here or on another machine
)


def shortened(entry: Any, arrays: Iterable[str] = ("image", "label")) -> str | None:
    """What is wrong with a `segspeed.data.cache.CacheEntry`: the first file that is shorter than its map, and what to do. None
    where all are whole, or where the entry lies in memory. Raises DataError where the entry cannot be opened at all."""
    path = getattr(entry, "path", None)
    if path is None:
        return None
    for name in arrays:
        array = getattr(entry, name)
        if not isinstance(array, np.memmap) or array.filename is None:
            continue
        try:
            size = os.stat(array.filename).st_size
        except OSError:  # deleted under a map that still has it
            continue
        if size < array.offset + array.nbytes:
            return (
                f"the cache entry {path.name} is damaged ({os.path.basename(array.filename)} ends after {size} of "
                f"{array.offset + array.nbytes} bytes). Delete the folder {path} and run data_prep.prepare with the same data "
                "settings: only what is missing is built again"
            )
    return None


def refuse_shortened(entries: Iterable[Any]) -> None:
    """Raises DataError with the first of ``entries`` that is `shortened`."""
    for entry in entries:
        damage = shortened(entry)
        if damage is not None:
            raise DataError(damage)


def remove_abandoned(folder: Path) -> int:
    """Take away the half-built entries of a cohort's cache that nobody has touched for an hour. Returns how many they were."""
    removed = 0
    for path in folder.glob(".building-*") if folder.is_dir() else ():
        try:
            newest = max(f.stat().st_mtime for f in (path, *path.iterdir()))
        except OSError:  # its builder has just finished it
            continue
        if time.time() - newest > ABANDONED:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed
