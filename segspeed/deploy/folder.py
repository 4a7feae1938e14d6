"""An export as a folder: written beside its place, checked, then moved there, so that it is whole or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from segspeed.config_inference import ExportConfig, InferenceConfig
from segspeed.data.digest import hash_file
from segspeed.deploy.bundle import write_bundle
from segspeed.deploy.network import Logits, refuse_apart, require_onnx, write_onnx, write_torchscript
from segspeed.deploy.sidecar import describe
from segspeed.jsonio import write_json
from segspeed.record.live import say
from segspeed.trained import TrainedRun, load_run
from segspeed.types import SettingError


def export_run(cfg: ExportConfig) -> Path:
    """Write the export that ``cfg`` describes and say what it came to; returns its folder.

    Raises SettingError when the target exists or a package is missing, DataError when the run cannot be loaded, or the exported
    network does not do what the run's does.
    """
    if cfg.format == "onnx":
        require_onnx()
    source = Path(cfg.run if isinstance(cfg.run, str) else cfg.run[0])
    target = Path(cfg.target) if cfg.target else source / f"export_{cfg.format}{'_best' * (cfg.weights == 'best')}"
    if os.path.lexists(target):
        raise SettingError(f"{target} exists already; an export replaces nothing, so name another target=FOLDER")
    how = InferenceConfig(weights=cfg.weights, precision="fp32", device="cpu", trust=cfg.trust)
    run = load_run(source, how, torch.device("cpu"))
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise SettingError(f"{target} cannot be made ({error.strerror}); name another target=FOLDER") from error
    try:
        difference = _write(cfg, run, work)
        if os.path.lexists(target):
            raise SettingError(f"{target} appeared meanwhile; an export replaces nothing, so name another")
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{cfg.format} of {source} ({cfg.weights} weights): largest difference of logits {difference:.2g}. {target}")
    if cfg.format == "bundle":
        say(
            f"Next: cd {target} && python -m monai.bundle run --config_file configs/inference.json --dataset_dir FOLDER "
            "--output_dir FOLDER (needs pytorch-ignite and fire)"
        )
    return target


def _write(cfg: ExportConfig, run: TrainedRun, work: Path) -> float:
    """The files of one export; returns the largest difference of logits."""
    network = Logits(run.predictor.model).eval()
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    channels, patch = len(run.cohort.channels), run.plan.patch
    folder = work / "models" if cfg.format == "bundle" else work
    folder.mkdir(exist_ok=True)
    file = folder / ("model.onnx" if cfg.format == "onnx" else "model.ts")
    batch: int | None = None if cfg.batch == "dynamic" else int(cfg.batch)
    if cfg.format == "onnx":
        difference = write_onnx(network, channels, patch, file, batch)
    else:
        difference = write_torchscript(network, channels, patch, file)
    refuse_apart(difference, cfg.tolerance, cfg.format)
    about: dict[str, Any] = {
        "format": "torchscript" if cfg.format == "bundle" else cfg.format,
        "file": file.name,
        "sha256": hash_file(file),
        "batch": cfg.batch if cfg.format == "onnx" else "dynamic",
        "largest_difference_of_logits": difference,
        **describe(run, cfg.weights),
    }
    write_json(file.with_suffix(".json"), about)
    if cfg.format == "bundle":
        write_bundle(work, run, about, overlap=cfg.overlap, windows=cfg.windows)
    return difference
