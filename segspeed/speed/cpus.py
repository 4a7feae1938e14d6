"""How many processors this process may really use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cpus() -> int:
    """Processors of this process: its affinity mask, further limited by a cgroup v2 quota (containers, SLURM), and divided
    among the ranks that torchrun started on this machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        cpus = cpus if quota == "max" else min(cpus, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no cgroup v2: the mask is all there is to know
    return max(1, cpus // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def loader_workers(requested: int | str, device_type: str) -> int:
    """Worker processes for patches. On CPU they share the cores with training, so one is enough."""
    if requested != "auto":
        return int(requested)
    cpus = available_cpus()
    return 1 if device_type == "cpu" else max(1, min(8, cpus - 1))
