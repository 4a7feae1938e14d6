"""How many patches a second a configuration trains on, and nothing else: no evaluation, no run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from segspeed import build
from segspeed.config import Config
from segspeed.engine import Progress, Step, fit
from segspeed.preparation import prepare
from segspeed.record.live import track
from segspeed.speed.memory import peak_memory_bytes, reset_peak
from segspeed.speed.meter import gpu_utilisation
from segspeed.speed.precision import Precision, choose_precision

WARMING = 0.3  # share of the time that is not counted: kernels are chosen, workers start, caches fill
FEWEST = 3  # steps that are counted


@dataclass
class Counter:
    """Sums over the steps after the warming up."""

    seconds: float
    samples: int = 0
    spent: float = 0.0
    waited: float = 0.0
    steps: int = 0
    warm: float = 0.0
    gpu: list[float] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __call__(self, step: Step) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.warm < WARMING * self.seconds or step.number < 2:
            self.warm += step.seconds
            return
        self.samples += step.samples
        self.spent += step.seconds
        self.waited += step.waited
        self.steps += 1
        used = gpu_utilisation(self.device)
        if used is not None:
            self.gpu.append(used)


@dataclass(frozen=True)
class Horizon:
    """Until enough was counted: what compiling took, which may be longer than all the rest, is not."""

    counter: Counter

    def progress(self, step: int, elapsed: float) -> float:
        """The middle of the schedule, whatever ``elapsed`` (seconds) is: nothing is learnt here."""
        return 0.5  # any learning rate does: nothing is learnt here

    def done(self, step: int, elapsed: float) -> bool:
        """Whether enough steps were timed, by the counter's own seconds and not by ``elapsed``."""
        return self.counter.steps >= FEWEST and self.counter.spent >= (1 - WARMING) * self.counter.seconds


def throughput(cfg: Config) -> dict[str, Any]:
    """Train for ``train.budget`` seconds; what stands in a run's ``result.json`` as far as it can be known without Dice."""
    device = build.device_from(cfg)
    cohort = build.cohort_from(cfg.data)
    prepared = prepare(cfg, cohort, device.type, track)
    precision = Precision(choose_precision(cfg.precision, device)[0], device)
    model = build.network_from(cfg, prepared.plan, cohort, precision)
    learner = build.learner_from(cfg, model, precision, prepared.cohort.table, prepared.plan)
    entries = [prepared.entries[i] for i in prepared.split.train]
    norms = build.norms_of(entries, prepared.plan)
    loader = build.loader_from(cfg, prepared.plan, cohort, entries, norms, device, first=0)
    stage = build.stage_from(cfg, prepared.plan, cohort, learner, loader)
    assert cfg.train.budget is not None
    counter = Counter(cfg.train.budget, device=device)
    reset_peak(device)
    fit(
        learner, loader, stage, Horizon(counter), Progress(),
        accumulate=prepared.plan.accumulate, after_step=counter,
    )  # fmt: skip
    return {
        "samples_per_s": counter.samples / counter.spent,
        "wait_share": counter.waited / counter.spent,
        "peak_memory_bytes": peak_memory_bytes(device),
        "precision": precision.name,
        "gpu_percent": sum(counter.gpu) / len(counter.gpu) if counter.gpu else None,
        "steps": counter.steps,
    }
