"""What run.jsonl holds, told to TensorBoard, MLflow or Weights & Biases as well. Each listens to the record of a run.

A logger of one's own is any ``_target_`` that takes the arguments it wants of ``folder`` (of the run), ``name``, ``cohort`` and
``settings`` (flat, without paths) and has the methods of `Logger`.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from segspeed.record.run_folder import flatten
from segspeed.types import SettingError

Event = Mapping[str, Any]
Mode = Literal["offline", "online"]
NEEDS = {"TensorBoard": ("tensorboard", "tensorboard"), "MLflow": ("mlflow", "mlflow"), "WandB": ("wandb", "wandb")}
PRIVATE = ("data", "cache", "run", "logger")  # sections with paths, which may hold names of people


class Logger(Protocol):
    """What a run tells. Any error ends the logger, not the run."""

    def event(self, event: Event) -> None:
        """One line of run.jsonl."""

    def picture(self, name: str, png: bytes) -> None:
        """An overlay, as the bytes of a PNG file."""

    def close(self) -> None:
        """The session ends."""


def require(target: str) -> None:
    """Raise SettingError when the package that a logger of ours needs is not installed."""
    room, _, name = target.rpartition(".")
    module, package = NEEDS.get(name, ("", ""))
    if room == __name__ and module and find_spec(module) is None:
        raise SettingError(f"logger={module} needs the package {package}: pip install {package}")


def nothing() -> None:
    """No logger beside run.jsonl."""


def figures(event: Event) -> Iterator[tuple[str, float]]:
    """The numbers of an event by name: ``train/loss``, ``dice/liver``. Times in seconds, memory in bytes."""
    if event["kind"] == "step":
        for key in ("loss", "lr", "grad_norm", "samples_per_s", "wait_share", "memory_bytes", "train_s"):
            if isinstance(event.get(key), (int, float)):
                yield f"train/{key}", float(event[key])
    elif event["kind"] == "evaluation":
        found = {"mean": event.get("mean_dice"), **event.get("dice", {})}
        for name, value in found.items():
            if value is not None:
                yield f"dice/{name}", float(value)
        for name, own in event.get("metrics", {}).items():
            if own.get("mean") is not None:
                yield f"metric/{name}", float(own["mean"])
    elif event["kind"] == "end":
        for key in ("mean_dice", "train_s", "total_s", "samples_per_s", "wait_share", "peak_memory_bytes"):
            value = event["result"].get(key)
            if value is not None:
                yield f"result/{key}", float(value)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted key, without the sections that name files and folders."""
    return {
        key: str(value)
        for key, value in flatten(settings)
        if key.split(".")[0] not in PRIVATE and os.sep not in str(value)
    }


def remembered(path: Path, made: str) -> str:
    """The name that an earlier session of the run kept in ``path``; ``made``, which is kept, if there was none."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made + "\n", encoding="utf-8")
    return made


class TensorBoard:
    """Event files in ``folder/tensorboard``. Dice stands twice: by step, and (``dice_by_second``) by seconds of training."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.step = 0
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("settings", "\n".join(f"    {key}={value}" for key, value in settings.items()))

    def event(self, event: Event) -> None:
        """Scalars at the event's step."""
        self.step = int(event.get("step", self.step))
        for name, value in figures(event):
            self.writer.add_scalar(name, value, self.step)
            if name.startswith("dice/"):
                self.writer.add_scalar(name.replace("dice/", "dice_by_second/"), value, round(event["train_s"]))
        if event["kind"] != "step":
            self.writer.flush()

    def picture(self, name: str, png: bytes) -> None:
        """An image ``(H, W, 3)``."""
        self.writer.add_image(f"overlay/{name}", pixels(png), self.step, dataformats="HWC")

    def close(self) -> None:
        """Write what is still held."""
        self.writer.close()


class MLflow:
    """A run in ``folder/mlflow``, or at ``uri``, under an experiment named after the cohort."""

    def __init__(
        self, folder: Path, name: str, cohort: str, settings: Mapping[str, str], uri: str | None = None
    ) -> None:
        from mlflow import MlflowClient

        local = folder.absolute() / "mlflow"
        # MLflow refuses its own file store unless it is asked twice; a folder needs no database and can be carried about
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client = MlflowClient(tracking_uri=uri or local.as_uri())
        known = self.client.get_experiment_by_name(cohort)
        experiment = known.experiment_id if known else self.client.create_experiment(cohort)
        path = local / "run_id.txt"
        earlier = path.exists()
        self.run = remembered(path, "" if earlier else self._create(experiment, name))
        self.step, self.status = 0, "KILLED"
        if not earlier:
            for key, value in settings.items():
                self.client.log_param(self.run, key, value[:500])

    def _create(self, experiment: str, name: str) -> str:
        made: str = self.client.create_run(experiment, run_name=name).info.run_id
        return made

    def event(self, event: Event) -> None:
        """Metrics at the event's step."""
        self.step = int(event.get("step", self.step))
        for name, value in figures(event):
            self.client.log_metric(self.run, name, value, step=self.step)
        if event["kind"] == "end":
            self.status = "FINISHED"

    def picture(self, name: str, png: bytes) -> None:
        """An artifact ``overlays/name.png``."""
        self.client.log_image(self.run, pixels(png), artifact_file=f"overlays/{name}.png")

    def close(self) -> None:
        """Finished, or killed where the run goes on later."""
        self.client.set_terminated(self.run, self.status)


class WandB:
    """A run of Weights & Biases in ``folder/wandb``, offline unless ``mode=online``, told neither the command line nor the names of
    the machine and its user."""

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, str], project: str = "segspeed", mode: Mode = "offline"
    ) -> None:
        import wandb

        (folder / "wandb").mkdir(exist_ok=True)
        self.step = 0
        self.image = wandb.Image
        self.run = wandb.init(
            dir=str(folder),
            id=remembered(folder / "wandb" / "run_id.txt", uuid.uuid4().hex[:12]),
            resume="allow",
            project=project,
            name=name,
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                host="segspeed",
                username="segspeed",
                email="",
            ),
        )

    def event(self, event: Event) -> None:
        """One row of the history."""
        self.step = int(event.get("step", self.step))
        found = dict(figures(event))
        if found:
            self.run.log({**found, "step": self.step, "train_s": event.get("train_s", event.get("t"))})

    def picture(self, name: str, png: bytes) -> None:
        """An image of the history."""
        self.run.log({f"overlay/{name}": self.image(pixels(png)), "step": self.step})

    def close(self) -> None:
        """Write the end of the run's file."""
        self.run.finish()


def pixels(png: bytes) -> np.ndarray:
    """Bytes of a PNG file as ``(H, W, 3)``, uint8."""
    from matplotlib.image import imread

    return np.ascontiguousarray((imread(io.BytesIO(png), format="png")[..., :3] * 255).round().astype(np.uint8))
