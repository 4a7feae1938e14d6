"""Slices of the worst cases, read from their files again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from segspeed.data.geometry import read_volume
from segspeed.data.labels import to_class_indices
from segspeed.record.overlays import Overlay, make_overlay
from segspeed.scoring.pairs import ScorePair
from segspeed.scoring.summary import ScoreSummary
from segspeed.types import LabelTable

SHOWN = 3


def worst_overlays(
    summary: ScoreSummary,
    pairs: Sequence[ScorePair],
    labels: LabelTable,
    images: Mapping[str, Path],
) -> list[Overlay]:
    """Pictures of the worst cases. ``images`` maps case ids to the volume behind the labels; without one it stays dark."""
    by_id = {p.id: p for p in pairs}
    found = []
    for worst in summary.worst[:SHOWN]:
        pair = by_id[worst.id]
        reference = read_volume(pair.reference, scaled=False)
        shape = reference.array.shape
        image = read_volume(images[worst.id]).array if worst.id in images else np.zeros(shape, np.float32)
        if image.shape != shape:
            image = np.zeros(shape, np.float32)  # labelled on another grid than the image's: the labels alone
        prediction = to_class_indices(read_volume(pair.prediction, scaled=False), labels)
        real = to_class_indices(reference, labels)
        found.append(
            make_overlay(
                "worst",
                worst.id,
                worst.mean_dice,
                image,
                np.where(real == labels.ignore_index, 0, real) if labels.ignore else real,
                prediction,
                reference.spacing,
            )
        )
    return found
