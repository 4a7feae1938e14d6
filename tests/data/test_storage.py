import numpy as np
import pytest

from data_prep.msd import msd
from segspeed.data.cache import CacheEntry, Storage, old_entries, resident, write_entry
from segspeed.data.preprocess import Grid, preprocess
from segspeed.data.sampling import PatchSampler, read_patch
from segspeed.types import DataError, LabelTable


@pytest.fixture
def arrays(msd_folder):
    case = msd(str(msd_folder(cases=1))).cases[0]
    return preprocess(case, LabelTable({"bright": (1,), "dark": (3,)}), Grid((1.0, 1.0, 1.0)))


def test_compressed_and_mapped_patches_are_the_same_to_the_bit(tmp_path, arrays):
    pytest.importorskip("blosc2")
    for kind in ("npy", "blosc2"):
        write_entry(tmp_path / kind, "b", arrays, Storage(kind, chunk=(8, 8, 8)))
    npy, packed = (CacheEntry(tmp_path / k) for k in ("npy", "blosc2"))
    assert (tmp_path / "blosc2" / "image.b2nd").exists()
    fill = np.array([5.0], np.float32)
    for start in ((0, 0, 0), (3, 5, 7), (-2, 10, 15)):
        found = []
        for entry in (npy, packed):
            image, label = np.empty((1, 8, 8, 8), np.float32), np.empty((8, 8, 8), np.int16)
            read_patch(entry, start, image, label, fill)
            found.append((image, label))
        for a, b in zip(*found, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.array(packed.image[:]), arrays.image)


def test_a_damaged_compressed_file_is_named(tmp_path, arrays):
    pytest.importorskip("blosc2")
    write_entry(tmp_path / "e", "b", arrays, Storage("blosc2"))
    (tmp_path / "e" / "image.b2nd").write_bytes(b"nonsense" * 10)
    with pytest.raises(DataError, match="damaged"):
        CacheEntry(tmp_path / "e").image  # noqa: B018


def test_half_precision_halves_the_image_and_refuses_what_does_not_fit(tmp_path, arrays):
    write_entry(tmp_path / "full", "b", arrays)
    write_entry(tmp_path / "half", "b", arrays, Storage(dtype="float16"))
    full, half = (CacheEntry(tmp_path / k).image for k in ("full", "half"))
    assert half.nbytes * 2 == full.nbytes
    np.testing.assert_allclose(half, full, rtol=2**-11, atol=1e-3)
    arrays.image[0, 0, 0, 0] = 70000
    with pytest.raises(DataError, match="float32"):
        write_entry(tmp_path / "over", "b", arrays, Storage(dtype="float16"))
    assert not (tmp_path / "over").exists()


def test_resident_entries_give_the_same_patches(tmp_path, arrays):
    write_entry(tmp_path / "e", "b", arrays)
    entry = CacheEntry(tmp_path / "e")
    kept = resident(entry)
    made = [PatchSampler((e,), (entry.norm,), (8, 8, 8), 0.5, 0) for e in (entry, kept)]
    for index in range(10):
        a, b = (s.read(index) for s in made)
        np.testing.assert_array_equal(a[1], b[1])
        np.testing.assert_array_equal(a[2], b[2])
    assert not isinstance(kept.image, np.memmap)


def test_old_entries_are_those_not_in_use(tmp_path, arrays):
    for name in ("b-1", "b-2"):
        write_entry(tmp_path / "cohort" / name, "b", arrays)
    (tmp_path / "cohort" / ".building-b-3-x").mkdir()
    used = tmp_path / "cohort" / "b-1"
    assert old_entries(tmp_path, "cohort", {used}) == [tmp_path / "cohort" / "b-2"], "a builder may still be at work"
    assert old_entries(tmp_path, "nobody", set()) == []
