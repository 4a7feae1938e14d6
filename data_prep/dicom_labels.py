"""Structures of DICOM SEG and RTSTRUCT as masks on the slices of the series they were drawn on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.polygons import beside, distinct, inside
from segspeed.data.dicom import Stack
from segspeed.data.dicom_files import TURNED, UNREADABLE, Frame, from_groups, make_frame, pydicom_module, silent
from segspeed.data.dicom_person import patient_id, person_of
from segspeed.data.dicom_pixels import check_decoder
from segspeed.data.dicom_stack import axes, depths
from segspeed.types import DataError

OFF_PLANE = 0.1  # a contour or frame belongs to a slice that is nearer than this share of the slice spacing
HALF = 0.5  # share of a fractional segment's full value that makes a voxel part of it


@dataclass(frozen=True)
class LabelObject:
    """One SEG or RTSTRUCT file: what it names and what it was drawn on. Identifiers stay out of its ``repr``."""

    file: Path = field(repr=False)
    kind: str  # SEG or RTSTRUCT
    names: Mapping[int, str]  # segment or ROI number -> name as the file has it
    uid: str = field(default="", repr=False)
    patient: str = field(default="", repr=False)
    study: str = field(default="", repr=False)
    series: tuple[str, ...] = field(default=(), repr=False)  # SeriesInstanceUIDs it refers to
    images: frozenset[str] = field(default=frozenset(), repr=False)  # SOPInstanceUIDs it refers to
    references: tuple[str, ...] = field(default=(), repr=False)  # FrameOfReferenceUIDs
    place: int = 0  # among the SEG and RTSTRUCT files of the tree, sorted by path, from 1
    person: frozenset[str] = field(
        default=frozenset(), repr=False
    )  # names and ids of the patient, as the file has them


def plain(name: str) -> str:
    """A structure's name for comparing: lower case, single spaces."""
    return re.sub(r"\s+", " ", name).strip().casefold()


def read_object(path: Path, place: int = 0) -> LabelObject:
    """What a SEG or RTSTRUCT file holds, without its pixels. Raises DataError when it cannot be read."""
    pydicom = pydicom_module()
    with silent():
        try:
            one = pydicom.dcmread(path, stop_before_pixels=True)
            kind = str(one.Modality)
            names = _segments(one) if kind == "SEG" else _rois(one)
            series, images, references = _drawn_on(one)
            return LabelObject(
                file=path,
                kind=kind,
                names=names,
                uid=str(one.get("SOPInstanceUID", "")),
                patient=patient_id(one),
                study=str(one.get("StudyInstanceUID", "")),
                series=tuple(dict.fromkeys(series)),
                images=frozenset(images),
                references=tuple(dict.fromkeys(references)),
                place=place,
                person=person_of(one),
            )
        except UNREADABLE as error:
            raise DataError(f"a SEG or RTSTRUCT file cannot be read ({type(error).__name__}); it is damaged") from error


def masks_of(one: LabelObject, wanted: Sequence[int], stack: Stack) -> tuple[dict[int, np.ndarray], list[str]]:
    """Masks ``(n, rows, columns)`` on the source slices of ``stack`` for the numbers in ``wanted``, and notes.

    Raises DataError where the object was drawn on planes that are none of the series' slices.
    """
    pydicom = pydicom_module()
    with silent():
        try:
            data = pydicom.dcmread(one.file)
            if one.kind == "SEG":
                return _seg_masks(pydicom, data, wanted, stack)
            return _contour_masks(data, wanted, stack)
        except DataError:
            raise
        except (RuntimeError, *UNREADABLE) as error:
            raise DataError(f"its {one.kind} cannot be read ({type(error).__name__}); the file is damaged") from error


def _segments(one: Any) -> dict[int, str]:
    """Segment number -> label; one without a label is called by its number, so that it is never background unsaid."""
    found = {int(s.SegmentNumber): str(s.get("SegmentLabel", "") or "") for s in one.SegmentSequence}
    return {n: name if plain(name) else f"segment_{n}" for n, name in found.items()}


def _rois(one: Any) -> dict[int, str]:
    found = {int(r.ROINumber): str(r.get("ROIName", "") or "") for r in one.get("StructureSetROISequence", None) or []}
    return {n: name if plain(name) else f"roi_{n}" for n, name in found.items()}


def _drawn_on(one: Any) -> tuple[list[str], list[str], list[str]]:
    """Series, images and frames of reference that an object names."""
    series: list[str] = [str(s.SeriesInstanceUID) for s in one.get("ReferencedSeriesSequence", None) or []]
    images: list[str] = []
    references = [str(one.FrameOfReferenceUID)] if one.get("FrameOfReferenceUID", None) else []
    for frame in one.get("ReferencedFrameOfReferenceSequence", None) or []:
        references.append(str(frame.get("FrameOfReferenceUID", "")))
        for study in frame.get("RTReferencedStudySequence", None) or []:
            series += [str(s.SeriesInstanceUID) for s in study.get("RTReferencedSeriesSequence", None) or []]
    for roi in one.get("ROIContourSequence", None) or []:
        for contour in roi.get("ContourSequence", None) or []:
            for image in contour.get("ContourImageSequence", None) or []:
                images.append(str(image.ReferencedSOPInstanceUID))
    for group in one.get("PerFrameFunctionalGroupsSequence", None) or []:
        for derived in group.get("DerivationImageSequence", None) or []:
            for image in derived.get("SourceImageSequence", None) or []:
                images.append(str(image.ReferencedSOPInstanceUID))
    return series, images, references


class _Slices:
    """The slices of a stack as places for planes and points."""

    def __init__(self, stack: Stack) -> None:
        self.frames = stack.frames
        self.row, self.column, self.normal = axes(stack.frames[0])
        self.depth = depths(stack.frames)
        self.step = float(np.diff(self.depth).min())
        self.pixels = stack.grid.pixels

    def nearest(self, depth: float) -> tuple[int, float]:
        """The slice nearest to a place along the axis, and its distance in mm."""
        n = int(np.abs(self.depth - depth).argmin())
        return n, float(abs(self.depth[n] - depth))

    def beyond(self, depth: float) -> bool:
        half = self.step / 2
        return bool(depth < self.depth[0] - half or depth > self.depth[-1] + half)


def _seg_masks(pydicom: Any, data: Any, wanted: Sequence[int], stack: Stack) -> tuple[dict[int, np.ndarray], list[str]]:
    slices = _Slices(stack)
    check_decoder(data)
    pixels = pydicom.pixels.pixel_array(data)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    kind = str(data.get("SegmentationType", "BINARY"))
    full = float(data.get("MaximumFractionalValue", 1) or 1) if kind == "FRACTIONAL" else 1.0
    masks = {n: np.zeros((len(slices.frames), *slices.pixels), dtype=bool) for n in wanted}
    covered: dict[int, set[int]] = {n: set() for n in wanted}  # slices with a frame, which may be empty
    off: list[float] = []
    for index, plane in enumerate(pixels):
        frame = _seg_frame(data, index)
        if kind == "LABELMAP":
            drawn = {n: plane == n for n in wanted}
        else:
            number = from_groups(data, index, "SegmentIdentificationSequence", "ReferencedSegmentNumber")
            drawn = {int(number): plane >= HALF * full if full > 1 else plane > 0} if int(number) in masks else {}
        n, distance = slices.nearest(float(np.dot(frame.position, slices.normal)))
        near = distance <= OFF_PLANE * slices.step
        for number in drawn:
            covered[number] |= {n} if near else set()
        drawn = {n: mask for n, mask in drawn.items() if mask.any()}
        if not drawn:
            continue
        if not near:
            off.append(distance)
            continue
        for number, mask in drawn.items():
            masks[number][n] |= _onto(mask, frame, slices, n)
    if off:
        raise DataError(
            f"{len(off)} frames of its SEG lie up to {max(off):.2f} mm off every slice of the series: it was drawn on another "
            "grid. Export it on the grid of the series"
        )
    names, notes = _segments(data), []
    for number, mask in masks.items():
        filled = np.flatnonzero(mask.any(axis=(1, 2)))
        gaps = len(set(range(filled[0], filled[-1])) - covered[number]) if len(filled) else 0
        if gaps:
            notes.append(f"{names.get(number, number)}: {gaps} slices between its first and last have no frame")
    return masks, notes


def _seg_frame(data: Any, index: int) -> Frame:
    position = from_groups(data, index, "PlanePositionSequence", "ImagePositionPatient")
    orientation = from_groups(data, index, "PlaneOrientationSequence", "ImageOrientationPatient")
    spacing = from_groups(data, index, "PixelMeasuresSequence", "PixelSpacing")
    if position is None or orientation is None or spacing is None:
        raise DataError("its SEG does not say where its frames lie, so it cannot be laid on the series")
    return make_frame(Path(), index, data, position, orientation, spacing)


def _onto(mask: np.ndarray, frame: Frame, slices: _Slices, n: int) -> np.ndarray:
    """A SEG frame on the pixels of slice ``n``: each pixel centre looks up the frame's nearest pixel."""
    source = slices.frames[n]
    row, column, normal = axes(frame)
    if abs(abs(normal @ slices.normal) - 1) > TURNED**2:
        raise DataError("its SEG was drawn in another orientation than the series; export it on the grid of the series")
    start = np.array(source.position) - np.array(frame.position)
    rows, columns = np.arange(slices.pixels[0]), np.arange(slices.pixels[1])
    right, down = slices.row * source.spacing[1], slices.column * source.spacing[0]

    def places(axis: np.ndarray, spacing: float) -> np.ndarray:
        whole = (start @ axis + np.add.outer(rows * (down @ axis), columns * (right @ axis))) / spacing
        nearest: np.ndarray = np.floor(whole + 0.5 + 1e-4).astype(np.intp)
        return nearest

    i, j = places(row, frame.spacing[1]), places(column, frame.spacing[0])
    valid = (i >= 0) & (i < mask.shape[1]) & (j >= 0) & (j < mask.shape[0])
    found: np.ndarray = mask[j.clip(0, mask.shape[0] - 1), i.clip(0, mask.shape[1] - 1)] & valid
    return found


def _contour_masks(data: Any, wanted: Sequence[int], stack: Stack) -> tuple[dict[int, np.ndarray], list[str]]:
    slices = _Slices(stack)
    items = {int(item.ReferencedROINumber): item for item in data.get("ROIContourSequence", None) or []}
    names = _rois(data)
    masks, notes, between, slanted = {}, [], [], 0
    for number in wanted:
        polygons: dict[int, list[np.ndarray]] = defaultdict(list)
        beyond = other = outside = twice = 0
        for points in _contours(items.get(number)):
            if points is None:
                other += 1
                continue
            depth = points @ slices.normal
            middle = float(depth.mean())
            if slices.beyond(middle):
                beyond += 1
                continue
            n, distance = slices.nearest(middle)
            if distance > OFF_PLANE * slices.step:
                between.append(distance)
            elif np.ptp(depth) > 2 * OFF_PLANE * slices.step:
                slanted += 1
            else:
                polygon = _in_pixels(points, slices, n)
                if beside(polygon, slices.pixels):
                    outside += 1
                else:
                    polygons[n].append(polygon)
        masks[number] = np.zeros((len(slices.frames), *slices.pixels), dtype=bool)
        for n, found in polygons.items():
            once = distinct(found)  # by even and odd an outline that is there twice would enclose nothing
            twice += len(found) - len(once)
            masks[number][n] = inside(once, slices.pixels)
        gaps = max(polygons) - min(polygons) + 1 - len(polygons) if polygons else 0
        for count, text in (
            (other, "contours that are points or open lines enclose nothing"),
            (beyond, "contours lie beyond the first or last slice"),
            (outside, "contours lie wholly beside the image"),
            (twice, "contours are there twice; each is used once"),
            (gaps, "slices between its first and last have no contour"),
        ):
            if count:
                notes.append(f"{names.get(number, number)}: {count} {text}")
    if between or slanted:
        text = f"{len(between)} lie up to {max(between):.2f} mm between slices" if between else ""
        text += (" and " if text and slanted else "") + (f"{slanted} lie askew to the slices" if slanted else "")
        raise DataError(
            f"contours of its RTSTRUCT are not on the slices of the series: {text}. Was it drawn on another?"
        )
    return masks, notes


def _contours(item: Any) -> Iterator[np.ndarray | None]:
    """Points ``(n, 3)`` of a structure's contours in mm; None for one that encloses nothing."""
    for contour in (item.get("ContourSequence", None) if item is not None else None) or []:
        kind = str(contour.get("ContourGeometricType", "CLOSED_PLANAR")).upper().replace("_", "")
        points = np.array([float(v) for v in contour.get("ContourData", None) or []])
        if not kind.startswith("CLOSEDPLANAR") or len(points) < 9 or len(points) % 3:
            yield None
        else:
            yield points.reshape(-1, 3)


def _in_pixels(points: np.ndarray, slices: _Slices, n: int) -> np.ndarray:
    """Points in mm as (column, row) on slice ``n``; pixel centres are whole numbers."""
    from_start = points - np.array(slices.frames[n].position)
    spacing = slices.frames[n].spacing
    return np.stack([from_start @ slices.row / spacing[1], from_start @ slices.column / spacing[0]], axis=1)
