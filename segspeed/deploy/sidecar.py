"""What an exported network needs to be known of, as plain JSON: no case, no patient, no path of the data."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from segspeed import __version__
from segspeed.data.digest import hash_file
from segspeed.data.preprocess import AIR_HU
from segspeed.deploy.network import Exported
from segspeed.infer.sliding import SIGMA
from segspeed.record.run_folder import RunFolder
from segspeed.trained import TrainedRun
from segspeed.types import BACKGROUND, Plan

AXES = "D towards superior, H towards anterior, W towards the right: NIfTI's closest canonical (i, j, k) turned round"
ORIENTATION = "SAR"  # the same as an orientation code of (D, H, W)
PACKAGES = ("torch", "monai", "numpy", "nibabel")


def sidecar(
    run: TrainedRun, exported: Exported, *, form: str, weights: str, weights_sha256: str, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything around the network of ``exported`` that whoever runs it has to do the same. Lengths in mm, axes (D, H, W)."""
    plan, labels = run.plan, run.cohort.table
    channels = list(run.cohort.channels)
    outputs = list(labels.targets) if labels.regions else [BACKGROUND, *labels.classes]
    window = run.predictor.window
    return {
        "format": form,
        "file": exported.path.name,
        "sha256": hash_file(exported.path),
        "weights": {"which": weights, "sha256": weights_sha256},
        "compared": {"max_abs_difference": exported.difference, "largest_logit": exported.largest},
        "cohort": run.cohort.name,
        "run": run.folder.resolve().name,
        **_scored(run.folder, weights),
        "input": {
            "name": "windows",
            "axes": f"(B, C, D, H, W); {AXES}",
            "orientation": ORIENTATION,
            "channels": channels,
            "patch": list(plan.patch),
            "batch": "any" if exported.any_batch else 1,
            "dtype": "float32",
        },
        "output": {
            "name": "logits",
            "axes": "(B, K, D, H, W)",
            "channels": outputs,
            "activation": "sigmoid, a region is there above 0.5" if labels.regions else "softmax",
        },
        "classes": {name: {"index": n, "values": list(v)} for n, (name, v) in enumerate(labels.classes.items(), start=1)},
        "regions": {name: list(parts) for name, parts in labels.regions.items()},
        "spacing_mm": list(plan.spacing),
        "coarse_axis": plan.coarse_axis,
        "crop": "the box of voxels above their channel's minimum, of all channels together",
        "resampling": "cubic splines, edges of the grids aligned" + (
            "; linear along coarse_axis" if plan.coarse_axis is not None else ""
        ),
        "normalisation": normalisation_of(plan, channels),
        "sliding_window": {
            "overlap": window.overlap,
            "weights": f"Gaussian, sigma {SIGMA} of the patch's side",
            "padding": "zeros after normalisation, as much on either side",
        },
        "way_back": "logits are resampled to the image's grid, then the largest class is taken; outside the box is background",
        "versions": {
            "python": platform.python_version(),
            "segspeed": __version__,
            **{name: version(name) for name in (*PACKAGES, *packages)},
        },
    }  # fmt: skip


def _scored(folder: Path, weights: str) -> dict[str, Any]:
    """The run's Dice. That of the best weights was chosen on the cases that it is a mean of, and is called so."""
    result = RunFolder(folder).outcome() or {}
    if weights == "best":
        return {"mean_dice": None, "mean_dice_selected_on_validation": result.get("best_selected_on_validation")}
    return {"mean_dice": result.get("mean_dice"), "dice": result.get("dice"), "validation_cases": result.get("cases")}


def normalisation_of(plan: Plan, channels: Sequence[str]) -> list[dict[str, Any]]:
    """How each channel is normalised, in raw intensities."""
    found: list[dict[str, Any]] = []
    for name, kind, ct in zip(channels, plan.normalisation, plan.ct_norm, strict=True):
        about: dict[str, Any] = {"channel": name, "kind": kind}
        if ct is not None:
            about |= {
                "at_least_before_resampling": AIR_HU, "clip": [ct.low, ct.high], "mean": ct.mean, "std": ct.std
            }  # fmt: skip
        else:
            about |= {"mean": "of the case's voxels in its box", "std": "of the case's voxels in its box"}
        found.append(about)
    return found
