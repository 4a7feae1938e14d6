"""Mixed precision: fp32, bf16, and fp16 with loss scaling (Micikevicius et al. 2018)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Precision:
    """Autocast, loss scaling and the order of an optimiser step, for one named precision on one device."""

    name: str
    device: torch.device

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.name == "fp16")
        self.skipped = 0  # updates that fp16 left out because a gradient overflowed
        self.skipped_in_a_row = 0

    def autocast(self) -> AbstractContextManager[None]:
        """Context for forward passes; weights stay in float32."""
        return torch.autocast(self.device.type, DTYPES[self.name], enabled=self.name != "fp32")

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss (scalar), scaled in fp16."""
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], clip: float | None) -> Tensor:
        """Unscale, clip, step. Returns the gradient norm before clipping (a tensor, not synchronised).

        Gradients are clipped after unscaling and once a step. fp16 skips the update when a gradient overflowed.
        """
        before = self.scaler.get_scale()
        self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip is not None else float("inf"))
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.is_enabled():
            overflowed = self.scaler.get_scale() < before
            self.skipped += overflowed
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if overflowed else 0
        return norm


def choose_precision(requested: str, device: torch.device) -> tuple[str, str]:
    """The precision to use and the reason. "auto" takes bf16 where the hardware is really faster with it."""
    if requested != "auto":
        return requested, "as asked for"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return "bf16", f"compute capability {major}.{minor} has bf16 tensor cores"
        if major >= 7:
            return "fp16", f"compute capability {major}.{minor} has fp16 but no bf16 tensor cores"
        return "fp32", f"compute capability {major}.{minor} has no tensor cores"
    if device.type == "cpu":
        ratio = bf16_speedup_cpu()
        if ratio >= 1.2:
            return "bf16", f"a convolution step is {ratio:.1f} times faster in bf16 on this CPU (measured)"
        return "fp32", f"bf16 is {ratio:.1f} times as fast as fp32 on this CPU (measured)"
    return "fp32", f"no measured advantage of less on {device.type}"


def bf16_speedup_cpu(seconds: float = 1.0) -> float:
    """Time of a small 3D convolution's forward and backward in fp32 over bf16, medians, interleaved, measured
    for so many seconds."""
    conv = nn.Conv3d(32, 32, 3, padding=1)
    x = torch.randn(1, 32, 24, 24, 24)

    def run(bf16: bool) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            conv(x).float().sum().backward()
        return time.perf_counter() - start

    for bf16 in (False, True):
        run(bf16)  # the first call of each builds its kernels
    spent: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(spent[0]) < 3:
        for i, bf16 in enumerate((False, True)):
            spent[i].append(run(bf16))
    medians = [sorted(s)[len(s) // 2] for s in spent]
    return medians[0] / medians[1]
