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


def test_globs_join_by_what_the_wildcards_stand_for(folders, tmp_path):
    p, labels = folders(
        ["1_ct.nii.gz", "2_ct.NII.gz", "3_ct.nii.gz", "other.nii"], ["1_seg.nii", "2_seg.nii", "1_old.nii"]
    )
    given = (p / "*_ct.nii.gz", labels / "*_seg.nii")
    with pytest.raises(DataError, match=r"without a label \(1\): 3_ct\.nii\.gz"):
        find_pairs(*given)
    pairs = find_pairs(*given, allow_extra=True)
    assert [(x.id, x.prediction.name, x.reference.name) for x in pairs] == [
        ("1", "1_ct.nii.gz", "1_seg.nii"),
        ("2", "2_ct.NII.gz", "2_seg.nii"),
    ]
    (tmp_path / "m").mkdir()
    (tmp_path / "m/1.nii").touch()
    (tmp_path / "m/2.nii").touch()
    assert [x.id for x in find_pairs(tmp_path / "m", labels / "*_seg.nii")] == ["1", "2"], "a folder and a glob"
    with pytest.raises(DataError) as caught:
        find_pairs(p / "none/*.nii", labels / "x*.nii")
    assert f"there is no folder {p / 'none'}" in str(caught.value)
    assert f"no .nii or .nii.gz file in {labels}" in str(caught.value)


def test_a_folder_in_its_other_spelling(folders):
    p, labels = folders(["a.nii"], ["a.nii"])
    p = p.rename(p.parent / unicodedata.normalize("NFD", "für"))
    assert len(find_pairs(p.parent / "für", labels)) == 1
