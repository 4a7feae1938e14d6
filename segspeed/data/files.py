"""NIfTI files by name, and writing one whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import nibabel as nib

SUFFIXES = (".nii.gz", ".nii")


def is_volume(path: Path) -> bool:
    """Whether a name is that of a NIfTI file, in any case of letters. Hidden files (``._x`` of macOS) are none."""
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")


def stem(path: Path) -> str:
    """File name without .nii or .nii.gz; dots, spaces and letters of the rest stay as they are."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.name


def save_nifti(image: nib.Nifti1Image, path: Path) -> None:
    """Write beside the place, then rename: what is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        nib.save(image, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
