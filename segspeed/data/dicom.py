"""DICOM series in, DICOM SEG out. Geometry and rescaling are highdicom's; nothing of a header reaches a file but the SEG."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from segspeed.data.files import save_nifti
from segspeed.types import DataError, first_line

MIN_SLICES = 3  # fewer make a localizer, not a volume
TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's patient axes run to left and posterior
EMPTY_ALLOWED = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber",
    "ReferringPhysicianName",
)  # fmt: skip
NEEDED = "reading DICOM needs the extra: pip install -e '.[dicom]'"


@dataclass(frozen=True)
class Series:
    """The slices of one volume. ``id`` is a digest of the series UID: the same each time, and nobody's name."""

    id: str
    files: tuple[Path, ...]


def find_series(folder: Path) -> tuple[list[Series], list[str]]:
    """Volumes among the DICOM files of a folder tree, and notes on what was left out.

    Slices belong together by series, orientation, matrix and pixel spacing, so that a localizer in the same series goes its
    own way. Files that are no DICOM are passed over.
    """
    pydicom = _pydicom()
    tags = ["SeriesInstanceUID", "ImageOrientationPatient", "ImagePositionPatient", "Rows", "Columns", "PixelSpacing"]
    groups: dict[tuple[Any, ...], list[Path]] = defaultdict(list)
    other = 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
        try:
            head = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=tags)
        except (pydicom.errors.InvalidDicomError, OSError, EOFError):
            other += 1
            continue
        if "ImagePositionPatient" not in head or "Rows" not in head:
            other += 1
            continue
        turned = tuple(round(float(v), 2) for v in head.ImageOrientationPatient)
        spacing = tuple(round(float(v), 4) for v in head.get("PixelSpacing", (0, 0)))
        groups[str(head.SeriesInstanceUID), turned, int(head.Rows), int(head.Columns), spacing].append(path)
    notes = [f"{other} files are no slices of a DICOM volume"] if other else []
    found: list[Series] = []
    for number, ((uid, *_), files) in enumerate(sorted(groups.items(), key=lambda g: (-len(g[1]), str(g[0])))):
        name = f"series_{hashlib.sha256(uid.encode()).hexdigest()[:10]}"
        if len(files) < MIN_SLICES:
            notes.append(f"{name}: {len(files)} slice(s) of their own orientation or size (a localizer) left out")
            continue
        taken = any(s.id == name for s in found)
        found.append(Series(f"{name}_{number}" if taken else name, tuple(files)))
    return found, notes


def read_series(series: Series) -> tuple[nib.Nifti1Image, Any, list[Any]]:
    """The volume as NIfTI (column, row, slice) in real-world values, highdicom's Volume, and the data sets of its slices.

    Raises DataError when slices are missing, doubled, unevenly spaced, sheared or cannot be decoded.
    """
    pydicom, highdicom = _pydicom(), _highdicom()
    slices = [pydicom.dcmread(path) for path in series.files]
    places = [tuple(round(float(v), 3) for v in s.ImagePositionPatient) for s in slices]
    if len(set(places)) < len(places):
        raise DataError(
            f"{series.id}: {len(places) - len(set(places))} slices lie where another does (two phases, or copies of files); "
            "keep one of each"
        )
    try:
        volume = highdicom.get_volume_from_series(slices, dtype=np.float32, rtol=0.01)
    except (ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        text = first_line(error)
        if "decod" in text.lower() or "decompress" in text.lower() or "plugin" in text.lower():
            raise DataError(
                f"{series.id}: its pixels cannot be decoded ({text}); pip install pylibjpeg[all]"
            ) from error
        raise DataError(
            f"{series.id}: its {len(slices)} slices make no regular volume ({text}). Slices may be missing or unevenly "
            "spaced, or the gantry was tilted"
        ) from error
    if not volume.array.any():
        raise DataError(f"{series.id}: every voxel is 0; the decoder failed, or the series is empty")
    array = np.ascontiguousarray(volume.array.transpose(2, 1, 0))
    affine = (TO_RAS @ volume.affine)[:, [2, 1, 0, 3]]
    if np.array_equal(array, np.rint(array)) and abs(array).max() < 2**15:
        array = array.astype(np.int16)
    return nib.Nifti1Image(array, affine), volume, slices


def convert_series(series: Series, path: Path) -> None:
    """Write a series as NIfTI that holds its geometry and values and nothing else."""
    image, _, _ = read_series(series)
    save_nifti(image, path)


def save_segmentation(label_map: Path, series: Series, path: Path, labels: Mapping[str, Sequence[int]]) -> None:
    """Write a predicted label map (on the grid of `convert_series`) as DICOM SEG, a segment a class that is there.

    It belongs to the patient's study and carries the identity of its source, as every DICOM object does.
    """
    highdicom = _highdicom()
    from pydicom.sr.codedict import codes

    from segspeed import __version__

    _, volume, slices = read_series(series)
    values = np.asarray(nib.load(label_map).dataobj).transpose(2, 1, 0)
    for one in slices:
        for keyword in EMPTY_ALLOWED:
            if keyword not in one:
                setattr(one, keyword, "")  # the standard lets these be empty, not absent; many files lack them
    present = [(name, v) for name, v in labels.items() if np.isin(values, v).any()]
    if not present:
        return
    masks = np.stack([np.isin(values, v) for _, v in present], axis=-1).astype(np.uint8)
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
            source_images=slices,
            pixel_array=volume.with_array(masks, channels={"SegmentNumber": list(range(1, len(present) + 1))}),
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


def _pydicom() -> Any:
    try:
        import pydicom
    except ImportError as error:
        raise DataError(NEEDED) from error
    return pydicom


def _highdicom() -> Any:
    try:
        import highdicom
    except ImportError as error:
        raise DataError(NEEDED) from error
    return highdicom
