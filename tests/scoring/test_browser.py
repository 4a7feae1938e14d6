"""The page in a real browser, where one is installed."""

import shutil
import subprocess

import numpy as np
import pytest

from segspeed.record.overlays import make_overlay
from segspeed.scoring.output import write_scores
from segspeed.scoring.pairs import ScorePair
from segspeed.scoring.score import score_pair
from segspeed.scoring.summary import summarise_scores
from segspeed.types import LabelTable

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_the_report_opens_and_shows_no_identity(tmp_path, write):
    reference = np.zeros((12, 12, 12), np.uint8)
    reference[3:8, 3:8, 3:8] = 1
    cases = []
    for n in range(3):
        label = write(tmp_path / f"l{n}.nii.gz", reference)
        shifted = write(tmp_path / f"p{n}.nii.gz", np.roll(reference, n, axis=0))
        pair = ScorePair(f"case{n}", shifted, label, patient=f"Mustermann {n}", site="north")
        cases.append(score_pair(pair, LabelTable({"organ": (1,)}), (1.0,), False, 0.1))
    overlay = make_overlay("worst", "case2", 0.6, np.random.default_rng(0).normal(size=reference.shape), reference,
                           np.roll(reference, 2, axis=0), (1.0, 1.0, 1.0))  # fmt: skip
    page = write_scores(
        tmp_path / "out", cases, summarise_scores(cases), "balls", about={"Settings": {"a": 1}}, overlays=[overlay]
    )
    picture = tmp_path / "page.png"
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=390,2400"]
    shown = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "Mustermann" not in shown.stdout
    for text in (
        "mean of classes",
        "Worst cases in three planes",
        "Volumes",
        "Settings",
        "data:image/png",
    ):
        assert text in shown.stdout, text
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=60, check=True)
    assert picture.stat().st_size > 20_000, "a page with something on it"
