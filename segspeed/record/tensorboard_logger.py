"""logger=tensorboard: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class TensorBoard:
    """Look with ``tensorboard --logdir outputs``. A resumed run adds a file to the same folder, which hides
    steps that were lost."""

    package: str | None = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "tensorboard"
        self.writer: Any = None

    def begin(self, settings: Mapping[str, str], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)
        if settings:
            rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
            self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self.writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
