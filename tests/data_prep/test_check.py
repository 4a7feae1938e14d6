"""The command: what it writes, prints and returns."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep import check, check_figures


def files(cfg):
    return Path(cfg.run.root, "balls")


@pytest.fixture
def no_figures(monkeypatch):
    """Pages without histograms, which take most of their time."""
    for name in ("histograms", "intensities"):
        monkeypatch.setattr(check_figures, name, lambda *_: None)


def broken(image, label):
    image[0, 0, 0] = np.nan
    return image, label


def test_a_good_cohort(tiny, capsys):
    cfg = tiny(cases=5)
    assert check.main(cfg) == 0
    printed = capsys.readouterr().out
    assert "0 errors, 0 warnings" in printed
    assert "check.html (open it in a browser)" in printed
    assert "Next: look through its pictures, then python -m segspeed.train" in printed
    assert all(len(line) <= 100 for line in printed.splitlines() if "/" not in line)
    html = (files(cfg) / "check.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 5
    found = json.loads((files(cfg) / "check.json").read_text())
    assert found["counts"]["cases"] == found["counts"]["readable"] == len(found["cases"]) == 5
    one = found["cases"][0]
    assert one["volume_ml"]["bright"] == round(one["voxels"]["bright"] / 1000, 4), "voxels of 1 mm"
    assert 150 < one["intensity_median"][0] < 210 or 0 < one["intensity_median"][0] < 60, "bright or dark ball"
    assert {m["name"] for m in found["measures"]} >= {"spacing along D", "volume of dark"}


def test_one_bad_case_of_many_stops_nothing(tiny, capsys, no_figures):
    cfg = tiny(
        cases=6,
        change={0: broken, 1: lambda i, m: (i, None), 2: lambda i, m: (i, m[1:]), 3: lambda i, m: (i[..., :9], None)},
    )
    assert check.main(cfg) == 1
    printed = capsys.readouterr().out
    assert "Training would be wrong" in printed
    found = json.loads((files(cfg) / "check.json").read_text())
    assert {p["case"] for p in found["problems"] if p["severity"] == "error"} >= {"b_00", "b_01", "b_02", "b_03"}
    assert set(found["kinds"]) == {p["kind"] for p in found["problems"]}
    assert found["kinds"]["nan"]["action"].startswith("Replace")
    html = (files(cfg) / "check.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 6, "their images can be seen all the same"
    for p in found["problems"]:
        assert p["kind"] in html
    first, *_ = re.findall(r"<figcaption><b>(.*?)</b>", html)
    assert first == "b_00"


def test_pictures_and_page_do_not_change_on_a_second_look(tiny):
    cfg = tiny(cases=4)
    check.main(cfg)
    before = [(files(cfg) / name).read_bytes() for name in ("check.html", "check.json")]
    check.main(cfg)
    assert before == [(files(cfg) / name).read_bytes() for name in ("check.html", "check.json")]


def test_pictures_missing_from_a_cache_are_drawn_again(tiny, no_figures):
    cfg = tiny(cases=4)
    check.main(cfg)
    shutil.rmtree(Path(cfg.run.root, "cache", "thumbnails"))
    check.main(cfg)
    assert (files(cfg) / "check.html").read_text().count("data:image/png;base64,") == 4


def test_a_disk_that_takes_no_pictures_costs_the_pictures_only(tiny, capsys, no_figures):
    cfg = tiny(cases=4)
    place = Path(cfg.run.root, "cache")
    place.mkdir(parents=True)
    (place / "thumbnails").write_text("a file where a folder should be")
    assert check.main(cfg) == 0
    html = (files(cfg) / "check.html").read_text()
    assert "4 cases without a picture" in html
