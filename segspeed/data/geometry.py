"""The one reader of volumes, and how an array came from its file.

NIfTI ``(i, j, k)`` -> closest canonical RAS (by flips and swaps, never by interpolation) -> transposed
``(k, j, i)``. So arrays are ``(D, H, W)``: D towards superior, H towards anterior, W towards the right.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform
from nibabel.spatialimages import HeaderDataError

from segspeed.data.files import load_nifti, not_a_file
from segspeed.types import Case, DataError, Geometry, Shape3, Triple, first_line

_RAS = axcodes2ornt(("R", "A", "S"))
SHEAR = 0.01  # largest cosine between two axes that counts as a right angle (half a degree)
NOISE = 1e-4
DEFLATE_MOST = 1032  # bytes that one compressed byte can stand for
UNREADABLE = (
    OSError, EOFError, ImageFileError, HeaderDataError, zlib.error, ValueError, OverflowError, MemoryError
)  # fmt: skip


@dataclass(frozen=True)
class Volume:
    """One file's voxels ``(D, H, W)`` in canonical order, with what it takes to go back.

    ``notes`` are (kind, message) pairs of oddities that do not stop the file from being used.
    """

    array: np.ndarray
    affine: np.ndarray  # 4x4, (i, j, k) to world mm, as the file has it
    file_shape: Shape3
    ornt: np.ndarray  # (3, 2) nibabel orientation of the file axes
    spacing: Triple  # mm, (D, H, W)
    notes: tuple[tuple[str, str], ...] = ()
    step: float = 0.0  # the slope that an integer file scales its values by: the size of its rounding; 0 without one
    forms_apart_mm: float = 0.0  # between the corners as qform and as sform have them, where both are coded

    @property
    def shape(self) -> Shape3:
        """(D, H, W) in voxels."""
        d, h, w = self.array.shape
        return (d, h, w)

    @property
    def orientation(self) -> str:
        """Axis codes of the file, e.g. "LPS"."""
        return "".join(nib.orientations.ornt2axcodes(self.ornt))

    def geometry(
        self, crop: tuple[tuple[int, int], ...] | None = None, target: tuple[Shape3, Triple] | None = None
    ) -> Geometry:
        """The Geometry of this volume, cropped to ``crop`` and resampled to ``target`` (shape, spacing in mm)."""
        box = crop or tuple((0, n) for n in self.shape)
        size = tuple(stop - start for start, stop in box)
        shape, spacing = target or (size, self.spacing)
        return Geometry(
            affine=tuple(tuple(float(v) for v in row) for row in self.affine),
            file_shape=self.file_shape,
            ornt=tuple((int(a), int(f)) for a, f in self.ornt),
            shape=self.shape,
            crop=tuple((int(a), int(b)) for a, b in box),  # type: ignore[arg-type]
            spacing=self.spacing,
            target_shape=shape,  # type: ignore[arg-type]
            target_spacing=spacing,
        )


class VolumeError(DataError):
    """A file that cannot be used; ``kind`` is the slug of the report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_volume(path: Path, *, scaled: bool = True) -> Volume:
    """Read a NIfTI file whole, voxels included (a truncated file has a sound header).

    ``scaled`` gives float32 with slope and intercept applied; without it integers or float64 (labels, see
    `segspeed.data.labels`). Raises VolumeError with what is wrong and what to do.
    """
    return _read(path, scaled, None)[0]


def read_channels(case: Case) -> list[Volume]:
    """Every channel of a case as float32 volumes; a file that holds all of them is read once. Raises VolumeError."""
    if case.stacked:
        return _read(case.images[0], True, len(case.images))
    return [read_volume(path) for path in case.images]


def _read(path: Path, scaled: bool, channels: int | None) -> list[Volume]:
    try:
        return _read_any(path, scaled, channels)
    except VolumeError:
        raise
    except UNREADABLE as error:  # a damaged header shows in as many places as it has fields
        raise VolumeError("unreadable", _why(path, error)) from error


def _read_any(path: Path, scaled: bool, channels: int | None) -> list[Volume]:
    if wrong := not_a_file(path):
        raise VolumeError("unreadable" if wrong.startswith("cannot be read") else "missing-file", wrong)
    image = load_nifti(path)
    shape = tuple(int(n) for n in image.shape)
    notes = []
    spatial: Shape3 = shape[:3]  # type: ignore[assignment]
    if channels is not None:
        if len(shape) != 4 or shape[3] != channels:
            raise VolumeError(
                "channel-count", f"shape {shape}, but {channels} channels are declared along the fourth axis"
            )
    elif len(shape) > 3 and all(n == 1 for n in shape[3:]):
        notes.append(("squeezed", f"shape {shape}: trailing axes of length 1 were dropped"))
    elif len(shape) > 3:
        raise VolumeError(
            "four-dimensional",
            f"shape {shape} is not one volume: the last axis may be channels, time frames or b-values. "
            "Write each as a file of its own and name them as channels, or pick one frame (data=msd takes channels along "
            "the last axis where dataset.json names as many modalities)",
        )
    if len(shape) < 3:
        raise VolumeError("not-3d", f"shape {shape} is no volume; segspeed needs three axes")
    if 0 in spatial:
        raise VolumeError("empty-volume", f"shape {shape} has no voxels")
    kind = image.get_data_dtype()
    if kind.names is not None:
        raise VolumeError("rgb", "RGB voxels (a screenshot or secondary capture) carry no intensities; leave it out")
    if kind.kind == "c":
        raise VolumeError("complex", "complex voxels: write the magnitude as a real volume")
    affine = np.asarray(image.affine, dtype=np.float64)
    lengths = np.sqrt((affine[:3, :3] ** 2).sum(0))
    if not np.isfinite(affine).all():
        raise VolumeError("bad-affine", "the affine in the header holds NaN or infinity; the file has lost its place")
    if (lengths <= 0).any():
        raise VolumeError("bad-affine", f"voxel sizes {lengths.tolist()} mm in the header: they must be positive")
    if abs(np.linalg.det(affine[:3, :3])) < 1e-6 * float(lengths.prod()):
        raise VolumeError("bad-affine", "the affine maps two axes onto one; the header is damaged")
    ornt = io_orientation(affine)
    if np.isnan(ornt).any():
        raise VolumeError("bad-affine", "the affine maps two axes onto one; the header is damaged")
    notes += _header_notes(image.header, affine)
    apart = _forms_apart_mm(image.header, spatial)
    i, j, k = (float(lengths[int(np.where(ornt[:, 0] == axis)[0][0])]) for axis in range(3))
    raw = _voxels(path, image)
    found = []
    for array in [raw.reshape(spatial)] if channels is None else [raw[..., n] for n in range(channels)]:
        canonical = apply_orientation(array, ornt_transform(ornt, _RAS)).transpose(2, 1, 0)
        voxels = np.ascontiguousarray(canonical, np.float32 if scaled else _exact(raw.dtype))
        found.append(Volume(voxels, affine, spatial, ornt, (k, j, i), tuple(notes), _step(image), apart))
    return found


def _voxels(path: Path, image: nib.spatialimages.SpatialImage) -> np.ndarray:
    """The file's voxels as its header has them. A compressed file is read to its very end, where its checksum stands."""
    claimed = int(np.prod(image.shape)) * image.get_data_dtype().itemsize
    if path.suffix.lower() != ".gz":
        return np.asanyarray(image.dataobj)
    if claimed > DEFLATE_MOST * path.stat().st_size + 2**20:
        raise VolumeError(
            "unreadable",
            f"its header speaks of {claimed / 1e6:.0f} MB of voxels, more than {path.stat().st_size} compressed bytes can "
            "hold; the file is damaged or cut short, copy it again from its source",
        )
    with gzip.open(path) as stream:
        whole = type(image).from_file_map({"image": nib.FileHolder(fileobj=stream)})
        raw = np.asanyarray(whole.dataobj)
        while stream.read(2**20):
            continue
    return raw


def to_file_axes(array: np.ndarray, geometry: Geometry) -> np.ndarray:
    """``(D, H, W)`` canonical back to the file's own ``(i, j, k)``: the exact inverse of `read_volume`."""
    assert array.shape == geometry.shape, f"{array.shape} is not the canonical shape {geometry.shape}"
    back = ornt_transform(_RAS, np.asarray(geometry.ornt, dtype=float))
    return apply_orientation(array.transpose(2, 1, 0), back)


def canonical_affine(volume: Volume) -> np.ndarray:
    """4x4 from canonical (i, j, k) indices, those of ``array`` turned round, to world mm."""
    return volume.affine @ inv_ornt_aff(volume.ornt, volume.file_shape)


def off_grid_mm(volume: Volume, other: Volume) -> float:
    """How far the corners of two volumes lie apart in mm; infinitely where their shapes differ. The order of axes in the files
    does not matter."""
    if volume.shape != other.shape:
        return float("inf")
    d, h, w = volume.shape
    return corner_distance_mm(canonical_affine(volume), (w, h, d), canonical_affine(other), (w, h, d))


def corner_distance_mm(affine_a: np.ndarray, shape_a: Shape3, affine_b: np.ndarray, shape_b: Shape3) -> float:
    """Largest distance in mm between corresponding corners (outer voxel centres) of two grids, told by
    their affines (4x4, voxel to mm) and shapes."""

    def corners(affine: np.ndarray, shape: Shape3) -> np.ndarray:
        at = np.array(list(itertools.product(*[(0, n - 1) for n in shape])), dtype=float)
        return at @ np.asarray(affine)[:3, :3].T + np.asarray(affine)[:3, 3]

    return float(np.linalg.norm(corners(affine_a, shape_a) - corners(affine_b, shape_b), axis=1).max())


def _exact(kind: np.dtype) -> np.dtype:
    """A type in native byte order that holds every value of ``kind``."""
    return kind.newbyteorder("=") if kind.kind in "iu" else np.dtype(np.float64)


def _step(image: nib.spatialimages.SpatialImage) -> float:
    slope, _ = image.header.get_slope_inter() if hasattr(image.header, "get_slope_inter") else (None, None)
    integer = np.issubdtype(image.get_data_dtype(), np.integer)
    return abs(float(slope)) if integer and slope not in (None, 1.0) else 0.0


def _why(path: Path, error: BaseException) -> str:
    if isinstance(error, PermissionError):
        return "cannot be read: permission denied"
    if isinstance(error, MemoryError):
        return "asks for more memory than there is; its header is damaged, or the volume is too large"
    if path.name.startswith("._"):
        return "is a companion file of macOS (._), not a volume; leave it out"
    if path.name.lower().endswith(".gz") and path.stat().st_size >= 2:
        with open(path, "rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return "named .gz but not a gzip file: rename it to .nii or compress it"
    text = first_line(error, 400).replace(str(path), path.name)[:150]  # a folder may be named after a patient
    return f"cannot be read, the file is damaged or cut short ({text}); copy it again from its source"


def _header_notes(header: Any, affine: np.ndarray) -> list[tuple[str, str]]:
    notes = []
    if hasattr(header, "get_sform") and not int(header["sform_code"]) and not int(header["qform_code"]):
        notes.append(
            ("no-orientation", "neither sform nor qform is coded, so left and right are a guess of the reader")
        )
    unit = affine[:3, :3] / np.sqrt((affine[:3, :3] ** 2).sum(0))
    skew = float(np.abs(unit.T @ unit - np.eye(3)).max())
    if skew > SHEAR:
        notes.append(
            (
                "shear",
                f"the axes are not at right angles (cosine {skew:.3f}), as a tilted CT gantry leaves them; distances and angles "
                "would be wrong. Resample it onto an orthogonal grid, or accept it with data.accept=[shear]",
            )
        )
    elif skew > NOISE:
        notes.append(
            ("direction-noise", f"axes off the right angle by a cosine of {skew:.1g}: rounding, left as it is")
        )
    return notes


def _forms_apart_mm(header: Any, shape: Shape3) -> float:
    if not hasattr(header, "get_sform"):
        return 0.0
    sform, scode = header.get_sform(coded=True)
    qform, qcode = _qform(header)
    if sform is None or qform is None or not scode or not qcode:
        return 0.0
    return corner_distance_mm(sform, shape, qform, shape)


def _qform(header: Any) -> tuple[np.ndarray | None, int]:
    try:
        qform, code = header.get_qform(coded=True)
    except (ValueError, HeaderDataError):  # a quaternion that is none; the sform stands
        return None, 0
    return qform, int(code)
