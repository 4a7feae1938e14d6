import json
import re

import numpy as np
import pytest

from segspeed.record import figures
from segspeed.record.overlays import load_overlays, make_overlay, save_overlays
from segspeed.record.report import write_report
from segspeed.record.run_record import RunRecord


@pytest.fixture
def run_folder(tmp_path):
    record = RunRecord(tmp_path / "run.jsonl")
    record.write(
        "start", cohort="a <b> & c", config={"seed": 0}, versions={"torch": "2"}, device="cpu", precision="bf16",
        plan={"patch": [8, 8, 8]}, cases_train=3, cases_val=2, seed=0,
    )  # fmt: skip
    for n in range(60):
        record.write(
            "step", step=n + 1, loss=3 / (n + 1), lr=1e-3, grad_norm=1.0, samples_per_s=5.0, wait_share=0.01,
            memory_bytes=10**9, train_s=2.0 * n,
        )  # fmt: skip
    for step, dice in ((20, 0.4), (60, 0.8)):
        cases = {"x": {"liver": dice, "spleen": None}, "y": {"liver": dice - 0.1, "spleen": 0.0}}
        record.write(
            "evaluation", step=step, train_s=2.0 * step, seconds=1.0, weights="ema", mean_dice=dice / 2,
            dice={"liver": dice, "spleen": 0.0}, empty={"liver": 0, "spleen": 1}, interval=[0.1, 0.5],
            empty_policy="counted", cases=cases, final=step == 60,
        )  # fmt: skip
    record.write("event", name="empty-label", message="y: nothing <there>")
    rng = np.random.default_rng(0)
    label = np.zeros((6, 8, 10), np.uint8)
    label[2:4, 3:6, 4:8] = 1
    save_overlays(
        tmp_path / "overlays.npz",
        [make_overlay("best", "x", 0.8, rng.normal(size=(6, 8, 10)), label, label, (3.0, 1.0, 1.0))],
    )
    return tmp_path


def test_a_report_in_the_middle_of_a_run_and_at_its_end(run_folder):
    page = write_report(run_folder).read_text()
    assert "this run is not finished" in page
    result = {"train_s": 120.0, "total_s": 130.0, "samples_per_s": 5.0, "wait_share": 0.01, "peak_memory_bytes": 10**9}
    (run_folder / "result.json").write_text(json.dumps(result))
    page = write_report(run_folder).read_text()
    assert "not finished" not in page
    for text in (
        "0.400",
        "1.00 GB",
        "liver",
        "absent in both",
        "best case x, mean Dice 0.800",
        "nothing &lt;there&gt;",
        "counted",
    ):
        assert text in page, text
    assert page.count("<svg") == 3
    assert "data:image/png;base64" in page
    assert "a &lt;b&gt; &amp; c" in page
    assert not re.search(r"(src|href)=['\"]https?:", page), "nothing is loaded from a network"


def test_an_empty_record_still_makes_a_page(tmp_path):
    assert "no evaluation yet" in write_report_of_nothing(tmp_path)


def write_report_of_nothing(folder):
    RunRecord(folder / "run.jsonl").write("start", cohort="x", device="cpu", precision="fp32", seed=0)
    return write_report(folder).read_text()


def test_pictures_of_too_little_are_none():
    assert figures.dice_against_time([]) is None
    assert figures.training_curves([]) is None
    assert figures.dice_per_case({"dice": {"a": None}, "cases": {"x": {"a": None}}}) is None


def test_overlays_cut_where_the_foreground_is(tmp_path):
    label = np.zeros((6, 8, 10), np.uint8)
    label[4, 2:5, 7] = 2
    image = np.arange(480, dtype=float).reshape(6, 8, 10)
    overlay = make_overlay("worst", "c", 0.1, image, label, label * 0, (3.0, 1.0, 1.0))
    np.testing.assert_array_equal(overlay.image[0], image[4])
    np.testing.assert_array_equal(overlay.image[2], image[:, :, 7])
    save_overlays(tmp_path / "o.npz", [overlay])
    (again,) = load_overlays(tmp_path / "o.npz")
    assert (again.role, again.case, again.dice, again.spacing) == ("worst", "c", 0.1, (3.0, 1.0, 1.0))
    np.testing.assert_array_equal(again.reference[1], overlay.reference[1])


def test_volumes_one_voxel_thick_have_a_picture():
    flat = np.zeros((1, 1, 5))
    label = np.ones((1, 1, 5), np.uint8)
    assert figures.overlay_picture(make_overlay("best", "c", 1.0, flat, label, label, (1.0, 1.0, 1.0)))
