import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from segspeed import build
from segspeed.config import Component
from segspeed.types import Case, ChannelNorm, Cohort, DataError, LabelTable, Plan, SettingError


def component(target, **keys):
    return Component.model_validate({"_target_": target, **keys})


def takes_some(plan, scale=1, **rest):
    return plan, scale, rest


def takes_none(a=1):
    return a


def refuses(a=1):
    raise ValueError("a is too small")


HERE = __name__


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """`_target_` names this file's functions, whatever the import mode."""
    import sys

    monkeypatch.setitem(sys.modules, "build_parts", sys.modules[HERE])


def test_only_what_a_signature_knows_is_handed_over():
    assert build.make(component("build_parts.takes_none"), plan=3, nonsense=4) == 1
    assert build.make(component("build_parts.takes_some", scale=5), plan=3) == (3, 5, {})


def test_the_users_own_value_comes_first():
    assert build.make(component("build_parts.takes_none", a=7), a=9) == 7


def test_an_object_that_is_handed_over_is_not_turned_into_configuration():
    plan = object()
    assert build.make(component("build_parts.takes_some"), plan=plan)[0] is plan


def test_what_a_component_refuses_is_named():
    with pytest.raises(DataError, match=r"build_parts\.refuses: a is too small"):
        build.make(component("build_parts.refuses"))


def test_nested_components_are_built():
    made = build.make(component("build_parts.takes_none", a={"_target_": "datetime.timedelta", "days": 2}))
    assert made.days == 2


def cohort():
    cases = tuple(Case(f"c{i}", (Path("i.nii"),), None) for i in range(3))
    return Cohort("x", cases, {"left": (1,), "right": (2,)}, ("CT",))


def returns_cohort():
    return cohort()


def test_exclusions_and_pairs_are_checked(settings):
    cfg = settings()

    def data(**changes):
        values = {"_target_": "build_parts.returns_cohort", **changes}
        return type(cfg.data).model_validate(values)

    assert [c.id for c in build.cohort_from(data(exclude=["c1"])).cases] == ["c0", "c2"]
    assert build.cohort_from(data(name="mine")).name == "mine"
    assert build.swap_pairs(data(swap_on_flip=[["left", "right"]]), cohort()) == [(1, 2)]
    with pytest.raises(DataError, match="c9"):
        build.cohort_from(data(exclude=["c9"]))
    with pytest.raises(DataError, match="lfet; known: left, right"):
        build.cohort_from(data(swap_on_flip=[["lfet", "right"]]))
    with pytest.raises(DataError, match="no cases left"):
        build.cohort_from(data(exclude=["c0", "c1", "c2"]))
    with pytest.raises(DataError, match="returned int; a data source returns a Cohort"):
        build.cohort_from(data(_target_="build_parts.takes_none"))


def test_ct_channels_take_the_training_constants_and_others_their_own():
    @dataclasses.dataclass
    class Entry:
        norm = np.array([[0, 10, 5, 2], [1, 9, 4, 3]], np.float32)

    plan = Plan(
        spacing=(1.0, 1.0, 1.0), patch=(8, 8, 8), batch=2, accumulate=1, features=(4,), strides=((1, 1, 1),),
        kernels=((3, 3, 3),), normalisation=("ct", "zscore"), ct_norm=(ChannelNorm(-100, 300, 50, 60), None),
    )  # fmt: skip
    (norm,) = build.norms_of([Entry()], plan)
    assert norm.tolist() == [[-100, 300, 50, 60], [1, 9, 4, 3]]


def test_a_device_that_is_not_there(settings):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(DataError, match="no CUDA device"):
        build.device_from(settings("device=cuda"))
    assert build.device_from(settings("device=auto")).type == "cpu"


def test_weights_are_those_of_the_seed(settings):
    from segspeed.speed.precision import Precision

    plan = Plan(
        spacing=(1.0, 1.0, 1.0), patch=(16, 16, 16), batch=2, accumulate=1, features=(4, 8, 16),
        strides=((1, 1, 1), (2, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3, normalisation=("ct",), ct_norm=(None,),
    )  # fmt: skip
    precision = Precision("fp32", torch.device("cpu"))
    a, b, c = (build.network_from(settings(f"seed={s}"), plan, cohort(), precision) for s in (0, 0, 1))
    first = lambda m: next(m.parameters())  # noqa: E731
    assert torch.equal(first(a), first(b))
    assert not torch.equal(first(a), first(c))


def test_a_class_has_one_partner(settings):
    cohort = Cohort("c", (Case("a", ()),), {"l": (1,), "r": (2,), "m": (3,)}, ("MRI",))
    data = settings("data=msd", "data.root=x", "data.swap_on_flip=[[l,r],[r,l]]").data
    with pytest.raises(SettingError, match="l, r more than once"):
        build.swap_pairs(data, cohort)


@pytest.mark.parametrize(
    ("section", "target", "text"),
    [("optimizer", "builtins.dict", "no torch.optim"), ("loss", "builtins.dict", "is called with")],
)
def test_an_object_of_the_wrong_kind_is_named(settings, section, target, text):
    from segspeed.speed.precision import Precision

    cfg = settings()
    cfg = cfg.model_copy(update={section: component(target)})
    with pytest.raises(SettingError, match=text):
        build.learner_from(cfg, torch.nn.Linear(1, 1), Precision("fp32", torch.device("cpu")), LabelTable.numbered(1))
