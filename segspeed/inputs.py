"""What there is to predict: NIfTI files by case, or DICOM series turned into NIfTI without their identity."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from segspeed.data.dicom import Series, convert_series, find_series
from segspeed.data.files import is_volume, stem
from segspeed.types import Case, DataError

CHANNEL = re.compile(r"(.+)_(\d{4})")


def find_cases(source: Path, channels: Sequence[str]) -> list[Case]:
    """The cases of a NIfTI file or a folder: one file a case, or ``ID_0000.nii.gz`` ... a channel (also for one channel).
    Where no file has a channel's number, several channels lie along the fourth axis of each.

    Raises DataError with everything that does not fit.
    """
    if not source.exists():
        raise DataError(f"the input does not exist: {source.absolute()}")
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if is_volume(p) and p.is_file())
    if not files or not all(map(is_volume, files)):
        raise DataError(f"{source} holds no NIfTI files (.nii or .nii.gz)")
    numbered = [CHANNEL.fullmatch(stem(p)) for p in files]
    if len(channels) == 1 and not all(m and m[2] == "0000" for m in numbered):
        found = {stem(p): [p] for p in files}
        if len(found) < len(files):
            raise DataError(f"{source} holds .nii and .nii.gz files of the same name; keep one of each")
        return [Case(name, tuple(paths)) for name, paths in found.items()]
    if len(channels) > 1 and not any(numbered):
        return [Case(stem(p), (p,) * len(channels), stacked=True) for p in files]
    groups: dict[str, dict[int, Path]] = {}
    problems = [f"{p.name} has no channel number" for p, m in zip(files, numbered, strict=True) if m is None]
    for path, match in zip(files, numbered, strict=True):
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


def holds_dicom(source: Path) -> bool:
    """Whether a folder is to be read as DICOM: it holds no NIfTI file, but files with DICOM's mark."""
    if not source.is_dir() or any(is_volume(p) for p in source.iterdir()):
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
    found, notes = find_series(source)
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
