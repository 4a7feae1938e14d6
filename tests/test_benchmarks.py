import pytest

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
