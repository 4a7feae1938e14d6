"""SHA-256 of files, remembered by path, size and time of change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

BLOCK = 1 << 20  # bytes read at a time


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class Memo:
    """A file of JSON lines that only grows: key -> value, the last one counts.

    Several processes may append at once: a line is written in one call. A line torn by a kill is skipped.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, object] = {}
        if path is not None and path.exists():
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    try:
                        key, value = json.loads(line)
                        self.known[str(key)] = value
                    except (ValueError, TypeError, RecursionError):
                        continue  # torn by a kill, or damaged: the work is simply done again

    def get(self, key: str) -> object | None:
        return self.known.get(key)

    def put(self, key: str, value: object) -> None:
        self.known[key] = value
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = "\n" + json.dumps([key, value], allow_nan=False) + "\n"  # the first newline ends a torn line
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


def stamp(files: Sequence[Path]) -> str | None:
    """What identifies files without reading them (path, size, time of change); None when one is missing."""
    parts = []
    for path in files:
        try:
            info = path.stat()
        except (OSError, ValueError):  # ValueError: no file can have that name
            return None
        parts.append(f"{path.resolve()}|{info.st_size}|{info.st_mtime_ns}")
    return hash_text("\n".join(parts))
