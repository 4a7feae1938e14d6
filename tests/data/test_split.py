import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segspeed.data.split import choose_split, draw_splits, read_splits
from segspeed.types import Case, Cohort, DataError, Split


def cohort(patients, splits=()):
    cases = tuple(Case(f"c{i}", (Path("x"),), Path("y"), patient=p) for i, p in enumerate(patients))
    return Cohort("x", cases, {"a": (1,)}, ("CT",), splits)


@given(st.lists(st.sampled_from("abcdefghijk"), min_size=10, max_size=40), st.integers(2, 5), st.integers(0, 9))
def test_folds_cover_every_case_once_and_no_patient_twice(patients, folds, seed):
    c = cohort(patients)
    if len(set(patients)) < folds:
        with pytest.raises(DataError, match=r"data\.folds|at least 2"):
            draw_splits(c.cases, folds, seed)
        return
    splits = draw_splits(c.cases, folds, seed)
    assert sorted(i for s in splits for i in s.val) == sorted(x.id for x in c.cases)
    for s in splits:
        assert {c.case(i).patient for i in s.train}.isdisjoint(c.case(i).patient for i in s.val)
    assert splits == draw_splits(c.cases, folds, seed)


def test_a_cohort_of_one_case_cannot_be_validated():
    with pytest.raises(DataError, match="at least 2"):
        draw_splits(cohort(["a"]).cases, 5, 0)


def pick(c, fold=0, splits="auto"):
    return choose_split(c, fold=fold, folds=2, seed=0, splits=splits)


def test_the_cohorts_own_split_comes_first():
    own = Split(("c0",), ("c1", "c2"))
    c = cohort("abc", (own,))
    assert pick(c) == own
    with pytest.raises(DataError, match="fold=1"):
        pick(c, fold=1)


def test_excluded_cases_drop_out_of_a_prescribed_split_and_unknown_ones_are_refused():
    c = cohort("abc", (Split(("c0", "c9"), ("c1",)),))
    assert choose_split(c, fold=0, folds=2, seed=0, splits="auto", excluded=["c9"]) == Split(("c0",), ("c1",))
    with pytest.raises(DataError, match=r"c9.*data\.splits=draw"):
        pick(c)


def test_a_patient_on_both_sides_is_refused():
    with pytest.raises(DataError, match="lie"):
        pick(cohort("aab", (Split(("c0",), ("c1", "c2")),)))


def test_split_files(tmp_path):
    path = tmp_path / "splits.json"
    path.write_text(json.dumps([{"train": ["c0"], "val": ["c1"]}]))
    assert read_splits(path) == (Split(("c0",), ("c1",)),)
    assert pick(cohort("ab"), splits=str(path)) == Split(("c0",), ("c1",))
    path.write_text(json.dumps([{"train": ["c0", "nobody"], "val": ["c1"]}]))
    with pytest.raises(DataError, match="nobody"):
        pick(cohort("ab"), splits=str(path))
    path.write_text("[]")
    with pytest.raises(DataError, match="no split file"):
        read_splits(path)
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match="no split file"):
        read_splits(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_splits(tmp_path / "gone.json")


def test_a_side_without_cases_is_refused():
    c = cohort("ab", (Split(("c0", "c1"), ()),))
    with pytest.raises(DataError, match="both need one"):
        pick(c)


def test_a_split_file_with_text_for_a_list_is_refused_and_a_byte_order_mark_is_not(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"train": "c0", "val": ["c1"]}]))
    with pytest.raises(DataError, match="no split file"):
        read_splits(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([{"train": ["c0"], "val": ["c1"]}]).encode())
    assert read_splits(tmp_path / "b.json")[0].train == ("c0",)
