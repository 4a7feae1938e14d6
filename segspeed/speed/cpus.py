"""How many processors this process may really use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cpus() -> int:
    """Processors of this process: its affinity mask, further limited by a cgroup v2 quota (containers, SLURM)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        return cpus  # no cgroup v2: the mask is all there is to know
    return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))


def loader_workers(requested: int | str, device_type: str) -> int:
    """Worker processes for patches. On CPU they share the cores with training, so one is enough."""
    if requested != "auto":
        return int(requested)
    cpus = available_cpus()
    return 1 if device_type == "cpu" else max(1, min(8, cpus - 1))
