"""Where the slices of a series lie, and the regular grid they become.

A volume on disk has equal steps and right angles. Slices that have both are stacked as they are; unevenly spaced slices and
those of a tilted gantry are resampled linearly onto a grid that has them, and the way back to the slices is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from segspeed.data.dicom_files import Frame
from segspeed.types import DataError, Shape3

ALONG = 0.01  # a slice may lie this share of the slice spacing off its place along the axis
ACROSS = 0.1  # and this share of a pixel beside its place across it
SAME = 1e-3  # mm: nearer slices lie in one place, whatever the spacing
WHOLE = 0.1  # a gap this near a multiple of the spacing (in spacings) is slices that are missing
ZONE = 3  # so many equal steps in a row are a zone of its own spacing, not a gap
WIDEST = 5.0  # widest step, over the narrowest, that is bridged by interpolation
JITTER = 1.2  # widest over narrowest step, below which the median step is taken


@dataclass(frozen=True)
class Grid:
    """A regular grid and where each source slice lies on it.

    ``affine`` (4x4) takes grid indices (column, row, slice) to mm, left, posterior and up positive. ``along[n]`` is the place
    of source slice n on the slice axis, ``across[n]`` = (columns, rows) that its first pixel is shifted by, all in voxels
    and from 0. Without ``resampled`` these are 0, 1, 2 ... and zeros.
    """

    affine: np.ndarray
    shape: Shape3  # columns, rows, slices
    along: np.ndarray
    across: np.ndarray
    pixels: tuple[int, int]  # rows, columns of a source slice
    resampled: bool
    notes: tuple[str, ...]


def axes(frame: Frame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit vectors along a row, down a column, and at right angles to both. Raises DataError where there are none."""
    row, column = np.array(frame.orientation).reshape(2, 3)
    if abs(row @ column) > 0.02:
        raise DataError("rows and columns of its slices are not at right angles; the header is damaged")
    column = column - (row @ column) * row
    column = column / np.linalg.norm(column)
    return row, column, np.cross(row, column)


def depths(frames: Sequence[Frame]) -> np.ndarray:
    """Places of planes along their common axis, in mm."""
    normal = axes(frames[0])[2]
    return np.array([f.position for f in frames]) @ normal


def same_place(frames: Sequence[Frame]) -> list[list[int]]:
    """Indices of planes in order along the axis; those that lie in one place together."""
    if len(frames) == 1:
        return [[0]]
    depth = depths(frames)
    order = [int(n) for n in np.argsort(depth, kind="stable")]
    steps = np.diff(depth[order])
    apart = steps[steps > SAME]
    near = max(SAME, ALONG * float(np.percentile(apart, 75))) if len(apart) else np.inf
    groups = [[order[0]]]
    for index, step in zip(order[1:], steps, strict=True):
        if step <= near:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def grid_of(frames: Sequence[Frame]) -> Grid:
    """The grid of planes in order along the axis, each in a place of its own.

    Raises DataError where slices are missing, with how many and where (mm along the axis).
    """
    assert len(frames) > 1
    first = frames[0]
    row, column, normal = axes(first)
    positions = np.array([f.position for f in frames])
    depth = positions @ normal
    steps = np.diff(depth)
    _refuse_gaps(depth, steps)
    notes: list[str] = []
    index = np.arange(len(frames), dtype=float)
    step, start = (float(v) for v in np.polyfit(index, depth, 1))
    even = bool((abs(depth - start - step * index) <= ALONG * step + SAME).all())
    if even:
        count, step = len(frames), float((depth[-1] - depth[0]) / (len(frames) - 1))
        along = index
    else:
        wide = float(steps.max() / steps.min())
        which, wanted = ("median", np.median(steps)) if wide < JITTER else ("smallest", steps.min())
        count = round((depth[-1] - depth[0]) / float(wanted)) + 1
        step = float((depth[-1] - depth[0]) / (count - 1))
        along = (depth - depth[0]) / step
        notes.append(
            f"uneven slice spacing ({steps.min():.4g} to {steps.max():.4g} mm): {len(frames)} slices resampled linearly to "
            f"{count} at {step:.4g} mm (the {which} step)"
        )
    moved = positions - positions[0] - np.outer(depth - depth[0], normal)
    shift = np.stack([moved @ row / first.spacing[1], moved @ column / first.spacing[0]], axis=1)
    tilted = bool((abs(shift) > ACROSS).any())
    rows, columns = first.shape
    origin = positions[0]
    if tilted:
        low = np.floor(shift.min(0) + 1e-6)
        grown = np.ceil(shift.max(0) - 1e-6) - low
        origin = origin + low[0] * first.spacing[1] * row + low[1] * first.spacing[0] * column
        shift = shift - low
        columns, rows = columns + int(grown[0]), rows + int(grown[1])
        slope = float(np.linalg.norm((positions[-1] - positions[0]) - (depth[-1] - depth[0]) * normal))
        angle = float(np.degrees(np.arctan2(slope, depth[-1] - depth[0])))
        notes.append(
            f"slices shifted sideways (a tilted gantry, {angle:.1f} degrees): resampled linearly to right angles, "
            f"{first.shape[1]} x {first.shape[0]} pixels became {columns} x {rows}"
        )
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = row * first.spacing[1], column * first.spacing[0]
    affine[:3, 2], affine[:3, 3] = normal * step, origin
    return Grid(
        affine=affine,
        shape=(columns, rows, count),
        along=along,
        across=shift if tilted else np.zeros((len(frames), 2)),
        pixels=first.shape,
        resampled=tilted or not even,
        notes=tuple(notes),
    )


def _refuse_gaps(depth: np.ndarray, steps: np.ndarray) -> None:
    usual = float(steps.min())
    if len(steps) > ZONE and (abs(steps / usual - 1) <= WHOLE).sum() == 1:
        usual = float(np.median(steps))  # one narrow step alone is the odd one
    gaps = []
    for n, step in enumerate(steps):
        ratio = float(step / usual)
        if ratio < 1.5:
            continue
        zone = _run(steps, n) >= ZONE
        multiple = abs(ratio - round(ratio)) <= WHOLE
        if ratio > WIDEST or (multiple and not zone):
            gaps.append((n, float(step), max(1, round(ratio) - 1)))
    if not gaps:
        return
    places = ", ".join(f"{missing} between {depth[n]:.5g} and {depth[n + 1]:.5g} mm" for n, _, missing in gaps[:6])
    more = f" and in {len(gaps) - 6} more places" if len(gaps) > 6 else ""
    raise DataError(
        f"{sum(g[2] for g in gaps)} slices are missing, or the series is too unevenly spaced: {places}{more} along the slice "
        f"axis, where the spacing is {usual:.4g} mm. Export the series again whole, or remove the part beyond the gap"
    )


def _run(steps: np.ndarray, n: int) -> int:
    """How many steps around step ``n`` are as wide, without one of another width between."""
    like = abs(steps / steps[n] - 1) <= 0.05
    low = high = n
    while low > 0 and like[low - 1]:
        low -= 1
    while high + 1 < len(steps) and like[high + 1]:
        high += 1
    return high - low + 1


def to_grid(stack: np.ndarray, grid: Grid, fill: float) -> np.ndarray:
    """Source slices ``(n, rows, columns)`` as values on the grid ``(slices, rows, columns)``, linear; ``fill`` outside."""
    if not grid.resampled:
        return stack
    columns, rows, count = grid.shape
    made = np.empty((count, rows, columns), dtype=np.float32)
    placed: dict[int, np.ndarray] = {}
    for k in range(count):
        upper = int(np.clip(np.searchsorted(grid.along, k, side="left"), 1, len(grid.along) - 1))
        lower = upper - 1
        placed = {n: placed[n] if n in placed else _placed(stack[n], grid, n, fill) for n in (lower, upper)}
        weight = (k - grid.along[lower]) / (grid.along[upper] - grid.along[lower])
        weight = float(np.clip(weight, 0, 1))
        made[k] = (1 - weight) * placed[lower] + weight * placed[upper]
    return made


def _placed(plane: np.ndarray, grid: Grid, n: int, fill: float) -> np.ndarray:
    """One source slice, shifted to its place on the grid's plane."""
    columns, rows, _ = grid.shape
    canvas = np.full((rows, columns), fill, dtype=np.float32)
    canvas[: grid.pixels[0], : grid.pixels[1]] = plane
    right, down = grid.across[n]
    if right == 0 and down == 0:
        return canvas
    moved: np.ndarray = ndimage.shift(canvas, (down, right), order=1, mode="constant", cval=fill)
    return moved


def labels_to_grid(stack: np.ndarray, grid: Grid) -> np.ndarray:
    """Label slices ``(n, rows, columns)`` on the grid ``(slices, rows, columns)``: each voxel takes the nearest slice (the
    lower of two as near) and pixel; 0 outside."""
    if not grid.resampled:
        return stack
    columns, rows, count = grid.shape
    middle = (grid.along[:-1] + grid.along[1:]) / 2
    made = np.zeros((count, rows, columns), dtype=stack.dtype)
    for k in range(count):
        n = int(np.searchsorted(middle, k - 1e-6, side="left"))
        right, down = (int(v) for v in np.floor(grid.across[n] + 0.5))
        made[k, down : down + grid.pixels[0], right : right + grid.pixels[1]] = stack[n]
    return made


def labels_to_slices(volume: np.ndarray, grid: Grid) -> np.ndarray:
    """A label map on the grid ``(slices, rows, columns)`` back on the source slices ``(n, rows, columns)``, nearest voxel."""
    if not grid.resampled:
        return volume
    made = np.empty((len(grid.along), *grid.pixels), dtype=volume.dtype)
    for n in range(len(grid.along)):
        k = min(int(np.floor(grid.along[n] + 0.5)), grid.shape[2] - 1)
        right, down = (int(v) for v in np.floor(grid.across[n] + 0.5))
        made[n] = volume[k, down : down + grid.pixels[0], right : right + grid.pixels[1]]
    return made
