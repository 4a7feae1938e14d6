"""Where the time of a step goes: waiting for data, transfer, augmentation, forward, backward, optimiser.

On CUDA the parts are timed by events that are read once the device has passed them; nothing waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

PARTS = ("waiting", "transfer", "augmentation", "forward", "backward", "optimiser")


@dataclass
class StepMeter:
    """Seconds a part since the run began (an earlier session's are loaded into ``seconds``)."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time a block; on CUDA what the block has put on the device's queue."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self.seconds[part] += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pending.append((part, begin, end))
        self._collect()

    def add(self, part: str, seconds: float) -> None:
        """Seconds of a part timed by the caller: waiting, which happens on the host."""
        self.seconds[part] += seconds

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            part, begin, end = self._pending.popleft()
            self.seconds[part] += begin.elapsed_time(end) / 1e3

    def shares(self) -> dict[str, float]:
        """Each part over the sum of all, 0 to 1; zeros before the first step."""
        self._collect()
        total = sum(self.seconds.values())
        return {part: s / total if total else 0.0 for part, s in self.seconds.items()}


def gpu_utilisation(device: torch.device) -> int | None:
    """Percent of the last moments in which the GPU was at work (NVML); None without a GPU or without NVML's bindings."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.utilization(device))
    except (ModuleNotFoundError, RuntimeError):  # the bindings are optional, and some virtual GPUs do not tell
        return None


def verdict(shares: dict[str, float], *, workers: int, device: str, precision: str, augmenting_loader: bool) -> str:
    """One sentence: what holds the run back, and which setting to change."""
    waiting, augmentation = shares["waiting"], shares["augmentation"]
    compute = shares["forward"] + shares["backward"] + shares["optimiser"]
    if waiting > 0.05:
        cure = "patches are augmented in it" if augmenting_loader else "patches are read in it"
        return (
            f"{waiting:.0%} of the step is waiting for data ({cure}): raise loader.workers from {workers}, "
            "or put cache.root on a local disk"
        )
    if augmentation > 0.25:
        return f"{augmentation:.0%} of the step is augmentation: augment=light costs less than augment=nnunet"
    if shares["transfer"] > 0.1:
        return f"{shares['transfer']:.0%} of the step is the copy to the device: check loader.pin_memory"
    hint = {
        "fp32": "precision=bf16 or fp16 if the hardware has them, else a smaller network (plan.features)",
        "bf16": "compile=true, or a smaller network (plan.features)",
        "fp16": "compile=true, or a smaller network (plan.features)",
    }[precision]
    return f"{compute:.0%} of the step is the network itself on {device}; data keeps up. Faster: {hint}"
