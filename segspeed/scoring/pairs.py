"""Which prediction belongs to which label: the files of two folders, joined by name, or of two globs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from segspeed.data.files import is_volume, stem
from segspeed.data.wildcards import as_on_disk, by_wildcard, composed, is_pattern
from segspeed.types import DataError


@dataclass(frozen=True)
class ScorePair:
    """One case to score: the file of the prediction and that of the reference. A case without a patient is one; ``fold`` names
    the part of a cross-validation that it was held out in."""

    id: str
    prediction: Path
    reference: Path
    patient: str = ""
    site: str = ""
    fold: str = ""

    def __post_init__(self) -> None:
        if not self.patient:
            object.__setattr__(self, "patient", self.id)


def find_pairs(predictions: Path, labels: Path, *, allow_extra: bool = False) -> list[ScorePair]:
    """Pair the NIfTI files of two folders by their names without .nii or .nii.gz, sorted by name. Either may be a glob
    (``maps/*_ct.nii.gz``): the text that its wildcards stand for is the name then.

    Hidden files (``._x`` of macOS) and folders inside are passed over. ``allow_extra`` lets predictions be there that
    have no label; a label without a prediction is an error always, for left out it would not lower any mean.
    Raises DataError with everything that is wrong in both folders.
    """
    problems: list[str] = []
    predicted = _files(predictions, "predictions", problems)
    real = _files(labels, "labels", problems)
    if predicted and real:
        missing = [real[name].name for name in real if name not in predicted]
        extra = [predicted[name].name for name in predicted if name not in real]
        if missing:
            problems.append(
                f"labels without a prediction ({len(missing)}): {', '.join(missing)}. "
                f"Predict them into {predictions}, or score against a folder without them. Names that differ by an ending are "
                'joined by two globs: predictions="P/*_ct.nii.gz" labels="L/*_seg.nii.gz"'
            )
        if extra and not allow_extra:
            problems.append(
                f"predictions without a label ({len(extra)}): {', '.join(extra)}. "
                "The name of a prediction is that of its label; take out what has none"
            )
    if problems:
        raise DataError("predictions and labels cannot be paired:\n" + "\n".join(f"- {p}" for p in problems))
    return [ScorePair(name, predicted[name], real[name]) for name in sorted(real)]


def _files(folder: Path, role: str, problems: list[str]) -> dict[str, Path]:
    """Name without ending, or what the wildcards of a glob stand for -> file; what is wrong goes to ``problems``."""
    if is_pattern(folder):
        try:
            return dict(by_wildcard(Path(), str(folder), role).files)
        except DataError as error:
            problems.append(str(error))
            return {}
    folder = as_on_disk(folder)
    if not os.path.isdir(folder):
        what = "is a file, not a folder" if os.path.exists(folder) else "does not exist"
        problems.append(f"the folder of the {role} {what}: {folder}")
        return {}
    try:
        listed = sorted(p for p in folder.iterdir() if is_volume(p) and p.is_file())
    except OSError as error:
        problems.append(f"the folder of the {role} cannot be read: {folder} ({error.strerror})")
        return {}
    if not listed:
        problems.append(
            f"the folder of the {role} holds no .nii or .nii.gz file: {folder} (folders inside it are not searched)"
        )
    groups: dict[str, list[Path]] = {}
    for path in listed:
        # macOS stores an accent as a character of its own: the same name has other bytes on another machine
        name = composed(stem(path))
        groups.setdefault(name, []).append(path)
    for name, paths in groups.items():
        if len(paths) > 1:
            problems.append(f"{role}: {' and '.join(p.name for p in paths)} are both case {name!r}; keep one of them")
    return {name: paths[0] for name, paths in groups.items()}
