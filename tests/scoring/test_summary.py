import json

import numpy as np
import pytest

from segspeed.jsonio import to_plain
from segspeed.metric.compare import bootstrap_interval_by_patient
from segspeed.metric.scores import score_case
from segspeed.metric.summary import EMPTY_POLICY, summarise
from segspeed.scoring.score import CaseScore
from segspeed.scoring.summary import summarise_scores

NAMES = ("liver", "spleen")


def scored(case_id, shift, patient=None, site="", spleen="both"):
    """A case with a liver cube shifted by ``shift`` of 8 voxels, and a spleen in the given state."""
    prediction, reference = np.zeros((2, 20, 12, 12), np.uint8)
    reference[1:9, 2:6, 2:6] = 1
    prediction[1 + shift : 9 + shift, 2:6, 2:6] = 1
    for volume, states in ((prediction, ("both", "invented")), (reference, ("both", "missed"))):
        if spleen in states:
            volume[2:4, 8:10, 8:10] = 2
    scores = score_case(prediction, reference, (1, 2), (1.0, 1.0, 1.0), lesions=True)
    return CaseScore(case_id, patient or case_id, site, dict(zip(NAMES, scores.values(), strict=True)), None)


CASES = [
    scored("a", 0, "p1", "north"),
    scored("b", 2, "p1", "north", "missed"),
    scored("c", 4, "p2", "south", "absent in both"),
    scored("d", 1, "p3", "south", "invented"),
]
FAILED = CaseScore("e", "p4", "south", None, "prediction e.nii: cannot be read")


def test_by_hand():
    s = summarise_scores([*CASES, FAILED])
    liver, spleen = (s.classes[n].metrics for n in NAMES)
    assert liver["dice"].n == 4
    assert liver["dice"].mean == pytest.approx((1 + 0.75 + 0.5 + 0.875) / 4)
    assert liver["dice"].median == pytest.approx((0.75 + 0.875) / 2)
    assert (liver["dice"].min, liver["dice"].max) == (0.5, 1.0)
    assert liver["hd95_mm"].mean == pytest.approx((0 + 2 + 4 + 1) / 4)
    assert liver["volume_ml"].mean == pytest.approx(0.128)
    assert liver["nsd_2mm"].max == 1.0
    assert spleen["dice"].n == 3
    assert spleen["dice"].mean == pytest.approx(1 / 3)
    assert spleen["hd95_mm"].max == pytest.approx(np.sqrt(20**2 + 12**2 + 12**2)), "the diagonal, not infinity"
    assert spleen["volume_error_ml"].n == 4
    assert s.classes["spleen"].states == {"both": 1, "absent in both": 1, "missed": 1, "invented": 1}
    assert s.mean.states == {"both": 5, "absent in both": 1, "missed": 1, "invented": 1}
    assert s.mean_dice == s.mean.metrics["dice"].mean == pytest.approx((0.78125 + 1 / 3) / 2)
    assert s.mean.metrics["dice"].min == pytest.approx(0.375), "the case b: 0.75 and 0"
    assert (s.cases, s.patients) == (4, 3)
    assert s.failed == {"e": "prediction e.nii: cannot be read"}
    assert s.policy.startswith(EMPTY_POLICY)


def test_mean_dice_is_that_of_a_training_run():
    rng = np.random.default_rng(0)
    states = ("both", "absent in both", "missed", "invented")
    cases = [scored(f"c{n}", int(rng.integers(0, 9)), spleen=states[rng.integers(0, 4)]) for n in range(12)]
    theirs = summarise({c.id: {n: s.dice for n, s in c.scores.items()} for c in cases})
    ours = summarise_scores(cases)
    assert ours.mean_dice == pytest.approx(theirs.mean_dice, abs=1e-12)
    assert {n: c.metrics["dice"].mean for n, c in ours.classes.items()} == pytest.approx(dict(theirs.dice))
    assert {n: c.states["absent in both"] for n, c in ours.classes.items()} == theirs.empty
    assert [w.id for w in ours.worst][0] == theirs.ranked()[-1][0]
    assert ours.interval == pytest.approx(theirs.interval, abs=0.03), "each case a patient: the same bootstrap"


def test_intervals_draw_patients():
    s = summarise_scores(CASES, seed=3)
    dice = {"a": 1.0, "b": 0.75, "c": 0.5, "d": 0.875}
    patients = {c.id: c.patient for c in CASES}
    expected = bootstrap_interval_by_patient(dice, patients, 3, 2000)
    assert s.classes["liver"].metrics["dice"].interval == pytest.approx(expected)
    only_liver = [CaseScore(c.id, c.patient, c.site, {"liver": c.scores["liver"]}, None) for c in CASES]
    assert summarise_scores(only_liver, seed=3).interval == pytest.approx(expected), "of one class, that of the class"
    one = summarise_scores([CASES[0], CASES[1]])
    assert one.interval is None, "one patient shows no spread"
    assert one.mean_dice is not None


def test_sites_by_the_same_rule():
    s = summarise_scores([*CASES, FAILED])
    assert list(s.sites) == ["north", "south"]
    assert (s.sites["north"].cases, s.sites["south"].cases) == (2, 2)
    assert s.sites["north"].dice == pytest.approx({"liver": 0.875, "spleen": 0.5})
    assert s.sites["south"].mean_dice == pytest.approx((0.6875 + 0.0) / 2)
    assert summarise_scores(CASES[:2]).sites == {}, "one site is the whole"


def test_the_worst_first_and_ten_at_most():
    cases = [scored(f"c{n:02d}", n % 9) for n in range(14)]
    worst = summarise_scores(cases).worst
    assert len(worst) == 10
    assert worst[0].id == "c08"
    assert [w.mean_dice for w in worst] == sorted(w.mean_dice for w in worst)
    assert worst[0].dice == {"liver": 0.0, "spleen": 1.0}


def test_order_of_the_cases_does_not_matter():
    assert summarise_scores(CASES[::-1]) == summarise_scores(CASES)


def test_json_without_nan_even_where_nothing_is_there():
    nothing = [scored("x", 0, spleen="absent in both")]
    for cases in ([], [FAILED], nothing, [*nothing, FAILED], CASES):
        s = summarise_scores(cases)
        json.dumps(to_plain(s), allow_nan=False)
    assert summarise_scores([FAILED]).mean_dice is None
    assert summarise_scores(nothing).classes["spleen"].metrics["dice"].mean is None
