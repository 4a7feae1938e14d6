import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segspeed.data.split import choose_split, draw_splits, read_splits
from segspeed.types import Case, CaseFacts, Cohort, DataError, Split


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


def with_facts(rare, pixels=None):
    """CaseFacts a case; ``rare`` says which cases have the class."""
    return {
        f"c{n}": CaseFacts(
            f"c{n}", "", class_voxels={"common": 9, "rare": 5 * has}, pixels=(pixels or {}).get(n, f"p{n}")
        )
        for n, has in enumerate(rare)
    }


def test_rare_classes_and_sites_are_spread_evenly():
    rare = [n % 4 == 0 for n in range(40)]  # 10 of 40
    cases = tuple(Case(f"c{n}", (Path("x"),), Path("y"), site="ab"[n % 3 == 0]) for n in range(40))  # 14 of site b
    for seed in range(10):
        splits = draw_splits(cases, 5, seed, with_facts(rare))
        for split in splits:
            assert len(split.val) == 8
            assert sum(rare[int(i[1:])] for i in split.val) == 2
            assert sum(int(i[1:]) % 3 == 0 for i in split.val) in (2, 3)
    assert draw_splits(cases, 5, 0, with_facts(rare)) != draw_splits(cases, 5, 1, with_facts(rare))


def test_what_all_patients_share_changes_no_fold():
    cases = cohort("abcdefghij").cases
    assert draw_splits(cases, 3, 0, with_facts([True] * 10)) == draw_splits(cases, 3, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefghijk"), st.booleans(), st.sampled_from(["", "s", "t"])),
        min_size=12,
        max_size=40,
    )
)
def test_stratified_folds_still_keep_patients_together(rows):
    cases = tuple(Case(f"c{n}", (Path("x"),), None, p, s) for n, (p, _, s) in enumerate(rows))
    if len({c.patient for c in cases}) < 3:
        return
    splits = draw_splits(cases, 3, 0, with_facts([r for _, r, _ in rows]))
    assert sorted(i for s in splits for i in s.val) == sorted(c.id for c in cases)
    patient = {c.id: c.patient for c in cases}
    for s in splits:
        assert {patient[i] for i in s.train}.isdisjoint(patient[i] for i in s.val)
        sizes = [len({patient[i] for i in t.val}) for t in splits]
        assert max(sizes) - min(sizes) <= 2


def test_the_same_image_on_both_sides_is_refused_unless_accepted():
    c = cohort("abcd", (Split(("c0", "c1"), ("c2", "c3")),))
    facts = with_facts([True] * 4, pixels={1: "same", 2: "same"})
    with pytest.raises(DataError, match=r"same image is in training and in validation.*c1, c2"):
        choose_split(c, fold=0, folds=2, seed=0, splits="auto", facts=facts)
    assert choose_split(c, fold=0, folds=2, seed=0, splits="auto", facts=facts, accept=["duplicate-overlap"]).val == (
        "c2",
        "c3",
    )


def test_a_patient_on_both_sides_can_be_accepted():
    c = cohort("aabb", (Split(("c0",), ("c1", "c2")),))
    with pytest.raises(DataError, match="patient-overlap"):
        pick(c)
    assert choose_split(c, fold=0, folds=2, seed=0, splits="auto", accept=["patient-overlap"]).train == ("c0",)
