"""NIfTI files by name, and writing one whole or not at all."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import nibabel as nib
from nibabel.fileholders import FileHolder
from nibabel.openers import ImageOpener

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


def load_nifti(path: Path) -> nib.spatialimages.SpatialImage:
    """As ``nib.load``, which takes .nii and .NII for NIfTI, but not .Nii. Raises what nibabel raises."""
    if path.name[len(stem(path)) :][:4] in ("", ".nii", ".NII"):
        return nib.load(path)
    with ImageOpener(str(path), "rb") as file:
        second = file.read(4) in (struct.pack("<i", 540), struct.pack(">i", 540))  # the length of a NIfTI-2 header
    kind = nib.Nifti2Image if second else nib.Nifti1Image
    holder = FileHolder(filename=str(path))
    return kind.from_file_map({"header": holder, "image": holder})


def not_a_file(path: Path) -> str | None:
    """Why there is no file to read at ``path``; None where there is one. Reading a pipe would wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        link = " (a link whose target is not there)" if os.path.islink(path) else ""
        return f"the file does not exist: {path.name}{link}"
    except (OSError, ValueError) as error:  # a name too long, a circle of links, no permission, NUL in the name
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return f"{path.name} is a folder, not a file"
    return None if stat.S_ISREG(mode) else f"{path.name} is not a regular file but a device, pipe or socket"


def save_nifti(image: nib.Nifti1Image, path: Path) -> None:
    """Write beside the place, then rename: what is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        nib.save(image, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
