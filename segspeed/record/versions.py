"""What a run ran on: versions, processor, GPU, state of the checkout. No host or user names."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("segspeed", "torch", "monai", "numpy", "scipy", "nibabel", "hydra-core", "nvidia-dali-cuda120")
MOST_CHANGES = 1_000_000  # bytes of a diff that are kept
CODE = (":/*.py", ":/*.yaml", ":/*.toml")
_QUIET: dict[str, Any] = {"capture_output": True, "timeout": 10}
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


def machine(versions: Mapping[str, Any]) -> str:
    """The GPU, or else the processor, that `environment` found."""
    return str(versions.get("gpu") or (versions.get("cpu") or {}).get("model"))


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
    """Commit of the checkout that ``folder`` lies in, whether tracked files differ from it, and the SHA-256 of how
    (`git_changes`); None outside a checkout of ours."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = git_changes(folder)
    return {
        "commit": commit.decode().strip(),
        "changed": bool(_git(folder, "status", "--porcelain", "-uno")),
        "changes_sha256": hashlib.sha256(changes).hexdigest() if changes else None,
    }


def git_changes(folder: Path) -> bytes:
    """How the tracked code and settings (`CODE`; no tables, which may hold people) of the checkout that ``folder`` lies in differ
    from its commit, as ``git diff`` tells it; empty where they do not, or outside a checkout. Cut off, with a line that says so,
    after `MOST_CHANGES` bytes."""
    changes = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--", *CODE) or b""
    if len(changes) <= MOST_CHANGES:
        return changes
    return changes[:MOST_CHANGES] + f"\n[cut off: {len(changes)} bytes in all]\n".encode()


def _git(folder: Path, *words: str) -> bytes | None:
    """What a git command prints; None where it fails, or where ``folder`` lies in no checkout of this package."""
    try:
        top = subprocess.run(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"], **_QUIET)
        done = subprocess.run(["git", "-C", str(folder), *words], **_QUIET) if top.returncode == 0 else top
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
