"""Label maps of another run, of other settings or of nobody known are never taken for one's own."""

from pathlib import Path

import numpy as np
import pytest

from segspeed.stamp import claim, earlier_volumes
from segspeed.types import Case, SettingError

STAMP = {"weights": ["abc"], "settings": {"overlap": 0.5}, "labels": {"a": [1]}}
OTHER = STAMP | {"weights": ["def"]}


@pytest.fixture
def cases(tmp_path, write):
    return [Case("a", (write(tmp_path / "in/a.nii.gz", np.zeros((3, 3, 3), np.uint8)),))]


def made_map(folder):
    (folder / "a.nii.gz").write_bytes(b"a map")


def test_the_same_run_and_settings_go_on(tmp_path, cases):
    out = tmp_path / "out"
    assert claim(out, STAMP, cases, overwrite=False) is False
    made_map(out)
    assert claim(out, STAMP, cases, overwrite=False) is True


def test_other_weights_need_a_word(tmp_path, cases):
    out = tmp_path / "out"
    claim(out, STAMP, cases, overwrite=False)
    made_map(out)
    with pytest.raises(SettingError, match="another run, of older weights"):
        claim(out, OTHER, cases, overwrite=False)
    assert claim(out, STAMP, cases, overwrite=False) is True, "a refusal changes nothing"
    assert claim(out, OTHER, cases, overwrite=True) is False


def test_files_of_somebody_else_are_never_replaced(tmp_path, cases):
    made_map(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(SettingError, match="did not write"):
            claim(tmp_path, STAMP, cases, overwrite=overwrite)
        with pytest.raises(SettingError, match="that of the input"):
            claim(tmp_path / "in", STAMP, cases, overwrite=overwrite)
        with pytest.raises(SettingError, match="that of the input"):
            claim(tmp_path / "in/../in", STAMP, cases, overwrite=overwrite)


def test_an_output_that_cannot_be_a_folder(tmp_path, cases):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file/sub"):
        with pytest.raises(SettingError, match="cannot be made"):
            claim(path, STAMP, cases, overwrite=False)


def test_volumes_of_earlier_cases_are_kept(tmp_path):
    assert earlier_volumes(tmp_path) == {}
    (tmp_path / "summary.json").write_text(
        '{"cases": [{"case": "a", "volumes_ml": {"x": 1.5}}, {"case": "b", "volumes_ml": null}]}'
    )
    assert earlier_volumes(tmp_path) == {"a": {"x": 1.5}}
    (tmp_path / "summary.json").write_text('{"cases": 3}')
    assert earlier_volumes(Path(tmp_path)) == {}
