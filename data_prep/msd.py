"""Medical Segmentation Decathlon: dataset.json lists the training pairs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.files import dataset_root, label_table, own_splits, read_dataset_json, table_fields
from segspeed.data.files import stem
from segspeed.data.wildcards import as_on_disk
from segspeed.types import Case, Cohort, DataError


def msd(root: str) -> Cohort:
    """The training cases of a Decathlon task. A split file in the folder is used for the folds. Several modalities lie along
    the fourth axis of one file, as the Decathlon keeps them.

    Raises DataError when the folder is not in this layout. Files that do not exist are left to the check of the
    cases, which reports all of them at once.
    """
    folder = dataset_root(root)
    about = read_dataset_json(folder, "Decathlon")
    pairs = about.get("training")
    if not isinstance(pairs, list) or not pairs:
        hint = "; with labels and channel_names it is nnU-Net's layout: data=nnunet" if "channel_names" in about else ""
        raise DataError(f'{folder / "dataset.json"} has no list "training"{hint}')
    channels = _channels(about.get("modality"))
    return Cohort(
        name=str(about.get("name") or folder.name),
        cases=tuple(_case(folder, pair, len(channels)) for pair in pairs),
        **table_fields(label_table(about.get("labels"), f"{folder / 'dataset.json'}, labels")),
        channels=channels,
        splits=own_splits(folder),
    )


def _case(folder: Path, pair: Any, channels: int) -> Case:
    if not isinstance(pair, Mapping) or not isinstance(pair.get("image"), str):
        raise DataError(f'{folder / "dataset.json"}: {pair!r} is no pair {{"image": ..., "label": ...}}')
    image, label = as_on_disk(folder / pair["image"]), pair.get("label")
    path = as_on_disk(folder / label) if isinstance(label, str) else None
    return Case(stem(image), (image,) * channels, path, stacked=channels > 1)


def _channels(modality: Any) -> tuple[str, ...]:
    if isinstance(modality, str):
        modality = [modality]
    if isinstance(modality, list):
        modality = dict(enumerate(modality))
    if isinstance(modality, Mapping) and modality:
        return tuple(str(modality[k]) for k in sorted(modality, key=lambda k: (len(str(k)), str(k))))
    return ("image",)
