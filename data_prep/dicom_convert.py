"""One case of a DICOM tree as NIfTI: channels on one grid, the label map on it, and a record of what was done."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel.orientations import apply_orientation, io_orientation, ornt_transform
from scipy import ndimage

from data_prep.dicom_cases import Wanted, numbers_for
from data_prep.dicom_labels import LabelObject, masks_of
from segspeed.data.dicom import Stack, stack_series
from segspeed.data.dicom_files import digest
from segspeed.data.dicom_pixels import smallest_type
from segspeed.data.dicom_stack import labels_to_grid
from segspeed.data.files import save_nifti
from segspeed.data.geometry import VolumeError, corner_distance_mm, read_volume, to_file_axes
from segspeed.data.labels import INTEGER_TOLERANCE
from segspeed.jsonio import from_plain, write_json
from segspeed.types import DataError

FORMAT = 2  # of the files a conversion writes; raise it when they change
TOLERANCE_MM = 0.1  # corners of two grids that are the same


@dataclass(frozen=True)
class Outcome:
    """What became of one case. ``values`` are those of its label map, background left out."""

    id: str
    patient: str
    status: str  # converted, there, failed
    images: tuple[str, ...] = ()  # relative to the folder
    label: str | None = None
    values: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None
    key: str = ""  # digest of the sources and settings


@dataclass(frozen=True)
class Job:
    """A case and the settings it is converted with."""

    wanted: Wanted
    out: Path = field(repr=False)
    structures: tuple[str, ...]
    resample: bool
    key: str


def record_path(out: Path, case_id: str) -> Path:
    """Where the outcome of a case is kept."""
    return out / "records" / f"{case_id}.json"


def source_key(wanted: Wanted, settings: str, salt: str) -> str:
    """Digest of everything a case's files depend on: which source files, their sizes and times, and the settings."""
    parts = [str(FORMAT), settings, wanted.id, wanted.patient]
    files = [(f.uid, f.file) for series in wanted.channels for f in series.frames]
    files += [(one.uid, one.file) for one in wanted.objects]
    files += [("label", wanted.label_file)] if wanted.label_file is not None else []
    for uid, path in sorted({(uid, path) for uid, path in files}):
        try:
            info = path.stat()
        except OSError:  # gone since the headers were read; converting it will tell
            continue
        parts.append(f"{uid}|{info.st_size}|{info.st_mtime_ns}")
    return digest("\n".join(parts), salt, 32)


def known_outcome(job: Job) -> Outcome | None:
    """What an earlier call has made of the case, if its files are there and of the same sources and settings."""
    return known_outcome_at(job.out, job.wanted.id, job.key)


def known_outcome_at(out: Path, case_id: str, key: str) -> Outcome | None:
    """What an earlier call made of a case, if it was made from the same sources (``key``); else None."""
    path = record_path(out, case_id)
    try:
        found = from_plain(json.loads(path.read_text(encoding="utf-8")), Outcome)
    except (OSError, ValueError):
        return None  # never made, or torn by a kill: it is made again
    files = [*found.images, *([found.label] if found.label else [])]
    if found.key != key or not all((out / name).is_file() for name in files):
        return None
    return replace(found, status="there")


def convert_case(job: Job) -> Outcome:
    """Convert one case and write its record last. What is wrong with it is told, never raised."""
    wanted = job.wanted
    try:
        made = _convert(job)
        write_json(record_path(job.out, wanted.id), made)
        return made
    except DataError as error:
        problem = str(error)
    except Exception as error:  # one bad case must not end the work on the others; its text may quote a header
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"could not be converted: {type(error).__name__} in {Path(place.filename).name}, line {place.lineno}"
    record_path(job.out, wanted.id).unlink(missing_ok=True)
    return Outcome(wanted.id, wanted.patient, "failed", notes=wanted.notes, problem=problem)


def _convert(job: Job) -> Outcome:
    wanted, out = job.wanted, job.out
    stacks = [stack_series(series) for series in wanted.channels]
    notes = [*wanted.notes, *(note for stack in stacks for note in stack.notes)]
    first = stacks[0]
    arrays = [first.array]
    for number, stack in enumerate(stacks[1:], start=1):
        array, note = _on_grid(stack, first, job, number)
        arrays.append(array)
        notes += [note] if note else []
    label: str | None = None
    values: tuple[int, ...] = ()
    if wanted.objects:
        drawn, told = structures_on(wanted.objects, job.structures, first)
        notes += told
    elif wanted.label_file is not None:
        drawn = label_from_file(wanted.label_file, first)
    if wanted.labelled:
        values = tuple(int(v) for v in np.unique(drawn) if v)
        notes += [] if values else ["its label has no foreground"]
        label = f"labels/{wanted.id}.nii.gz"
    images = tuple(f"images/{wanted.id}_{n:04d}.nii.gz" for n in range(len(arrays)))
    for name, array in zip(images, arrays, strict=True):
        save_nifti(_nifti(smallest_type(array), first), out / name)
    if label is not None:
        save_nifti(_nifti(drawn, first), out / label)
    return Outcome(wanted.id, wanted.patient, "converted", images, label, values, tuple(notes), None, job.key)


def _nifti(array: np.ndarray, stack: Stack) -> nib.Nifti1Image:
    """``(slices, rows, columns)`` on the grid of a stack, with units and nothing else in the header."""
    image = nib.Nifti1Image(np.ascontiguousarray(array.transpose(2, 1, 0)), stack.affine)
    image.header.set_xyzt_units("mm")
    return image


def structures_on(
    objects: Sequence[LabelObject], structures: Sequence[str], stack: Stack
) -> tuple[np.ndarray, list[str]]:
    """One number a voxel ``(slices, rows, columns)``: bit n is set inside ``structures[n]``. And notes on absent ones."""
    numbers = numbers_for(objects, structures)
    absent = [name for name in structures if name not in numbers]
    notes = [f"no structure called {', '.join(absent)}: background here"] if absent else []
    bits = np.zeros((len(stack.frames), *stack.grid.pixels), dtype=np.uint16)
    for one in objects:
        mine = {number: name for name, (owner, number) in numbers.items() if owner is one}
        if not mine:
            continue
        masks, told = masks_of(one, list(mine), stack)
        notes += told
        for number, mask in masks.items():
            bits |= mask.astype(np.uint16) << structures.index(mine[number])
            notes += [] if mask.any() else [f"{mine[number]} is named but encloses no voxel centre"]
    kind = np.uint8 if len(structures) <= 8 else np.uint16
    return labels_to_grid(bits, stack.grid).astype(kind), notes


def label_from_file(path: Path, stack: Stack) -> np.ndarray:
    """A NIfTI label map ``(slices, rows, columns)`` on the grid of a stack; its axes may be turned and flipped.

    Raises DataError when it lies on another grid or holds no whole numbers. The file's name is not quoted.
    """
    try:
        volume = read_volume(path, scaled=False)
    except VolumeError as error:
        raise DataError(f"its label map: {error.kind}") from error
    back = to_file_axes(volume.array, volume.geometry())
    turn = ornt_transform(io_orientation(volume.affine), io_orientation(stack.affine))
    array = apply_orientation(back, turn)
    affine = volume.affine @ nib.orientations.inv_ornt_aff(turn, volume.file_shape)
    columns, rows, count = stack.grid.shape
    if array.shape != (columns, rows, count):
        raise DataError(f"its label map has the shape {array.shape}, but its image {(columns, rows, count)}")
    apart = corner_distance_mm(affine, array.shape, stack.affine, stack.grid.shape)
    if apart > TOLERANCE_MM:
        raise DataError(f"its label map lies elsewhere than its image: corners up to {apart:.2f} mm apart")
    whole = array
    if array.dtype.kind == "f":
        whole = np.rint(array)
        if not np.isfinite(array).all() or abs(array - whole).max() > max(INTEGER_TOLERANCE, volume.step):
            raise DataError("its label map holds values that are no whole numbers")
    if whole.min() < 0 or whole.max() > np.iinfo(np.uint16).max:
        raise DataError("its label map holds values below 0 or above 65535")
    return whole.transpose(2, 1, 0).astype(np.uint8 if whole.max() < 256 else np.uint16)


def _on_grid(stack: Stack, first: Stack, job: Job, number: int) -> tuple[np.ndarray, str | None]:
    """A further channel on the first one's grid. Raises DataError where it lies elsewhere and may not be resampled."""
    series = job.wanted.channels
    same = stack.grid.shape == first.grid.shape
    apart = corner_distance_mm(stack.affine, stack.grid.shape, first.affine, first.grid.shape)
    if same and apart <= TOLERANCE_MM:
        return stack.array, None
    grids = " and ".join("x".join(map(str, s.grid.shape)) for s in (stack, first))
    if not job.resample:
        raise DataError(
            f"channel {number} lies on another grid than the first ({grids} voxels, corners up to {apart:.2f} mm apart); "
            "resample=true puts it on the first one's grid"
        )
    if series[number].reference != series[0].reference or not series[0].reference:
        raise DataError(
            f"channel {number} has another frame of reference than the first, so nothing says how they lie to each other; "
            "register them first"
        )
    matrix = np.linalg.inv(stack.affine) @ first.affine
    low = float(stack.array.min())
    moved = ndimage.affine_transform(
        stack.array.transpose(2, 1, 0), matrix[:3, :3], matrix[:3, 3], first.grid.shape, np.float32, 1, "constant", low
    )
    outside = _outside(stack, first, matrix)
    note = f"channel {number} resampled linearly onto the first one's grid ({grids} voxels)"
    return moved.transpose(2, 1, 0), note + (f"; {outside:.0%} of the grid lies outside it" if outside > 0.005 else "")


def _outside(stack: Stack, first: Stack, matrix: np.ndarray) -> float:
    """Share of the first grid's voxels (every fourth an axis) that the other does not cover."""
    steps = [np.arange(0, n, 4) for n in first.grid.shape]
    at = np.stack(np.meshgrid(*steps, indexing="ij"), axis=-1) @ matrix[:3, :3].T + matrix[:3, 3]
    size = np.array(stack.grid.shape)
    return float(1 - ((at >= -0.5) & (at <= size - 0.5)).all(-1).mean())
