"""Peak memory and time of a training step: recomputed blocks, precision and batch, as ratios to fp32 with none recomputed.

Each setting is predicted first (its tensors counted, plus what probes of smaller cubes showed besides), then measured in a process
of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from segspeed.config import BenchConfig, Config
from segspeed.memory.candidates import fewest
from segspeed.memory.forecast import Forecast, Unsuitable
from segspeed.memory.limit import free_bytes, shown_bytes
from segspeed.memory.probe import Measured, Prober, probing
from segspeed.memory.settings import Subject
from segspeed.speed.cpus import available_cpus
from segspeed.types import Cohort, Plan, Shape3

FEATURES = (16, 32, 64, 128, 256)
PROBED = (32, 48, 64)  # cubes that may be probed before anything is predicted: the first two that the network takes
PROBES = 2
LONGEST = 300.0  # seconds of a measurement
HALF = 0.5  # of the tensors' memory, for checkpointing=auto


@dataclass(frozen=True)
class Row:
    """One setting. ``tensors``: the most bytes of activations, gradients and batch alive at once, what is held between steps
    not counted; ``predicted`` bytes in all, as ``measured`` is."""

    side: int
    batch: int
    precision: str
    checkpointing: str
    blocks: int
    tensors: int
    predicted: int
    measured: Measured


def cube(side: int, batch: int = 1) -> Plan:
    """A Plan of five levels for a cube (voxels)."""
    shape: Shape3 = (side, side, side)
    return Plan(
        spacing=(1.0, 1.0, 1.0), patch=shape, batch=batch, accumulate=1, features=FEATURES,
        strides=((1, 1, 1), *((2, 2, 2),) * 4), kernels=((3, 3, 3),) * 5, normalisation=("zscore",), ct_norm=(None,),
    )  # fmt: skip


def subject_of(cfg: Config, precision: str, device: torch.device) -> Subject:
    """One channel, two classes, and no data."""
    plain = cfg.model_copy(
        update={
            "data": cfg.data.model_copy(update={"swap_on_flip": ()}),
            "memory": cfg.memory.model_copy(update={"checkpointing": "auto"}),
        }
    )
    return Subject.of(plain, Cohort("bench", (), {"one": (1,), "two": (2,)}, ("MR",)), device, precision)


def measure_memory(cfg: Config, b: BenchConfig, device: torch.device) -> Iterator[Row]:
    """Every setting of the benchmark that the network takes and the device has room for."""
    with probing() as prober:
        for precision in b.precisions:
            forecast = calibrated(subject_of(cfg, precision, device), prober)
            for side in b.sides:
                for batch in b.batches:
                    yield from _measure(forecast, prober, cube(side, batch), b.checkpointing, free_bytes(device))


def calibrated(subject: Subject, prober: Prober, sides: Sequence[int] = PROBED) -> Forecast:
    """A forecast that has seen small cubes through the same network."""
    forecast = Forecast(subject)
    for side in sides:
        try:
            forecast.predict(cube(side))
        except Unsuitable:
            continue
        forecast.learn(cube(side), prober.probe(subject, cube(side), seconds=LONGEST))
        if len(forecast.overheads) == PROBES:
            break
    return forecast


def _measure(forecast: Forecast, prober: Prober, plain: Plan, choices: Sequence[str], free: int) -> Iterator[Row]:
    try:
        bare = forecast.account(plain)
        names = tuple(block.name for block in forecast.blocks(plain))
    except Unsuitable:
        return
    target = bare.held + HALF * (bare.peak - bare.held)
    for choice in choices:
        plan = plain
        if choice == "all":
            plan = dataclasses.replace(plain, checkpointing=names)
        elif choice == "auto":
            plan = fewest(plain, names, lambda p: forecast.account(p).peak <= target)
        found, predicted = forecast.account(plan), forecast.predict(plan) - forecast.waiting(plan)
        measured = Measured("out of memory")
        if predicted < free:
            measured = prober.probe(forecast.subject, plan, limit=free, seconds=LONGEST)
        yield Row(
            plan.patch[0], plan.batch, forecast.subject.precision, choice, len(plan.checkpointing), found.peak - found.held,
            predicted, measured,
        )  # fmt: skip


def table(rows: Sequence[Row], model: str, device: torch.device) -> str:
    """Markdown, a row a setting; ratios to fp32 with nothing recomputed at the same cube and batch."""
    where = f"{available_cpus()} CPU cores" if device.type == "cpu" else torch.cuda.get_device_name(device)
    kind = "resident memory without files" if device.type == "cpu" else "allocated by torch"
    lines = [
        f"memory: {model}, {where}, n = 1; peak: {kind}. auto: half the memory of activations.",
        "",
        "| cube | batch | precision | recomputed | activations | step | peak | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reference = {(r.side, r.batch): r for r in rows if r.precision == "fp32" and r.checkpointing == "none"}
    for r in rows:
        first, m = reference.get((r.side, r.batch)), r.measured
        head = f"| {r.side} | {r.batch} | {r.precision} | {r.checkpointing} ({r.blocks} blocks) |"
        activations = f"{r.tensors / first.tensors:.2f}" if first else shown_bytes(r.tensors)
        if m.outcome != "done":
            lines.append(f"{head} {activations} | - | {m.outcome} | {shown_bytes(r.predicted)} | - |")
            continue
        step = f"{m.step_s / first.measured.step_s:.2f}" if first and first.measured.step_s else f"{m.step_s:.2f} s"
        if first is r:
            activations, step = f"{shown_bytes(r.tensors)} = 1", f"{m.step_s:.2f} s = 1"
        error = f"{(r.predicted - m.peak) / m.peak:+.1%}"
        lines.append(f"{head} {activations} | {step} | {shown_bytes(m.peak)} | {shown_bytes(r.predicted)} | {error} |")
    return "\n".join(lines)
