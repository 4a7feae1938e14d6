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
    """SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class Memo:
    """A file of JSON lines that only grows: key -> value, the last one counts. In memory lie only the keys and where their
    lines begin, however large the values are.

    Several processes may append at once: a line is written in one call. A line torn by a kill is skipped. Processes on several
    machines, where that does not hold, write a file each; ``beside`` is a glob of those in the same folder, which are read too.
    """

    def __init__(self, path: Path | None, beside: str = "") -> None:
        self.path = path
        self._beside = beside
        self._places: dict[str, tuple[Path, int]] = {}
        self._scanned: dict[Path, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what other processes have added since."""
        if self.path is None:
            return
        others = sorted(self.path.parent.glob(self._beside)) if self._beside else []
        for file in dict.fromkeys((*others, self.path)):
            try:
                size = file.stat().st_size
            except OSError:
                continue  # nothing has been written yet
            if size > self._scanned.get(file, 0):
                self._scan(file)

    def _scan(self, path: Path) -> None:
        with open(path, "rb") as file:
            start = file.seek(self._scanned.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break  # torn, or just being written: it is looked at again when there is more
                try:
                    key, _ = json.JSONDecoder().raw_decode(line.decode("utf-8", "replace"), 1)
                    if line[:1] == b"[" and line.endswith(b"]\n"):
                        self._places[str(key)] = (path, start)
                except (ValueError, RecursionError):
                    pass  # damaged: the work is simply done again
                start += len(line)
            self._scanned[path] = start

    def get(self, key: str) -> object | None:
        """The last value of a key; None where there is none, or it is damaged."""
        if key not in self._places:
            return None
        path, start = self._places[key]
        try:
            with open(path, "rb") as file:
                file.seek(start)
                found, value = json.loads(file.readline())
        except (OSError, ValueError, TypeError, RecursionError):
            return None  # damaged, or taken away since: the work is done again
        return value if found == key else None

    def put(self, key: str, value: object) -> None:
        """Append a value (whatever JSON holds); forgotten at once where there is no file."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps([key, value], allow_nan=False) + "\n").encode()
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, b"\n" + line)  # the first newline ends a torn line
            self._places[key] = (self.path, os.lseek(handle, 0, os.SEEK_CUR) - len(line))
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
