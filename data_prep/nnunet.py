"""nnU-Net's raw layout: imagesTr/<case>_0000.nii.gz a channel, labelsTr/<case>.nii.gz, dataset.json."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.files import dataset_root, label_table, own_splits, read_dataset_json, some, table_fields
from segspeed.data.files import is_volume, stem
from segspeed.data.wildcards import composed
from segspeed.types import Case, Cohort, DataError

_CHANNEL = re.compile(r"(?s)(.+)_(\d{4})$")


def nnunet(root: str) -> Cohort:
    """The training cases of a raw dataset (``DatasetXXX_Name``), versions 1 and 2 of dataset.json.

    Raises DataError when the folder is not in this layout, and when image files have no label or labels no image.
    """
    folder = dataset_root(root)
    about = read_dataset_json(folder, "nnU-Net")
    images, labels = folder / "imagesTr", folder / "labelsTr"
    for wanted in (images, labels):
        if not wanted.is_dir():
            raise DataError(f"{folder} has no folder {wanted.name}, so it is not in nnU-Net layout")
    channels = _channels(about)
    return Cohort(
        name=str(about.get("name") or folder.name),
        cases=_cases(images, labels, len(channels)),
        **table_fields(label_table(about.get("labels"), f"{folder / 'dataset.json'}, labels")),
        channels=channels,
        splits=own_splits(folder),
    )


def _channels(about: Mapping[str, Any]) -> tuple[str, ...]:
    named = about.get("channel_names", about.get("modality"))
    if not isinstance(named, Mapping) or not named:
        raise DataError('dataset.json needs "channel_names", such as {"0": "CT"}')
    return tuple(str(named[k]) for k in sorted(named, key=lambda k: (len(str(k)), str(k))))


def _cases(images: Path, labels: Path, channels: int) -> tuple[Case, ...]:
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    nameless = []
    for path in sorted(p for p in images.iterdir() if is_volume(p)):
        match = _CHANNEL.match(composed(stem(path)))
        if match:
            found[match[1]][int(match[2])] = path
        else:
            nameless.append(path.name)
    label_of = {composed(stem(p)): p for p in sorted(labels.iterdir()) if is_volume(p)}
    problems = []
    if nameless:
        problems.append(f"images without a channel number such as _0000: {some(nameless)}")
    if orphans := [i for i in label_of if i not in found]:
        problems.append(f"labels without an image: {some(orphans)}")
    if extra := [f"{i} (channel {c})" for i, files in found.items() for c in files if c >= channels]:
        problems.append(f"channels that dataset.json does not name: {some(extra)}")
    if not found:
        problems.append("no image")
    if problems:
        raise DataError(f"{images.parent}: " + "; ".join(problems))
    cases = []
    for case_id, files in found.items():
        any_file = next(iter(files.values()))
        ending = any_file.name[len(stem(any_file)) :]
        # A missing channel gets the path it should have: the check of the cases names every missing file at once.
        paths = tuple(files.get(c, images / f"{case_id}_{c:04d}{ending}") for c in range(channels))
        cases.append(Case(case_id, paths, label_of.get(case_id)))
    return tuple(cases)
