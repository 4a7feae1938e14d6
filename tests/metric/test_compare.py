import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from segspeed.metric.compare import bootstrap_interval_by_patient, compare

A = {"c1": 0.80, "c2": 0.70, "c3": 0.60, "c4": 0.90}
B = {"c1": 0.82, "c2": 0.69, "c3": 0.60, "c4": 0.94}


def cohort(shift, n=40, spread=0.01, seed=0):
    rng = np.random.default_rng(seed)
    a = {f"c{i}": float(v) for i, v in enumerate(rng.uniform(0.6, 0.9, n))}
    return a, {case: v + shift + spread * float(rng.normal()) for case, v in a.items()}


def test_by_hand():
    c = compare(A, B)
    assert (c.cases, c.patients) == (4, 4)
    assert c.mean_difference == pytest.approx((0.02 - 0.01 + 0 + 0.04) / 4)
    assert (c.better, c.worse, c.equal) == (2, 1, 1)
    assert c.losses == ("c2",), "only losses are listed"
    assert c.unpaired == ()
    assert c.p == pytest.approx(stats.wilcoxon([0.02, -0.01, 0.04]).pvalue), "cases that are equal have no rank"
    assert c.interval[0] <= c.mean_difference <= c.interval[1]
    assert compare(A, B) == c, "reproducible"


def test_cases_of_a_patient_are_averaged_first():
    c = compare(A, B, patients={"c1": "x", "c2": "x", "c3": "y", "c4": "z"})
    assert (c.cases, c.patients) == (4, 3)
    assert c.mean_difference == pytest.approx((0.005 + 0 + 0.04) / 3)
    assert (c.better, c.worse, c.equal) == (2, 0, 1)
    assert c.losses == ("c2",), "losses are cases: that is what one looks at"


def test_copies_of_a_case_add_no_certainty():
    a, b = cohort(0.0, n=12)
    copies = [{f"{case}-{i}": v for case, v in scores.items() for i in range(20)} for scores in (a, b)]
    of = {case: case.split("-")[0] for case in copies[0]}
    single, grouped, naive = compare(a, b), compare(*copies, patients=of), compare(*copies)
    assert grouped.interval == pytest.approx(single.interval)
    assert grouped.p == pytest.approx(single.p)
    assert naive.interval[1] - naive.interval[0] < (single.interval[1] - single.interval[0]) / 3


@pytest.mark.parametrize(
    ("shift", "spread", "verdict"),
    [
        (0.0, 0.001, "not inferior"),
        (0.02, 0.01, "not inferior"),
        (-0.02, 0.001, "inferior"),
        (-0.005, 0.01, "inconclusive"),
        (0.0, 0.2, "inconclusive"),
    ],
)
def test_verdicts(shift, spread, verdict):
    c = compare(*cohort(shift, spread=spread))
    assert c.verdict == verdict
    assert c.margin == 0.005


def test_the_margin_itself_is_not_enough():
    a = {f"c{i}": 0.5 for i in range(10)}
    b = dict.fromkeys(a, 0.25)
    assert compare(a, b, margin=0.25).interval == (-0.25, -0.25)
    assert compare(a, b, margin=0.25).verdict == "inconclusive"
    assert compare(a, b, margin=0.26).verdict == "not inferior"
    assert compare(a, b, margin=0.24).verdict == "inferior"


def test_equal_models_have_no_p():
    c = compare(A, A)
    assert c.p is None
    assert (c.mean_difference, c.interval, c.verdict) == (0.0, (0.0, 0.0), "not inferior")
    assert (c.better, c.worse, c.equal, c.losses) == (0, 0, 4, ())
    nearly = {case: v + 0.1 - 0.1 for case, v in A.items()}
    assert compare(A, nearly).equal == 4, "the last bit of a float is no difference"


def test_cases_of_one_model_only_are_listed_and_left_out():
    c = compare(A | {"only a": 0.1}, B | {"also b": 0.2})
    assert c.unpaired == ("also b", "only a")
    assert c.cases == 4
    assert c.interval == compare(A, B).interval


def test_the_five_largest_losses_worst_first():
    a = {f"c{i}": 0.9 for i in range(8)}
    b = {f"c{i}": 0.9 - 0.01 * i for i in range(8)}
    assert compare(a, b).losses == ("c7", "c6", "c5", "c4", "c3")


def test_one_patient_has_no_interval_and_no_verdict():
    c = compare(A, B, patients=dict.fromkeys(A, "x"))
    assert (c.patients, c.interval, c.verdict) == (1, None, "inconclusive")
    with pytest.raises(ValueError, match="two or more"):
        bootstrap_interval_by_patient(A, dict.fromkeys(A, "x"))


def test_interval_has_the_width_theory_gives():
    rng = np.random.default_rng(1)
    values = {str(i): float(v) for i, v in enumerate(rng.normal(0.8, 0.05, 400))}
    low, high = bootstrap_interval_by_patient(values, None)
    assert (high - low) / 2 == pytest.approx(1.96 * np.std(list(values.values())) / 20, rel=0.05)
    assert low < np.mean(list(values.values())) < high
    assert bootstrap_interval_by_patient(values, None, seed=1) != (low, high)


def test_many_patients_are_drawn_in_pieces(monkeypatch):
    a, b = cohort(0.01)
    whole = compare(a, b, samples=500)
    monkeypatch.setattr("segspeed.metric.compare.DRAWS_AT_ONCE", 999)
    assert compare(a, b, samples=500) == whole


def test_what_is_refused():
    with pytest.raises(ValueError, match="no case in common"):
        compare({"x": 0.5}, {"y": 0.5})
    with pytest.raises(ValueError, match="'c2' has no patient"):
        compare(A, B, patients={"c1": "x"})
    with pytest.raises(ValueError, match="'c1' scores nan"):
        compare(A | {"c1": float("nan")}, B)
    with pytest.raises(ValueError, match="margin"):
        compare(A, B, margin=-0.1)
    with pytest.raises(ValueError, match="sample"):
        compare(A, B, samples=0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6))
def test_exchanging_the_models_turns_every_sign(pairs):
    a, b = ({str(i): pair[k] for i, pair in enumerate(pairs)} for k in (0, 1))
    one, other = compare(a, b, samples=200), compare(b, a, samples=200)
    assert other.mean_difference == pytest.approx(-one.mean_difference)
    assert other.interval == pytest.approx((-one.interval[1], -one.interval[0]), abs=1e-12)
    assert (other.better, other.worse, other.equal) == (one.worse, one.better, one.equal)
    assert other.p == (None if one.p is None else pytest.approx(one.p))
