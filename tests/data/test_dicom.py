"""DICOM series written here by hand, with pydicom alone: what highdicom makes of them, and what is refused."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from segspeed.data.dicom import convert_series, find_series, read_series, save_segmentation
from segspeed.types import DataError

pydicom = pytest.importorskip("pydicom")
pytest.importorskip("highdicom")
NAME = "Mustermann^Erika"
SHAPE = (6, 5, 4)  # slices, rows, columns


def voxels():
    return np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE) + 10


def write_slice(path, pixels, position, *, uid="1.2.3", orientation=(1, 0, 0, 0, 1, 0), spacing=(0.5, 0.7), number=1,
                slope=2.0, intercept=-1024.0):  # fmt: skip
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    one = Dataset()
    one.file_meta = meta
    one.SOPClassUID, one.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    one.PatientName, one.PatientID, one.PatientBirthDate = NAME, "4711", "19620101"
    one.Modality, one.StudyInstanceUID, one.SeriesInstanceUID = "CT", "1.2.9", uid
    one.FrameOfReferenceUID, one.InstanceNumber = "1.2.8", number
    one.ImagePositionPatient, one.ImageOrientationPatient = list(position), list(orientation)
    one.PixelSpacing, one.SliceThickness = list(spacing), 2.5
    one.Rows, one.Columns = pixels.shape
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 16, 15, 1
    one.RescaleSlope, one.RescaleIntercept = slope, intercept
    one.PixelData = pixels.astype("<i2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    one.save_as(path, enforce_file_format=True)


def write_series(folder, positions=None, order=(3, 0, 5, 1, 4, 2), **more):
    positions = positions or [(-10.0, 20.0, 2.5 * z) for z in range(SHAPE[0])]
    for place in order:
        write_slice(folder / f"{order.index(place)}.dcm", voxels()[place], positions[place], number=place, **more)
    return folder


def series_of(folder):
    (found,), notes = find_series(folder)
    return found, notes


def test_slices_in_any_order_become_a_volume_in_its_place(tmp_path):
    one, notes = series_of(write_series(tmp_path / "study"))
    assert notes == []
    image, _, _ = read_series(one)
    data = image.get_fdata()
    assert data.shape == (4, 5, 6)
    for z, y, x in ((0, 0, 0), (5, 4, 3), (2, 1, 3)):
        world = (-10 + 0.7 * x, 20 + 0.5 * y, 2.5 * z)  # DICOM, left and posterior positive; spacing is (row, column)
        at = np.linalg.inv(image.affine) @ (-world[0], -world[1], world[2], 1)
        i, j, k = np.rint(at[:3]).astype(int)
        np.testing.assert_allclose(at[:3], (i, j, k), atol=1e-4)
        assert data[i, j, k] == voxels()[z, y, x] * 2 - 1024, "rescaled to real-world values"


def test_nothing_of_the_header_goes_along(tmp_path):
    one, _ = series_of(write_series(tmp_path / NAME))
    convert_series(one, tmp_path / "out" / f"{one.id}.nii")
    (written,) = (tmp_path / "out").iterdir()
    content = written.read_bytes()
    for secret in (b"Muster", b"4711", b"19620101", b"1.2.3"):
        assert secret not in content
        assert secret.decode() not in written.name
    assert series_of(tmp_path / NAME)[0].id == one.id, "the same id each time"


def test_a_localizer_under_the_same_series_is_left_out_with_a_word(tmp_path):
    folder = write_series(tmp_path / "s")
    write_slice(folder / "scout.dcm", voxels()[0], (0, 0, 0), orientation=(0, 1, 0, 0, 0, -1))
    (folder / "readme.txt").write_text("no DICOM")
    one, notes = series_of(folder)
    assert len(one.files) == 6
    assert any("localizer" in n for n in notes)
    assert any("1 files are no slices" in n for n in notes)
    assert read_series(one)[0].header.get_zooms()[2] == pytest.approx(2.5)


def test_several_series_of_a_tree_are_told_apart(tmp_path):
    write_series(tmp_path / "a")
    write_series(tmp_path / "b", uid="1.2.4")
    found, _ = find_series(tmp_path)
    assert len({s.id for s in found}) == 2
    assert all(len(s.files) == 6 for s in found)


UNEVEN = [(-10.0, 20.0, z) for z in (0, 2.5, 5, 7.5, 15, 17.5)]
TILTED = [(-10.0, 20.0 + 1.2 * n, 5.0 * n) for n in range(6)]


@pytest.mark.parametrize(("positions", "text"), [(UNEVEN, "missing or unevenly"), (TILTED, "no regular volume")])
def test_slices_that_make_no_regular_volume_are_refused(tmp_path, positions, text):
    one, _ = series_of(write_series(tmp_path, positions))
    with pytest.raises(DataError, match=text):
        read_series(one)


def test_rounded_positions_are_no_gap(tmp_path):
    one, _ = series_of(write_series(tmp_path, [(-10.0, 20.0, 1.6 * z + 0.0001 * (z % 2)) for z in range(6)]))
    assert read_series(one)[0].shape == (4, 5, 6)


def test_doubled_and_empty_slices_are_refused(tmp_path):
    folder = write_series(tmp_path / "double")
    (folder / "copy.dcm").write_bytes((folder / "0.dcm").read_bytes())
    with pytest.raises(DataError, match="1 slices lie where another does"):
        read_series(series_of(folder)[0])
    for n in range(4):
        write_slice(tmp_path / f"zero/{n}.dcm", np.zeros((5, 4), np.int16), (0, 0, 2.5 * n), intercept=0.0)
    with pytest.raises(DataError, match="every voxel is 0"):
        read_series(series_of(tmp_path / "zero")[0])


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


def test_a_real_study(real_data, tmp_path):
    one, notes = series_of(Path(real_data) / "dicom_study")
    convert_series(one, tmp_path / "x.nii.gz")
    image = nib.load(tmp_path / "x.nii.gz")
    assert sorted(image.shape) == [32, 35, 51]
    assert notes == []
