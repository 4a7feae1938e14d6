"""What lies in a tree of DICOM files: image planes, by series, and the objects that label them. Headers only.

Nothing read here may be printed or written: `Series` keeps what identifies a person out of its ``repr``, and errors of the
DICOM library, whose texts quote values, are replaced by the number of files they concern.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import struct
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from segspeed.data.dicom_person import WHO, modality_of, owner_of, patient_id, person_of
from segspeed.data.dicom_walk import files_of
from segspeed.types import DataError, Triple

MIN_SLICES = 3  # fewer make a localizer, not a volume
TURNED = 0.01  # direction cosines of one volume differ by less
RELATIVE = 0.01  # pixel spacings of one volume differ by less
NEEDED = "reading DICOM needs the extra: pip install -e '.[dicom]'"
NO_IMAGES = frozenset(
    ["SEG", "RTSTRUCT", "RTDOSE", "RTPLAN", "RTRECORD", "RTIMAGE", "SR", "PR", "KO", "REG", "FID", "DOC", "AU", "ECG"]
)
DIRECTORY = "1.2.840.10008.1.3.10"  # DICOMDIR, the table of contents of a disc
TAGS = [
    *WHO, "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID", "Modality", "ImageType",
    "SeriesDescription", "ImageOrientationPatient", "ImagePositionPatient", "Rows", "Columns", "PixelSpacing",
    "SamplesPerPixel", "NumberOfFrames", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
]  # fmt: skip
# What a damaged or odd header raises, in as many places as it has fields
UNREADABLE = (
    OSError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, struct.error,
    NotImplementedError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """One image plane: a file, or a frame of a multi-frame file. Lengths in mm, axes of the patient (left, posterior, up)."""

    file: Path
    number: int | None  # of the frame in its file, from 0; None: the file is one plane
    uid: str  # SOPInstanceUID
    position: Triple  # centre of the first pixel
    orientation: tuple[float, ...]  # unit vectors along a row, then down a column
    spacing: tuple[float, float]  # between rows, between columns
    shape: tuple[int, int]  # rows, columns


@dataclass(frozen=True)
class Series:
    """The planes of one volume. ``id`` is a digest of the series UID: the same each time, and nobody's name."""

    id: str
    frames: tuple[Frame, ...] = field(repr=False)
    modality: str = ""
    patient: str = field(default="", repr=False)  # PatientID
    study: str = field(default="", repr=False)  # StudyInstanceUID
    uid: str = field(default="", repr=False)  # SeriesInstanceUID
    reference: str = field(default="", repr=False)  # FrameOfReferenceUID
    description: str = field(default="", repr=False)
    owner: str = field(default="", repr=False)  # PatientID, else the patient's name
    person: frozenset[str] = field(
        default=frozenset(), repr=False
    )  # names and ids of the patient, as the files have them
    place: int = 0  # among the series of the tree, sorted by path of the first file, from 1

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the frames, each once, in order."""
        return tuple(dict.fromkeys(f.file for f in self.frames))


@dataclass(frozen=True)
class Tree:
    """Series with at least `MIN_SLICES` planes, files of DICOM SEG and RTSTRUCT, and notes on the rest (without names).

    ``damaged`` are the DICOM files whose headers cannot be read, ``people`` all names and ids of patients in the tree.
    """

    series: tuple[Series, ...]
    objects: tuple[Path, ...] = field(repr=False)
    notes: tuple[str, ...]
    damaged: tuple[Path, ...] = field(default=(), repr=False)
    people: frozenset[str] = field(default=frozenset(), repr=False)


def pydicom_module() -> Any:
    """pydicom, imported when it is needed. Raises DataError that names the extra."""
    try:
        import pydicom
    except ImportError as error:
        raise DataError(NEEDED) from error
    return pydicom


@contextmanager
def silent() -> Iterator[None]:
    """Without the DICOM library's warnings and log lines: they quote the values of headers."""
    logger = logging.getLogger("pydicom")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def digest(text: str, salt: str = "", length: int = 10) -> str:
    """A short name for an identifier; with a salt nobody without the salt can recompute it."""
    if not salt:
        return hashlib.sha256(text.encode()).hexdigest()[:length]
    return hmac.new(salt.encode(), text.encode(), hashlib.sha256).hexdigest()[:length]


def read_tree(folder: Path, salt: str = "") -> Tree:
    """Sort the files of a folder tree, whatever their names, into volumes.

    Planes belong together by patient, study, series, orientation, matrix and pixel spacing, so that a localizer in the same
    series goes its own way, and patients whose files have the same UIDs do too. Files without a series UID belong together
    by folder. Files that are no DICOM, and DICOM files that are no planes (reports, colour captures), are counted.
    """
    pydicom = pydicom_module()
    planes: dict[tuple[Any, ...], list[tuple[Frame, Any]]] = defaultdict(list)
    objects: list[Path] = []
    broken: list[Path] = []
    people: set[str] = set()
    left_out: dict[str, list[str]] = defaultdict(list)
    scouts: dict[str, int] = defaultdict(int)
    other = 0
    paths, closed = files_of(folder)
    with silent():
        for path in paths:
            try:
                head = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=TAGS)
                if head.file_meta.get("MediaStorageSOPClassUID", "") == DIRECTORY:
                    other += 1
                    continue
                people |= person_of(head)
                modality = str(head["Modality"].value)
            except pydicom.errors.InvalidDicomError:
                other += 1
                continue
            except UNREADABLE:
                broken.append(path)
                continue
            try:
                if modality in ("SEG", "RTSTRUCT"):
                    objects.append(path)
                    continue
                frames = list(_frames(head, path)) if modality not in NO_IMAGES else []
                uid = str(head.get("SeriesInstanceUID", ""))
                if not frames and "Rows" not in head and _is_image(head):
                    broken.append(path)  # cut short before what every image has
                elif not frames:
                    other += 1
                elif "LOCALIZER" in [str(part).upper() for part in head.get("ImageType", None) or []]:
                    scouts[uid] += len(frames)
                else:
                    owner = owner_of(head)
                    study = str(head.get("StudyInstanceUID", ""))
                    for frame in frames:
                        planes[owner, study, uid or str(path.parent), frame.shape].append((frame, head))
            except UNREADABLE:
                broken.append(path)
    notes = [f"{other} files are no slices of a DICOM volume"] if other else []
    if closed:
        notes.append(f"{closed} folders may not be read; what they hold is not used")
    if broken:
        notes.append(f"{len(broken)} DICOM files are damaged or cut short and are left out")
    for uid, count in scouts.items():
        left_out[uid].append(f"{count} slice(s) marked as a localizer left out")
    found: list[Series] = []
    groups = [group for _, members in sorted(planes.items()) for group in _alike(members)]
    for group in sorted(groups, key=lambda g: -len(g)):
        head = group[0][1]
        uid = str(head.get("SeriesInstanceUID", ""))
        if len(group) < MIN_SLICES:
            left_out[uid].append(f"{len(group)} slice(s) of their own orientation or size (a localizer) left out")
            continue
        name = f"series_{digest(uid, salt)}"
        taken = sum(s.uid == uid for s in found)
        found.append(
            Series(
                id=f"{name}_{taken}" if taken else name,
                frames=tuple(frame for frame, _ in group),
                modality=modality_of(head),
                patient=patient_id(head),
                study=str(head.get("StudyInstanceUID", "")),
                uid=uid,
                reference=str(head.get("FrameOfReferenceUID", "")),
                description=str(head.get("SeriesDescription", "") or ""),
                owner=owner_of(head),
                person=frozenset().union(*(person_of(one) for one in {id(h): h for _, h in group}.values())),
            )
        )
    places = {s.id: n for n, s in enumerate(sorted(found, key=lambda s: min(s.files)), start=1)}
    found = [replace(s, place=places[s.id]) for s in found]
    notes += [f"series_{digest(uid, salt)}: {text}" for uid, texts in left_out.items() for text in texts]
    return Tree(tuple(found), tuple(objects), tuple(notes), tuple(broken), frozenset(people))


def _is_image(head: Any) -> bool:
    """By its file meta information, which comes first and so survives what cuts a file short."""
    return str(getattr(head.file_meta.get("MediaStorageSOPClassUID", ""), "name", "")).endswith("Image Storage")


def groups_of(head: Any, number: int) -> list[Any]:
    """Functional groups of a frame of a multi-frame file: its own, then the shared ones."""
    found = []
    own = head.get("PerFrameFunctionalGroupsSequence", None)
    if own is not None and number < len(own):
        found.append(own[number])
    shared = head.get("SharedFunctionalGroupsSequence", None)
    return [*found, *(shared[:1] if shared is not None else [])]


def from_groups(head: Any, number: int, sequence: str, keyword: str) -> Any:
    """A value of a frame's functional groups, None where none has it."""
    for group in groups_of(head, number):
        items = group.get(sequence, None)
        if items is not None and len(items) and keyword in items[0]:
            return items[0][keyword].value
    return None


def _frames(head: Any, path: Path) -> Iterator[Frame]:
    if "Rows" not in head or "Columns" not in head or int(head.get("SamplesPerPixel", 1) or 1) != 1:
        return
    count = int(head.get("NumberOfFrames", 1) or 1)
    enhanced = "PerFrameFunctionalGroupsSequence" in head
    if not enhanced and count > 1:
        return  # a film or an old multi-frame object, which does not say where its frames lie
    for number in range(count):
        if enhanced:
            position = from_groups(head, number, "PlanePositionSequence", "ImagePositionPatient")
            orientation = from_groups(head, number, "PlaneOrientationSequence", "ImageOrientationPatient")
            spacing = from_groups(head, number, "PixelMeasuresSequence", "PixelSpacing")
        else:
            position, orientation, spacing = (
                head.get(k, None) for k in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing")
            )
        if position is None or orientation is None or spacing is None:
            return
        yield make_frame(path, number if enhanced else None, head, position, orientation, spacing)


def make_frame(path: Path, number: int | None, head: Any, position: Any, orientation: Any, spacing: Any) -> Frame:
    """A Frame with unit direction vectors; ``position`` and ``spacing`` (of rows, of columns) in mm. Raises ValueError for
    values that describe no plane."""
    x, y, z = (float(v) for v in position)
    turned = np.array([float(v) for v in orientation]).reshape(2, 3)
    lengths = np.linalg.norm(turned, axis=1)
    between_rows, between_columns = (float(v) for v in spacing)
    values = [x, y, z, *turned.ravel(), between_rows, between_columns]
    if not np.isfinite(values).all() or (abs(lengths - 1) > 0.1).any() or min(between_rows, between_columns) <= 0:
        raise ValueError("no plane in space")
    return Frame(
        file=path,
        number=number,
        uid=str(head.get("SOPInstanceUID", "")),
        position=(x, y, z),
        orientation=tuple((turned / lengths[:, None]).ravel().tolist()),
        spacing=(between_rows, between_columns),
        shape=(int(head.Rows), int(head.Columns)),
    )


def _alike(members: Sequence[tuple[Frame, Any]]) -> list[list[tuple[Frame, Any]]]:
    """Planes of one orientation and one pixel spacing each; values that differ by rounding go together."""
    groups: list[list[tuple[Frame, Any]]] = []
    for frame, head in members:
        for group in groups:
            first = group[0][0]
            turned = max(abs(a - b) for a, b in zip(frame.orientation, first.orientation, strict=True))
            off = max(abs(a / b - 1) for a, b in zip(frame.spacing, first.spacing, strict=True))
            if turned < TURNED and off < RELATIVE:
                group.append((frame, head))
                break
        else:
            groups.append([(frame, head)])
    return groups
