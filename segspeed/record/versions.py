"""What a run ran on: versions, processor, GPU, state of the checkout. No host or user names."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("segspeed", "torch", "monai", "numpy", "scipy", "nibabel", "hydra-core", "nvidia-dali-cuda120")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


def environment() -> dict[str, Any]:
    """Versions and hardware as plain values for the record."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "git": git_state(Path(__file__).parent),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    model, flags = platform.processor(), set()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    return {"model": model, "flags": [f for f in CPU_FLAGS if f in flags], "threads": torch.get_num_threads()}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that ``folder`` lies in and whether files differ from it; None outside one."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "changed": bool(git("status", "--porcelain", "-uno"))} if commit else None
