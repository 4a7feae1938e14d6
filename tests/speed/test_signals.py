import signal
import sys

import pytest

from segspeed.speed import signals
from segspeed.speed.clock import Clock
from segspeed.speed.cpus import available_cpus, loader_workers
from segspeed.speed.signals import catch_stop_signals


def test_first_signal_is_noted_second_acts(monkeypatch):
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def twice():
        with catch_stop_signals() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.signal == signal.SIGINT
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_echo_of_the_first_signal_is_the_same_request():
    """torchrun sends a SIGTERM after the one that the scheduler sent to all processes."""
    with catch_stop_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGTERM


def test_work_is_broken_off_once_the_end_is_asked_for():
    with catch_stop_signals() as stop:
        stop.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(signals.Interrupted):
            stop.check()


def test_an_earlier_handler_is_called_too_and_comes_back():
    seen = []
    earlier = lambda number, frame: seen.append(number)  # noqa: E731
    old = signal.signal(signal.SIGTERM, earlier)
    try:
        with catch_stop_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
            assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is earlier
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_job_goes_back_into_the_queue_once_all_is_saved():
    """submitit's handler of SIGUSR2 requeues the job and ends the process at once."""
    seen = []

    def requeue(number, frame):
        seen.append(number)
        sys.exit(-1)

    def run():
        with catch_stop_signals() as stop:
            signal.raise_signal(signal.SIGUSR2)
            assert stop.signal == signal.SIGUSR2
            assert seen == []  # the step at hand goes on, and is saved

    old = signal.signal(signal.SIGUSR2, requeue)
    try:
        with pytest.raises(SystemExit):
            run()
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_clock_adds_up():
    clock = Clock({"train": 2.0})
    clock.add("train", 1.0)
    with clock.measure("setup"):
        pass
    assert clock["train"] == 3.0
    assert clock["setup"] >= 0
    assert clock["cache"] == 0.0


def test_workers():
    assert available_cpus() >= 1
    assert loader_workers(3, "cpu") == 3
    assert loader_workers(0, "cuda") == 0
    assert loader_workers("auto", "cpu") == 1
