import csv
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from segspeed.metric.scores import score_case
from segspeed.scoring.output import compare_scores, print_comparison, print_scores, read_scores, write_scores
from segspeed.scoring.score import CaseScore
from segspeed.scoring.summary import MEAN, summarise_scores
from segspeed.types import DataError

NAMES = ("liver", "a <b> & [c] $x")


def scored(number, shift, spleen="both", patient=None, size=4):
    prediction, reference = np.zeros((2, 20, 12, 12), np.uint8)
    reference[1:9, 2 : 2 + size, 2:6] = 1
    prediction[1 + shift : 9 + shift, 2:6, 2:6] = 1
    for volume, states in ((prediction, ("both", "invented")), (reference, ("both", "missed"))):
        if spleen in states:
            volume[2:4, 8:10, 8:10] = 2
    found = score_case(prediction, reference, (1, 2), (1.0, 1.0, 1.0), tolerances=(1.0, 2.5), lesions=True)
    scores = dict(zip(NAMES, found.values(), strict=True))
    return CaseScore(f"c{number}", patient or f"p{number}", "north" if number % 2 else "south", scores, None)


FAILED = CaseScore("odd <i>", "odd", "south", None, "prediction odd.nii: cannot be read")
CASES = [*(scored(n, n % 4, "absent in both" if n == 3 else "both") for n in range(8)), scored(8, 1, "missed"), FAILED]


@pytest.fixture
def written(tmp_path):
    path = write_scores(tmp_path / "out", CASES, summarise_scores(CASES), "Liver & <spleen>")
    assert path == tmp_path / "out" / "report.html"
    assert sorted(p.name for p in path.parent.iterdir()) == ["cases.csv", "report.html", "summary.json"]
    return path.parent


def test_json_there_and_back(written):
    assert read_scores(written / "summary.json") == CASES
    text = (written / "summary.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    found = json.loads(text)
    assert found["mean_dice"] == summarise_scores(CASES).mean_dice
    assert found["policy"] == summarise_scores(CASES).policy
    assert summarise_scores(read_scores(written / "summary.json")) == summarise_scores(CASES)


def test_csv_has_a_row_a_case_and_class(written):
    rows = list(csv.DictReader((written / "cases.csv").read_text().splitlines()))
    assert len(rows) == 9 * 2 + 1
    header = ["case", "patient", "site", "class", "state", "dice", "nsd_1mm", "nsd_2.5mm", "hd95_mm", "msd_mm"]
    assert list(rows[0])[:10] == header
    for case in CASES[:-1]:
        for name, score in case.scores.items():
            (row,) = (r for r in rows if (r["case"], r["class"]) == (case.id, name))
            assert row["state"] == score.state
            assert (float(row["dice"]) if row["dice"] else None) == score.dice
            assert (float(row["nsd_2.5mm"]) if row["nsd_2.5mm"] else None) == score.nsd[2.5]
            assert float(row["volume_ml"]) == score.volume_ml
    assert (rows[-1]["case"], rows[-1]["class"], rows[-1]["problem"]) == (FAILED.id, "", FAILED.problem)
    assert "nan" not in (written / "cases.csv").read_text().lower()


def test_page_stands_alone(written):
    page = (written / "report.html").read_text()
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "http" not in without_namespaces
    assert "<script" not in page
    assert "<link" not in page
    assert page.count("<svg role='img' aria-label='") == 3
    assert page.count("<table><caption>") == 6
    for text in (
        "Liver &amp; &lt;spleen&gt;", "a &lt;b&gt; &amp; [c] $x", "odd &lt;i&gt;", "prediction odd.nii: cannot be read",
        "prefers-color-scheme:dark", "name='viewport'", "NSD at 2.5 mm", "HD95 (mm)", "mean of classes", "north",
        "the diagonal of the volume", "9 cases of 9 patients scored, 1 not scored",
    ):  # fmt: skip
        assert text in page, text
    assert "<i>" not in page
    for svg in re.findall(r"(?s)<svg.*?</svg>", page):
        ElementTree.fromstring(svg)


def test_pages_of_little(tmp_path):
    for number, cases in enumerate(([FAILED], [scored(0, 0, "absent in both")], [])):
        folder = tmp_path / str(number)
        page = write_scores(folder, cases, summarise_scores(cases), "few").read_text()
        assert page.endswith("</html>\n")
        assert read_scores(folder / "summary.json") == cases


def test_many_points_become_one_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("segspeed.scoring.page.DOTS", 4)
    page = write_scores(tmp_path, CASES, summarise_scores(CASES), "many").read_text()
    assert "data:image/png;base64" in page


def test_files_that_are_no_scores(tmp_path, written):
    bad = tmp_path / "bad.json"
    with pytest.raises(DataError, match=r"bad\.json cannot be read: No such file"):
        read_scores(bad)
    bad.write_text("{")
    with pytest.raises(DataError, match="is no JSON"):
        read_scores(bad)
    bad.write_text("[]")
    with pytest.raises(DataError, match="no scores in the format"):
        read_scores(bad)
    found = json.loads((written / "summary.json").read_text())
    del found["each"][0]["scores"]["liver"]["dice"]
    bad.write_text(json.dumps(found))
    with pytest.raises(DataError, match="has been changed"):
        read_scores(bad)


def test_table_fits_100_columns(capsys):
    long = [replace(c, scores={"a very long name " * 6: c.scores["liver"]}) for c in CASES[:3]]
    for cases in (CASES, long, [FAILED]):
        print_scores(summarise_scores(cases))
    out = capsys.readouterr().out
    for text in (
        "a <b> & [c] $x",
        "mean of classes",
        "Site north",
        "Not scored, and in no mean: 1 cases",
        "odd <i>: pred",
    ):
        assert text in out, text
    assert "one present in only one of them scores 0" in out.replace("\n", " ").replace("  ", " ")
    assert max(len(line) for line in out.splitlines()) <= 100


def test_two_runs_with_a_known_difference(capsys):
    a = [scored(n, 1) for n in range(6)]
    b = [scored(n, 2) for n in range(6)]
    found = compare_scores(a, b, 0.05)
    assert list(found) == [*NAMES, MEAN]
    assert found["liver"].mean_difference == pytest.approx(-0.125)
    assert found["liver"].verdict == "inferior"
    assert found[NAMES[1]].mean_difference == 0
    assert found[NAMES[1]].verdict == "not inferior"
    assert found[MEAN].mean_difference == pytest.approx(-0.0625)
    assert found[MEAN].margin == 0.05
    assert compare_scores(b, a, 0.05)["liver"].mean_difference == pytest.approx(0.125)
    print_comparison(found, "old", "new")
    out = capsys.readouterr().out
    assert "Dice of new minus old" in out
    assert "-0.1250" in out
    assert "a <b> & [c] $x" in out
    assert max(len(line) for line in out.splitlines()) <= 100


def test_patients_of_a_comparison():
    a, b = ([scored(n, shift, patient=f"p{n // 2}") for n in range(6)] for shift in (1, 2))
    assert (compare_scores(a, b, 0.05)["liver"].cases, compare_scores(a, b, 0.05)["liver"].patients) == (6, 3)


def test_an_invention_counts_against_its_run():
    a = [scored(n, 0, "absent in both") for n in range(4)]
    b = [scored(n, 0, "invented" if n == 0 else "absent in both") for n in range(4)]
    found = compare_scores(a, b)
    assert found[NAMES[1]].mean_difference == -1.0
    assert found[NAMES[1]].cases == 1
    assert found[MEAN].losses == ("c0",)
    assert NAMES[1] not in compare_scores(a, a), "a class that nobody has"


def test_runs_that_cannot_be_compared():
    with pytest.raises(DataError, match="no scored case in common"):
        compare_scores([scored(0, 0)], [scored(1, 0), replace(scored(0, 0), scores=None, problem="x")])
    with pytest.raises(DataError, match="different classes .*only in the first: liver"):
        compare_scores([scored(0, 0)], [replace(scored(0, 0), scores={NAMES[1]: scored(0, 0).scores["liver"]})])
    with pytest.raises(DataError, match=r"other volumes .*1 cases: c0"):
        compare_scores([scored(0, 0), scored(1, 0)], [scored(0, 0, size=5), scored(1, 0)])
    nothing = replace(scored(0, 0), scores={"none": scored(0, 0, "absent in both").scores[NAMES[1]]})
    with pytest.raises(DataError, match="nothing to compare"):
        compare_scores([nothing], [nothing])


def test_cases_of_one_run_only_are_named(capsys):
    a = [scored(n, 0) for n in range(4)]
    found = compare_scores(a, [*a[:3], FAILED])
    assert found[MEAN].unpaired == ("c3",)
    print_comparison(found)
    assert "left out: c3" in capsys.readouterr().out
