"""A MONAI bundle around a TorchScript network: NIfTI files in, label maps on their own grids out, without segspeed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from segspeed.data.labels import to_file_values
from segspeed.deploy import bundle_transforms
from segspeed.infer.decode import class_indices
from segspeed.infer.sliding import SIGMA
from segspeed.jsonio import write_json
from segspeed.trained import TrainedRun
from segspeed.types import LabelTable

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
PRIVATE = "scripts.transforms"  # where `bundle_transforms` lies in a bundle

LICENSE = """The configuration and the scripts of this bundle were written by segspeed and are under the Apache License, Version 2.0
(https://www.apache.org/licenses/LICENSE-2.0).

The weights in models/ belong to whoever trained them, on whatever terms the data allows. State those terms here before this
bundle is passed on.
"""

README = """# {title}

{classes} from {channels}, trained by segspeed on {cohort}. Mean Dice {dice} ({of}).

```bash
cd THIS_FOLDER
pip install monai torch nibabel scipy pytorch-ignite fire
python -m monai.bundle run --config_file configs/inference.json --dataset_dir FOLDER --output_dir FOLDER
```

Reads NIfTI files (several channels: CASE_0000.nii.gz, CASE_0001.nii.gz ... in the order above, or along the fourth axis) and writes
a label map of the same name on each one's own grid, in the label values of the training data: {values}.

The network sees patches of {patch} voxels, (D, H, W), at {spacing} mm; `models/model.json` tells axes, normalisation and versions.
Scores of a whole volume are held at once. Not a medical device.
"""


def write_bundle(root: Path, run: TrainedRun, about: Mapping[str, Any], *, overlap: float, windows: int) -> None:
    """Everything of the bundle but ``models/``, which is there. ``about`` is what stands beside the network."""
    write_json(root / "configs/inference.json", inference(run, overlap, windows))
    write_json(root / "configs/metadata.json", metadata(run, about))
    scripts = root / "scripts"
    scripts.mkdir()
    (scripts / "__init__.py").touch()
    shutil.copyfile(str(bundle_transforms.__file__), scripts / "transforms.py")
    (root / "LICENSE").write_text(LICENSE, encoding="utf-8")
    (root / "docs").mkdir()
    cohort, plan, dice = run.cohort, run.plan, about["score"]["mean_dice"]
    text = README.format(
        title=cohort.name,
        classes=", ".join(cohort.table.targets),
        channels=", ".join(cohort.channels),
        cohort=cohort.name,
        dice="not measured" if dice is None else f"{dice:.3f}",
        of=about["score"]["of"],
        values=", ".join(f"{name} {values[0]}" for name, values in cohort.labels.items()),
        patch=" x ".join(map(str, plan.patch)),
        spacing=" x ".join(f"{s:.3g}" for s in plan.spacing),
    )
    (root / "docs/README.md").write_text(text, encoding="utf-8")


def inference(run: TrainedRun, overlap: float, windows: int) -> dict[str, Any]:
    """``configs/inference.json``. The way of a volume is that of `segspeed.predict`, in MONAI's words."""
    plan, channels = run.plan, len(run.cohort.channels)
    ct = [None if c is None else {"low": c.low, "high": c.high, "mean": c.mean, "std": c.std} for c in plan.ct_norm]
    values, dtype = outcomes(run.cohort.table)
    load = [
        {"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True, "image_only": True},
        {"_target_": "EnsureTyped", "keys": "image", "dtype": "$torch.float32"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "SAR", "labels": [["L", "R"], ["P", "A"], ["I", "S"]]},
        {
            "_target_": "CropForegroundd",
            "keys": "image",
            "source_key": "image",
            "select_fn": "$above_minimum",
            "allow_smaller": False,
        },
        {
            "_target_": f"{PRIVATE}.OntoPlan",
            "keys": "image",
            "spacing": list(plan.spacing),
            "ct": ct,
            "coarse_axis": plan.coarse_axis,
        },
    ]
    save = [
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        },
        {
            "_target_": f"{PRIVATE}.LabelValues",
            "keys": "pred",
            "values": values,
            "regions": bool(run.cohort.regions),
        },
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "",
            "output_dtype": f"$numpy.{dtype}",
            "separate_folder": False,
            "resample": False,
        },
    ]
    return {
        "imports": [
            "$import numpy",
            "$import torch",
            f"$from {PRIVATE} import above_minimum",
            f"$from {PRIVATE} import volumes",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/output'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "data": f"$volumes(@dataset_dir, {channels})",
        "network_def": "$torch.jit.load(@bundle_root + '/models/model.ts', map_location=@device).eval()",
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": load},
        "dataset": {"_target_": "Dataset", "data": "@data", "transform": "@preprocessing"},
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": 1,
            "shuffle": False,
            "num_workers": 0,
        },
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(plan.patch),
            "sw_batch_size": windows,
            "overlap": overlap,
            "mode": "gaussian",
            "sigma_scale": SIGMA,
            "padding_mode": "constant",
            "cval": 0.0,
        },
        "postprocessing": {"_target_": "Compose", "transforms": save},
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "amp": False,
        },
        "initialize": [],
        "run": ["$@evaluator.run()"],
    }


def outcomes(labels: LabelTable) -> tuple[list[int], str]:
    """The file value of each outcome (see `bundle_transforms.LabelValues`), and the smallest type that holds them."""
    if labels.regions:
        count = len(labels.regions)
        sets = [[1.0 if number >> region & 1 else -1.0 for region in range(count)] for number in range(1 << count)]
        indices = class_indices(torch.tensor(sets)[..., None], labels)[:, 0].numpy()
    else:
        indices = torch.arange(labels.outputs).numpy()
    values = to_file_values(indices, labels.classes)
    return values.tolist(), str(values.dtype)


def metadata(run: TrainedRun, about: Mapping[str, Any]) -> dict[str, Any]:
    """``configs/metadata.json`` after MONAI's schema; ``segspeed`` holds what that has no words for."""
    versions, channels = about["versions"], run.cohort.channels
    shape, classes = list(run.plan.patch), about["output"]["channels"]
    regions = bool(run.cohort.regions)
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "exported by segspeed"},
        "monai_version": versions["monai"],
        "pytorch_version": versions["torch"],
        "numpy_version": versions["numpy"],
        "required_packages_version": {key: versions[key] for key in ("nibabel", "scipy")},
        "optional_packages_version": {},
        "name": run.cohort.name,
        "task": f"segmentation of {', '.join(run.cohort.table.targets)}",
        "description": f"{', '.join(run.cohort.table.targets)} from {', '.join(channels)}, trained by segspeed",
        "authors": "",
        "copyright": "",
        "intended_use": "Research. Not a medical device.",
        "image_classes": ", ".join(channels),
        "label_classes": ", ".join(run.cohort.table.targets),
        "pred_classes": ", ".join(classes),
        "eval_metrics": {"mean_dice": about["score"]["mean_dice"]},
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude" if not all(run.plan.ct_norm) else "hounsfield",
                    "modality": ", ".join(channels),
                    "num_channels": len(channels),
                    "spatial_shape": shape,
                    "dtype": "float32",
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": {str(n): name for n, name in enumerate(channels)},
                }
            },
            "outputs": {
                "pred": {
                    "type": "image",
                    "format": "segmentation",
                    "num_channels": len(classes),
                    "spatial_shape": shape,
                    "dtype": "float32",
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": {str(n): name for n, name in enumerate(classes)},
                    "activation": "sigmoid" if regions else "softmax",
                }
            },
        },
        "segspeed": dict(about),
    }
