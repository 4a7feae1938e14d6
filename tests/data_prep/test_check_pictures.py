import numpy as np
import pytest
from PIL import Image

from data_prep.check_pictures import choose, draw_case, draw_missing, rank
from segspeed.data.inspect import case_digest, picture_path
from segspeed.types import Case, CaseFacts, Cohort, Problem


def problem(case, severity="error", kind="nan"):
    return Problem(case, "", severity, kind, "")


def test_the_order_is_error_warning_outlier_note_nothing():
    kinds = {
        "a": [], "b": [problem("b", "info", "squeezed")], "c": [problem("c", "info", "outlier")],
        "d": [problem("d", "warning")], "e": [problem("e", "info", "outlier"), problem("e", "error")],
    }  # fmt: skip
    assert [rank(kinds[c]) for c in "abcde"] == [4, 3, 2, 1, 0]
    assert choose(list("abcde"), kinds) == list("edcba")
    assert choose(list("abc"), {}) == list("abc"), "the cohort's order among equals"


def test_a_large_cohort_leaves_the_flagged_and_an_even_sample():
    ids = [f"{n:04d}" for n in range(2500)]
    flagged = {i: [problem(i)] for i in ids[1000:1010]}
    chosen = choose(ids, flagged, most=100)
    assert len(chosen) == 100
    assert chosen[:10] == ids[1000:1010]
    gaps = np.diff([int(i) for i in chosen[10:]])
    assert gaps.min() >= 27
    assert gaps.max() <= 28 + 10, "evenly spread, but for the flagged ones left out"
    assert chosen == choose(ids, flagged, most=100)


@pytest.mark.parametrize(("flagged", "of_them"), [(2500, 100), (2490, 90), (1250, 70), (80, 70), (70, 70), (3, 3)])
def test_there_is_room_for_both(flagged, of_them):
    ids = [f"{n:04d}" for n in range(2500)]
    chosen = choose(ids, {i: [problem(i)] for i in ids[:flagged]}, most=100)
    assert len(chosen) == len(set(chosen)) == 100
    assert sum(i in ids[:flagged] for i in chosen) == of_them


@pytest.fixture
def cases(tmp_path, write):
    """A good case, one with a label of unknown values, one cut short, one without an image."""
    rng = np.random.default_rng(0)
    label = np.zeros((8, 9, 10), np.uint8)
    label[2:6, 2:6, 2:6] = 1
    made = []
    for name, change in (("good", None), ("odd", 7), ("cut", None), ("gone", None)):
        image = write(tmp_path / name / "i.nii.gz", rng.normal(size=label.shape).astype(np.float32))
        path = write(tmp_path / name / "l.nii.gz", np.where(label > 0, change or 1, 0).astype(np.uint8))
        made.append(Case(name, (image,), path))
    cut = made[2].images[0]
    cut.write_bytes(cut.read_bytes()[:200])
    made[3].images[0].unlink()
    return made


def quiet(iterable, total, description):
    return iter(iterable)


def test_what_can_be_seen_is_drawn_and_the_rest_says_why(cases, tmp_path):
    cohort = Cohort("c", tuple(cases), {"a": (1,)}, ("MRI",))
    facts = {c.id: CaseFacts(c.id, case_digest(c)) for c in cases}
    folder = tmp_path / "pictures"
    why = draw_missing(cohort, facts, folder, 1, quiet)
    assert set(why) == {"cut", "gone"}
    assert "copy it again" in why["cut"]
    assert "does not exist" in why["gone"]
    assert len(list(folder.iterdir())) == 2
    blue = (0x25, 0x63, 0xEB)
    seen = {}
    for name in ("good", "odd"):
        with Image.open(picture_path(folder, facts[name].digest)) as picture:
            seen[name] = blue in {c for _, c in picture.convert("RGB").getcolors(100_000)}
    assert seen == {"good": True, "odd": False}, "a label that cannot be read leaves the image"
    stamps = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert set(draw_missing(cohort, facts, folder, 1, quiet)) == {"cut", "gone"}
    assert stamps == {p: p.stat().st_mtime_ns for p in folder.iterdir()}, "nothing is drawn twice"


def test_whatever_goes_wrong_is_text(cases, tmp_path, monkeypatch):
    import segspeed.data.thumbnail

    def broken(*_):
        raise RuntimeError("no pixels today\nsecond line")

    monkeypatch.setattr(segspeed.data.thumbnail, "save_thumbnail", broken)
    table = Cohort("c", (), {"a": (1,)}, ("MRI",)).table
    assert draw_case(cases[0], table, tmp_path / "x.png") == "no pixels today"
