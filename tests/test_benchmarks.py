import pytest

from segspeed.benchmarks import predict
from segspeed.benchmarks.floor import Rates, counted_work, floor_text, measure_rates
from segspeed.benchmarks.loader import (
    Reading,
    Round,
    Setting,
    measure_reading,
    run_contenders,
    synthetic_entries,
    table,
)
from segspeed.config import AugmentConfig

SETTING = Setting("loader", (14, 16, 18), 2, (8, 8, 8), 2, 0, 2, 4)


@pytest.fixture
def entries(tmp_path):
    return synthetic_entries(tmp_path, SETTING)


def test_contenders_take_turns_and_one_that_cannot_run_is_a_row(entries):
    found = run_contenders(entries, SETTING, AugmentConfig(), ["segspeed torch", "nobody"])
    rounds = found["segspeed torch"]
    assert [r.patches for r in rounds] == [4, 4]
    assert all(r.wall_s > 0 and r.cpu_s >= 0 and r.peak_bytes > 1e6 for r in rounds)
    assert "nobody" in found["nobody"]
    text = table(found, None, SETTING)
    assert "| nobody | KeyError" in text
    assert "| segspeed torch |" in text


def test_table_by_hand():
    found = {
        "a": [Round(10, 2.0, 1.0, 10**9), Round(10, 4.0, 3.0, 2 * 10**9), Round(10, 2.0, 2.0, 10**9)],
        "b": [Round(10, 1.0, 4.0, 1)],
    }
    text = table(found, Reading([0.003], [0.002], [0.01]), SETTING)
    assert "| a | 200.0 (100.0 to 300.0) | 1.0 | 5.0 | 2.00 GB |" in text
    assert "| b | 400.0 (400.0 to 400.0) | 2.0 |" in text
    assert "ratio of medians 1.50" in text


def test_reading_is_timed_against_the_same_copy_from_memory(entries):
    found = measure_reading(entries, SETTING, repeats=5)
    assert len(found.warm_s) == len(found.ram_s) == 5
    assert len(found.cold_s) == 5


def test_the_floor_counts_what_the_probabilities_say():
    off = {
        n: {"probability": (0, 0, 0) if n == "flip" else 0}
        for n in AugmentConfig.model_fields
        if n not in ("margin", "extra")
    }
    bare = counted_work(AugmentConfig.model_validate(off))
    assert (bare.copies, bare.label_copies, bare.gathers, bare.normals, bare.multiply_adds) == (1, 1, 0, 0, 0)
    some = {"rotation": {"probability": 0.5}, "noise": {"probability": 0.25}, "gamma": {"probability": 0.1}}
    work = counted_work(AugmentConfig.model_validate({**off, **some}))
    assert work.gathers == 4.5
    assert work.copies == pytest.approx(1 + 0.5 + 0.25 + 0.3)
    assert work.normals == 0.25
    assert work.multiply_adds == pytest.approx(7 * 0.5 + 2)
    assert work.seconds(Rates(1.0, 2.0, 10.0, 100.0, 1000.0), 2) == pytest.approx(2 * (2.05 + 2 + 45 + 25 + 5500))


def test_the_floor_lies_below_what_augmentation_takes():
    rates = measure_rates((16, 16, 16))
    assert all(0 < rate < 1e-6 for rate in vars(rates).values())
    text = floor_text(AugmentConfig(), (16, 16, 16), 1e-4, 1e-2)
    assert "Counted floor" in text
    assert "segspeed torch reaches" in text


def test_a_prediction_is_measured_in_a_process_of_its_own(tmp_path):
    volume = predict.synthetic_volume(tmp_path / "v.nii.gz", (20, 24, 28))
    found = predict.measure_prediction(volume, (16, 16, 16), 2, 1)
    assert found.classes == 2
    assert 0 < found.network_s < found.total_s
    assert found.peak_bytes > 1e8
    assert [p.name for p in tmp_path.iterdir()] == ["v.nii.gz"], "its label maps are gone"
    text = predict.table([found], (20, 24, 28), (16, 16, 16), 1)
    assert "| 2 | " in text
