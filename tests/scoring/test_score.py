import gzip

import nibabel as nib
import numpy as np
import pytest

from segspeed.scoring.pairs import ScorePair, find_pairs
from segspeed.scoring.score import classes_of, score_pairs
from segspeed.types import DataError, LabelTable, SettingError

SPACING = np.diag([2.0, 1.0, 0.5, 1.0])


def cube(start, value=1, shape=(16, 14, 12), side=4, into=None):
    """(i, j, k) label map with one cube of 4x4x4 voxels."""
    out = np.zeros(shape, np.uint8) if into is None else into
    out[tuple(slice(s, s + side) for s in start)] = value
    return out


@pytest.fixture
def pair(write, tmp_path):
    """pair(prediction, reference, name="x", affine=..., prediction_affine=None)"""

    def make(prediction, reference, name="x", affine=SPACING, prediction_affine=None, **about):
        p = write(
            tmp_path / "p" / f"{name}.nii.gz", prediction, affine if prediction_affine is None else prediction_affine
        )
        return ScorePair(name, p, write(tmp_path / "l" / f"{name}.nii.gz", reference, affine), **about)

    return make


def score(pair, classes=None, **settings):
    (case,) = score_pairs([pair], LabelTable(classes or {"one": (1,)}), **settings)
    return case


def test_cubes_by_hand(pair):
    # shifted by one voxel along i (2 mm): 3 of 4 layers in common
    case = score(pair(cube((5, 4, 4)), cube((4, 4, 4)), patient="p", site="s"), tolerances=(0.5, 2.0), lesions=True)
    assert (case.id, case.patient, case.site, case.problem) == ("x", "p", "s", None)
    one = case.scores["one"]
    assert one.state == "both"
    assert one.dice == pytest.approx(2 * 48 / 128)
    assert one.volume_ml == one.reference_volume_ml == pytest.approx(64 * 1e-3)  # a voxel has 2 * 1 * 0.5 mm^3
    assert one.volume_error_ml == 0
    assert one.sensitivity == one.precision == pytest.approx(0.75)
    assert one.hd95_mm == pytest.approx(2.0)
    assert one.nsd[2.0] == 1.0, "no surface lies further than the shift"
    assert 0 < one.nsd[0.5] < 1
    assert (one.detection.found, one.detection.missed, one.detection.false) == (1, 0, 0)


def test_states_and_the_worth_of_what_is_not_there(pair):
    prediction, reference = cube((1, 1, 1), 1), cube((1, 1, 1), 2)
    case = score(pair(prediction, reference), {"a": (1,), "b": (2,), "c": (3,)})
    a, b, c = (case.scores[n] for n in "abc")
    assert [s.state for s in (a, b, c)] == ["invented", "missed", "absent in both"]
    assert (a.dice, b.dice, c.dice) == (0.0, 0.0, None)
    assert a.hd95_mm == pytest.approx(np.linalg.norm([16 * 2, 14 * 1, 12 * 0.5]))
    assert b.nsd == {1.0: 0.0, 2.0: 0.0}
    assert (b.volume_ml, b.volume_error_ml) == (0.0, pytest.approx(-0.064))


def test_values_that_mean_one_class_are_merged(pair):
    reference = cube((1, 1, 1), 5, into=cube((1, 1, 5), 9))
    case = score(pair(cube((1, 1, 1), 9, into=cube((1, 1, 5), 5)), reference), {"both": (5, 9)})
    assert case.scores["both"].dice == 1.0


def test_decimals_and_other_axes_on_the_same_grid(pair, write, tmp_path):
    reference = cube((4, 4, 4))
    p = pair(reference.astype(np.float32), reference)
    assert score(p).scores["one"].dice == 1.0
    turned = nib.as_closest_canonical(nib.load(p.reference)).as_reoriented([[1, 1], [0, -1], [2, -1]])
    assert nib.aff2axcodes(turned.affine) != ("R", "A", "S")
    nib.save(turned, p.prediction)
    assert score(p).problem is None
    assert score(p).scores["one"].dice == 1.0


def test_each_problem_is_told_and_the_others_go_on(pair, write, tmp_path):
    good = cube((4, 4, 4))
    shifted = SPACING.copy()
    shifted[0, 3] = 0.3
    pairs = [
        pair(good, good, "good"),
        pair(cube((4, 4, 4), shape=(16, 14, 13)), good, "shape"),
        pair(good, good, "moved", prediction_affine=shifted),
        pair(cube((4, 4, 4), 7), good, "value"),
        pair(good * 0.4, good, "probability"),
        pair(np.where(good, np.nan, 0), good, "nan"),
        pair(good, good, "cut"),
        pair(good, good, "gone"),
        pair(cube((1, 1, 1), 7), cube((1, 1, 1), 8), "both"),
    ]
    whole = gzip.decompress(pairs[6].prediction.read_bytes())
    pairs[6].prediction.write_bytes(gzip.compress(whole[: len(whole) // 2]))
    pairs[7].reference.unlink()
    found = {case.id: case for case in score_pairs(pairs, LabelTable({"one": (1,)}))}
    assert set(found) == {p.id for p in pairs}
    assert found["good"].scores["one"].dice == 1.0
    wanted = {
        "shape": "prediction shape.nii.gz: shape (16, 14, 13), but the label has (16, 14, 12)",
        "moved": "corners up to 0.30 mm apart (tolerance 0.1 mm)",
        "value": "prediction value.nii.gz: label values that no class declares: 7 (64 voxels)",
        "probability": "away from an integer",
        "nan": "64 voxels that are NaN",
        "cut": "prediction cut.nii.gz: cannot be read",
        "gone": "label gone.nii.gz: the file does not exist",
        "both": "declared: 1 = one; label both.nii.gz: label values that no class declares: 8",
    }
    for name, text in wanted.items():
        assert text in found[name].problem, name
        assert found[name].scores is None
    assert score(pairs[2], tolerance_mm=0.5).problem is None


def test_parallel_is_serial(pair):
    rng = np.random.default_rng(0)
    pairs = [pair(cube(rng.integers(1, 8, 3)), cube((4, 4, 4)), f"c{n}") for n in range(5)]
    pairs.append(pair(cube((1, 1, 1), 4), cube((1, 1, 1)), "odd"))
    serial, parallel = (
        sorted(score_pairs(pairs, LabelTable({"one": (1,)}), lesions=True, workers=w), key=lambda c: c.id)
        for w in (1, 2)
    )
    assert serial == parallel


def test_what_cannot_be_meant_is_refused_before_any_file_is_read(tmp_path):
    p = ScorePair("x", tmp_path / "none", tmp_path / "none")
    with pytest.raises(DataError) as caught:
        score_pairs([p, p], LabelTable({"a": (1,), "b": (1, 0), "c": ()}))
    for text in ("given twice: x", "value 1 is given to two", "'c' has no value", "0 is the background"):
        assert text in str(caught.value)
    with pytest.raises(DataError, match="no case(.|\n)*no class"):
        score_pairs([], LabelTable({}))
    for bad in ((-1.0,), (float("nan"),)):
        with pytest.raises(SettingError, match="0 mm or more"):
            score_pairs([p], LabelTable({"a": (1,)}), tolerances=bad)
    with pytest.raises(SettingError, match="given twice: 1, 1"):
        score_pairs([p], LabelTable({"a": (1,)}), tolerances=(1.0, 1.0))


def test_classes_of_labels_that_nobody_named(write, tmp_path):
    a = write(tmp_path / "a.nii.gz", cube((1, 1, 1), 3))
    b = write(tmp_path / "b.nii", cube((1, 1, 1), 12, into=cube((6, 6, 6), 3)).astype(np.float32))
    assert classes_of([b, a]) == {"class_3": (3,), "class_12": (12,)}
    empty = write(tmp_path / "empty.nii", np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(DataError, match="none of the 1 label files holds a value"):
        classes_of([empty])
    half = write(tmp_path / "half.nii", np.full((4, 4, 4), 0.5))
    with pytest.raises(DataError, match=r"half\.nii: label values are up to(.|\n)*gone\.nii: the file does not exist"):
        classes_of([a, half, tmp_path / "gone.nii"])
    image = write(tmp_path / "image.nii", np.arange(1000, dtype=np.int16).reshape(10, 10, 10))
    with pytest.raises(DataError, match="999 different values.*are these images"):
        classes_of([image])


def test_real_labels_against_themselves(real_data):
    labels = real_data / "hippocampus" / "labelsTr"
    pairs = find_pairs(labels, labels)[:3]
    classes = {"anterior": (1,), "posterior": (2,)}
    for case in score_pairs(pairs, LabelTable(classes)):
        assert {s.dice for s in case.scores.values()} == {1.0}
        assert {s.hd95_mm for s in case.scores.values()} == {0.0}
