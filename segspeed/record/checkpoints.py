"""Checkpoints: written whole or not at all, the previous one kept, loaded without running code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from segspeed.types import RunStopped

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"


def save_atomic(state: Any, path: Path) -> None:
    """Write to a temporary file, sync it, then rename: a kill or a full disk leaves the old file as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        raise RunStopped(
            f"{path} could not be written ({str(error).splitlines()[0][:160]}); is the disk full? What was saved before is intact"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def save_last(state: Any, folder: Path) -> Path:
    """Save ``last.pt``; the one before stays as ``previous.pt``."""
    last = folder / LAST
    if last.exists():
        previous = folder / f".{PREVIOUS}.tmp"
        previous.unlink(missing_ok=True)
        os.link(last, previous)
        os.replace(previous, folder / PREVIOUS)
    save_atomic(state, last)
    return last


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Tensors and plain values only (``weights_only``): a checkpoint never runs code."""
    state = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a segspeed checkpoint")
    return state


def load_last(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest readable checkpoint of a run (None if there is none), and what was wrong with newer ones."""
    notes: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            return load_checkpoint(path), notes
        except Exception as error:  # a damaged archive fails in many ways; each is reported, none is hidden
            notes.append(f"{name} cannot be read ({type(error).__name__}: {str(error).splitlines()[0][:120]})")
    return None, notes
