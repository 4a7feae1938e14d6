"""Distances between the surfaces of two masks: NSD, HD95, mean surface distance, in mm.

The definitions are those of DeepMind's surface-distance library (Nikolov et al. 2018, arXiv:1809.04430), so that
figures compare with those of papers that use it. A surface element sits on each voxel corner whose 2x2x2
neighbourhood holds both inside and outside; its area is that of the marching-cubes patch there (Lorensen and Cline
1987). Voxels beyond the array count as outside: a mask that touches the border is closed there.

The distances are those of a Euclidean distance transform of the surface elements, but looked up in a k-d tree: a
transform keeps some 50 bytes for every voxel of the box, the tree only for the voxels of the surface.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree

Triangle = tuple[int, int, int]  # positions on a loop
Edge = tuple[int, int]  # two corners of the cube, the lower first

CORNERS = np.array(list(product((0, 1), repeat=3)))  # (8, 3): corner 4d + 2h + w is bit 4d + 2h + w of a code


@dataclass(frozen=True)
class SurfaceDistances:
    """The nearest distance (mm) of each surface element to the other surface, ascending, and its area (mm^2).

    ``to_reference`` belongs to the elements of the prediction, ``to_prediction`` to those of the reference.
    """

    to_reference: np.ndarray
    to_reference_area: np.ndarray
    to_prediction: np.ndarray
    to_prediction_area: np.ndarray


def surface_distances(prediction: np.ndarray, reference: np.ndarray, spacing: Sequence[float]) -> SurfaceDistances:
    """Distances both ways between two masks ``(D, H, W)``; ``spacing`` is (D, H, W) in mm.

    ValueError where a mask is empty: an empty mask has no surface, and what that is worth is the caller's policy.
    """
    if prediction.shape != reference.shape or prediction.ndim != 3:
        raise ValueError(f"prediction {prediction.shape} and reference {reference.shape} are not on one 3D grid")
    steps = check_spacing(spacing)
    p, r = prediction.astype(bool, copy=False), reference.astype(bool, copy=False)
    if not p.any() or not r.any():
        raise ValueError("an empty mask has no surface")
    box = ndimage.find_objects((p | r).view(np.uint8))[0]
    codes_p, codes_r = neighbour_codes(p[box]), neighbour_codes(r[box])
    on_p, on_r = _on_surface(codes_p), _on_surface(codes_r)
    areas = element_areas(steps)
    forth = _sorted(_directed(on_p, on_r, steps), areas[codes_p[on_p]])
    back = _sorted(_directed(on_r, on_p, steps), areas[codes_r[on_r]])
    return SurfaceDistances(*forth, *back)


def normalised_surface_dice(d: SurfaceDistances, tolerance_mm: float) -> float:
    """Share of both surfaces, by area, that lies within the tolerance (mm) of the other: 0 to 1 (Nikolov et al.).

    Distances equal to the tolerance count as within, compared in float64 as they stand.
    """
    if not tolerance_mm >= 0:
        raise ValueError(f"a tolerance is 0 mm or more, not {tolerance_mm}")
    near = d.to_reference_area[d.to_reference <= tolerance_mm].sum()
    near += d.to_prediction_area[d.to_prediction <= tolerance_mm].sum()
    return float(near / (d.to_reference_area.sum() + d.to_prediction_area.sum()))


def hausdorff(d: SurfaceDistances, percent: float = 95.0) -> float:
    """Percentile (by area) of the distances each way, the larger of the two, in mm; 100 is the maximum itself.

    Pooling both ways before the percentile is another definition in use, and can hide a whole failed direction.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent lies above 0 and up to 100, not {percent}")
    forth = _percentile(d.to_reference, d.to_reference_area, percent)
    return max(forth, _percentile(d.to_prediction, d.to_prediction_area, percent))


def mean_surface_distance(d: SurfaceDistances) -> float:
    """Average of the two area-weighted mean distances, in mm."""
    forth = np.average(d.to_reference, weights=d.to_reference_area)
    return float((forth + np.average(d.to_prediction, weights=d.to_prediction_area)) / 2)


def check_spacing(spacing: Sequence[float]) -> np.ndarray:
    """Spacing (D, H, W) in mm as float64 ``(3,)``; ValueError unless three finite positive numbers."""
    steps = np.asarray(spacing, np.float64)
    if steps.shape != (3,) or not (np.isfinite(steps) & (steps > 0)).all():
        raise ValueError(f"spacing is three positive numbers in mm, not {spacing}")
    return steps


def neighbour_codes(mask: np.ndarray) -> np.ndarray:
    """Which of its eight voxels are inside, for each corner of the voxels of ``(D, H, W)``: ``(D+1, H+1, W+1)`` uint8.

    Bit 4d + 2h + w is the voxel at offset (d, h, w); 0 is all outside, 255 all inside.
    """
    codes = np.pad(mask.view(np.uint8), 1)
    # one axis at a time: three passes in place of eight
    codes = codes[:, :, :-1] | codes[:, :, 1:] << np.uint8(1)
    codes = codes[:, :-1] | codes[:, 1:] << np.uint8(2)
    return codes[:-1] | codes[1:] << np.uint8(4)


def element_areas(spacing: np.ndarray) -> np.ndarray:
    """Area of the surface element of each neighbour code, ``(256,)`` in mm^2, for a spacing (D, H, W) in mm."""
    codes, normals = _unit_patches()
    d, h, w = spacing
    # cross products of stretched vectors: each component grows with the two other axes
    stretched = normals * np.array([h * w, d * w, d * h])
    return np.bincount(codes, np.linalg.norm(stretched, axis=1), minlength=256)


def _on_surface(codes: np.ndarray) -> np.ndarray:
    return (codes != 0) & (codes != 255)


def _directed(start: np.ndarray, target: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """Distance (mm) of each true element of ``start`` to the nearest of ``target``, in C order; maps of one grid."""
    apart = ~target[start]  # an element on both surfaces is at distance 0: in a good prediction that is most
    out = np.zeros(apart.shape)
    origin, points = np.argwhere(start)[apart], np.argwhere(target)
    # Not compact: measured ten times as fast where many elements are nearly as near, as on concentric spheres.
    tree = cKDTree(points * spacing, leafsize=32, compact_nodes=False, balanced_tree=False)
    nearest = tree.query(origin * spacing)[1]
    # Anew from whole steps: differences of products are not exact, and 3 * 0.7 - 2 * 0.7 must not exceed 0.7.
    steps = (origin - points[nearest]) * spacing
    out[apart] = np.sqrt((steps * steps).sum(1))
    return out


def _sorted(distances: np.ndarray, areas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((areas, distances))
    return distances[order], areas[order]


def _percentile(distances: np.ndarray, areas: np.ndarray, percent: float) -> float:
    """The first distance at which the share of area reaches ``percent``."""
    share = np.cumsum(areas) / areas.sum()
    return float(distances[min(int(np.searchsorted(share, percent / 100)), len(distances) - 1)])


# --- the patch of each neighbour code -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _unit_patches() -> tuple[np.ndarray, np.ndarray]:
    """All triangles of all codes in the unit cube: code ``(n,)``, normal ``(n, 3)`` as long as the area.

    Inside and outside may be exchanged without a change of the surface, so the code with fewer voxels inside stands
    for both. Where a loop does not lie in a plane its triangulations differ: the one of the largest area in the unit
    cube is the reference library's, for all codes and spacings.
    """
    codes, normals = [], []
    for code in range(1, 255):
        drawn = code if code.bit_count() <= 4 else 255 - code
        for loop in _loops(drawn):
            corners = CORNERS[np.array(loop)].mean(axis=1)  # the surface cuts each edge in the middle
            patches = [_normals(corners, t) for t in _triangulations(0, len(loop) - 1)]
            best = max(patches, key=lambda n: np.linalg.norm(n, axis=1).sum())
            codes += [code] * len(best)
            normals.append(best)
    return np.array(codes), np.concatenate(normals)


def _normals(points: np.ndarray, triangles: list[Triangle]) -> np.ndarray:
    a, b, c = (points[[t[i] for t in triangles]] for i in range(3))
    return np.cross(b - a, c - a) / 2


def _loops(code: int) -> list[list[Edge]]:
    """The closed curves in which the surface crosses the faces of the cube, each as the edges it cuts, in order."""
    joined: dict[Edge, list[Edge]] = {}
    for a, b in _segments(code):
        joined.setdefault(a, []).append(b)
        joined.setdefault(b, []).append(a)
    loops = []
    while joined:
        edge: Edge | None = next(iter(joined))
        loop = []
        while edge is not None:
            loop.append(edge)
            edge = next((e for e in joined.pop(edge) if e in joined), None)
        loops.append(loop)
    return loops


def _segments(code: int) -> Iterator[tuple[Edge, Edge]]:
    """Pairs of edges that the surface joins across a face: one around each run of inside corners.

    On a face with two opposite corners inside, each is cut off alone: they touch in an edge and do not connect.
    """
    for a, b, c in ((1, 2, 4), (2, 1, 4), (4, 1, 2)):
        for side in (0, a):
            ring = (side, side + b, side + b + c, side + c)
            inside = [bool(code >> corner & 1) for corner in ring]
            for first in range(4):
                if not inside[first] or inside[first - 1]:
                    continue
                last = first
                while inside[(last + 1) % 4]:
                    last += 1
                yield _edge(ring[first - 1], ring[first]), _edge(ring[last % 4], ring[(last + 1) % 4])


def _edge(a: int, b: int) -> Edge:
    return min(a, b), max(a, b)


def _triangulations(first: int, last: int) -> list[list[Triangle]]:
    """Every way to cut the polygon of the vertices ``first`` to ``last`` into triangles."""
    if last - first < 2:
        return [[]]
    return [
        [*left, *right, (first, apex, last)]
        for apex in range(first + 1, last)
        for left in _triangulations(first, apex)
        for right in _triangulations(apex, last)
    ]
