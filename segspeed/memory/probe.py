"""Memory and time of a real training step, in a process of its own: what happens to it happens to nobody else.

A server process loads what training loads, once; each probe is forked from it, so that it begins like a fresh training and
costs no imports. A probe that is killed, or finds no memory, is an answer: the setting does not fit.
"""

from __future__ import annotations

import copy
import importlib
import multiprocessing as mp
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from segspeed import build
from segspeed.memory.settings import Subject
from segspeed.speed.memory import peak_memory_bytes, reset_peak
from segspeed.speed.oom import OutOfMemory, is_out_of_memory
from segspeed.types import Plan, RunStopped

UPDATES = 2  # timed ones at least, after one that warms up
TIMED_SECONDS = 1.0  # more updates until so long
TRAINING = ("segspeed.augment.cpu_backend", "segspeed.loader.torch_loader", "segspeed.record.report")  # what it loads
ROOM = 1.5  # times the limit: a probe that wants more is stopped by the allocator, not by the machine


@dataclass(frozen=True)
class Measured:
    """One probe. ``base`` is what the process held before the network was made; ``peak`` the most it ever held, base
    included. On CPU both are resident memory that no file backs, on CUDA what torch allocated. Bytes and seconds."""

    outcome: Literal["done", "out of memory", "killed", "too slow"]
    base: int = 0
    peak: int = 0
    step_s: float = 0.0  # of an optimiser step over one micro-batch
    samples_per_s: float = 0.0


class Prober:
    """Runs probes one at a time; see `probing`."""

    def __init__(self) -> None:
        self._server: BaseProcess | None = None
        self._pipe: Connection | None = None

    def probe(self, subject: Subject, plan: Plan, *, limit: int | None = None, seconds: float = 60.0) -> Measured:
        """Train on micro-batches of ``plan.batch`` patches with ``plan.checkpointing``; at most ``seconds`` long, and with
        at most `ROOM` times ``limit`` bytes."""
        if self._server is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((subject, plan, limit, seconds))
            found = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.close()  # the machine's last defence took the server as well; the next probe gets a new one
            return Measured("killed")
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Measured)
        return found

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._server = context.Process(target=_serve, args=(theirs,), daemon=False, name="memory probes")
        self._server.start()
        theirs.close()

    def close(self) -> None:
        """End the processes that probe."""
        if self._pipe is not None:
            self._pipe.close()
        if self._server is not None:
            self._server.join(timeout=5)
            if self._server.is_alive():
                self._server.kill()
                self._server.join()
        self._server = self._pipe = None


@contextmanager
def probing() -> Iterator[Prober]:
    """A `Prober` whose processes are gone afterwards."""
    prober = Prober()
    try:
        yield prober
    finally:
        prober.close()


def _serve(pipe: Connection) -> None:
    """Answer requests until the other side closes. Everything a training loads is loaded here, and no thread is started."""
    for module in TRAINING:
        importlib.import_module(module)

    while True:
        try:
            request = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer: Any = _in_a_fork(*request)
        except KeyboardInterrupt:
            return
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return


def _in_a_fork(subject: Subject, plan: Plan, limit: int | None, seconds: float) -> Measured | Exception:
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, subject, plan, limit))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            process.kill()
            return Measured("too slow")
        found = ours.recv()
    except EOFError:
        return Measured("killed")
    finally:
        process.join()
        ours.close()
    return found


def _answer(pipe: Connection, subject: Subject, plan: Plan, limit: int | None) -> None:
    try:
        pipe.send(train_a_little(subject, plan, limit))
    except (OutOfMemory, MemoryError):
        pipe.send(Measured("out of memory"))
    except Exception as error:  # whatever it is, the process that asked must hear of it
        text = RunStopped(f"a training step with patch {list(plan.patch)} failed: {type(error).__name__}: {error}")
        # under a limit, a thread that finds no room for its stack is the limit at work
        refused = is_out_of_memory(error) or (limit is not None and "can't start new thread" in str(error))
        pipe.send(Measured("out of memory") if refused else text)


def train_a_little(subject: Subject, plan: Plan, limit: int | None = None) -> Measured:
    """A few optimiser steps in this process, beside a copy of all that learns (a run makes one at its end),
    within ``limit`` bytes."""
    if limit is not None and subject.device == "cpu" and sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(ROOM * limit) + 2**30, hard))
    device = build.device_from(subject.cfg)
    if device.type == "cuda" and limit is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM * limit / total), device)
    base = held_bytes(device)
    learner = subject.learner(plan, plan.checkpointing, device)
    stage = build.stage_from(subject.cfg, plan, subject.cohort, learner, None)
    raw = subject.raw_batch(plan)
    learner.update([stage(raw)], plan.batch)
    reset_peak(device)
    beside = copy.deepcopy(learner)
    times: list[float] = []
    while len(times) < UPDATES or sum(times) < TIMED_SECONDS:
        start = time.perf_counter()
        loss, _ = learner.update([stage(raw)], plan.batch)
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    del beside
    step = min(times)
    return Measured("done", base, peak_bytes(device), step, plan.batch / step)


def held_bytes(device: torch.device) -> int:
    """What this process holds now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    status = _status()
    return status.get("RssAnon", peak_memory_bytes(device))


def peak_bytes(device: torch.device) -> int:
    """The most this process ever held (CUDA: since the last reset); on Linux without what files and shared memory back."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = _status()
    if not status:
        return peak_memory_bytes(device)
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]


def _status() -> dict[str, int]:
    """Bytes by name from /proc/self/status; empty where there is none."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file if line.startswith(("VmHWM:", "RssAnon:", "RssFile:", "RssShmem:"))]
    except OSError:
        return {}
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in rows}
