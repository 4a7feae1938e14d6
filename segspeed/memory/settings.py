"""One way to train under a memory limit, and what it costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from segspeed import build
from segspeed.augment.torch_backend import source_shape
from segspeed.config import Config
from segspeed.engine import Learner
from segspeed.speed.cpus import loader_workers
from segspeed.speed.precision import Precision
from segspeed.types import Batch, Cohort, Plan


@dataclass(frozen=True)
class Subject:
    """What stays the same while a plan is sought: the settings, what the network must map, device and precision."""

    cfg: Config
    cohort: Cohort  # its cases are not needed, so that nothing about patients travels to a probe
    device: str
    precision: str

    @classmethod
    def of(cls, cfg: Config, cohort: Cohort, device: torch.device, precision: str) -> Subject:
        """The subject of these settings, without the cases."""
        return cls(cfg, dataclasses.replace(cohort, cases=(), splits=()), str(device), precision)

    def learner(self, plan: Plan, checkpointing: tuple[str, ...], device: torch.device) -> Learner:
        """The network and all that trains it, on ``device``, with the named blocks recomputed."""
        memory = self.cfg.memory.model_copy(update={"checkpointing": checkpointing})
        cfg = self.cfg.model_copy(update={"memory": memory})
        precision = Precision(self.precision, device)
        model = build.network_from(cfg, plan, self.cohort, precision)
        return build.learner_from(cfg, model, precision, self.cohort.table)

    def raw_batch(self, plan: Plan) -> Batch:
        """A micro-batch as a loader gives it: random intensities, classes drawn evenly."""
        shape, classes = source_shape(plan.patch, self.cfg.augment), len(self.cohort.class_names) + 1
        channels, b = len(self.cohort.channels), plan.batch
        norm = torch.tensor([-5.0, 5.0, 0.0, 1.0]).expand(b, channels, 4).contiguous()
        label = torch.randint(0, classes, (b, *shape), dtype=torch.int16)
        return Batch(torch.randn(b, channels, *shape), label, norm, torch.arange(b), ("probe",) * b)

    def in_flight_bytes(self, plan: Plan) -> int:
        """Batches that the loader's processes keep ready, and those of a step beside the one worked on."""
        d, h, w = source_shape(plan.patch, self.cfg.augment)
        one = plan.batch * d * h * w * (4 * len(self.cohort.channels) + 2)
        waiting = self.cfg.loader.prefetch * loader_workers(self.cfg.loader.workers, self.device.split(":")[0])
        return one * (waiting + plan.accumulate - 1)


def with_batch(plan: Plan, batch: int, accumulate: int) -> Plan:
    """``plan`` with another micro-batch, and as many of them a step as told."""
    return dataclasses.replace(plan, batch=batch, accumulate=accumulate)
