"""How many bytes training may take."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

# Of what is free, where memory.limit=auto. The rest of a GPU is for the volumes that cache.resident keeps there (0.3) and for
# gaps between allocations; the rest of RAM for loader processes and the page cache of the volumes.
SHARE = {"cpu": 0.8, "cuda": 0.65}


def bytes_allowed(limit: int | str | None, device: torch.device) -> int:
    """``memory.limit`` in bytes; "auto" (or none, when a plan is asked for) is `SHARE` of what is free on ``device``."""
    if isinstance(limit, int):
        return limit
    return int(SHARE.get(device.type, SHARE["cpu"]) * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on ``device``; in a container with a limit of its own, within that."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        most, now = (group / name for name in ("memory.max", "memory.current"))
        return min(free, int(most.read_text()) - int(now.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max": the machine's own is all there is
        return free


def shown_bytes(count: float) -> str:
    """Bytes for a person: 512 MB, 8.25 GB (powers of ten)."""
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
