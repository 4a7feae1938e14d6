import os
import signal
import time

import pytest

from segspeed.data.pool import run_jobs
from segspeed.record.live import track
from segspeed.types import DataError


def double(x):
    return 2 * x


def dies(x):
    if x == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def slow(x, folder):
    try:
        (folder / f"start{x}").touch()
        time.sleep(0 if x == 0 else 60)
    finally:
        (folder / f"end{x}").touch()
    return x


@pytest.mark.parametrize("workers", [1, 2])
def test_every_result_with_its_number(workers):
    assert sorted(run_jobs(double, [(n,) for n in range(5)], workers, "doubles")) == [(n, 2 * n) for n in range(5)]


def test_a_killed_process_is_an_error_not_a_hang():
    with pytest.raises(DataError, match=r"doubles was killed.*cache\.workers=1"):
        list(run_jobs(dies, [(n,) for n in range(6)], 2, "doubles"))


def test_stopping_ends_the_work_at_hand_through_its_finally(tmp_path):
    start = time.perf_counter()
    found = track(run_jobs(slow, [(n, tmp_path) for n in range(6)], 2, "sleeps"), 6, "sleeping")
    assert next(found) == (0, 0)
    while not (tmp_path / "start1").exists():
        time.sleep(0.01)
    found.close()
    end = time.perf_counter() + 10
    while not (tmp_path / "end1").exists() and time.perf_counter() < end:
        time.sleep(0.02)
    assert time.perf_counter() - start < 30
    assert (tmp_path / "end1").exists()
    assert not (tmp_path / "start5").exists()
