"""logger=wandb: offline files in the run folder; ``wandb sync`` sends them where you want them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class WandB:
    """Nothing leaves the machine, and neither host, user, code nor git state is written. A resumed run has the same id."""

    package: str | None = "wandb"

    def __init__(self, folder: Path, project: str = "segspeed") -> None:
        self.folder, self.project = Path(folder), project
        self.run: Any = None

    def begin(self, settings: Mapping[str, str], step: int) -> None:
        import wandb

        keep = self.folder / "wandb_id.txt"
        if not keep.exists():
            keep.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
        )
        self.run = wandb.init(
            project=self.project,
            id=keep.read_text(encoding="utf-8"),
            name=self.folder.name,
            dir=str(self.folder),
            mode="offline",
            config=dict(settings),
            settings=quiet,
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log({**values, "step": step})

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        import wandb

        self.run.log({f"overlay/{name}": wandb.Image(pixels), "step": step})

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
