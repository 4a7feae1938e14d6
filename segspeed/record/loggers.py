"""What other programs show of a run: scalars and pictures, heard from run.jsonl alone.

A logger is any class with the methods of `Logger`, named by ``_target_`` in ``conf/logger/``. It gets ``folder``, the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from segspeed.record.live import say
from segspeed.record.overlays import Overlay, load_overlays
from segspeed.record.run_record import RunRecord
from segspeed.types import first_line

STEP = ("loss", "lr", "grad_norm", "samples_per_s", "wait_share", "memory_bytes", "train_s")
END = ("mean_dice", "train_s", "total_s", "setup_s", "cache_s", "evaluation_s", "samples_per_s", "peak_memory_bytes")
TOLD = ("model", "loss", "optimizer", "schedule", "train", "augment", "evaluation")  # settings that hold no paths
COLOURS = np.array([(214, 69, 65), (41, 128, 185), (39, 174, 96), (243, 156, 18), (142, 68, 173), (22, 160, 133)])


class Logger(Protocol):
    """What a `Listener` asks of a logger."""

    package: str | None  # what must be installed for it

    def begin(self, settings: Mapping[str, str], step: int) -> None:
        """A session of the run begins after ``step`` (0: a new run, whose ``settings`` are flat texts)."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """``pixels (height, width, 3)`` uint8."""

    def close(self) -> None: ...


class Silent:
    """No logger: logger=none."""

    package: str | None = None

    def begin(self, settings: Mapping[str, str], step: int) -> None:
        return

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        return

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        return

    def close(self) -> None:
        return


class Listener:
    """Passes a record's events on to a logger. One that fails is told once and not asked again; training goes on."""

    def __init__(self, logger: Logger, folder: Path, record: RunRecord) -> None:
        self.logger, self.folder, self.record = logger, folder, record
        self.step, self.begun = 0, False
        record.listeners.append(self.hear)

    def hear(self, event: Mapping[str, Any]) -> None:
        """One event, as it stands in run.jsonl."""
        try:
            self._pass_on(event)
        except (
            Exception
        ) as error:  # a server that is gone, a full disk, a package of another version: none may stop a run
            self._give_up(error)

    def close(self) -> None:
        """The end of this session, whatever ended it."""
        if self.hear not in self.record.listeners:
            return
        self.record.listeners.remove(self.hear)
        try:
            self.logger.close()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self.hear in self.record.listeners:
            self.record.listeners.remove(self.hear)
        text = f"the logger failed ({type(error).__name__}: {first_line(error)}); the run goes on without it"
        self.record.write("event", name="logger", message=text)
        say(f"warning: {text}")

    def _pass_on(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "start":
            self._begin(settings_of(event), 0)
        elif kind == "event" and event.get("name") == "resume":
            self._begin({}, int(event["step"]))
        elif kind in ("step", "evaluation", "end"):
            if not self.begun:  # a record that an older version began
                self._begin({}, int(event.get("step", 0)))
            self.step = int(event.get("step", self.step))
            values = dict(scalars_of(event))
            if values:
                self.logger.scalars(values, self.step)
            for overlay in load_overlays(self.folder / "overlays.npz") if kind == "end" else ():
                self.logger.picture(f"{overlay.role}/{overlay.case}", pixels_of(overlay), self.step)

    def _begin(self, settings: Mapping[str, str], step: int) -> None:
        self.begun, self.step = True, step
        self.logger.begin(settings, step)


def scalars_of(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of what an event measured. Cases stay in run.jsonl."""
    kind = event["kind"]
    found: dict[str, Any] = {"wall_clock_s": event["t"]}
    if kind == "step":
        found |= {f"train/{key}": event.get(key) for key in STEP}
    elif kind == "evaluation":
        part = "final" if event.get("final") else "validation"
        found |= {f"{part}/mean_dice": event["mean_dice"], f"{part}/seconds": event["seconds"]}
        found |= {f"{part}/dice/{name}": value for name, value in event["dice"].items()}
    elif kind == "end":
        found |= {f"result/{key}": event["result"].get(key) for key in END}
    yield from ((key, float(value)) for key, value in found.items() if value is not None)


def settings_of(start: Mapping[str, Any]) -> dict[str, str]:
    """Flat texts on how the run is set up, without the sections that name folders."""
    flat = {
        key: str(start[key]) for key in ("device", "precision", "seed", "effective_batch", "cases_train", "cases_val")
    }
    flat["classes"] = ", ".join(start["classes"])
    for section in TOLD:
        for key, value in start["config"].get(section, {}).items():
            if "/" not in str(value):
                flat[f"{section}.{key}"] = str(value)[:250]
    return flat


def pixels_of(overlay: Overlay, height: int = 256) -> np.ndarray:
    """Axial, coronal and sagittal slice side by side, each twice: the reference above, the prediction below. ``(H, W, 3)`` uint8,
    superior or anterior up."""
    low, high = np.percentile(np.concatenate([plane.ravel() for plane in overlay.image]), [1, 99])
    d, h, w = overlay.spacing
    columns = []
    for number, (rows, across) in enumerate(((h, w), (d, w), (d, h))):
        plane = overlay.image[number]
        tall = max(1, round(plane.shape[1] * across / (plane.shape[0] * rows) * height))
        grey = np.clip((plane - low) / max(float(high - low), 1e-6), 0, 1)[..., None] * np.full(3, 255.0)
        halves = []
        for labels in (overlay.reference[number], overlay.prediction[number]):
            tinted = np.where((labels > 0)[..., None], 0.55 * grey + 0.45 * COLOURS[(labels.astype(int) - 1) % 6], grey)
            i = np.arange(height) * plane.shape[0] // height
            j = np.arange(tall) * plane.shape[1] // tall
            halves.append(tinted[::-1][i][:, j])
        columns.append(np.concatenate(halves))
    return np.concatenate(columns, 1).astype(np.uint8)
