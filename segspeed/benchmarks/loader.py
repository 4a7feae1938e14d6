"""Patches per second and CPU-seconds per augmented patch, ours against the peers', interleaved, each in its own process."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from segspeed.benchmarks.contenders import CONTENDERS
from segspeed.config import AugmentConfig
from segspeed.data.cache import CacheEntry, write_entry
from segspeed.data.preprocess import PreparedArrays, foreground_voxels, zscore_constants
from segspeed.data.sampling import PatchSampler, read_patch
from segspeed.types import Geometry, Shape3


@dataclass(frozen=True)
class Round:
    """One contender's round: what it took for ``patches`` augmented patches."""

    patches: int
    wall_s: float
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Setting:
    """What a benchmark measures: volumes (D, H, W), patches, batch, workers, rounds and patches a round."""

    name: str
    volume: Shape3
    cases: int
    patch: Shape3
    batch: int
    workers: int
    rounds: int
    patches: int


def synthetic_entries(root: Path, setting: Setting) -> list[CacheEntry]:
    """Cache entries of smooth random volumes, made once."""
    entries = []
    for number in range(setting.cases):
        path = root / f"{'x'.join(map(str, setting.volume))}_{number}"
        if not path.is_dir():
            write_entry(path, f"bench_{number}", _arrays(setting.volume, number))
        entries.append(CacheEntry(path))
    return entries


def _arrays(shape: Shape3, seed: int) -> PreparedArrays:
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=[-(-n // 8) for n in shape]).astype(np.float32)
    image = coarse.repeat(8, 0).repeat(8, 1).repeat(8, 2)[tuple(slice(0, n) for n in shape)]
    image = np.ascontiguousarray(image) * 100
    image += rng.standard_normal(shape[1:], dtype=np.float32)[None] * 10
    label = (image > 120).astype(np.uint8)
    geometry = Geometry(
        affine=((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)),
        file_shape=shape[::-1],
        ornt=((0, 1), (1, 1), (2, 1)),
        shape=shape,
        crop=tuple((0, n) for n in shape),  # type: ignore[arg-type]
        spacing=(1.0, 1.0, 1.0),
        target_shape=shape,
        target_spacing=(1.0, 1.0, 1.0),
    )
    tiny = label[:1, :1, :1]  # the label on the file's grid is not read here
    return PreparedArrays(image[None], label, tiny, geometry, zscore_constants(image)[None], foreground_voxels(label))


def run_contenders(
    entries: list[CacheEntry], setting: Setting, config: AugmentConfig, names: list[str]
) -> dict[str, list[Round] | str]:
    """Rounds by contender; a text instead for one that could not run. Contenders take turns within every round."""
    context = mp.get_context("spawn")
    running: dict[str, tuple[Any, Connection]] = {}
    found: dict[str, list[Round] | str] = {name: [] for name in names}
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, name, [e.path for e in entries], setting, config))
        process.start()
        theirs.close()
        running[name] = (process, ours)
    try:
        for _ in range(setting.rounds + 1):
            for name, (_process, pipe) in list(running.items()):
                answer = _ask(pipe)
                rounds = found[name]
                if isinstance(answer, str):
                    found[name] = answer
                    running.pop(name)[1].close()
                elif isinstance(rounds, list):
                    rounds.append(answer)
    finally:
        for process, pipe in running.values():
            pipe.close()
            process.join(10)
            process.kill()
    return {name: rounds if isinstance(rounds, str) else rounds[1:] for name, rounds in found.items()}  # first: warm-up


def _ask(pipe: Connection) -> Round | str:
    with suppress(BrokenPipeError):  # it could not even start; its last word may still lie in the pipe
        pipe.send("go")
    try:
        answer = pipe.recv()
        assert isinstance(answer, (Round, str))
        return answer
    except (EOFError, OSError) as error:
        return f"its process ended ({type(error).__name__})"


def _serve(pipe: Connection, name: str, paths: list[Path], setting: Setting, config: AugmentConfig) -> None:
    """In its own process: wait for a turn, make batches, answer with what they took."""
    try:
        entries = tuple(CacheEntry(p) for p in paths)
        sampler = PatchSampler(entries, tuple(e.norm for e in entries), setting.patch, 0.5, 0)
        torch.set_num_threads(1)  # waiting threads of torch spin, which would count as work
        next_batch = CONTENDERS[name](sampler, config, setting.patch, setting.batch, setting.workers)
        next_batch()
        count = -(-setting.patches // setting.batch)
        while pipe.recv() == "go":
            cpu, start = _cpu_seconds(), time.perf_counter()
            for _ in range(count):
                next_batch()
            wall = time.perf_counter() - start
            pipe.send(Round(count * setting.batch, wall, _cpu_seconds() - cpu, _tree_bytes()))
    except (EOFError, BrokenPipeError):
        pass  # the benchmark is over
    except Exception as error:  # a peer that is not installed or refuses the settings is a row that says so
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)  # loader processes of a peer would hold the exit up


def _tree() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu_seconds() -> float:
    total = 0.0
    for process in _tree():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # ended while it was looked at
        total += times.user + times.system
    return total


def _tree_bytes() -> int:
    total = 0
    for process in _tree():
        try:
            total += process.memory_full_info().uss
        except psutil.Error:
            continue
    return total


@dataclass(frozen=True)
class Reading:
    """Seconds to copy a patch: out of the warm cache, out of an array in RAM in the same strides, and from a cold cache."""

    warm_s: list[float]
    ram_s: list[float]
    cold_s: list[float]


def measure_reading(entries: list[CacheEntry], setting: Setting, repeats: int = 40) -> Reading:
    """Interleaved: the same patch out of the memory map and out of an array, then with the file dropped from the page cache."""
    entry = entries[0]
    array, label = np.array(entry.image), np.array(entry.label)
    fill = np.zeros(len(array), np.float32)
    image, mask = np.empty((len(array), *setting.patch), np.float32), np.empty(setting.patch, np.int16)
    rng = np.random.default_rng(0)
    room = np.array(array.shape[1:]) - np.array(setting.patch)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(repeats):
        start = tuple(int(v) for v in rng.integers(0, room + 1))
        where = (slice(None), *(slice(a, a + n) for a, n in zip(start, setting.patch, strict=True)))
        read_patch(entry, start, image, mask, fill)  # type: ignore[arg-type]
        for kind in (0, 1):
            begin = time.perf_counter()
            if kind == 0:
                read_patch(entry, start, image, mask, fill)  # type: ignore[arg-type]
            else:
                image[:], mask[:] = array[where], label[where[1:]]
            times[kind].append(time.perf_counter() - begin)
    for _ in range(5):
        _drop(entry.path / "image.npy")
        start = tuple(int(v) for v in rng.integers(0, room + 1))
        begin = time.perf_counter()
        read_patch(entry, start, image, mask, fill)  # type: ignore[arg-type]
        times[2].append(time.perf_counter() - begin)
    return Reading(*times)


def _drop(path: Path) -> None:
    """Ask the kernel to forget a file's pages (Linux; elsewhere the read stays warm)."""
    if not hasattr(os, "posix_fadvise"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def table(found: dict[str, list[Round] | str], reading: Reading | None, setting: Setting) -> str:
    """Markdown: medians and ranges over the rounds, and CPU time over that of the cheapest."""
    cpu = {n: median(r.cpu_s / r.patches for r in rounds) for n, rounds in found.items() if not isinstance(rounds, str)}
    least = min(cpu.values(), default=0.0)
    lines = [
        f"{setting.name}: patches {'x'.join(map(str, setting.patch))} out of {setting.cases} volumes "
        f"{'x'.join(map(str, setting.volume))}, batch {setting.batch}, {setting.workers} worker processes, "
        f"n = {setting.rounds} rounds of {setting.patches} patches, interleaved",
        "",
        "| | CPU ms a patch | over the cheapest | patches/s | peak memory |",
        "|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        if isinstance(rounds, str):
            lines.append(f"| {name} | {rounds.splitlines()[0][:90]} | | | |")
            continue
        per_patch = sorted(r.cpu_s / r.patches * 1e3 for r in rounds)
        rates = [r.patches / r.wall_s for r in rounds]
        peak = max(r.peak_bytes for r in rounds)
        lines.append(
            f"| {name} | {median(per_patch):.1f} ({per_patch[0]:.1f} to {per_patch[-1]:.1f}) | "
            f"{cpu[name] / least:.1f} | {median(rates):.1f} | {peak / 1e9:.2f} GB |"
        )
    if reading is not None:
        lines += [
            "",
            f"Reading a patch: {median(reading.warm_s) * 1e3:.2f} ms from the warm cache, "
            f"{median(reading.ram_s) * 1e3:.2f} ms for the same strided copy from RAM (ratio of medians "
            f"{median(reading.warm_s) / median(reading.ram_s):.2f}, n = {len(reading.warm_s)}); "
            f"{median(reading.cold_s) * 1e3:.1f} ms with the file dropped from the page cache (n = {len(reading.cold_s)}).",
        ]
    return "\n".join(lines)
