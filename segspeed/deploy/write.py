"""A folder with an exported network in it: made whole beside its place, then put there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segspeed.deploy import bundle
from segspeed.deploy.network import ONNX_NEEDS, Exported, portable, save_onnx, save_torchscript, weights_sha256
from segspeed.deploy.sidecar import sidecar
from segspeed.jsonio import write_json
from segspeed.trained import TrainedRun
from segspeed.types import SettingError

LICENCE = """The configuration in this bundle was written by segspeed and may be used under the Apache License, Version 2.0
(http://www.apache.org/licenses/LICENSE-2.0).

The weights belong to whoever trained them, and the data they were trained on may restrict their use: before you pass this bundle
on, replace this text by the terms that you give them under.
"""


def export_run(
    run: TrainedRun, form: str, target: Path, weights: str, tolerance: float
) -> tuple[Exported, dict[str, Any]]:
    """Write the network of ``run`` (format bundle, onnx or torchscript) and its sidecar into the new folder ``target``.

    Returns what was compared, and the sidecar. Raises SettingError when the folder is there or cannot be made, DataError when the
    network cannot be exported or the file differs from it by more than ``tolerance``.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise SettingError(f"the folder {target} cannot be made: {error.strerror}; name another target") from error
    try:
        exported, about = _write(run, form, temporary, weights, tolerance)
        if target.exists():
            raise SettingError(f"{target} has appeared meanwhile and is not touched; name another target=FOLDER")
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return exported, about


def _write(run: TrainedRun, form: str, folder: Path, weights: str, tolerance: float) -> tuple[Exported, dict[str, Any]]:
    model = portable(run.predictor.model)
    channels, patch = len(run.cohort.channels), run.plan.patch
    inside = folder / "models" if form == "bundle" else folder
    inside.mkdir(exist_ok=True)
    if form == "onnx":
        exported = save_onnx(model, channels, patch, inside / "model.onnx", tolerance)
    else:
        exported = save_torchscript(model, channels, patch, inside / "model.ts", tolerance)
    packages = ONNX_NEEDS if form == "onnx" else ()
    digest = weights_sha256(run.predictor.model)
    about = sidecar(run, exported, form=form, weights=weights, weights_sha256=digest, packages=packages)
    write_json(inside / "model.json", about)
    if form == "bundle":
        windows = run.predictor.window.batch if exported.any_batch else 1
        write_json(folder / "configs/inference.json", bundle.inference_config(run, windows))
        write_json(folder / "configs/metadata.json", bundle.metadata(run, about))
        (folder / "LICENSE").write_text(LICENCE, encoding="utf-8")
        (folder / "docs").mkdir()
        (folder / "docs/README.md").write_text(_readme(run, about), encoding="utf-8")
    return exported, about


def _readme(run: TrainedRun, about: Mapping[str, Any]) -> str:
    dice = about.get("mean_dice")
    files = (
        "one NIfTI file a case" if len(run.cohort.channels) == 1 else "CASE_0000.nii.gz, CASE_0001.nii.gz ... a case"
    )
    return f"""# {run.cohort.name}

Segments {", ".join(run.cohort.table.targets)} in {", ".join(run.cohort.channels)}. Mean Dice on {about.get("validation_cases")} \
validation cases, in segspeed: {"not known" if dice is None else f"{dice:.3f}"}.

    pip install 'monai[nibabel,ignite,fire]' scipy
    python -m monai.bundle run --config_file BUNDLE/configs/inference.json --meta_file BUNDLE/configs/metadata.json \\
        --bundle_root BUNDLE --dataset_dir IMAGES --output_dir MAPS

IMAGES holds {files}; MAPS gets one label map a case, on its image's grid, in the label values of the training data.
`models/model.json` says what is done around the network, for whoever runs it elsewhere.

Against segspeed's own prediction, voxels at the borders of structures may differ: MONAI steps by the exact spacing where segspeed
fits a whole number of voxels into the same extent, brings logits back by the splines of the way there, and does not cap what
splines overshoot. The network runs in single precision.
"""
