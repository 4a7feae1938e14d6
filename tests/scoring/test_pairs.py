import unicodedata

import pytest

from segspeed.scoring.pairs import ScorePair, find_pairs
from segspeed.types import DataError


@pytest.fixture
def folders(tmp_path):
    """folders(predictions, labels): two folders with empty files of these names."""

    def make(predictions, labels):
        for folder, names in (("p", predictions), ("l", labels)):
            (tmp_path / folder).mkdir()
            for name in names:
                (tmp_path / folder / name).touch()
        return tmp_path / "p", tmp_path / "l"

    return make


def test_odd_names_pair(folders):
    real = ["b.v1.2.nii.gz", "Case 7.nii", "é.NII.GZ", "._b.nii.gz", ".hidden.nii", "notes.txt"]
    predictions = ["b.v1.2.NII", "Case 7.Nii.gz", unicodedata.normalize("NFD", "é") + ".nii", "._x.nii", "plan.json"]
    p, labels = folders(predictions, real)
    (p / "inner.nii").mkdir()
    pairs = find_pairs(p, labels)
    assert [pair.id for pair in pairs] == ["Case 7", "b.v1.2", "é"]
    assert pairs[0] == ScorePair("Case 7", p / "Case 7.Nii.gz", labels / "Case 7.nii", patient="Case 7", site="")
    assert pairs[1].prediction.name == "b.v1.2.NII"


def test_everything_that_is_wrong_is_said_at_once(folders):
    p, labels = folders(["a.nii", "a.nii.gz", "extra.nii", "b.nii"], ["a.nii", "b.nii.gz", "c.nii", "d.nii.gz"])
    with pytest.raises(DataError) as caught:
        find_pairs(p, labels)
    text = str(caught.value)
    assert "labels without a prediction (2): c.nii, d.nii.gz" in text
    assert "predictions without a label (1): extra.nii" in text
    assert "a.nii and a.nii.gz are both case 'a'" in text


def test_more_predictions_than_labels_only_when_asked(folders):
    p, labels = folders(["a.nii", "b.nii"], ["a.nii"])
    with pytest.raises(DataError, match=r"without a label \(1\): b\.nii"):
        find_pairs(p, labels)
    assert [pair.id for pair in find_pairs(p, labels, allow_extra=True)] == ["a"]
    with pytest.raises(DataError, match=r"labels without a prediction \(1\): b\.nii"):
        find_pairs(labels, p, allow_extra=True)


def test_folders_that_are_none(folders, tmp_path):
    p, _ = folders([], ["a.nii"])
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as caught:
        find_pairs(tmp_path / "nowhere", tmp_path / "file")
    assert "predictions does not exist" in str(caught.value)
    assert "labels is a file, not a folder" in str(caught.value)
    with pytest.raises(DataError, match=r"predictions holds no \.nii or \.nii\.gz file"):
        find_pairs(p, tmp_path / "l")
