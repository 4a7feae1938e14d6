"""A run in a process of its own, with the memory of its whole process tree watched from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from segspeed.config import Config
from segspeed.jsonio import write_json

LOOK_SECONDS = 0.5  # between two looks at the memory
STOPPED = (130, 143)  # exit codes of a child that was told to stop, and saved
PATIENCE = 90.0  # seconds that a child has to save what it earned when we are told to stop


@dataclass(frozen=True)
class Ended:
    """How a child ended. ``tree_bytes``: the most that it and its processes held together (proportional set size where the
    system tells it, else resident size); ``error`` its last words, "" after success."""

    code: int
    seconds: float
    tree_bytes: int
    error: str


def run_child(cfg: Config, job: Path, *, quick: bool = False) -> Ended:
    """Train ``cfg`` (or measure it, ``quick``) in a process of its own; its output goes where ours goes.

    ``job`` is the JSON file that tells it what to do. Ctrl-C and SIGTERM reach the child, which saves and ends before they go on
    here.
    """
    write_json(job, {"config": cfg.model_dump(mode="json", by_alias=True), "quick": quick})
    told = job.with_suffix(".error.txt")
    told.unlink(missing_ok=True)
    begin = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "segspeed.proof.child", str(job)])
    peak = 0
    try:
        while True:
            peak = max(peak, tree_bytes(child.pid))
            try:
                child.wait(LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        _stop(child)
        raise
    error = ""
    if child.returncode:
        error = told.read_text(encoding="utf-8") if told.exists() else _died(child.returncode)
    return Ended(child.returncode, time.monotonic() - begin, peak, error)


def _stop(child: subprocess.Popen[Any]) -> None:
    """Ask the child to save and end; a second signal while it does so is for it as well."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(PATIENCE)
    except BaseException:
        child.kill()
        child.wait()
        raise


def _died(code: int) -> str:
    return (
        f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}; see its output above"
    )


def tree_bytes(pid: int) -> int:
    """Memory of a process and its descendants now, shared pages counted once; 0 when it is gone."""
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_bytes(p) for p in found)


def _bytes(process: psutil.Process) -> int:
    try:
        try:
            full = process.memory_full_info()
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
        return int(getattr(full, "pss", 0) or full.rss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0
