"""DICOM series written with pydicom alone: what becomes of them, by hand, and what is refused."""

import warnings
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from segspeed.data.dicom import convert_series, find_series, read_series, save_segmentation
from segspeed.types import DataError
from tests.data.dicom_writers import NAME, voxels, write_multiframe, write_series, write_slice

pydicom = pytest.importorskip("pydicom")
pytest.importorskip("highdicom")


def series_of(folder):
    (found,), notes = find_series(folder)
    return found, notes


def values_at(image, world):
    """Voxel value at a DICOM place (left and posterior positive), which must be a voxel centre."""
    at = np.linalg.inv(image.affine) @ (-world[0], -world[1], world[2], 1)
    np.testing.assert_allclose(at[:3], np.rint(at[:3]), atol=1e-3)
    return image.get_fdata()[tuple(np.rint(at[:3]).astype(int))]


def test_slices_in_any_order_become_a_volume_in_its_place(tmp_path):
    one, notes = series_of(write_series(tmp_path / "study"))
    assert notes == []
    image, stack, _ = read_series(one)
    assert image.shape == (4, 5, 6)
    assert (stack.notes, stack.grid.resampled) == ((), False)
    for z, y, x in ((0, 0, 0), (5, 4, 3), (2, 1, 3)):
        world = (-10 + 0.7 * x, 20 + 0.5 * y, 2.5 * z)  # spacing is (between rows, between columns)
        assert values_at(image, world) == voxels()[z, y, x] * 2 - 1024, "rescaled to real-world values"


def test_a_sagittal_series_lies_where_its_header_says(tmp_path):
    positions = [(5.0 + 3 * n, -40.0, 90.0) for n in range(6)]
    one, _ = series_of(write_series(tmp_path, positions, orientation=(0, 1, 0, 0, 0, -1), intercept=0.0, slope=1.0))
    image, _, _ = read_series(one)
    for z, y, x in ((0, 0, 0), (5, 4, 3), (2, 1, 3)):
        assert values_at(image, (5 + 3 * z, -40 + 0.7 * x, 90 - 0.5 * y)) == voxels()[z, y, x]


def test_nothing_of_the_header_goes_along(tmp_path):
    one, _ = series_of(write_series(tmp_path / NAME))
    convert_series(one, tmp_path / "out" / f"{one.id}.nii")
    (written,) = (tmp_path / "out").iterdir()
    content = written.read_bytes()
    for secret in (b"Muster", b"4711", b"19620101", b"1.2.3"):
        assert secret not in content
        assert secret.decode() not in written.name
    assert "Geheim" not in repr(one)
    assert "Muster" not in repr(one)
    assert series_of(tmp_path / NAME)[0].id == one.id, "the same id each time"


def test_a_localizer_under_the_same_series_is_left_out_with_a_word(tmp_path):
    folder = write_series(tmp_path / "s")
    write_slice(folder / "scout.dcm", voxels()[0], (0, 0, 0), orientation=(0, 1, 0, 0, 0, -1))
    for n in range(4):
        kind = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
        write_slice(folder / f"lat{n}.dcm", voxels()[0], (0, 0, 7.0 * n), ImageType=kind)
    (folder / "readme.txt").write_text("no DICOM")
    one, notes = series_of(folder)
    assert len(one.files) == 6
    assert sum("localizer" in n for n in notes) == 2
    assert any("4 slice(s) marked" in n for n in notes)
    assert any("1 files are no slices" in n for n in notes)
    assert read_series(one)[0].header.get_zooms()[2] == pytest.approx(2.5)


def test_several_series_of_a_tree_are_told_apart(tmp_path):
    write_series(tmp_path, uid="1.2.3", order=range(6))
    for n in range(6):
        write_slice(tmp_path / f"b{n}", voxels()[n], (0, 0, 2.0 * n), uid="1.2.4")
    folder = write_slice(tmp_path / "DICOMDIR", voxels()[0], (0, 0, 0))
    del folder.Modality
    folder.file_meta.MediaStorageSOPClassUID = folder.SOPClassUID = "1.2.840.10008.1.3.10"
    folder.save_as(tmp_path / "DICOMDIR", enforce_file_format=True)
    write_slice(tmp_path / "colour.dcm", voxels()[0], (0, 0, 0), SamplesPerPixel=3)
    found, notes = find_series(tmp_path)
    assert len({s.id for s in found}) == 2
    assert [len(s.files) for s in found] == [6, 6]
    assert notes == ["2 files are no slices of a DICOM volume"]


def at(*zs):
    return [(-10.0, 20.0, float(z)) for z in zs]


@pytest.mark.parametrize(
    ("zs", "text"),
    [
        ((0, 2.5, 5, 7.5, 15, 17.5), r"2 slices are missing.*2 between 7.5 and 15 mm.*spacing is 2.5 mm"),
        ((0, 1, 2, 3, 7, 8), r"3 slices are missing.*3 between 3 and 7 mm"),
        ((0, 1, 2, 4, 5, 7), r"2 slices are missing.*1 between 2 and 4 mm, 1 between 5 and 7 mm"),
        ((0, 2.5, 5, 12.5, 15, 17.5), r"2 between 5 and 12.5"),
        ((0, 1, 2, 3, 60.5, 61.5), r"unevenly spaced"),
    ],
)
def test_missing_slices_are_counted_and_placed(tmp_path, zs, text):
    one, _ = series_of(write_series(tmp_path, at(*zs)))
    with pytest.raises(DataError, match=text):
        read_series(one)


@pytest.mark.parametrize(
    "zs",
    [
        [1.6 * z + 0.0001 * (z % 2) for z in range(6)],
        [round(0.7 * z, 2) + 0.004 * (z % 2) for z in range(6)],  # 0.6 % of the spacing
    ],
)
def test_rounded_positions_are_no_gap(tmp_path, zs):
    image, stack, _ = read_series(series_of(write_series(tmp_path, at(*zs)))[0])
    assert (image.shape, stack.grid.resampled) == ((4, 5, 6), False)


def ramp(zs, y_shift=lambda z: 0.0):
    """Planes whose value is 10 x + 20 y + 3 z in mm: linear interpolation is exact on them."""
    x, y = np.meshgrid(np.arange(8.0), np.arange(12.0))
    return np.stack([10 * x + 20 * (y + y_shift(z)) + 3 * z for z in zs])


def test_uneven_spacing_is_resampled_linearly(tmp_path):
    zs = [0, 2, 4, 6, 8, 13, 18, 23, 28]  # 2 mm, then 5 mm: a zone of its own spacing
    for n, z in enumerate(zs):
        write_slice(tmp_path / f"{n}.dcm", ramp(zs)[n], (0, 0, z), spacing=(1, 1), slope=1.0, intercept=0.0)
    image, stack, _ = read_series(series_of(tmp_path)[0])
    assert image.shape == (8, 12, 15), "28 mm in steps of 2"
    np.testing.assert_allclose(image.header.get_zooms(), (1, 1, 2), atol=1e-6)
    assert stack.grid.resampled
    assert "2 to 5 mm" in stack.notes[0]
    assert "smallest step" in stack.notes[0]
    for world in ((0, 0, 0), (7, 11, 28), (3, 5, 10), (2, 9, 16)):
        assert values_at(image, world) == pytest.approx(10 * world[0] + 20 * world[1] + 3 * world[2])


def test_a_little_jitter_goes_to_the_median_step(tmp_path):
    zs = [0, 3, 6.1, 9.0, 12, 15]
    for n, z in enumerate(zs):
        write_slice(tmp_path / f"{n}.dcm", ramp(zs)[n], (0, 0, z), spacing=(1, 1), slope=1.0, intercept=0.0)
    image, stack, _ = read_series(series_of(tmp_path)[0])
    assert "median step" in stack.notes[0]
    assert image.shape == (8, 12, 6)
    assert values_at(image, (3, 5, 6)) == pytest.approx(148, abs=1), "between 9.1 ... rounded to int16 in the files"


def tilted(folder, **more):
    zs = [5.0 * n for n in range(6)]
    planes = ramp(zs, y_shift=lambda z: 0.24 * z)  # each slice starts 1.2 mm further back
    for n, z in enumerate(zs):
        position = (-4, 7 + 0.24 * z, z)
        exact = np.rint(planes[n] * 10)
        write_slice(folder / f"{n}.dcm", exact, position, spacing=(1, 1), slope=0.1, intercept=0.0, **more)
    return folder


def test_a_tilted_gantry_is_set_upright(tmp_path):
    image, stack, _ = read_series(series_of(tilted(tmp_path))[0])
    assert image.shape == (8, 18, 6), "12 rows, and 6 mm of shift"
    axes = image.affine[:3, :3] / np.linalg.norm(image.affine[:3, :3], axis=0)
    np.testing.assert_allclose(axes.T @ axes, np.eye(3), atol=1e-9)
    assert "13.5 degrees" in stack.notes[0]
    # (x, y, z) in mm of the patient; the first pixel of the first slice is (-4, 7, 0) and holds 0
    for x, y, z in ((0, 0, 0), (7, 11, 0), (3, 9, 10), (5, 12, 25), (2, 7, 15)):
        assert values_at(image, (x - 4, y + 7, z)) == pytest.approx(10 * x + 20 * y + 3 * z, abs=1e-3)
    assert values_at(image, (-4, 7, 25)) == 0, "beyond the last slice's first row: the smallest value"


def test_tilt_is_read_from_positions_not_from_the_tag(tmp_path):
    image, stack, _ = read_series(series_of(write_series(tmp_path, GantryDetectorTilt=15))[0])
    assert (image.shape, stack.grid.resampled) == ((4, 5, 6), False)


def test_copies_are_dropped_and_two_phases_refused(tmp_path):
    folder = write_series(tmp_path / "double")
    (folder / "copy.dcm").write_bytes((folder / "0.dcm").read_bytes())
    image, stack, _ = read_series(series_of(folder)[0])
    assert image.shape == (4, 5, 6)
    assert "1 slices were there twice" in stack.notes[0]
    for n in range(6):
        write_slice(folder / f"late{n}.dcm", voxels()[n] + 1, (-10, 20, 2.5 * n), AcquisitionNumber=2)
    with pytest.raises(DataError, match=r"6 slices lie where another does.*AcquisitionNumber.*Export each"):
        read_series(series_of(folder)[0])


def test_empty_slices(tmp_path):
    for n in range(4):
        write_slice(tmp_path / f"zero/{n}.dcm", np.zeros((5, 4), np.int16), (0, 0, 2.5 * n), intercept=0.0)
    with pytest.raises(DataError, match="every voxel is 0"):
        read_series(series_of(tmp_path / "zero")[0])
    array = voxels()
    array[3] = 0
    with pytest.raises(DataError, match="1 slices inside the volume are 0"):
        read_series(series_of(write_series(tmp_path / "inside", array=array))[0])
    array = voxels()
    array[[0, 5]] = 0
    assert read_series(series_of(write_series(tmp_path / "ends", array=array))[0])[0].shape == (4, 5, 6)


def test_the_whole_range_of_stored_values(tmp_path):
    array = voxels()
    array[2, 1, 1], array[2, 1, 2] = -32768, 32767
    image, _, _ = read_series(series_of(write_series(tmp_path, array=array, slope=1, intercept=0, modality="MR"))[0])
    assert (image.get_fdata().min(), image.get_fdata().max()) == (-32768, 32767)
    assert image.get_data_dtype() == np.int16


def test_slope_and_intercept_of_each_slice(tmp_path):
    for n in range(6):
        write_slice(
            tmp_path / f"{n}.dcm", voxels()[n], (0, 0, 3.0 * n), slope=0.25 * (n + 1), intercept=n, modality="PT"
        )
    data = read_series(series_of(tmp_path)[0])[0].get_fdata()
    for n in range(6):
        np.testing.assert_allclose(data[:, :, n], (voxels()[n] * 0.25 * (n + 1) + n).T)


def test_without_rescale_tags_values_are_as_stored_and_ct_is_doubted(tmp_path):
    image, stack, _ = read_series(series_of(write_series(tmp_path, slope=None))[0])
    assert image.get_fdata().max() == voxels().max()
    assert "not in HU" in stack.notes[0]


def test_a_multi_frame_file(tmp_path):
    order = [4, 0, 3, 1, 5, 2]
    write_multiframe(
        tmp_path / "x", voxels()[order], [(-10, 20, 2.5 * z) for z in order], slopes=[z + 1 for z in order]
    )
    one, _ = series_of(tmp_path)
    assert len(one.files) == 1
    image, stack, _ = read_series(one)
    assert image.shape == (4, 5, 6)
    for z, y, x in ((0, 0, 0), (5, 4, 3), (2, 1, 3)):
        assert values_at(image, (-10 + 0.7 * x, 20 + 0.5 * y, 2.5 * z)) == voxels()[z, y, x] * (z + 1)


def test_compressed_pixels(tmp_path):
    image, _, _ = read_series(series_of(write_series(tmp_path / "rle", rle=True))[0])
    assert image.get_fdata().max() == voxels().max() * 2 - 1024


@pytest.mark.parametrize(
    ("syntax", "package"),
    [("1.2.840.10008.1.2.4.90", "pylibjpeg-openjpeg"), ("1.2.840.10008.1.2.4.70", "pylibjpeg-libjpeg"),
     ("1.2.840.10008.1.2.4.80", "pyjpegls"), ("1.2.840.10008.1.2.4.201", "pylibjpeg-openjpeg")],
)  # fmt: skip
def test_a_missing_decoder_is_named(tmp_path, monkeypatch, syntax, package):
    from pydicom.encaps import encapsulate
    from pydicom.pixels.decoders.base import get_decoder

    monkeypatch.setattr(type(get_decoder(syntax)), "is_available", property(lambda self: False))
    write_series(tmp_path)
    for path in tmp_path.iterdir():
        one = pydicom.dcmread(path)
        one.file_meta.TransferSyntaxUID = syntax
        one.PixelData = encapsulate([b"\xff\x4f\xff\x51nothing."])
        one["PixelData"].VR = "OB"
        one.save_as(path, enforce_file_format=True)
    with pytest.raises(DataError, match=rf"nothing installed here decodes.*{package}"):
        read_series(series_of(tmp_path)[0])


def test_damaged_files_are_counted_and_quote_nothing(tmp_path, caplog, capsys):
    folder = write_series(tmp_path)
    bad = (folder / "2.dcm").read_bytes()
    (folder / "2.dcm").write_bytes(bad[:-30])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match="pixels of 1 files cannot be decoded") as told:
            read_series(series_of(folder)[0])
    said = str(told.value) + caplog.text + "".join(capsys.readouterr())
    assert "Muster" not in said
    assert "1.2.3" not in said


def test_a_label_map_goes_back_into_its_study(tmp_path):
    import highdicom

    one, _ = series_of(write_series(tmp_path / "s"))
    convert_series(one, tmp_path / "image.nii.gz")
    image = nib.load(tmp_path / "image.nii.gz")
    label = np.zeros(image.shape, np.uint8)
    label[1:3, 2:4, 1:3], label[0, 0, 5] = 1, 7
    nib.save(nib.Nifti1Image(label, image.affine), tmp_path / "label.nii.gz")
    save_segmentation(
        tmp_path / "label.nii.gz", one, tmp_path / "x.dcm", {"organ": (1,), "lesion": (7,), "absent": (9,)}
    )
    back = highdicom.seg.segread(tmp_path / "x.dcm")
    assert [back.get_segment_description(n).segment_label for n in back.segment_numbers] == ["organ", "lesion"]
    assert back.StudyInstanceUID == "1.2.9"
    volume = back.get_volume(combine_segments=True)
    assert [(volume.array == n).sum() for n in (1, 2)] == [(label == 1).sum(), (label == 7).sum()]
    place = np.argwhere(volume.array == 2)[0]
    world = volume.affine @ (*place, 1)
    expected = np.diag([-1, -1, 1, 1]) @ image.affine @ (0, 0, 5, 1)
    np.testing.assert_allclose(world, expected, atol=1e-3)


def test_a_label_map_of_a_tilted_series_goes_back_to_its_slices(tmp_path):
    one, _ = series_of(tilted(tmp_path / "s"))
    convert_series(one, tmp_path / "image.nii.gz")
    image = nib.load(tmp_path / "image.nii.gz")
    label = np.zeros(image.shape, np.uint8)
    where = np.linalg.inv(image.affine) @ (4 - 3, -7 - 9, 15, 1)  # 3 mm right of the first pixel, 9 mm behind it
    i, j, k = np.rint(where[:3]).astype(int)
    label[i, j, k] = 1
    nib.save(nib.Nifti1Image(label, image.affine), tmp_path / "label.nii.gz")
    save_segmentation(tmp_path / "label.nii.gz", one, tmp_path / "x.dcm", {"organ": (1,)})
    back = pydicom.dcmread(tmp_path / "x.dcm")
    (frame,) = back.PerFrameFunctionalGroupsSequence
    np.testing.assert_allclose(frame.PlanePositionSequence[0].ImagePositionPatient, (-4, 7 + 3.6, 15))
    ((row, column),) = np.argwhere(back.pixel_array.reshape(12, 8))
    assert (row, column) == (5, 3), "9 mm less the slice's own start of 3.6 mm is 5.4: row 5"


def test_a_label_map_of_an_uneven_and_of_a_multi_frame_series_goes_back(tmp_path):
    import highdicom

    zs = [0, 2, 4, 6, 8, 13, 18, 23, 28]
    write_series(tmp_path / "a", at(*zs), array=np.arange(9 * 20, dtype=np.int16).reshape(9, 5, 4) + 1)
    order = [4, 0, 3, 1, 5, 2]
    write_multiframe(tmp_path / "b/x", voxels()[order], [(-10, 20, 2.5 * z) for z in order])
    for name, z, grid_z in (("a", 13, 7), ("b", 7.5, 3)):
        one, _ = series_of(tmp_path / name)
        image, _, _ = read_series(one)
        label = np.zeros(image.shape, np.uint8)
        label[2, 1, grid_z] = (
            1  # of the uneven one: 14 mm, the voxel nearest to the slice at 13 (12 and 14 are as near)
        )
        nib.save(nib.Nifti1Image(label, image.affine), tmp_path / "l.nii.gz")
        save_segmentation(tmp_path / "l.nii.gz", one, tmp_path / f"{name}.dcm", {"organ": (1,)})
        back = highdicom.seg.segread(tmp_path / f"{name}.dcm")
        (frame,) = back.PerFrameFunctionalGroupsSequence
        np.testing.assert_allclose(frame.PlanePositionSequence[0].ImagePositionPatient, (-10, 20, z))
        assert np.argwhere(back.pixel_array.reshape(5, 4)).tolist() == [[1, 2]]


def test_a_real_study(real_data, tmp_path):
    one, notes = series_of(Path(real_data) / "dicom_study")
    assert convert_series(one, tmp_path / "x.nii.gz") == ()
    image = nib.load(tmp_path / "x.nii.gz")
    assert sorted(image.shape) == [32, 35, 51]
    assert notes == []
