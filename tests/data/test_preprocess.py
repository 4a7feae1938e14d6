import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from segspeed.data.geometry import read_volume
from segspeed.data.labels import to_class_indices
from segspeed.data.preprocess import (
    Grid,
    content_box,
    foreground_voxels,
    is_ct,
    label_on_grid,
    preprocess,
    preprocess_image,
    resample_image,
    resample_label,
    share_outside,
    target_shape,
    zscore_constants,
)
from segspeed.infer.export import to_native
from segspeed.metric.overlap import dice_per_target
from segspeed.types import Case, DataError, LabelTable


def test_content_box_by_hand():
    image = np.zeros((1, 6, 7, 8), np.float32)
    image[0, 2:4, 3, 1:7] = 5
    assert content_box(image) == ((2, 4), (3, 4), (1, 7))
    label = np.zeros((6, 7, 8), np.uint8)
    label[5, 0, 0] = 1
    assert content_box(image, label) == ((2, 6), (0, 4), (0, 7)), "labelled voxels are content, whatever their value"
    assert content_box(np.full((1, 3, 4, 5), 9.0)) == ((0, 3), (0, 4), (0, 5))


def test_padding_of_a_ct_is_no_content():
    image = np.full((1, 5, 5, 5), -1024.0)
    image[0, 1:4, 1:4, 2] = -1000
    assert content_box(image) == ((1, 4), (1, 4), (2, 3))


def test_target_shape_keeps_the_extent():
    assert target_shape((10, 20, 30), (3.0, 1.0, 1.0), (1.0, 1.0, 2.0)) == (30, 20, 15)
    assert target_shape((1, 1, 1), (1.0, 1.0, 1.0), (9.0, 9.0, 9.0)) == (1, 1, 1)


def test_linear_ramp_is_resampled_exactly_inside():
    """On grids whose corners are aligned, voxel i of the doubled grid lies at (i + 0.5) / 2 - 0.5."""
    ramp = np.broadcast_to(np.arange(12, dtype=np.float32), (6, 8, 12)).copy()
    out = resample_image(ramp, (6, 8, 24), None)
    expected = (np.arange(24) + 0.5) / 2 - 0.5
    np.testing.assert_allclose(out[3, 4, 4:-4], expected[4:-4], atol=2e-2)


def test_a_coarse_axis_is_interpolated_linearly_and_slices_do_not_mix_in_plane():
    image = np.zeros((4, 8, 8), np.float32)
    image[2] = 100.0
    out = resample_image(image, (8, 8, 8), coarse_axis=0)
    assert out.min() >= 0, "a spline across slices would overshoot"
    assert out.max() <= 100
    cubic = resample_image(image, (8, 8, 8), coarse_axis=None)
    assert cubic.min() < -1


def test_no_class_appears_between_two_others():
    label = np.zeros((8, 8, 8), np.uint8)
    label[:, :, :4] = 3  # interpolated values between 0 and 3 would make 1 and 2
    for shape in ((16, 16, 16), (5, 5, 5), (11, 8, 13)):
        assert set(np.unique(resample_label(label, shape))) == {0, 3}


def test_constants_of_a_channel_and_of_a_constant_one():
    assert zscore_constants(np.array([[[1.0, 3.0]]])).tolist() == [1, 3, 2, 1]
    assert zscore_constants(np.full((2, 2, 2), 5.0)).tolist() == [5, 5, 5, 1]


def test_foreground_is_thinned_evenly():
    label = np.zeros((40, 40, 40), np.uint8)
    label[10:] = 2
    found = foreground_voxels(label)
    assert list(found) == [2]
    assert found[2].shape == (10_000, 3)
    assert (label[tuple(found[2].T)] == 2).all()
    assert found[2][:, 0].min() == 10
    assert found[2][:, 0].max() == 39


@settings(max_examples=12, deadline=None)
@given(st.tuples(*[st.floats(0.8, 1.6)] * 3), st.tuples(*[st.floats(0.55, 1.9)] * 3), st.integers(0, 1000))
def test_round_trip_to_another_spacing_keeps_dice(tmp_path_factory, write, spacing, ratio, seed):
    """A perfect network's scores (each voxel's share of each class) on the planned grid, put back: Dice 0.98."""
    rng = np.random.default_rng(seed)
    label = ellipsoids(rng, shape=(48, 52, 50), radii=(8, 13))
    folder = tmp_path_factory.mktemp("trip")
    affine = np.diag([*spacing, 1.0])
    image = ndimage.gaussian_filter(label.astype(np.float32), 1) + 1
    case = Case("c", (write(folder / "i.nii", image, affine),), write(folder / "l.nii", label, affine))
    target = tuple(float(s * r) for s, r in zip(reversed(spacing), ratio, strict=True))
    out = preprocess(case, LabelTable({"a": (1,), "b": (2,)}), Grid(target))
    inside = out.native_label[tuple(slice(a, b) for a, b in out.geometry.crop)]
    shares = [resample_image((inside == k).astype(np.float32), out.geometry.target_shape, 0) for k in range(3)]
    native = to_native(np.stack(shares), out.geometry, LabelTable.numbered(2))
    assert native.shape == out.native_label.shape
    assert min(dice_per_target(out.native_label, native, LabelTable.numbered(2))) >= 0.98
    scores = np.stack([(out.label == k).astype(np.float32) for k in range(3)])
    hard = to_native(scores, out.geometry, LabelTable.numbered(2))
    assert min(dice_per_target(out.native_label, hard, LabelTable.numbered(2))) >= 0.93, (
        "whole voxels of a coarser grid keep less"
    )


def ellipsoids(rng, shape, radii):
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"))
    label = np.zeros(shape, np.uint8)
    for value, centre in ((1, 15), (2, 33)):
        at = centre + rng.uniform(-2, 2, 3)
        offset = (grid - at[:, None, None, None]) / rng.uniform(*radii, (3, 1, 1, 1))
        label[np.sqrt((offset**2).sum(0)) < 1] = value
    return label


def test_same_spacing_is_exact(tmp_path, write):
    image = np.zeros((9, 10, 11), np.float32)
    image[2:7, 3:8, 4:9] = 1
    label = (image > 0).astype(np.uint8)
    case = Case("c", (write(tmp_path / "i.nii", image),), write(tmp_path / "l.nii", label))
    out = preprocess(case, LabelTable({"a": (1,)}), Grid((1.0, 1.0, 1.0)))
    assert out.image.shape == (1, 5, 5, 5), "cropped to content"
    assert out.label.all()
    scores = np.stack([1 - out.label, out.label]).astype(np.float32)
    native = to_native(scores, out.geometry, LabelTable.numbered(1))
    np.testing.assert_array_equal(native, out.native_label)


def test_a_bad_file_is_named_with_its_case(tmp_path, write):
    case = Case("c7", (write(tmp_path / "i.nii", np.zeros((4, 4, 4))),), tmp_path / "gone.nii")
    with pytest.raises(DataError, match=r"c7.*gone\.nii"):
        preprocess(case, LabelTable({"a": (1,)}), Grid((1.0, 1.0, 1.0)))


def test_ct_is_kept_from_ringing_at_its_padding(tmp_path, write):
    """Beside a padding of -32768 a spline overshoots by thousands of HU; what is kept stays near tissue and air."""
    image = np.full((16, 16, 16), 40, np.int16)
    image[:8] = -32768
    image[0, 0, 0] = 41
    label = np.zeros(image.shape, np.uint8)
    label[8:] = 1
    case = Case("c", (write(tmp_path / "i.nii", image),), write(tmp_path / "l.nii", label))
    table = LabelTable({"a": (1,)})
    plain = preprocess(case, table, Grid((0.7, 0.7, 0.7), ct=(False,))).image
    clean = preprocess(case, table, Grid((0.7, 0.7, 0.7), ct=(True,))).image
    assert plain.max() > 1000
    assert -1200 < clean.min() < -900
    assert clean.max() < 400
    assert np.array_equal(preprocess_image(case, Grid((0.7, 0.7, 0.7), ct=(True,))).image, clean), "as at prediction"


@pytest.mark.parametrize(
    ("name", "ct"), [("CT", True), ("ct portal", True), ("CTA", False), ("T1", False), ("", False)]
)
def test_channels_that_are_ct(name, ct):
    assert is_ct(name) is ct


def test_a_label_on_a_coarser_turned_grid_comes_back_to_its_image(tmp_path, write):
    """A box of 8 x 8 x 8 mm in an LPS label of 2 mm, laid on a RAS image of 1 mm: each voxel by hand."""
    image = read_volume(write(tmp_path / "i.nii", np.zeros((20, 20, 20), np.float32)))
    label = np.zeros((10, 10, 10), np.uint8)
    label[2:6, 3:7, 4:8] = 1  # along i and j the axis runs down from 19
    affine = np.diag([-2, -2, 2, 1.0])
    affine[:3, 3] = (18.5, 18.5, 0.5)
    volume = read_volume(write(tmp_path / "l.nii", label, affine), scaled=False)
    placed = label_on_grid(to_class_indices(volume, LabelTable.numbered(1)), volume, image)
    expected = np.zeros((20, 20, 20), np.uint8)  # (D, H, W) = (z, y, x)
    expected[8:16, 6:14, 8:16] = 1
    expected[np.ix_((8, 15), (6, 13), (8, 15))] = 0  # a corner has 0.75 cubed of the box: less than half
    np.testing.assert_array_equal(placed, expected)


def test_a_label_off_its_grid_is_placed_when_preprocessing_is_told_to(tmp_path, write):
    image, label = np.random.default_rng(0).normal(size=(12, 12, 12)), np.zeros((12, 12, 12), np.uint8)
    label[4:8, 4:8, 4:8] = 1
    affine = np.eye(4)
    affine[0, 3] = 2.0
    case = Case("c", (write(tmp_path / "i.nii", image),), write(tmp_path / "l.nii", label, affine))
    table = LabelTable.numbered(1)
    as_is = preprocess(case, table, Grid((1.0, 1.0, 1.0)))
    moved = preprocess(case, table, Grid((1.0, 1.0, 1.0)), resample_over_mm=0.1)
    np.testing.assert_array_equal(moved.native_label, np.roll(as_is.native_label, 2, axis=2))
    within = preprocess(case, table, Grid((1.0, 1.0, 1.0)), resample_over_mm=5.0)
    np.testing.assert_array_equal(within.native_label, as_is.native_label)


def test_ignored_voxels_are_never_a_patch_centre(tmp_path, write):
    label = np.zeros((6, 6, 6), np.uint8)
    label[:3], label[3, 3, 3] = 7, 1
    case = Case("c", (write(tmp_path / "i.nii", np.ones((6, 6, 6))),), write(tmp_path / "l.nii", label))
    out = preprocess(case, LabelTable({"a": (1,)}, ignore=(7,)), Grid((1.0, 1.0, 1.0)))
    assert list(out.foreground) == [1]
    assert (out.label == 2).sum() == 3 * 36


@pytest.mark.parametrize("shape", [(63, 23, 24), (140, 20, 31), (70, 25, 24)], ids=str)
def test_slabs_give_what_the_whole_gives(shape, monkeypatch):
    """Against scipy in one piece; a cubic spline reaches past a slab, and its margin covers that."""
    from scipy import ndimage

    from segspeed.data import preprocess as module

    rng = np.random.default_rng(0)
    image = rng.normal(0, 300, (70, 20, 24)).astype(np.float32)
    label = rng.integers(0, 4, image.shape).astype(np.uint8)
    factors = [n / m for n, m in zip(shape, image.shape, strict=True)]

    def whole(array, order):
        return ndimage.zoom(array, factors, order=order, mode="nearest", grid_mode=True)

    shares = np.stack([whole((label == value).astype(np.float32), 1) for value in range(4)])
    monkeypatch.setattr(module, "SLAB", 3000)
    assert len(module._slabs(shape)) > 10
    np.testing.assert_allclose(module.resample_image(image, shape, None), whole(image, 3), atol=1e-3)
    np.testing.assert_allclose(module._zoom(image, shape, order=1), whole(image, 1), atol=1e-3)
    found = module.resample_label(label, shape)
    best = np.sort(shares, 0)
    clear = best[-1] - best[-2] > 1e-5  # where two classes share a voxel evenly, rounding decides
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(found[clear], shares.argmax(0)[clear])
    monkeypatch.setattr(module, "REACH", 2)
    if shape[0] == len(image):
        return  # planes that stay where they are come back whatever lies beside them
    assert np.abs(module.resample_image(image, shape, None) - whole(image, 3)).max() > 1e-3, "the margin is needed"


def test_a_label_of_thick_slices_covers_the_whole_of_its_extent(tmp_path, write):
    """Slices of 5 mm whose outer faces are those of an image of 1 mm: no voxel of the image goes without."""
    image = read_volume(write(tmp_path / "i.nii", np.zeros((4, 4, 20), np.float32)))
    affine = np.diag([1, 1, 5, 1.0])
    affine[2, 3] = 2.0  # the first slice reaches from -0.5 to 4.5 mm
    volume = read_volume(write(tmp_path / "l.nii", np.ones((4, 4, 4), np.uint8), affine), scaled=False)
    indices = to_class_indices(volume, LabelTable.numbered(1))
    assert label_on_grid(indices, volume, image).all()
    assert share_outside(indices, volume, image) == 0
    affine[2, 3] = 7.0
    moved = read_volume(write(tmp_path / "m.nii", np.ones((4, 4, 4), np.uint8), affine), scaled=False)
    placed = label_on_grid(indices, moved, image)
    assert placed[5:].all()
    assert not placed[:5].any()
    assert share_outside(indices, moved, image) == 0.25
