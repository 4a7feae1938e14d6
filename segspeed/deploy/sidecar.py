"""What a program must know of an exported network. No patients, no paths."""

from __future__ import annotations

from typing import Any

from segspeed.data.digest import hash_file
from segspeed.record.checkpoints import BEST, LAST, load_checkpoint
from segspeed.record.run_folder import RunFolder
from segspeed.record.versions import environment
from segspeed.trained import TrainedRun

AXES = (
    "(B, C, D, H, W): D towards superior, H towards anterior, W towards the right of the patient (orientation code SAR)"
)


def describe(run: TrainedRun, weights: str) -> dict[str, Any]:
    """Plain values: what goes in, what comes out, where it came from, how good it was. ``weights`` is last or best."""
    cohort, plan, table = run.cohort, run.plan, run.cohort.table
    name = LAST if weights == "last" else BEST
    return {
        "cohort": cohort.name,
        "input": {
            "name": "image",
            "axes": AXES,
            "channels": list(cohort.channels),
            "patch": list(plan.patch),
            "spacing_mm": list(plan.spacing),
            "coarse_axis": plan.coarse_axis,
            "normalisation": [
                {"kind": "zscore", "of": "the case, cropped, before resampling"}
                if ct is None
                else {"kind": "ct", "low": ct.low, "high": ct.high, "mean": ct.mean, "std": ct.std}
                for ct in plan.ct_norm
            ],
        },
        "output": {
            "name": "logits",
            "axes": "(B, K, D, H, W)",
            "activation": "sigmoid" if table.regions else "softmax",
            "channels": list(table.regions) if table.regions else ["background", *table.classes],
            "classes": {key: list(values) for key, values in table.classes.items()},
            "regions": {key: list(parts) for key, parts in table.regions.items()},
        },
        "weights": {"which": weights, "file": name, "sha256": hash_file(run.folder / name)},
        "score": score(run, weights),
        "versions": environment()["packages"],
    }


def score(run: TrainedRun, weights: str) -> dict[str, Any]:
    """Mean Dice of the weights on the run's validation cases; None where it was not measured."""
    if weights == "best":
        kept = load_checkpoint(run.folder / BEST).get("mean_dice")
        return {"mean_dice": kept, "of": "whole validation volumes; these weights were chosen by it, so it flatters"}
    result = RunFolder(run.folder).outcome() or {}
    found = {"mean_dice": result.get("mean_dice"), "of": "whole validation volumes on their original grid"}
    return {**found, "dice": result.get("dice"), "cases": result.get("cases")}
