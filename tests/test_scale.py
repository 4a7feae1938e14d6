"""Growth: what is measured, what it is judged by, and the parts that must not grow with the number of cases."""

import json
import tracemalloc

import nibabel as nib
import numpy as np
import pytest

from segspeed.benchmarks.scale import (
    Measure,
    Size,
    bytes_a_case,
    exponent,
    grows_too_fast,
    make_cohort,
    measure_scale,
    sizes_of,
    table,
)
from segspeed.config import BenchConfig
from segspeed.data import pool
from segspeed.data.digest import Memo
from segspeed.data.pool import run_jobs
from segspeed.metric import summary
from segspeed.metric.summary import summarise
from segspeed.preparation import thinned
from segspeed.scoring import summary as scoring
from segspeed.types import CaseFacts


def grown(axis, what, seconds, peaks=(0, 0, 0), amounts=(10, 100, 1000)):
    sizes = [Size(axis, n, 24, 2) if axis == "cases" else Size(axis, 10, 24, n) for n in amounts]
    return [Measure(what, s, t, p) for s, t, p in zip(sizes, seconds, peaks, strict=True)]


def test_exponents_by_hand():
    a, b, c = grown("cases", "check", (1.0, 10.0, 1000.0), (10**8, 10**8, 10**8 + 9_000_000))
    assert exponent(a, b) == pytest.approx(1)
    assert exponent(b, c) == pytest.approx(2)
    assert bytes_a_case(b, c) == 10_000
    assert Size("voxels", 10, 48, 2).amount == 48**3


def test_what_grows_too_fast_is_named():
    fine = grown("cases", "check", (5.0, 6.0, 60.0), (10**8, 10**8, 10**8 + 9_000_000))
    square = grown("classes", "scoring", (1.0, 1.0, 100.0))
    hoarding = grown("cases", "report", (1.0, 2.0, 3.0), (10**8, 10**8, 2 * 10**8))
    assert grows_too_fast(fine) == []
    assert grows_too_fast([*fine, *square, *hoarding]) == [
        "scoring with classes: exponent 2.00", "memory of report: 111.1 kB a case",
    ]  # fmt: skip
    text = table([*fine, *square])
    assert "| check | 5.00 s | 6.00 s | 60.0 s | 1.00 | 10.0 kB, peak 0.11 GB |" in text
    assert "Verdict: scoring with classes: exponent 2.00." in text
    assert "nothing faster than linear" in table(fine)


def test_one_thing_grows_at_a_time():
    found = sizes_of(BenchConfig(counts=(50, 500), sides=(24, 48, 96), classes=(2, 20), cases=10))
    assert [(s.axis, s.cases, s.side, s.classes) for s in found] == [
        ("cases", 50, 24, 2), ("cases", 500, 24, 2), ("voxels", 10, 24, 2), ("voxels", 10, 48, 2), ("voxels", 10, 96, 2),
        ("classes", 10, 48, 2), ("classes", 10, 48, 20),
    ]  # fmt: skip


def test_generated_cases_differ_and_hold_all_classes(tmp_path):
    make_cohort(tmp_path / "c", Size("cases", 3, 24, 20))
    images = [nib.load(tmp_path / f"c/imagesTr/case_{n:06d}.nii") for n in range(3)]
    assert len({i.get_fdata().tobytes() for i in images}) == 3
    label = np.asarray(nib.load(tmp_path / "c/labelsTr/case_000000.nii").dataobj)
    assert np.unique(label).tolist() == list(range(21))
    other = np.asarray(nib.load(tmp_path / "c/predictions/case_000000.nii").dataobj)
    assert (label != other).any()
    assert len(json.loads((tmp_path / "c/dataset.json").read_text())["training"]) == 3


@pytest.mark.long
def test_every_kind_of_work_is_measured_and_nothing_is_left(tmp_path, settings):
    bench = BenchConfig(name="scale", counts=(10,), sides=(24,), classes=(2,), cases=10, steps=4)
    found = [m for part in measure_scale(settings(), bench, tmp_path / "scale") for m in part]
    kinds = ["check", "preparation", "training step", "training of 4 steps", "scoring", "report"]
    assert [m.what for m in found] == kinds * 3
    assert all(m.seconds > 0 for m in found)
    assert all(m.peak > 10**8 for m in found if m.what != "training step")
    assert list((tmp_path / "scale").iterdir()) == []


def test_a_memo_holds_keys_and_not_values(tmp_path):
    """500 values of 20 kB each: 10 MB on disk, a few hundred bytes of memory a key."""
    writer = Memo(tmp_path / "memo.jsonl")
    for n in range(500):
        writer.put(f"{n:064d}", [n] * 5000)
    tracemalloc.start()
    memo = Memo(tmp_path / "memo.jsonl")
    assert tracemalloc.get_traced_memory()[0] < 500 * 1000
    tracemalloc.stop()
    for found in (memo, writer):
        assert found.get(f"{7:064d}") == [7] * 5000
        assert found.get("x") is None


def test_a_memo_survives_torn_and_damaged_lines_and_sees_others(tmp_path):
    path = tmp_path / "m-1.jsonl"
    mine = Memo(path, beside="m-*.jsonl")
    mine.put("a", 1)
    with open(path, "ab") as file:
        file.write(b'["b", 2')  # torn
    assert Memo(path).get("b") is None
    mine.put("a", 3)  # the last one counts, and the torn line does not swallow it
    other = Memo(tmp_path / "m-2.jsonl", beside="m-*.jsonl")
    assert other.get("a") == 3
    mine.put("c", {"d": [1.5]})
    assert other.get("c") is None
    other.refresh()
    assert other.get("c") == {"d": [1.5]}
    with open(tmp_path / "m-2.jsonl", "wb") as file:
        file.write(b'["e", 1]\n["a", 9}]\n[]\nnull\n"a"\n["\xff", 1]\n')
    other.refresh()
    assert (other.get("e"), other.get("a"), Memo(None).get("a")) == (1, None, None)


def work(x):
    return x


def test_jobs_are_taken_as_there_is_room_for_them():
    taken = []

    def jobs():
        for n in range(100):
            taken.append(n)
            yield (n,)

    found = run_jobs(work, jobs(), 1, "works")
    next(found)
    assert len(taken) == 1
    taken.clear()
    found = run_jobs(work, jobs(), 2, "works")
    first = next(found)
    assert len(taken) <= 2 * pool.AHEAD + 1
    assert sorted([first, *found]) == [(n, n) for n in range(100)]
    assert list(run_jobs(work, (), 2, "works")) == []


def test_foreground_samples_of_a_large_cohort_are_thinned_evenly():
    facts = CaseFacts("a", "0", foreground=(tuple(map(float, range(10))), (1.0,)))
    assert thinned(facts, 4).foreground == ((0.0, 2.0, 5.0, 7.0), (1.0,))
    assert thinned(facts, 10) is facts


@pytest.mark.parametrize("cases", [2, 7, 40])
def test_a_bootstrap_in_parts_is_the_bootstrap(cases, monkeypatch):
    """The same interval whether all resamples are drawn at once or a few at a time."""
    rng = np.random.default_rng(cases)
    scores = {
        f"c{n}": {"a": float(rng.random()), "b": None if n % 3 == 1 else float(rng.random())} for n in range(cases)
    }
    columns = [{c: s[k] for c, s in scores.items() if s[k] is not None} for k in "ab"]
    patients = {c: c for c in scores}
    whole = summarise(scores).interval, scoring._interval(columns, patients, 3)
    monkeypatch.setattr(summary, "DRAWN_AT_ONCE", 50)
    monkeypatch.setattr(scoring, "DRAWS_AT_ONCE", 90)
    parts = summarise(scores).interval, scoring._interval(columns, patients, 3)
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    assert parts[1] == pytest.approx(whole[1], abs=1e-12)
