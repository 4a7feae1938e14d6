import numpy as np
import pytest

from data_prep.msd import msd
from segspeed.data import cache
from segspeed.data.cache import CacheEntry, entry_key, write_entry
from segspeed.data.inspect import Rules, inspect_case
from segspeed.data.prepare import prepare_cases
from segspeed.data.preprocess import Grid, preprocess
from segspeed.types import DataError, LabelTable


@pytest.fixture
def arrays(msd_folder):
    case = msd(str(msd_folder(cases=1))).cases[0]
    return preprocess(case, LabelTable({"bright": (1,), "dark": (3,)}), Grid((1.0, 1.0, 1.0)))


def test_an_entry_gives_back_what_was_written(tmp_path, arrays):
    path = tmp_path / "cohort" / "b-key"
    size = write_entry(path, "b", arrays)
    entry = CacheEntry(path)
    np.testing.assert_array_equal(entry.image, arrays.image)
    np.testing.assert_array_equal(entry.label, arrays.label)
    np.testing.assert_array_equal(entry.native_label, arrays.native_label)
    np.testing.assert_array_equal(entry.norm, arrays.norm)
    for index, voxels in arrays.foreground.items():
        np.testing.assert_array_equal(entry.foreground(index), voxels)
    assert entry.case_id == "b"
    assert entry.class_indices == (1, 2)
    assert entry.geometry == arrays.geometry
    assert size == sum(f.stat().st_size for f in path.iterdir())
    assert isinstance(entry.image, np.memmap)


def test_nothing_is_left_of_a_failed_write(tmp_path, arrays, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_save", full)
    with pytest.raises(OSError, match="space"):
        write_entry(tmp_path / "c" / "b-key", "b", arrays)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_lost_race_leaves_the_winner(tmp_path, arrays, monkeypatch):
    path = tmp_path / "c" / "b-key"
    write_entry(path, "b", arrays)
    before = (path / "image.npy").stat().st_ino
    write_entry(path, "b", arrays)
    assert (path / "image.npy").stat().st_ino == before
    assert [p.name for p in path.parent.iterdir()] == ["b-key"]


@pytest.mark.parametrize("file", ["image.npy", "case.json"])
def test_a_damaged_entry_is_named_with_the_remedy(tmp_path, arrays, file):
    path = tmp_path / "c" / f"b-{file}"
    write_entry(path, "b", arrays)
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"damaged.*Delete the folder"):
        CacheEntry(path).image  # noqa: B018


def test_maps_stay_bounded(tmp_path, arrays, monkeypatch):
    monkeypatch.setattr(cache, "MAX_OPEN", 3)
    for n in range(6):
        write_entry(tmp_path / f"b{n}", "b", arrays)
        CacheEntry(tmp_path / f"b{n}").label  # noqa: B018
    assert len(cache._open) <= 3


def test_the_key_is_the_content():
    settings = {"spacing": (1.0, 1.0, 1.0), "coarse_axis": None, "labels": [[1]]}
    key = entry_key("abc", settings)
    assert key == entry_key("abc", dict(reversed(settings.items())))
    changed = [{**settings, "spacing": (1.0, 1.0, 1.5)}, {**settings, "labels": [[2]]}, {**settings, "coarse_axis": 0}]
    assert len({key, entry_key("abd", settings), *(entry_key("abc", c) for c in changed)}) == 5


def prepared(cohort, root, spacing=(1.0, 1.0, 1.0), workers=1):
    facts = {c.id: inspect_case(c, Rules(cohort.table)) for c in cohort.cases}
    return {p.case_id: p for p in prepare_cases(cohort, facts, Grid(spacing), root, workers)}


def test_only_what_is_missing_is_built(msd_folder, tmp_path, write):
    cohort = msd(str(msd_folder(cases=4)))
    root = tmp_path / "cache"
    assert all(p.built for p in prepared(cohort, root, workers=2).values())
    assert not any(p.built for p in prepared(cohort, root).values())
    assert all(p.built for p in prepared(cohort, root, spacing=(2.0, 1.0, 1.0)).values()), (
        "another setting, another key"
    )
    image = np.random.default_rng(9).normal(size=(20, 18, 16)).astype(np.float32)
    write(cohort.cases[2].images[0], image)
    again = prepared(cohort, root)
    assert [i for i, p in again.items() if p.built] == ["b_02"]
    entry = CacheEntry(again["b_02"].path)
    np.testing.assert_array_equal(entry.image[0], image.transpose(2, 1, 0))


def test_one_bad_case_does_not_stop_the_rest(msd_folder, tmp_path):
    cohort = msd(str(msd_folder(cases=4)))
    facts = {c.id: inspect_case(c, Rules(cohort.table)) for c in cohort.cases}
    bad = cohort.cases[1].images[0]
    bad.write_bytes(bad.read_bytes()[:200])  # damaged after it was checked
    done = {p.case_id: p for p in prepare_cases(cohort, facts, Grid((1.0, 1.0, 1.0)), tmp_path / "cache", 1)}
    assert [i for i, p in done.items() if p.problem] == ["b_01"]
    assert "cut short" in done["b_01"].problem.message
    assert sum(p.built for p in done.values()) == 3


def test_a_small_disk_is_refused_before_anything_is_built(msd_folder, tmp_path, monkeypatch):
    from segspeed.data import prepare as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10_000})())
    with pytest.raises(DataError, match=r"cache\.root"):
        prepared(msd(str(msd_folder(cases=2))), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
