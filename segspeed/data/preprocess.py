"""One case from its files to arrays on the planned grid, and everything needed to go back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segspeed.data.geometry import Volume, VolumeError, canonical_affine, off_grid_mm, read_channels, read_volume
from segspeed.data.labels import to_class_indices
from segspeed.types import Case, DataError, Geometry, LabelTable, Shape3, Triple

AIR_HU = -1024.0  # of CT channels nothing is kept below: padding of -32768 would ring through a spline
SLAB = 2**24  # voxels that are resampled at a time
REACH = 16  # planes beside them that have a say
ROUNDING = 1e-3  # voxels by which a place may lie outside through rounding
FOREGROUND_VOXELS = 10_000  # kept a class: enough to draw from, small enough to keep for every case
Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class PreparedArrays:
    """What the cache holds of a case.

    ``image (C, D, H, W)`` float32 in raw intensities on the planned grid; ``label (D, H, W)`` class indices there;
    ``native_label`` the same on the uncropped canonical grid of the file; ``norm (C, 4)`` low, high, mean, std of
    each channel before resampling; ``foreground`` voxel coordinates ``(n, 3)`` a class index.
    """

    image: np.ndarray
    label: np.ndarray
    native_label: np.ndarray
    geometry: Geometry
    norm: np.ndarray
    foreground: dict[int, np.ndarray]


@dataclass(frozen=True)
class PreparedImage:
    """``image (C, D, H, W)``, ``geometry`` and ``norm`` as in `PreparedArrays`."""

    image: np.ndarray
    geometry: Geometry
    norm: np.ndarray


@dataclass(frozen=True)
class Grid:
    """How volumes are brought onto the planned grid: ``spacing`` (D, H, W) in mm, the ``coarse_axis`` that has a rule of its
    own, and which channels are CT (in HU)."""

    spacing: Triple
    coarse_axis: int | None = None
    ct: tuple[bool, ...] = ()


def is_ct(channel: str) -> bool:
    """Whether a channel's name says that it is CT."""
    return re.match(r"(?i)ct\b", channel) is not None


def preprocess(case: Case, labels: LabelTable, grid: Grid, resample_over_mm: float | None = None) -> PreparedArrays:
    """Read, crop to content, measure, resample. A label whose corners lie farther off its image's than ``resample_over_mm``
    is brought onto the image's grid; None: never.

    Raises DataError with the case and the file that is wrong.
    """
    try:
        volumes = read_channels(case)
        if case.label is None:
            raise VolumeError("missing-label", "the case has no label")
        label_volume = read_volume(case.label, scaled=False)
        native = to_class_indices(label_volume, labels)
    except VolumeError as error:
        raise DataError(f"case {case.id}: {error}") from error
    if resample_over_mm is not None and off_grid_mm(label_volume, volumes[0]) > resample_over_mm:
        native = label_on_grid(native, label_volume, volumes[0])
    if native.shape != volumes[0].shape:
        raise DataError(f"case {case.id}: image and label have different shapes; run data_prep.check")
    prepared = _prepare(case, volumes, native, grid)
    where = tuple(slice(a, b) for a, b in prepared.geometry.crop)
    placed = resample_label(native[where], prepared.geometry.target_shape)
    return PreparedArrays(
        image=prepared.image,
        label=np.ascontiguousarray(placed),
        native_label=native,
        geometry=prepared.geometry,
        norm=prepared.norm,
        foreground=foreground_voxels(placed, labels.ignore_index),
    )


def preprocess_image(case: Case, grid: Grid) -> PreparedImage:
    """`preprocess` for a case whose label is not known. Raises DataError with the case and the file that is wrong."""
    try:
        volumes = read_channels(case)
    except VolumeError as error:
        raise DataError(f"case {case.id}: {error}") from error
    for path, volume in zip(case.images, volumes, strict=True):
        bad = int(volume.array.size - np.isfinite(volume.array).sum())
        if bad:
            raise DataError(
                f"case {case.id}: {path.name} has {bad} voxels that are NaN or infinite; replace them, by the image's minimum "
                "for instance"
            )
    return _prepare(case, volumes, None, grid)


def _prepare(case: Case, volumes: list[Volume], label: np.ndarray | None, grid: Grid) -> PreparedImage:
    first = volumes[0]
    if any(v.shape != first.shape for v in volumes):
        raise DataError(f"case {case.id}: its channels have different shapes; run data_prep.check")
    channels = [v.array for v in volumes]
    box = content_box(channels, label)
    where = tuple(slice(a, b) for a, b in box)
    cropped = [channel[where] for channel in channels]
    for number, ct in enumerate(grid.ct):
        if ct and cropped[number].min() < AIR_HU:
            cropped[number] = np.maximum(cropped[number], np.float32(AIR_HU))
    shape = target_shape(cropped[0].shape, first.spacing, grid.spacing)
    if len(cropped) == 1:
        image = resample_image(cropped[0], shape, grid.coarse_axis)[None]  # no second copy where one is all
    else:
        image = np.empty((len(cropped), *shape), np.float32)
        for n, channel in enumerate(cropped):
            image[n] = resample_image(channel, shape, grid.coarse_axis)
    return PreparedImage(
        image=image,
        geometry=first.geometry(box, (shape, grid.spacing)),
        norm=np.stack([zscore_constants(channel) for channel in cropped]),
    )


def content_box(images: Sequence[np.ndarray] | np.ndarray, label: np.ndarray | None = None) -> Box:
    """Start and stop an axis of what is not padding: voxels above their channel's minimum (zero, or the padding
    value of a scanner), and all labelled ones. A constant volume is kept whole."""
    inside = np.zeros(images[0].shape, dtype=bool)
    for channel in images:
        inside |= channel > channel.min()
    if label is not None:
        inside |= label > 0
    if not inside.any():
        d, h, w = inside.shape
        return ((0, d), (0, h), (0, w))
    bounds = []
    for axis in range(3):
        line = np.flatnonzero(inside.any(axis=tuple(a for a in range(3) if a != axis)))
        bounds.append((int(line[0]), int(line[-1]) + 1))
    return (bounds[0], bounds[1], bounds[2])


def target_shape(shape: tuple[int, ...], spacing: Triple, target: Triple) -> Shape3:
    """Voxels an axis so that the extent in mm is kept as nearly as whole voxels allow."""
    d, h, w = (max(1, round(n * s / t)) for n, s, t in zip(shape, spacing, target, strict=True))
    return (d, h, w)


def zscore_constants(channel: np.ndarray) -> np.ndarray:
    """low, high, mean, std ``(4,)`` of a channel ``(D, H, W)``. A constant one gets std 1, so that it becomes all zeros."""
    mean = float(channel.mean(dtype=np.float64))
    squares = sum(float(np.square(plane.astype(np.float64) - mean).sum()) for plane in channel)  # never twice in memory
    std = (squares / channel.size) ** 0.5
    return np.array([channel.min(), channel.max(), mean, std if std > 1e-8 else 1.0], dtype=np.float32)


def resample_image(image: np.ndarray, shape: Shape3, coarse_axis: int | None) -> np.ndarray:
    """``(D, H, W)`` float32 to ``shape`` by cubic splines; along a coarse axis linearly, since a spline through
    thick slices overshoots. Grid corners, not voxel centres, are aligned (as in scikit-image's resize)."""
    if image.shape == shape:
        return image
    if coarse_axis is None:
        return _zoom(image, shape, order=3)
    plane = list(shape)
    plane[coarse_axis] = image.shape[coarse_axis]
    if tuple(plane) != image.shape:  # slice by slice: no spline runs across slices
        moved = np.moveaxis(image, coarse_axis, 0)
        flat = tuple(n for axis, n in enumerate(plane) if axis != coarse_axis)
        image = np.moveaxis(np.stack([_zoom(s, flat, order=3) for s in moved]), 0, coarse_axis)
    return image if image.shape == shape else _zoom(image, shape, order=1)


def resample_label(label: np.ndarray, shape: Shape3) -> np.ndarray:
    """``(D, H, W)`` class indices to ``shape``: each class linearly, the largest share wins. No class can appear
    between two others, as interpolated values would; only one class is held as floats at a time."""
    if label.shape == shape:
        return label
    out = np.zeros(shape, dtype=label.dtype)
    for start, stop in _slabs(shape):  # shares take 8 bytes a voxel
        low, high = _reach(label.shape[0], shape[0], start, stop)
        part = label[low:high]
        best = np.full((stop - start, *shape[1:]), -1.0, dtype=np.float32)
        for value in np.unique(part):
            share = _zoom_part((part == value).astype(np.float32), low, label.shape, shape, start, stop, order=1)
            wins = share > best
            out[start:stop][wins] = value
            np.maximum(best, share, out=best)
    return out


def label_on_grid(indices: np.ndarray, label: Volume, image: Volume) -> np.ndarray:
    """Class indices ``(D, H, W)`` of a label volume on the grid of its image: each class linearly in world coordinates, the
    largest share wins. A voxel of the label reaches half its size to every side; what none covers is background."""
    from scipy import ndimage

    to_label = np.linalg.inv(_array_affine(label)) @ _array_affine(image)
    best = np.zeros(image.shape, dtype=np.float32)
    out = np.zeros(image.shape, dtype=indices.dtype)
    for value in np.unique(indices):
        share = ndimage.affine_transform(
            (indices == value).astype(np.float32), to_label[:3, :3], to_label[:3, 3], output_shape=image.shape, order=1,
            mode="nearest",
        )  # fmt: skip
        wins = share > best
        out[wins] = value
        np.maximum(best, share, out=best)
    for number, plane in enumerate(out):
        plane[~_covered(to_label, number, plane.shape, indices.shape)] = 0
    return out


def _covered(matrix: np.ndarray, plane: int, size: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Which voxels ``(H, W)`` of a plane the ``matrix`` takes into a volume of ``shape``, half a voxel at its rim included."""
    rows, columns = np.arange(size[0])[:, None], np.arange(size[1])[None]
    inside = np.ones(size, dtype=bool)
    for (a, b, c, t), length in zip(matrix[:3], shape, strict=True):
        at = a * plane + b * rows + c * columns + t
        inside &= (at >= -0.5 - ROUNDING) & (at <= length - 0.5 + ROUNDING)
    return inside


def share_outside(indices: np.ndarray, label: Volume, image: Volume) -> float:
    """Share of a label's foreground voxels (``indices (D, H, W)`` over 0) whose centres lie outside their image, 0 to 1."""
    where = np.argwhere(indices > 0)
    if not len(where):
        return 0.0
    to_image = np.linalg.inv(_array_affine(image)) @ _array_affine(label)
    at = where @ to_image[:3, :3].T + to_image[:3, 3]
    inside = ((at >= -0.5 - ROUNDING) & (at <= np.array(image.shape) - 0.5 + ROUNDING)).all(1)
    return float(1 - inside.mean())


def _array_affine(volume: Volume) -> np.ndarray:
    """4x4 from ``(D, H, W)`` indices of ``array`` to world mm."""
    return canonical_affine(volume)[:, [2, 1, 0, 3]]


def _zoom(array: np.ndarray, shape: tuple[int, ...], order: int) -> np.ndarray:
    """``array`` resampled to ``shape``, grid corners aligned; a large one in slabs, since scipy's spline coefficients take 8
    bytes a voxel beside two copies in float32."""
    out = np.empty(shape, array.dtype)
    for start, stop in _slabs(shape):
        low, high = _reach(array.shape[0], shape[0], start, stop)
        out[start:stop] = _zoom_part(array[low:high], low, array.shape, shape, start, stop, order)
    return out


def _slabs(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Start and stop of runs of planes along the first axis that hold about `SLAB` voxels each."""
    step = max(1, SLAB * shape[0] // max(1, int(np.prod(shape))))
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _reach(length: int, wanted: int, start: int, stop: int) -> tuple[int, int]:
    """Which of ``length`` planes the planes ``start`` to ``stop`` of ``wanted`` are made from. A plane `REACH` away has
    0.27 to the power of `REACH` to say in a cubic spline, under the rounding of float32."""
    ratio = length / wanted
    low, high = int((start + 0.5) * ratio - 0.5) - REACH, int((stop - 0.5) * ratio - 0.5) + 2 + REACH
    return max(low, 0), min(high, length)


def _zoom_part(
    part: np.ndarray, low: int, full: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int, order: int
) -> np.ndarray:
    """Planes ``start`` to ``stop`` of an array of shape ``full`` resampled to ``shape``, from its planes ``low`` onwards."""
    from scipy import ndimage  # half a second of import, which cohorts that are not resampled spare themselves

    ratio = np.array(full) / np.array(shape)
    offset = 0.5 * ratio - 0.5
    offset[0] += start * ratio[0] - low
    size = (stop - start, *shape[1:])
    return ndimage.affine_transform(part, ratio, offset, output_shape=size, order=order, mode="nearest")


def foreground_voxels(label: np.ndarray, ignore: int | None = None) -> dict[int, np.ndarray]:
    """Coordinates ``(n, 3)`` int32 a class index but ``ignore``, evenly thinned to `FOREGROUND_VOXELS`."""
    found = {}
    flat = label.ravel()
    for value in np.unique(flat[flat > 0]):
        if value == ignore:
            continue
        where = np.flatnonzero(flat == value)
        if len(where) > FOREGROUND_VOXELS:
            where = where[np.linspace(0, len(where) - 1, FOREGROUND_VOXELS).astype(np.int64)]
        found[int(value)] = np.stack(np.unravel_index(where, label.shape), axis=1).astype(np.int32)
    return found
