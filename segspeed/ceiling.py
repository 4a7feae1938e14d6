"""The rate a run would have if data cost nothing: the same step on a batch that is there already."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import torch

from segspeed.engine import Learner
from segspeed.types import Batch

SECONDS = 10.0  # at most


def ceiling_samples_per_s(
    learner: Learner, stage: Callable[[Batch], Batch], batches: Sequence[Batch], steps: int = 5
) -> float:
    """Patches per second of optimiser steps over ``batches`` (the micro-batches of one step), augmented anew each time.

    Runs on a copy of the learner, so that nothing it has learnt changes. The first step warms up and is not counted.
    """
    trial = copy.deepcopy(learner)
    samples = sum(len(b.cases) for b in batches)
    trial.update(map(stage, batches), samples)
    _synchronise(learner.precision.device)
    start = time.perf_counter()
    done = 0
    while done < steps and time.perf_counter() - start < SECONDS:
        trial.update(map(stage, batches), samples)
        done += 1
    _synchronise(learner.precision.device)
    return done * samples / (time.perf_counter() - start)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
