"""logger=mlflow: a database in the run folder, no server and no network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class MLflow:
    """Look with ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db``. A resumed run goes on
    with the same MLflow run."""

    package: str | None = "mlflow"

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = Path(folder) / "mlflow", Path(folder).name
        self.client: Any = None
        self.run = ""

    def begin(self, settings: Mapping[str, str], step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        from mlflow.tracking import MlflowClient

        self.folder.mkdir(exist_ok=True)
        self.client = MlflowClient(tracking_uri=f"sqlite:///{(self.folder / 'mlflow.db').resolve()}")
        known = self.client.get_experiment_by_name("segspeed")
        place = (self.folder / "artifacts").resolve().as_uri()
        experiment = (
            known.experiment_id if known else self.client.create_experiment("segspeed", artifact_location=place)
        )
        runs = self.client.search_runs([experiment], max_results=1)
        self.run = runs[0].info.run_id if runs else self.client.create_run(experiment, run_name=self.name).info.run_id
        self.client.update_run(self.run, status="RUNNING")
        for key, value in settings.items():
            self.client.log_param(self.run, key, value)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, step=step)

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        from PIL import Image

        self.client.log_image(self.run, Image.fromarray(pixels), f"overlays/{name.replace('/', '_')}.png")

    def close(self) -> None:
        if self.client is not None:
            self.client.set_terminated(self.run)
