import warnings
from itertools import product

import numpy as np
import pytest
import surface_distance
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.ndimage import gaussian_filter
from scipy.spatial.distance import cdist
from surface_distance import lookup_tables

from segspeed.metric.surface import (
    SurfaceDistances,
    element_areas,
    hausdorff,
    mean_surface_distance,
    neighbour_codes,
    normalised_surface_dice,
    surface_distances,
)

MASKS = hnp.arrays(bool, (5, 4, 6))
SPACINGS = st.tuples(*[st.sampled_from([0.5, 0.7, 1.0, 1.25, 3.0, 5.0])] * 3)

# areas of the elements of a box of unit voxels: on a face, along an edge, at a corner
FACE, EDGE, CORNER = 1.0, np.sqrt(2) / 2, np.sqrt(3) / 8


def cube(start, size=5, shape=(16, 16, 16)):
    mask = np.zeros(shape, bool)
    d, h, w = start
    mask[d : d + size, h : h + size, w : w + size] = True
    return mask


def all_three(d):
    return [normalised_surface_dice(d, 1.0), normalised_surface_dice(d, 2.0), hausdorff(d), mean_surface_distance(d)]


# --- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cube_shifted_by_a_voxel(axis):
    start = [4, 4, 4]
    start[axis] += 1
    d = surface_distances(cube(start), cube((4, 4, 4)), (1, 1, 1))
    whole = 6 * 16 * FACE + 12 * 4 * EDGE + 8 * CORNER
    # in common: of the four side walls, all but the last ring of the cube that lags behind
    common = 4 * (16 * FACE + 4 * EDGE) + 16 * EDGE + 4 * CORNER
    assert d.to_reference_area.sum() == pytest.approx(whole)
    assert set(d.to_reference) == set(d.to_prediction) == {0.0, 1.0}
    assert normalised_surface_dice(d, 0.5) == pytest.approx(common / whole)
    assert normalised_surface_dice(d, 1.0) == 1.0, "a distance equal to the tolerance is within"
    assert normalised_surface_dice(d, 1.5) == 1.0
    assert hausdorff(d) == hausdorff(d, 100) == 1.0
    assert mean_surface_distance(d) == pytest.approx(1 - common / whole)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_shift_is_as_far_as_its_axis_is_coarse(axis):
    spacing, start = (5.0, 0.7, 0.8), [4, 4, 4]
    start[axis] += 1
    d = surface_distances(cube(start), cube((4, 4, 4)), spacing)
    assert hausdorff(d, 100) == spacing[axis]


def test_three_voxels_apart_at_a_tolerance_of_just_that():
    a, b = np.zeros((9, 1, 1), bool), np.zeros((9, 1, 1), bool)
    a[2:4], b[2:7] = True, True
    for step in (0.7, 0.1, 1.1):
        assert normalised_surface_dice(surface_distances(a, b, (step, 9, 9)), 3 * step) == 1.0


def test_one_voxel():
    d = surface_distances(cube((3, 3, 3), 1), cube((3, 3, 5), 1), (1, 1, 1))
    assert d.to_reference_area.tolist() == pytest.approx([CORNER] * 8)
    assert sorted(d.to_reference) == [1.0] * 4 + [2.0] * 4
    assert mean_surface_distance(d) == pytest.approx(1.5)
    assert hausdorff(d) == 2.0
    assert normalised_surface_dice(d, 1.0) == pytest.approx(0.5)


def test_percentiles_are_directed_and_the_larger_one_counts():
    """4 % of 1000 distances and 10 % of 100 at 20 mm: pooled, the 95th percentile would be 0."""
    many, few = np.r_[np.zeros(960), np.full(40, 20.0)], np.r_[np.zeros(90), np.full(10, 20.0)]
    d = SurfaceDistances(many, np.ones(1000), few, np.ones(100))
    assert hausdorff(d) == 20.0
    assert hausdorff(SurfaceDistances(few, np.ones(100), many, np.ones(1000))) == 20.0
    assert hausdorff(d, 90) == 0.0
    assert np.percentile(np.r_[many, few], 95) == 0.0


def test_percentiles_weigh_by_area():
    """Five elements, one of them at 10 mm: whether it is in the last 5 % is a matter of its area."""
    distances = np.array([0.0, 0.0, 0.0, 0.0, 10.0])
    for share, expected in ((0.2, 10.0), (0.06, 10.0), (0.04, 0.0)):
        areas = np.array([(1 - share) / 4] * 4 + [share])
        d = SurfaceDistances(distances, areas, distances, areas)
        assert hausdorff(d) == expected
        assert mean_surface_distance(d) == pytest.approx(10 * share)
        assert normalised_surface_dice(d, 1.0) == pytest.approx(1 - share)


def test_offset_spheres_by_brute_force():
    grid = np.stack(np.meshgrid(*[np.arange(14.0)] * 3, indexing="ij"))
    balls = [((grid - np.reshape(c, (3, 1, 1, 1))) ** 2).sum(0) <= 16 for c in ((6, 6, 6), (7, 8, 6))]
    spacing = np.array([2.0, 1.0, 0.5])
    points = []
    for ball in balls:
        padded = np.pad(ball, 1)
        corners = product(range(15), repeat=3)
        mixed = [c for c in corners if 0 < padded[tuple(slice(i, i + 2) for i in c)].sum() < 8]
        points.append(np.array(mixed) * spacing)
    apart = cdist(*points)
    d = surface_distances(*balls, spacing)
    assert d.to_reference == pytest.approx(np.sort(apart.min(1)))
    assert d.to_prediction == pytest.approx(np.sort(apart.min(0)))


# --- against the library whose definitions these are ----------------------------------------------------------------


def test_areas_of_all_neighbour_codes():
    voxels = np.unravel_index(np.arange(8), (2, 2, 2))
    theirs_of = np.zeros(256, int)
    for code in range(256):
        block = np.zeros((2, 2, 2), bool)
        block[voxels] = [code >> bit & 1 for bit in range(8)]
        assert neighbour_codes(block)[1, 1, 1] == code
        theirs_of[code] = (block * lookup_tables.ENCODE_NEIGHBOURHOOD_3D_KERNEL).sum()
    assert sorted(theirs_of) == list(range(256))
    for spacing in np.random.default_rng(0).uniform(0.2, 6, (20, 3)):
        theirs = lookup_tables.create_table_neighbour_code_to_surface_area(spacing)[theirs_of]
        np.testing.assert_allclose(element_areas(spacing), theirs, rtol=1e-12)


def theirs(prediction, reference, spacing):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its scipy names are old
        d = surface_distance.compute_surface_distances(reference, prediction, spacing)
    return [
        surface_distance.compute_surface_dice_at_tolerance(d, 1.0),
        surface_distance.compute_surface_dice_at_tolerance(d, 2.0),
        surface_distance.compute_robust_hausdorff(d, 95),
        np.mean(surface_distance.compute_average_surface_distance(d)),
    ]


@pytest.mark.parametrize("seed", range(60))
def test_random_label_maps(seed):
    rng = np.random.default_rng(seed)
    shape, spacing = rng.integers(6, 20, 3), rng.uniform(0.4, 4, 3)
    base, smooth = rng.normal(size=shape), seed % 4 * 0.7  # from salt and pepper to smooth blobs
    fields = [gaussian_filter(base + 0.3 * rng.normal(size=shape), smooth) for _ in "pr"]
    maps = [np.digitize(field, np.quantile(field, [0.6, 0.9])) for field in fields]
    for label in (1, 2):
        p, r = (m == label for m in maps)
        assert all_three(surface_distances(p, r, spacing)) == pytest.approx(theirs(p, r, spacing), rel=1e-6)


def test_whole_millimetres_where_distances_meet_the_tolerance():
    rng = np.random.default_rng(7)
    for spacing in ((1, 1, 1), (2, 1, 0.5), (5, 1, 1)):
        p, r = (gaussian_filter(rng.normal(size=(14, 15, 16)), 1.2) > 0.1 for _ in "pr")
        assert all_three(surface_distances(p, r, spacing)) == pytest.approx(theirs(p, r, spacing), rel=1e-6)


# --- properties -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(MASKS, MASKS, SPACINGS)
def test_symmetric_and_bounded(a, b, spacing):
    assume(a.any() and b.any())
    d, back = surface_distances(a, b, spacing), surface_distances(b, a, spacing)
    assert all_three(d) == pytest.approx(all_three(back), rel=1e-12)
    assert 0 <= normalised_surface_dice(d, 1.0) <= normalised_surface_dice(d, 3.0) <= 1 + 1e-12
    assert mean_surface_distance(d) <= hausdorff(d, 100) <= np.linalg.norm(np.array(a.shape) * spacing)
    assert (np.diff(d.to_reference) >= 0).all()


@settings(deadline=None, max_examples=40)
@given(MASKS, SPACINGS)
def test_identity(a, spacing):
    assume(a.any())
    assert all_three(surface_distances(a, a, spacing)) == [1.0, 1.0, 0.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(MASKS, MASKS, SPACINGS, st.tuples(*[st.integers(0, 3)] * 3))
def test_where_the_masks_lie_does_not_matter_nor_the_border(a, b, spacing, shift):
    """The same masks at the very border of their array and somewhere in a larger one."""
    assume(a.any() and b.any())
    moved = [np.pad(m, [(s, 4 - s) for s in shift]) for m in (a, b)]
    here, there = surface_distances(a, b, spacing), surface_distances(*moved, spacing)
    assert all_three(here) == pytest.approx(all_three(there), rel=1e-12)
    assert here.to_reference_area.sum() == pytest.approx(there.to_reference_area.sum())


@settings(deadline=None, max_examples=40)
@given(MASKS, MASKS, SPACINGS)
def test_inside_and_outside_have_the_same_surface(a, b, spacing):
    assume(a.any() and b.any())
    a, b = np.pad(a, 1), np.pad(b, 1)
    codes, steps = neighbour_codes(a), np.array(spacing)
    assert element_areas(steps)[255 - codes] == pytest.approx(element_areas(steps)[codes])


def test_axes_can_be_exchanged():
    rng = np.random.default_rng(3)
    p, r = (gaussian_filter(rng.normal(size=(9, 10, 11)), 1) > 0 for _ in "pr")
    spacing = np.array([3.0, 0.7, 1.1])
    for axes in ((1, 2, 0), (0, 2, 1), (2, 1, 0)):
        turned = surface_distances(p.transpose(axes), r.transpose(axes), spacing[list(axes)])
        assert all_three(turned) == pytest.approx(all_three(surface_distances(p, r, spacing)))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    full, empty = cube((1, 1, 1)), np.zeros((16, 16, 16), bool)
    for pair in ((full, empty), (empty, full), (empty, empty)):
        with pytest.raises(ValueError, match="empty"):
            surface_distances(*pair, (1, 1, 1))
    with pytest.raises(ValueError, match="one 3D grid"):
        surface_distances(full, full[1:], (1, 1, 1))
    for spacing in ((1, 1), (1, 0, 1), (1, float("nan"), 1)):
        with pytest.raises(ValueError, match="spacing"):
            surface_distances(full, full, spacing)
    d = surface_distances(full, full, (1, 1, 1))
    with pytest.raises(ValueError, match="percent"):
        hausdorff(d, 0)
    with pytest.raises(ValueError, match="tolerance"):
        normalised_surface_dice(d, -1)
