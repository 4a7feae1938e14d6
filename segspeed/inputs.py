"""What there is to predict: NIfTI files by case, or DICOM series turned into NIfTI without their identity."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segspeed.data.dicom import Series, convert_series, find_series
from segspeed.data.files import is_volume, load_nifti, not_a_file, stem
from segspeed.data.geometry import UNREADABLE
from segspeed.data.wildcards import as_on_disk, by_wildcard, folders_below, is_pattern
from segspeed.types import Case, DataError

FEW = 32  # different values that a label map has at most
SMALL = 1 << 20  # bytes of voxels that are unpacked to be looked at, whatever the file's size
PACKED = 20  # label maps shrink more than so many times in gzip, images do not
LOOKED_AT = 10_000  # folders, for a message
CHANNEL = re.compile(r"(.+)_(\d{4})")


def find_cases(source: Path, channels: Sequence[str]) -> list[Case]:
    """The cases of a NIfTI file, a folder or a glob (``folder/*_ct.nii.gz``: a case is called what the wildcards stand for):
    one file a case, or ``ID_0000.nii.gz`` ... a channel (also for one channel). Where no file has a channel's number, several
    channels lie along the fourth axis of each.

    Raises DataError with everything that does not fit.
    """
    files = _by_name(source)
    numbered = [(CHANNEL.fullmatch(name), name, path) for name, path in files]
    if len(channels) == 1 and not all(m and m[2] == "0000" for m, _, _ in numbered):
        if len(dict(files)) < len(files):
            raise DataError(f"{source} holds .nii and .nii.gz files of the same name; keep one of each")
        return [Case(name, (path,)) for name, path in files]
    if len(channels) > 1 and not any(m for m, _, _ in numbered):
        return [Case(name, (path,) * len(channels), stacked=True) for name, path in files]
    groups: dict[str, dict[int, Path]] = {}
    problems = [f"{path.name} has no channel number" for m, _, path in numbered if m is None]
    for match, _, path in numbered:
        if match is not None:
            groups.setdefault(match[1], {})[int(match[2])] = path
    wanted = set(range(len(channels)))
    problems += [f"{name} has channel files {sorted(have)}" for name, have in groups.items() if set(have) != wanted]
    if problems:
        raise DataError(
            f"the run needs {len(channels)} channels ({', '.join(channels)}), so each case CASE_0000.nii.gz to "
            f"CASE_{len(channels) - 1:04d}.nii.gz in {source}: " + "; ".join(problems[:10])
        )
    return [Case(name, tuple(have[n] for n in sorted(have))) for name, have in groups.items()]


def _by_name(source: Path) -> list[tuple[str, Path]]:
    """What each file is called, and the file. Raises DataError where there is none."""
    if is_pattern(source):
        return list(by_wildcard(Path(), str(source), "input").files.items())
    source = as_on_disk(source)
    if not os.path.lexists(source):
        raise DataError(f"the input does not exist: {source.absolute()}")
    if not source.is_dir():
        if wrong := not_a_file(source):
            raise DataError(f"input={source}: {wrong}")
        files = [source]
    else:
        files = sorted(p for p in source.iterdir() if is_volume(p) and p.is_file())
    if not files or not all(map(is_volume, files)):
        raise DataError(f"{source} holds no NIfTI files (.nii or .nii.gz){_below(source)}")
    return [(stem(p), p) for p in files]


def _below(source: Path) -> str:
    """What to type where the files lie in folders of a folder."""
    if not source.is_dir():
        return ""
    for folder in itertools.islice(folders_below(source), LOOKED_AT):
        if found := next((p for p in sorted(folder.iterdir()) if is_volume(p)), None):
            ending = ".nii.gz" if found.name.lower().endswith(".gz") else ".nii"
            return (
                f", but {found.relative_to(source)} lies below: 'input=\"{source}/**/*{ending}\"' takes what is there"
            )
    return ""


def label_notes(cases: Sequence[Case]) -> list[str]:
    """A line on the input files that look like label maps: whole numbers from 0, and few different ones. Several thousand
    voxels of a file are looked at; a gzip file that is hardly smaller than its voxels is no label map and is not unpacked."""
    alike = [path for case in cases for path in dict.fromkeys(case.images) if _like_labels(path)]
    if not alike:
        return []
    names = ", ".join(p.name for p in alike[:8]) + (f" and {len(alike) - 8} more" if len(alike) > 8 else "")
    what = "looks like a label map" if len(alike) == 1 else "look like label maps"
    return [f"note: {names} {what} and no image; a glob leaves them out, such as 'input=\"FOLDER/*_ct.nii.gz\"'"]


def _like_labels(path: Path) -> bool:
    try:
        image = load_nifti(path)
        size = max(1, math.prod(image.shape)) * image.get_data_dtype().itemsize
        if path.name.lower().endswith(".gz") and size > SMALL and path.stat().st_size > size / PACKED:
            return False
        values = np.asanyarray(image.dataobj[..., :: max(1, image.shape[-1] // 8)])
        if not values.size:
            return False
        low, high = values.min(), values.max()
        whole = low == 0 and 0 < high <= np.iinfo(np.uint16).max and not np.any(values % 1)
        return bool(whole) and len(np.unique(values)) <= FEW
    except (*UNREADABLE, TypeError, IndexError):  # predicting the case says what is wrong with it
        return False


def holds_dicom(source: Path) -> bool:
    """Whether a folder is to be read as DICOM: it holds no NIfTI file, but files with DICOM's mark."""
    source = as_on_disk(source)
    if not os.path.isdir(source) or any(is_volume(p) for p in source.iterdir()):
        return False
    return any(_has_mark(p) for p in source.rglob("*") if p.is_file() and not p.name.startswith("."))


def _has_mark(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(132)[128:] == b"DICM"


def cases_from_dicom(
    source: Path, folder: Path, channels: Sequence[str]
) -> tuple[list[Case], list[Series], list[str], list[str]]:
    """The series of a folder tree as NIfTI files in ``folder`` (those that are there stay), as cases; the series; the problems
    of those that cannot be used; notes on files left out. Raises DataError where there is none."""
    if len(channels) != 1:
        raise DataError(f"the run takes {len(channels)} channels a case; DICOM is read for one. Convert to NIfTI first")
    found, notes = find_series(as_on_disk(source))
    if not found:
        raise DataError(
            f"{source} holds no DICOM series of at least 3 slices" + (": " + "; ".join(notes) if notes else "")
        )
    cases, problems, usable = [], [], []
    for series in found:
        path = folder / f"{series.id}.nii.gz"
        try:
            if not path.exists():
                notes += [f"{series.id}: {note}" for note in convert_series(series, path)]
        except DataError as error:
            problems.append(str(error))
            continue
        cases.append(Case(series.id, (path,)))
        usable.append(series)
    return cases, usable, problems, notes
