"""Checkpoints: written whole or not at all, the previous one kept, loaded without running code."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from segspeed.types import RunStopped, first_line

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"


def save_atomic(state: Any, path: Path, *, keep: Path | None = None) -> None:
    """Write to a temporary file, sync it, then rename: a kill or a full disk leaves the old file as it was.

    ``keep`` is where the old file goes, unless it is damaged. Raises RunStopped when the disk does not take it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists() and _readable(path):
            os.replace(path, keep)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        raise RunStopped(
            f"{path} could not be written ({first_line(error)}); is the disk full? What was saved before is intact"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename outlives a power cut once the folder is synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems sync no folders; the file itself is on the disk
        pass
    finally:
        os.close(handle)


def save_last(state: Any, folder: Path) -> Path:
    """Save ``last.pt``; the one before stays as ``previous.pt``."""
    save_atomic(state, folder / LAST, keep=folder / PREVIOUS)
    return folder / LAST


def _readable(path: Path) -> bool:
    """Whether a checkpoint's archive is whole; a damaged one must not push out the good one before it."""
    return zipfile.is_zipfile(path)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Tensors and plain values only (``weights_only``): a checkpoint never runs code."""
    state = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a segspeed checkpoint")
    return state


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved a state, readable or not."""
    return any((folder / name).exists() for name in (LAST, PREVIOUS))


def load_last(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest readable checkpoint of a run (None if it has none), and what was wrong with newer ones.

    Raises RunStopped when there are checkpoints and none can be read: to begin anew would throw the run away.
    """
    notes: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = load_checkpoint(path)
            if "model" not in state:
                raise ValueError("it holds no weights")
            return state, notes
        except Exception as error:  # a damaged archive fails in many ways; each is reported, none is hidden
            notes.append(f"{name} cannot be read ({type(error).__name__}: {first_line(error)})")
    if notes:
        raise RunStopped(
            f"no checkpoint of {folder} can be read: {'; '.join(notes)}. Bring one back from a copy, or choose another "
            "run.name to begin anew"
        )
    return None, notes
