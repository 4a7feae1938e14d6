import numpy as np
import pytest

from data_prep.check_outliers import RULE, measures, outlier_problems, usual_range, volume_ml
from segspeed.types import CaseFacts, Cohort


def cohort(facts, channels=("CT",)):
    return Cohort("c", (), {"liver": (1,), "tumour": (2,)}, channels)


def fact(case, spacing=(1.0, 1.0, 1.0), shape=(10, 10, 10), voxels=(1000, 50), values=(50.0,)):
    counts = dict(zip(("liver", "tumour"), voxels, strict=True))
    return CaseFacts(case, "", shape, spacing, "RAS", shape, counts, (values,))


def outliers(facts, **options):
    return {m.name: m.outliers for m in measures(cohort(facts, **options), facts) if m.outliers}


def test_the_rule_by_hand():
    """Logarithms 0, 1, 2, 3, 4, so median 2 and MAD 1: five times 1.4826 to either side."""
    low, high = usual_range(list(np.exp([0.0, 1.0, 2.0, 3.0, 4.0])))
    assert np.log([low, high]) == pytest.approx([2 - 7.413, 2 + 7.413])
    assert usual_range([7.0] * 5) == pytest.approx((7 / 1.2, 7 * 1.2)), "without a spread, the factor that is near"
    low, high = usual_range([-2.0, -1.0, 0.0, 1.0, 2.0], near=3.0)
    assert (low, high) == pytest.approx((-7.413, 7.413)), "not on the logarithm where values may be negative"
    assert usual_range([0.0, 0.0, 0.0], near=3.0) == (-3.0, 3.0)


def test_a_spacing_far_off_is_named_and_one_nearby_is_not():
    facts = [fact(f"c{n}") for n in range(20)]
    facts[3] = fact("c3", spacing=(5.0, 1.0, 1.0))
    facts[4] = fact("c4", spacing=(1.19, 1.0, 1.0))
    # the volumes of c3 are five times the others' too, and those of c4 are near
    assert outliers(facts) == {
        "spacing along D": ("c3",), "volume of liver": ("c3",), "volume of tumour": ("c3",)
    }  # fmt: skip


def test_shape_volume_and_intensity_are_compared():
    rng = np.random.default_rng(0)
    facts = [
        fact(f"c{n:02d}", shape=(100, 100, 100 + n % 5), voxels=(int(1e6 * rng.uniform(0.8, 1.25)), 500 + n),
             values=tuple(rng.normal(60, 8, 50)))
        for n in range(30)
    ]  # fmt: skip
    assert outliers(facts) == {}
    facts[7] = fact("c07", shape=(100, 30, 100), voxels=(10_000, 500), values=tuple(rng.normal(-700, 8, 50)))
    assert outliers(facts) == {
        "shape along H": ("c07",), "volume of liver": ("c07",), "median foreground intensity, CT": ("c07",)
    }  # fmt: skip


def test_outliers_stand_in_the_order_of_their_distance():
    facts = [fact(f"c{n:02d}", voxels=(1000, 0)) for n in range(40)]
    facts[5], facts[6], facts[7] = (fact(f"c{n:02d}", voxels=(v, 0)) for n, v in ((5, 2000), (6, 5000), (7, 3000)))
    assert outliers(facts)["volume of liver"] == ("c06", "c07", "c05")


def test_absent_classes_are_no_small_ones_and_few_cases_have_no_outliers():
    facts = [fact(f"c{n}", voxels=(1000, 0 if n % 2 else 40)) for n in range(20)]
    assert outliers(facts) == {}
    few = [fact(f"c{n}") for n in range(6)] + [fact("far", spacing=(50.0, 1.0, 1.0))]
    assert outliers(few) == {}
    assert [m.low for m in measures(cohort(few), few)] == [None] * len(measures(cohort(few), few))


def test_a_second_scanner_is_a_group_and_no_outlier():
    facts = [fact(f"c{n}", spacing=(5.0 if n < 3 else 1.0, 1.0, 1.0)) for n in range(20)]
    assert "spacing along D" not in outliers(facts), "three of twenty are more than a tenth"
    facts = [fact(f"c{n}", spacing=(5.0 if n < 2 else 1.0, 1.0, 1.0)) for n in range(20)]
    assert set(outliers(facts)["spacing along D"]) == {"c0", "c1"}


def test_scaling_all_values_changes_nothing():
    rng = np.random.default_rng(1)
    voxels = rng.lognormal(8, 1.5, 60).astype(int) + 1
    for factor in (1, 100):
        facts = [fact(f"c{n}", voxels=(int(v) * factor, 0)) for n, v in enumerate([*voxels, 10**9])]
        assert outliers(facts)["volume of liver"] == ("c60",)


def test_a_problem_says_value_median_and_range():
    facts = [fact(f"c{n}") for n in range(19)] + [fact("far", shape=(40, 10, 10))]
    (problem,) = outlier_problems(measures(cohort(facts), facts))
    assert (problem.case, problem.severity, problem.kind) == ("far", "info", "outlier")
    assert problem.message == (
        "shape along D is 40 voxels; the cohort's median is 10 voxels, usual are 8.333 to 12 voxels"
    )
    for number in ("5 robust", "factor of 1.2", "from 8 cases", "10%"):
        assert number in RULE


def test_volume_by_hand():
    assert volume_ml(fact("a", spacing=(2.0, 0.5, 0.5), voxels=(4000, 0)), "liver") == 2.0


def test_nothing_readable_gives_no_measure():
    assert measures(cohort([]), []) == []
