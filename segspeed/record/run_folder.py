"""The folder of one run: what was asked for, what was planned, what happened, what came out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from segspeed.record.live import say
from segspeed.types import DataError

# Sections that may differ between the sessions of one run without changing what is learnt.
FREE_SECTIONS = ("run", "save", "evaluation", "resume", "threads", "bench", "ladder", "speedrun", "logger")
FREE_KEYS = (
    "loader.workers", "loader.prefetch", "loader.pin_memory", "loader.timeout",
    "memory.limit", "cache.root", "cache.workers", "cache.resident", "cache.verify", "cache.prune",
)  # fmt: skip


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[int] = set()  # descriptors of this process's locks


def _let_go() -> None:
    """In a forked loader process: the lock is the run's, and must not outlive it in a child that dies a little later."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def record(self) -> Path:
        return self.path / "run.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def outcome(self) -> dict[str, Any] | None:
        """What stands in ``result.json``; None where there is none, or half of one that a power cut left."""
        try:
            result = json.loads(self.result.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    @property
    def finished(self) -> bool:
        """Whether the run is complete: trained, and every validation case scored."""
        result = self.outcome()
        return result is not None and not result.get("failed")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, keep it to this process, and take away what a killed one left half written in it.

        Raises DataError when another process has it. The lock holds between processes of a machine, and between machines
        where the file system passes it on (NFS from version 4, Lustre mounted with flock).
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / ".lock"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        _held.add(descriptor)
        try:
            self._lock(descriptor)
            for left in self.path.glob(".*.tmp"):
                left.unlink()
            try:
                yield
            finally:
                if list(self.path.iterdir()) == [lock]:  # nothing came of it: the data or the settings were refused
                    lock.unlink()
                    self.path.rmdir()
        finally:
            _held.discard(descriptor)
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process trains in {self.path}; wait for it, or choose another run.name"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            say(f"warning: the file system of {self.path} keeps no locks; see to it that nobody else trains there")


def choose_folder(root: str | Path, cohort: str, name: str | None) -> RunFolder:
    """``<root>/<cohort>/<name>``; without a name the date and time, made unique and made."""
    parent = Path(root) / cohort
    if name is not None:
        return RunFolder(parent / name)
    parent.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in count():
        folder = RunFolder(parent / (f"{stamp}_{attempt}" if attempt else stamp))
        try:
            folder.path.mkdir()  # made at once: jobs that start in the same second get folders of their own
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that changed what a resumed run would learn, as "key: old -> new"."""
    before, after = dict(flatten(old)), dict(flatten(new))
    changed = []
    for key in sorted({*before, *after}):
        if key.split(".")[0] in FREE_SECTIONS or key in FREE_KEYS:
            continue
        if before.get(key) != after.get(key):
            changed.append(f"{key}: {before.get(key)!r} -> {after.get(key)!r}")
    return changed


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested mappings with dotted keys; lists are leaves."""
    if isinstance(value, Mapping) and value:
        return [pair for k, v in value.items() for pair in flatten(v, f"{prefix}.{k}" if prefix else str(k))]
    return [(prefix, value)]
