"""What a set of cases is like, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from segspeed.types import CaseFacts, DataError, Fingerprint


def fingerprint(facts: Sequence[CaseFacts]) -> Fingerprint:
    """Shapes, spacings, class volumes and foreground intensities over ``facts`` (the training cases).

    Cases without foreground or with a constant image count for geometry, not for intensities.
    Raises DataError when no case has foreground.
    """
    assert facts, "a fingerprint of no cases"
    classes = list(facts[0].class_voxels)
    voxels = {name: sum(f.class_voxels[name] for f in facts) for name in classes}
    if not sum(voxels.values()):
        raise DataError("no training case has any labelled foreground, so there is nothing to learn")
    usable = [f for f in facts if not any(p.kind == "constant-image" for p in f.problems)]
    channels = max(len(f.foreground) for f in facts)
    return Fingerprint(
        cases=len(facts),
        spacings=tuple(f.spacing for f in facts),
        crop_shapes=tuple(f.crop_shape for f in facts),
        class_voxels=voxels,
        intensity=tuple(
            _statistics([v for f in usable if len(f.foreground) > c for v in f.foreground[c]]) for c in range(channels)
        ),
    )


def _statistics(values: Sequence[float]) -> Mapping[str, float]:
    a = np.asarray(values, dtype=np.float64)
    if not a.size:
        return {}
    low, median, high = np.percentile(a, [0.5, 50, 99.5])
    return {
        "mean": float(a.mean()),
        "std": float(a.std()),
        "median": float(median),
        "minimum": float(a.min()),
        "maximum": float(a.max()),
        "percentile_00_5": float(low),
        "percentile_99_5": float(high),
    }
