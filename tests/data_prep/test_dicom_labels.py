"""Structures of SEG and RTSTRUCT files written with pydicom alone, laid on the slices of a series."""

import numpy as np
import pytest
from skimage.draw import polygon2mask

from data_prep.dicom_convert import structures_on
from data_prep.dicom_labels import masks_of, read_object
from data_prep.polygons import beside, distinct, inside
from segspeed.data.dicom import find_series, stack_series
from segspeed.types import DataError
from tests.data.dicom_writers import voxels, write_multiframe, write_rtstruct, write_seg, write_series

pytest.importorskip("pydicom")
PLACES = [(-10.0, 20.0, 2.5 * z) for z in range(6)]


def square(left, top, right, bottom):
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)], dtype=float)


def test_a_square_holds_the_centres_inside_it():
    mask = inside([square(0.5, 1.5, 3.5, 2.5)], (4, 6))
    assert np.argwhere(mask).tolist() == [[2, 1], [2, 2], [2, 3]]


def test_centres_on_an_outline_belong_to_one_of_two_neighbours():
    left, right = inside([square(0, 0, 2, 3)], (4, 6)), inside([square(2, 0, 4, 3)], (4, 6))
    assert not (left & right).any()
    assert np.array_equal(left | right, inside([square(0, 0, 4, 3)], (4, 6)))
    assert left.sum() == 6
    noise = np.random.default_rng(0).uniform(-1e-6, 1e-6, (4, 2))
    assert np.array_equal(inside([square(0, 0, 2, 3) + noise], (4, 6)), left), "rounding changes nothing"


def test_holes_and_keyholes():
    outer, inner = square(-0.5, -0.5, 6.5, 6.5), square(1.5, 1.5, 4.5, 4.5)
    ring = inside([outer, inner], (8, 8))
    assert ring.sum() == 49 - 9
    keyhole = np.concatenate([outer, outer[:1], inner, inner[:1]])  # in and out by the same way
    assert np.array_equal(inside([keyhole], (8, 8)), ring)


def test_an_outline_that_is_there_twice_counts_once():
    outer, inner = square(-0.5, -0.5, 6.5, 6.5), square(1.5, 1.5, 4.5, 4.5)
    again = np.roll(outer, 1, axis=0)[::-1] + 1e-4  # from another corner, the other way round
    closed = np.concatenate([outer, outer[:1]])
    assert inside([outer, outer], (8, 8)).sum() == 0, "by even and odd alone"
    assert len(distinct([outer, again, closed, inner])) == 2
    assert inside(distinct([outer, again, inner]), (8, 8)).sum() == 49 - 9
    assert len(distinct([inner, inner + 0.5])) == 2
    keyhole = np.concatenate([outer, outer[:1], inner, inner[:1]])
    assert len(distinct([keyhole, outer])) == 2


def test_an_outline_beside_the_image_is_told_from_one_that_reaches_in():
    assert beside(square(-9, -9, -0.6, 20), (4, 6))
    assert beside(square(0, 3.6, 5, 9), (4, 6))
    assert not beside(square(-9, -9, 20, 20), (4, 6)), "around it all"
    assert not beside(square(5.4, 0, 9, 1), (4, 6))


def test_outlines_beyond_the_image_are_cut_off():
    assert inside([square(-9, -9, 20, 1.5)], (4, 6)).tolist() == [[True] * 6] * 2 + [[False] * 6] * 2
    assert not inside([square(-9, -9, -3, 20)], (4, 6)).any()


def test_a_random_polygon_as_another_library_sees_it():
    rng = np.random.default_rng(3)
    for _ in range(20):
        points = rng.uniform(-3, 33, (9, 2))
        mine = inside([points], (30, 28))
        other = polygon2mask((30, 28), points[:, ::-1])
        assert (mine != other).mean() < 0.01, "but for centres on an outline"


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    (series,), _ = find_series(write_series(folder))
    return stack_series(series)


def masks(path, stack):
    one = read_object(path)
    found, notes = masks_of(one, list(one.names), stack)
    return {one.names[n]: m for n, m in found.items()}, notes


def some(*at):
    mask = np.zeros((6, 5, 4), dtype=int)
    for z, y, x in at:
        mask[z, y, x] = 1
    return mask


def test_binary_segments_may_overlap_and_leave_out_empty_frames(tmp_path, stack):
    organ, lesion = some((1, 2, 3), (1, 0, 0), (4, 4, 1)), some((1, 2, 3))
    write_seg(tmp_path / "s", [organ, lesion, some((0, 0, 0))], PLACES, names=["Organ", "lesion", "other"])
    found, notes = masks(tmp_path / "s", stack)
    assert np.array_equal(found["Organ"], organ)
    assert np.array_equal(found["lesion"], lesion)
    bits, told = structures_on([read_object(tmp_path / "s")], ["organ", "Lesion", "spleen"], stack)
    assert bits[1, 2, 3] == 3
    assert bits[1, 0, 0] == 1
    assert bits[0, 0, 0] == 0, "a structure that nobody asked for"
    assert notes == ["Organ: 2 slices between its first and last have no frame"]
    assert told == ["no structure called spleen: background here", *notes]


def test_a_fractional_segment_is_cut_at_half_of_its_full_value(tmp_path, stack):
    part = some()
    part[2, 1] = (100, 50, 49, 0)
    write_seg(tmp_path / "s", [part], PLACES, names=["x"], kind="FRACTIONAL", full=100)
    found, _ = masks(tmp_path / "s", stack)
    assert np.argwhere(found["x"]).tolist() == [[2, 1, 0], [2, 1, 1]]


def test_a_seg_on_a_flipped_and_finer_grid_is_looked_up_in_place(tmp_path, stack):
    # Rows run the other way, pixels have half the size: pixel (r, c) of slice 2 covers rows 2r, 2r+1 from the bottom
    fine = np.zeros((6, 10, 8), dtype=int)
    fine[2, 0:2, 6:8] = 1  # the lowest row, the last column
    start = [(-10 - 0.175, 20 + 4 * 0.5 + 0.125, 2.5 * z) for z in range(6)]
    write_seg(tmp_path / "s", [fine], start, names=["x"], spacing=(0.25, 0.35), orientation=(1, 0, 0, 0, -1, 0))
    found, _ = masks(tmp_path / "s", stack)
    assert np.argwhere(found["x"]).tolist() == [[2, 4, 3]]


def test_a_seg_off_the_slices_is_refused(tmp_path, stack):
    write_seg(tmp_path / "s", [some((1, 1, 1))], [(x, y, z + 1.0) for x, y, z in PLACES], names=["x"])
    with pytest.raises(DataError, match=r"1 frames of its SEG lie up to 1.00 mm off"):
        masks(tmp_path / "s", stack)
    write_seg(tmp_path / "t", [some((1, 1, 1))], PLACES, names=["x"], orientation=(1, 0, 0, 0, 0.8, 0.6))
    with pytest.raises(DataError, match="another orientation"):
        masks(tmp_path / "t", stack)


def contour(z, left, top, right, bottom):
    """A rectangle in pixels on slice z, in mm of the patient."""
    return [(-10 + 0.7 * x, 20 + 0.5 * y, 2.5 * z) for x, y in square(left, top, right, bottom)]


def test_contours_become_the_centres_inside(tmp_path, stack):
    rois = {
        "Organ": [contour(3, 0.5, 0.5, 3.5, 3.5), contour(1, -0.5, -0.5, 0.5, 0.5)],
        "ring": [contour(2, -0.5, -0.5, 3.5, 4.5), contour(2, 0.5, 0.5, 2.5, 3.5)],
        "empty": None,
    }
    write_rtstruct(tmp_path / "r", rois)
    found, notes = masks(tmp_path / "r", stack)
    expected = some((1, 0, 0), *((3, y, x) for y in (1, 2, 3) for x in (1, 2, 3)))
    assert np.array_equal(found["Organ"], expected)
    assert found["ring"].sum() == 20 - 6
    assert not found["empty"].any()
    assert notes == ["Organ: 1 slices between its first and last have no contour"]


def test_contours_that_enclose_nothing_or_lie_beyond_are_noted(tmp_path, stack):
    write_rtstruct(tmp_path / "r", {"p": [contour(3, 0, 0, 1, 1)]}, kind="POINT")
    assert masks(tmp_path / "r", stack)[1] == ["p: 1 contours that are points or open lines enclose nothing"]
    write_rtstruct(tmp_path / "r", {"p": [contour(3, 0, 0, 2, 2), contour(7, 0, 0, 2, 2)]})
    assert masks(tmp_path / "r", stack)[1] == ["p: 1 contours lie beyond the first or last slice"]


def test_a_contour_drawn_twice_and_one_beside_the_image_are_noted(tmp_path, stack):
    twice = [contour(3, 0.5, 0.5, 3.5, 3.5)] * 2
    write_rtstruct(tmp_path / "r", {"p": [*twice, contour(4, 90, 0, 99, 9)]})
    found, notes = masks(tmp_path / "r", stack)
    assert found["p"].sum() == found["p"][3].sum() == 9
    assert notes == ["p: 1 contours lie wholly beside the image", "p: 1 contours are there twice; each is used once"]


def test_a_structure_without_a_name_has_its_number_for_one(tmp_path, stack):
    write_seg(tmp_path / "s", [some((1, 1, 1)), some((2, 1, 1))], PLACES, names=["", "x"])
    assert dict(read_object(tmp_path / "s").names) == {1: "segment_1", 2: "x"}
    found, _ = masks(tmp_path / "s", stack)
    assert np.argwhere(found["segment_1"]).tolist() == [[1, 1, 1]]
    write_rtstruct(tmp_path / "r", {" ": [contour(3, 0, 0, 2, 2)]})
    assert dict(read_object(tmp_path / "r").names) == {1: "roi_1"}


def test_a_seg_on_every_second_slice_is_noted(tmp_path, stack):
    full = np.ones((3, 5, 4), int)
    write_seg(tmp_path / "s", [full], PLACES[::2], names=["x"])
    assert masks(tmp_path / "s", stack)[1] == ["x: 2 slices between its first and last have no frame"]


def test_contours_between_or_askew_to_the_slices_are_refused(tmp_path, stack):
    write_rtstruct(tmp_path / "r", {"p": [contour(3.4, 0, 0, 2, 2)]})
    with pytest.raises(DataError, match=r"1 lie up to 1.00 mm between slices"):
        masks(tmp_path / "r", stack)
    askew = [(x, y, z + s * 0.9) for (x, y, z), s in zip(contour(3, 0, 0, 2, 2), (-1, 1, 1, -1), strict=True)]
    write_rtstruct(tmp_path / "r", {"p": [askew]})
    with pytest.raises(DataError, match="1 lie askew"):
        masks(tmp_path / "r", stack)


def test_a_damaged_object_is_named_by_its_kind_only(tmp_path, stack):
    write_seg(tmp_path / "Mustermann", [some((1, 1, 1))], PLACES, names=["x"], SegmentSequence=[])
    one = read_object(tmp_path / "Mustermann")
    assert one.names == {}
    assert "Muster" not in repr(one)
    assert "1.2.3" not in repr(one)


def test_labels_follow_a_tilted_and_an_uneven_series(tmp_path):
    shifts = [(-10.0, 20.0 + 0.5 * n, 5.0 * n) for n in range(6)]  # a row each slice
    (series,), _ = find_series(write_series(tmp_path / "tilt", shifts))
    stack = stack_series(series)
    write_seg(tmp_path / "s", [some((0, 1, 1), (4, 1, 1))], shifts, names=["x"])
    bits, _ = structures_on([read_object(tmp_path / "s")], ["x"], stack)
    assert np.argwhere(bits).tolist() == [[0, 1, 1], [4, 5, 1]], "slice 4 starts four rows further down"
    places = [(-10.0, 20.0, z) for z in (0, 2, 4, 6, 8, 13, 18, 23)]
    array = np.arange(160, dtype=np.int16).reshape(8, 5, 4) + 1
    (series,), _ = find_series(write_series(tmp_path / "uneven", places, array=array))
    stack = stack_series(series)
    mask = np.zeros((8, 5, 4), int)
    mask[5, 2, 2] = 1  # at 13 mm, the middle of 10.5 to 15.5 mm; the grid has 23 mm in 12 steps (1.917 mm)
    write_seg(tmp_path / "u", [mask], places, names=["x"])
    bits, _ = structures_on([read_object(tmp_path / "u")], ["x"], stack)
    step = 23 / (stack.grid.shape[2] - 1)
    assert [round(k * step, 2) for k in np.flatnonzero(bits[:, 2, 2])] == [11.5, 13.42, 15.33]


def test_labels_on_a_multi_frame_series(tmp_path):
    order = [4, 0, 3, 1, 5, 2]
    write_multiframe(tmp_path / "m/x", voxels()[order], [PLACES[z] for z in order])
    (series,), _ = find_series(tmp_path / "m")
    write_seg(tmp_path / "s", [some((4, 2, 3))], PLACES, names=["x"], refers="1.2.6")
    bits, _ = structures_on([read_object(tmp_path / "s")], ["x"], stack_series(series))
    assert np.argwhere(bits).tolist() == [[4, 2, 3]]


def test_one_name_drawn_twice_is_refused(tmp_path, stack):
    write_seg(tmp_path / "a", [some((1, 1, 1))], PLACES, names=["Liver"])
    write_seg(tmp_path / "b", [some((1, 1, 1))], PLACES, names=["liver "])
    with pytest.raises(DataError, match="drawn 2 times"):
        structures_on([read_object(tmp_path / "a"), read_object(tmp_path / "b")], ["liver"], stack)


def test_a_seg_that_a_prediction_became_is_read_as_the_label_it_was(tmp_path):
    """Written by highdicom, read here: on a tilted series, whose labels go to the slices and back."""
    import nibabel as nib

    from segspeed.data.dicom import save_segmentation

    shifts = [(-10.0, 20.0 + 0.5 * n, 5.0 * n) for n in range(6)]
    (series,), _ = find_series(write_series(tmp_path / "tilt", shifts))
    stack = stack_series(series)
    slices, rows, columns = stack.array.shape
    label = np.zeros((slices, rows, columns), np.uint8)
    label[2, 2:5, 1:3], label[3, 4, 2] = 1, 2  # inside the shifted slices
    nib.save(nib.Nifti1Image(label.transpose(2, 1, 0), stack.affine), tmp_path / "l.nii.gz")
    save_segmentation(tmp_path / "l.nii.gz", series, tmp_path / "s.dcm", {"organ": (1, 2), "tumour": (2,)})
    one = read_object(tmp_path / "s.dcm")
    assert (one.series, one.study) == ((series.uid,), series.study)
    bits, _ = structures_on([one], ["organ", "tumour"], stack)
    assert np.array_equal(bits & 1 > 0, label > 0)
    assert np.array_equal(bits & 2 > 0, label == 2)
