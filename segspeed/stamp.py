"""What made the label maps of a folder: so that maps of another run or other settings are never taken for this one's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segspeed.config_inference import InferenceConfig
from segspeed.data.digest import hash_file
from segspeed.data.files import is_volume
from segspeed.jsonio import write_json
from segspeed.record.checkpoints import BEST, LAST
from segspeed.trained import TrainedRun
from segspeed.types import Case, LabelTable, SettingError

STAMP = ".made_by.json"


def stamp_of(runs: Sequence[TrainedRun], how: InferenceConfig, labels: LabelTable) -> dict[str, Any]:
    """Everything that decides what a label map looks like: weights, settings, label values."""
    name = LAST if how.weights == "last" else BEST
    return {
        "weights": [hash_file(run.folder / name) for run in runs],
        "settings": {"overlap": how.overlap, "mirror": how.mirror, "precision": how.precision},
        "labels": {key: list(values) for key, values in labels.classes.items()},
    }


def claim(output: Path, stamp: Mapping[str, Any], cases: Sequence[Case], *, overwrite: bool) -> bool:
    """Make the folder ours. True where its maps were made by the same weights and settings, and may stay.

    Raises SettingError when the folder cannot be made, when a map would replace one of the images, when it holds maps that
    nobody here made, or maps of other weights or settings that ``overwrite`` does not give up.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"the output folder {output} cannot be made: {error.strerror}; name another") from error
    here = output.resolve()
    if any(path.resolve().parent == here for case in cases for path in case.images):
        raise SettingError(
            f"the output folder {output} is that of the input, whose files would be replaced; name another"
        )
    path = output / STAMP
    maps = [p for p in output.iterdir() if is_volume(p)]
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        before = None
    except (OSError, ValueError):
        before = {}
    if before is None and maps:
        raise SettingError(
            f"{output} holds {len(maps)} NIfTI files that segspeed.predict did not write ({maps[0].name} ...); name another folder"
        )
    same = before == json.loads(json.dumps(stamp))
    if before is not None and maps and not same and not overwrite:
        raise SettingError(
            f"{output} holds label maps of another run, of older weights or of other settings; name another folder, or give "
            "overwrite=true to make them anew"
        )
    write_json(path, stamp)
    return same


def earlier_volumes(output: Path) -> dict[str, Mapping[str, float]]:
    """Volumes in ml by case that the folder's summary.json holds already."""
    try:
        found = json.loads((output / "summary.json").read_text(encoding="utf-8"))
        return {c["case"]: c["volumes_ml"] for c in found["cases"] if c.get("volumes_ml")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # there is none, or one that is not ours: nothing is known of earlier cases
