import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segspeed.config import PlanConfig
from segspeed.data.fingerprint import fingerprint
from segspeed.data.plan import make_plan
from segspeed.jsonio import from_plain, to_plain
from segspeed.types import CaseFacts, DataError, Fingerprint, Plan, Problem

STATS = {"mean": 40.0, "std": 20.0, "percentile_00_5": -50.0, "percentile_99_5": 200.0}


def fp(shapes, spacings, channels=1):
    return Fingerprint(len(shapes), tuple(spacings), tuple(shapes), {"a": 1000}, tuple([STATS] * channels))


def plan(found, channels=("MRI",), device="cpu", **by_hand):
    return make_plan(found, channels=channels, classes=1, device=device, overrides=PlanConfig(**by_hand))


def test_isotropic_data_takes_the_median_spacing():
    p = plan(fp([(64, 64, 64)] * 3, [(1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (2.0, 1.0, 1.0)]))
    assert p.spacing == (1.0, 1.0, 1.0)
    assert p.coarse_axis is None
    assert set(p.kernels) == {(3, 3, 3)}


def test_width_by_hand_doubles_a_level():
    found = fp([(40, 56, 40)] * 3, [(1.0, 1.0, 1.0)] * 3)
    assert plan(found, width=24).features == (24, 48, 96, 192, 320)
    assert plan(found).features == (16, 32, 64, 128, 256)
    assert plan(found, width=200).features == (200, 320, 320, 320, 320)
    assert plan(found, width=24, finest_width="half").features == (12, 48, 96, 192, 320)
    assert plan(found, finest_width=6).features[:2] == (6, plan(found).features[1])
    assert plan(found, width=1, finest_width="half").features[0] == 1


def test_a_coarse_axis_takes_its_tenth_percentile_and_flat_kernels():
    spacings = [(5.0, 0.8, 0.8)] * 9 + [(3.0, 0.8, 0.8)]
    p = plan(fp([(26, 200, 200)] * 10, spacings))
    assert p.coarse_axis == 0
    assert p.spacing == (pytest.approx(np.percentile([5.0] * 9 + [3.0], 10)), 0.8, 0.8)
    assert p.kernels[0] == (1, 3, 3)
    assert p.strides[1] == (1, 2, 2), "the fine axes are halved first"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.tuples(*[st.integers(8, 400)] * 3), st.tuples(*[st.floats(0.3, 6.0)] * 3)), min_size=1, max_size=5
    ),
    st.sampled_from(["cpu", "cuda"]),
)
def test_any_cohort_gives_a_plan_that_works(cases, device):
    p = plan(fp([c[0] for c in cases], [c[1] for c in cases]), device=device)
    assert all(side % d == 0 and side >= d for side, d in zip(p.patch, p.divisor, strict=True))
    assert np.prod(p.patch) <= 1.6 * {"cpu": 40 * 56 * 40, "cuda": 128**3}[device]
    assert len(p.features) == len(p.strides) == len(p.kernels)
    assert p.batch >= 2
    assert set(p.reasons) >= {"spacing", "patch", "levels", "features", "batch", "normalisation", "accumulate"}
    assert from_plain(to_plain(p), Plan) == p


def test_values_by_hand_are_kept_and_checked():
    found = fp([(64, 64, 64)], [(1.0, 1.0, 1.0)])
    p = plan(found, patch=(32, 48, 32), batch=5, spacing=(2.0, 1.0, 1.0))
    assert (p.patch, p.batch, p.spacing) == ((32, 48, 32), 5, (2.0, 1.0, 1.0))
    assert p.reasons["patch"] == "set by hand"
    with pytest.raises(DataError, match=r"nearest: \[32,48,32\]"):
        plan(found, patch=(33, 47, 32))
    with pytest.raises(DataError, match="levels"):
        plan(found, features=(8, 16))
    with pytest.raises(DataError, match="2 channels"):
        plan(found, channels=("CT", "MRI"), normalisation=("ct",))


def test_normalisation_by_channel_name():
    p = plan(fp([(64, 64, 64)], [(1.0, 1.0, 1.0)], channels=3), channels=("CT", "T1", "contrast"))
    assert p.normalisation == ("ct", "zscore", "zscore")
    assert (p.ct_norm[0].low, p.ct_norm[0].high, p.ct_norm[0].mean, p.ct_norm[0].std) == (-50, 200, 40, 20)
    assert p.ct_norm[1:] == (None, None)


def facts(i, values=(1.0, 3.0), voxels=2, problems=()):
    return CaseFacts(
        id=i, digest=i, shape=(9, 9, 9), spacing=(1.0, 1.0, 1.0), crop_shape=(8, 8, 8),
        class_voxels={"a": voxels}, foreground=(tuple(values),), problems=problems,
    )  # fmt: skip


def test_fingerprint_by_hand():
    found = fingerprint([facts("x"), facts("y", (5.0, 7.0))])
    assert found.class_voxels == {"a": 4}
    stats = found.intensity[0]
    assert (stats["mean"], stats["median"], stats["minimum"], stats["maximum"]) == (4, 4, 1, 7)
    assert stats["std"] == pytest.approx(np.std([1, 3, 5, 7]))


def test_constant_images_tell_nothing_about_intensities():
    constant = facts("y", (9.0, 9.0), problems=(Problem("y", "", "warning", "constant-image", ""),))
    assert fingerprint([facts("x"), constant]).intensity[0]["maximum"] == 3


def test_nothing_labelled_is_nothing_to_learn():
    with pytest.raises(DataError, match="foreground"):
        fingerprint([facts("x", (), voxels=0)])
