"""DICOM series in, DICOM SEG out. Nothing of a header reaches a file but the SEG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from segspeed.data.dicom_files import NEEDED, Frame, Series, read_tree
from segspeed.data.dicom_pixels import read_planes, smallest_type
from segspeed.data.dicom_stack import Grid, grid_of, labels_to_slices, same_place, to_grid
from segspeed.data.files import save_nifti
from segspeed.types import DataError, first_line

__all__ = ["Series", "Stack", "convert_series", "find_series", "read_series", "save_segmentation", "stack_series"]

TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's patient axes run to left and posterior
EMPTY_ALLOWED = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber",
    "ReferringPhysicianName",
)  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """A series as one volume: ``array (slices, rows, columns)`` on ``grid``, made of ``frames`` in order along the axis."""

    array: np.ndarray
    grid: Grid
    frames: tuple[Frame, ...]
    heads: tuple[Any, ...]  # pydicom data sets of the files, without pixels
    notes: tuple[str, ...]

    @property
    def image(self) -> nib.Nifti1Image:
        """As NIfTI (column, row, slice), right, anterior and up positive."""
        return nib.Nifti1Image(smallest_type(self.array).transpose(2, 1, 0), self.affine)

    @property
    def affine(self) -> np.ndarray:
        """4x4, (column, row, slice) to mm, right, anterior and up positive."""
        made: np.ndarray = TO_RAS @ self.grid.affine
        return made


def find_series(folder: Path) -> tuple[list[Series], list[str]]:
    """Volumes among the DICOM files of a folder tree, and notes on what was left out (see `read_tree`)."""
    tree = read_tree(folder)
    return list(tree.series), list(tree.notes)


def stack_series(series: Series) -> Stack:
    """Decode a series, drop doubled slices, and put the others on a regular grid.

    Raises DataError when slices are missing, lie in one place with different pixels, are empty, or cannot be decoded.
    """
    try:
        return _stack(series)
    except DataError as error:
        raise DataError(f"{series.id}: {error}") from error


def _stack(series: Series) -> Stack:
    places = same_place(series.frames)
    if len(places) < 2:
        raise DataError("all its slices lie in one place: a film over time, or a header without positions")
    order = [n for place in places for n in place]
    frames = [series.frames[n] for n in order]
    values, empty, heads = read_planes(frames)
    keep, copies = _without_copies([len(p) for p in places], values, frames, heads)
    if copies:
        frames, values, empty = [frames[n] for n in keep], values[keep], empty[keep]
    grid = grid_of(frames)
    filled = np.flatnonzero(~empty)
    if not len(filled):
        raise DataError("every voxel is 0; the decoder failed, or the series is empty")
    inside = int(empty[filled[0] : filled[-1]].sum())
    if inside:
        raise DataError(
            f"{inside} slices inside the volume are 0 in every pixel: they were not decoded or not transferred. Export the "
            "series again"
        )
    notes = [f"{copies} slices were there twice with the same pixels; one of each is used"] if copies else []
    notes += grid.notes
    array = to_grid(values, grid, fill=float(values.min()))
    if grid.resampled and smallest_type(values).dtype == np.int16:
        np.rint(array, out=array)  # whole numbers as the scanner gave: half the size on disk
    if series.modality == "CT" and values.min() >= 0:
        notes.append(
            "CT without a value below 0: not in HU, or cut to a part without air; its rescale tags may be missing"
        )
    return Stack(array, grid, tuple(frames), tuple(heads), tuple(notes))


def _without_copies(
    sizes: Sequence[int], values: np.ndarray, frames: Sequence[Frame], heads: Sequence[Any]
) -> tuple[list[int], int]:
    """Indices of one plane a place, and how many copies were dropped. Raises DataError for two images in one place."""
    keep, start, differ = [], 0, 0
    for size in sizes:
        members = range(start, start + size)
        first = values[start]
        differ += any(not np.array_equal(values[n], first) for n in members[1:])
        keep.append(start)
        start += size
    if differ:
        told = _told_apart_by(heads)
        raise DataError(
            f"{differ} slices lie where another does, with other pixels: two phases, echoes or time points in one series"
            + (f" (its files differ in {', '.join(told)})" if told else "")
            + ". Export each as a series of its own, or keep one of each"
        )
    return keep, len(frames) - len(keep)


def _told_apart_by(heads: Sequence[Any]) -> list[str]:
    """Names of the tags that may tell the images of one series apart; never their values."""
    keywords = (
        "AcquisitionNumber", "EchoNumbers", "EchoTime", "TemporalPositionIdentifier", "DiffusionBValue", "TriggerTime",
        "ImageType", "ContrastBolusAgent", "ConvolutionKernel",
    )  # fmt: skip
    return [k for k in keywords if len({str(h.get(k, "")) for h in heads}) > 1]


def read_series(series: Series) -> tuple[nib.Nifti1Image, Stack, list[Any]]:
    """The volume as NIfTI (column, row, slice) in real-world values, how its slices lie in it, and their data sets.

    Raises DataError as `stack_series` does.
    """
    stack = stack_series(series)
    return stack.image, stack, list(stack.heads)


def convert_series(series: Series, path: Path) -> tuple[str, ...]:
    """Write a series as NIfTI that holds its geometry and values and nothing else; notes on what was done to it."""
    stack = stack_series(series)
    save_nifti(stack.image, path)
    return stack.notes


def save_segmentation(label_map: Path, series: Series, path: Path, labels: Mapping[str, Sequence[int]]) -> None:
    """Write a predicted label map (on the grid of `convert_series`) as DICOM SEG, a segment a class that is there.

    Of a series that was resampled (tilted, unevenly spaced) the map goes back to the source slices, nearest voxel. It
    belongs to the patient's study and carries the identity of its source, as every DICOM object does. Raises DataError.
    """
    highdicom = _highdicom()
    from pydicom.sr.codedict import codes

    from segspeed import __version__

    stack = stack_series(series)
    values = np.asarray(nib.load(label_map).dataobj).transpose(2, 1, 0)
    if values.shape != stack.grid.shape[::-1]:
        raise DataError(f"{series.id}: the label map is not on the grid of its series; predict it again")
    values = labels_to_slices(values, stack.grid)
    present = [(name, v) for name, v in labels.items() if np.isin(values, v).any()]
    if not present:
        return
    sources, order = _sources(series, stack)
    for one in sources:
        for keyword in EMPTY_ALLOWED:
            if keyword not in one:
                setattr(one, keyword, "")  # the standard lets these be empty, not absent; many files lack them
    masks = np.stack([np.isin(values, v) for _, v in present], axis=-1).astype(np.uint8)[order]
    segments = [
        highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=name,
            segmented_property_category=codes.SCT.AnatomicalStructure,
            segmented_property_type=codes.SCT.AnatomicalStructure,
            algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=highdicom.AlgorithmIdentificationSequence(
                name="segspeed", version=__version__, family=codes.DCM.ArtificialIntelligence
            ),
        )
        for number, (name, _) in enumerate(present, start=1)
    ]
    try:
        made = highdicom.seg.Segmentation(
            source_images=sources,
            pixel_array=masks,
            segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
            segment_descriptions=segments,
            series_instance_uid=highdicom.UID(),
            series_number=900,
            sop_instance_uid=highdicom.UID(),
            instance_number=1,
            manufacturer="segspeed",
            manufacturer_model_name="segspeed",
            software_versions=__version__,
            device_serial_number="0",
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{series.id}: no DICOM SEG can be made of it ({first_line(error)})") from error
    made.save_as(path)


def _sources(series: Series, stack: Stack) -> tuple[list[Any], list[int]]:
    """Data sets for the SEG and, for each of their planes in order, its index among the stack's slices."""
    by_uid = {str(h.SOPInstanceUID): h for h in stack.heads}
    if all(f.number is None for f in stack.frames):
        return [by_uid[f.uid] for f in stack.frames], list(range(len(stack.frames)))
    numbers = [f.number for f in stack.frames]
    if len(stack.heads) > 1 or sorted(n or 0 for n in numbers) != list(range(int(stack.heads[0].NumberOfFrames))):
        raise DataError(
            f"{series.id}: it is spread over several multi-frame files or is a part of one, of which no DICOM SEG can be "
            "made; use the NIfTI label map"
        )
    return list(stack.heads), [int(n) for n in np.argsort([n or 0 for n in numbers])]


def _highdicom() -> Any:
    try:
        import highdicom
    except ImportError as error:
        raise DataError(NEEDED) from error
    return highdicom
