"""A run as a MONAI bundle: configuration in MONAI's own transforms and engines alone, no code of segspeed's.

MONAI evaluates texts of a configuration that begin with $, and follows those that begin with @ or %. Everything that comes from
data (names of classes and channels) therefore goes through `inert`, and into expressions only numbers are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from segspeed.data.labels import to_file_values
from segspeed.data.plan import grid_of
from segspeed.data.preprocess import AIR_HU
from segspeed.deploy.sidecar import ORIENTATION
from segspeed.infer.decode import class_indices
from segspeed.infer.sliding import SIGMA
from segspeed.trained import TrainedRun
from segspeed.types import BACKGROUND, LabelTable, Plan

NO_LIMIT = 1e30  # of channels whose values are not clipped
SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"


def inert(text: str) -> str:
    """``text`` without the marks that make MONAI evaluate or follow it."""
    return re.sub(r"[$@%]", "_", text)


def inference_config(run: TrainedRun, windows: int) -> dict[str, Any]:
    """configs/inference.json: from NIfTI files in ``dataset_dir`` to label maps in ``output_dir``."""
    window = run.predictor.window
    return {
        "imports": ["$import glob", "$import os"],
        "bundle_root": ".",
        "dataset_dir": "images",
        "output_dir": "maps",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "data": _datalist(len(run.cohort.channels)),
        "network_def": "$torch.jit.load(os.path.join(@bundle_root, 'models', 'model.ts'), map_location=@device)",
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": preprocessing(run.plan)},
        "dataset": {"_target_": "Dataset", "data": "@data", "transform": "@preprocessing"},
        "dataloader": {
            "_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "shuffle": False, "num_workers": 0
        },
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(window.patch),
            "sw_batch_size": windows,
            "overlap": window.overlap,
            "mode": "gaussian",
            "sigma_scale": SIGMA,
            "padding_mode": "constant",
        },
        "postprocessing": {"_target_": "Compose", "transforms": postprocessing(run.cohort.table)},
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
        "finalize": [],
    }  # fmt: skip


def _datalist(channels: int) -> str:
    if channels == 1:
        return "$[{'image': p} for p in sorted(glob.glob(os.path.join(@dataset_dir, '*.nii*')))]"
    first = "sorted(glob.glob(os.path.join(@dataset_dir, '*_0000.nii*')))"
    return (
        "$[{'image': [('_%04d.nii' % n).join(p.rsplit('_0000.nii', 1)) for n in range("
        + str(channels)
        + ")]} for p in "
        f"{first}]"
    )


def preprocessing(plan: Plan) -> list[dict[str, Any]]:
    """What `segspeed.data.preprocess` and the normalisation do, in MONAI's transforms. Arrays become ``(C, D, H, W)``.

    Constants of a case are taken before its voxels are resampled, as they are there: resampling is linear, so it makes no
    difference which comes first.
    """
    grid = grid_of(plan)
    steps: list[dict[str, Any]] = [
        {"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True, "reader": "NibabelReader"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": ORIENTATION, "labels": None},
        {
            "_target_": "CropForegroundd",
            "keys": "image",
            "source_key": "image",
            "select_fn": "$lambda x: (x > x.amin((1, 2, 3), keepdim=True)) | (x.amin() == x.amax())",
            "allow_smaller": False,
        },
    ]
    if any(grid.ct):
        floor = [AIR_HU if ct else -NO_LIMIT for ct in grid.ct]
        steps.append(_expression(f"x.clamp(min={_column(floor)})"))
    if not all(grid.ct):
        if any(grid.ct):  # only the channels that are no CT are normalised by their own values
            own = _column([0.0 if ct else 1.0 for ct in grid.ct])
            steps.append(_expression(
                f"(x - {own} * x.mean((1, 2, 3), keepdim=True)) / "
                f"(1 + {own} * (x.std((1, 2, 3), unbiased=False, keepdim=True).clamp(min=1e-8) - 1))"
            ))  # fmt: skip
        else:
            steps.append({"_target_": "NormalizeIntensityd", "keys": "image", "channel_wise": True})
    steps += _resampling(plan)
    if any(grid.ct):
        constants = [(c.low, c.high, c.mean, c.std) if c else (-NO_LIMIT, NO_LIMIT, 0.0, 1.0) for c in plan.ct_norm]
        low, high, mean, std = (list(values) for values in zip(*constants, strict=True))
        steps.append(_expression(f"x.clamp({_column(low)}, {_column(high)})"))
        steps.append(
            {
                "_target_": "NormalizeIntensityd",
                "keys": "image",
                "subtrahend": mean,
                "divisor": std,
                "channel_wise": True,
            }  # fmt: skip
        )
    return steps


def _resampling(plan: Plan) -> list[dict[str, Any]]:
    """Cubic splines onto the Plan's spacing; along a coarse axis linearly, after the two others."""
    fixed = {"_target_": "Spacingd", "keys": "image", "scale_extent": True, "align_corners": True}
    if plan.coarse_axis is None:
        return [{**fixed, "pixdim": list(plan.spacing), "mode": 3, "padding_mode": "nearest"}]
    kept = [-1.0 if axis == plan.coarse_axis else s for axis, s in enumerate(plan.spacing)]  # -1: as it is
    return [
        {**fixed, "pixdim": kept, "mode": 3, "padding_mode": "nearest"},
        {**fixed, "pixdim": list(plan.spacing), "mode": "bilinear", "padding_mode": "border"},
    ]


def postprocessing(labels: LabelTable) -> list[dict[str, Any]]:
    """Logits back to the image's grid, to classes, to the label values of the training data, to a file."""
    values = to_file_values(np.arange(len(labels.classes) + 1), labels.classes)
    steps: list[dict[str, Any]] = [
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        }
    ]
    if labels.regions:
        combinations = 1 << len(labels.regions)
        shifts = np.arange(len(labels.regions))
        signs = (np.arange(combinations)[:, None] >> shifts & 1).astype(np.float32) * 2 - 1
        import torch

        table = class_indices(torch.from_numpy(signs), labels).tolist()
        bits = _column([1 << n for n in range(len(labels.regions))])
        steps.append(
            _expression(f"torch.tensor({table})[((x > 0) * {bits}).sum(0, keepdim=True).long().cpu()]", "pred")
        )
    else:
        steps.append({"_target_": "AsDiscreted", "keys": "pred", "argmax": True})
    plain = values.tolist()
    if plain != list(range(len(plain))):
        steps.append(
            {
                "_target_": "MapLabelValued",
                "keys": "pred",
                "orig_labels": list(range(len(plain))),
                "target_labels": plain,
            }  # fmt: skip
        )
    steps.append(
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "seg",
            "output_ext": ".nii.gz",
            "output_dtype": f"$np.{values.dtype.name}",
            "separate_folder": False,
            "resample": False,
        }
    )
    return steps


def _expression(text: str, key: str = "image") -> dict[str, Any]:
    return {"_target_": "Lambdad", "keys": key, "func": f"$lambda x: {text}", "track_meta": True}


def _column(values: list[Any]) -> str:
    """Numbers, one a channel, as an expression of shape (C, 1, 1, 1)."""
    return f"torch.tensor({values}).view(-1, 1, 1, 1)"


def metadata(run: TrainedRun, about: Mapping[str, Any]) -> dict[str, Any]:
    """configs/metadata.json, in the words of MONAI's schema."""
    labels, channels = run.cohort.table, [inert(c) for c in run.cohort.channels]
    names = [inert(n) for n in (labels.targets if labels.regions else (BACKGROUND, *labels.classes))]
    patch = list(run.plan.patch)
    dice = about.get("mean_dice")
    tensor = {"type": "image", "is_patch_data": True, "spatial_shape": patch, "dtype": "float32"}
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "as trained"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {
            "nibabel": version("nibabel"), "scipy": version("scipy"), "pytorch-ignite": _known("pytorch-ignite", "0.5"),
            "fire": _known("fire", "0.7"),
        },
        "name": inert(run.cohort.name),
        "task": f"Segmentation of {', '.join(names[0 if labels.regions else 1:])}",
        "description": f"A 3D segmentation network trained with segspeed on {inert(run.cohort.name)}",
        "authors": "to be filled in",
        "copyright": "to be filled in",
        "data_type": "nibabel",
        "image_classes": f"{len(channels)} channels: {', '.join(channels)}",
        "label_classes": ", ".join(f"{inert(n)} {list(v)}" for n, v in labels.classes.items()),
        "pred_classes": ", ".join(names),
        "eval_metrics": {} if dice is None else {"mean_dice": dice},
        "intended_use": "research; not a medical device",
        "network_data_format": {
            "inputs": {
                "image": {
                    **tensor,
                    "format": "magnitude",
                    "modality": inert("/".join(channels)),
                    "num_channels": len(channels),
                    "value_range": [],
                    "channel_def": {str(n): c for n, c in enumerate(channels)},
                }
            },
            "outputs": {
                "pred": {
                    **tensor,
                    "format": "segmentation",
                    "num_channels": labels.outputs,
                    "value_range": [],
                    "channel_def": {str(n): c for n, c in enumerate(names)},
                }
            },
        },
    }  # fmt: skip


def _known(package: str, otherwise: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it is needed where the bundle runs, which may be elsewhere
        return otherwise
