"""Faults are put into a run: each gives one clear text and the right exit code, keeps what was earned, and can be resumed.

| fault | tested in |
|---|---|
| killed at any moment: preparation, first evaluation, steps, saves, last evaluation, report | test_kill_points.py |
| SIGTERM, Ctrl-C and SIGKILL to the command | test_doors.py: test_a_killed_run_goes_on_to_the_same_weights |
| a signal during an evaluation; to a loader process; an echo of it | here; tests/speed/test_signals.py |
| a loader process killed | test_doors.py: test_a_dead_loader_process_ends_the_run_with_what_to_do |
| a loader process that hangs; a damaged or unreadable case | tests/loader/test_torch_loader.py, test_dali_loader.py |
| a preparation process killed; one bad case in the preparation | tests/data/test_pool.py, test_cache.py |
| a cache file truncated in the middle of a run, of a case to train on or to judge by | here |
| a full disk: during a save, a line of run.jsonl, the report | here; before the cache is built: tests/data/test_cache.py |
| NaN in a batch; fp16 that never recovers | test_training.py |
| a loss that explodes | here; tests/speed/test_precision.py |
| a case that cannot be scored | here |
| /dev/shm too small; too many open files | tests/loader/test_torch_loader.py, tests/speed/test_descriptors.py |
| out of memory | test_training.py, tests/test_engine.py; on one of several ranks: test_lost_ranks.py |
| a clock that jumps | here |
| two runs in one folder; a lock that outlives its run; a file system without locks | here, tests/record/test_run_files.py |
| a line, a checkpoint or a result that is torn | here; tests/record/test_run_files.py |
| other settings, another network, other data | here; test_training.py |
"""

import ast
import errno
import fcntl
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch

import segspeed
from segspeed import outcome, run
from segspeed.data import wholeness
from segspeed.engine import Learner
from segspeed.loader.torch_loader import TorchLoader
from segspeed.monitor import Monitor
from segspeed.record import run_folder
from segspeed.record.run_folder import RunFolder
from segspeed.record.run_record import RunRecord, read_record
from segspeed.speed.cadence import Cadence
from segspeed.speed.health import LOOKS, Health
from segspeed.training import train
from segspeed.types import DataError, RunStopped
from tests.integration.test_training import folder_of, interrupt_at, weights_of
from tests.loader.test_torch_loader import entry, sampler


@pytest.fixture
def tiny(tiny):
    """`tiny` on one thread: a step of so small a network is too short to share out."""
    return lambda *settings, **more: tiny("threads=1", *settings, **more)


def at_step(monkeypatch, step, act):
    """Call ``act`` once, after a step."""
    note, done = Monitor.note, []

    def noted(self, finished, loss, norm):
        note(self, finished, loss, norm)
        if finished.number == step and not done:
            done.append(step)
            act()

    monkeypatch.setattr(Monitor, "note", noted)


def entries(cfg, side):
    split = json.loads((folder_of(cfg) / "split.json").read_text())
    cache = Path(cfg.run.root) / "cache/balls"
    return [path for case in split[side] for path in cache.glob(f"{case}-*")]


@contextmanager
def small_files(size):
    """No file grows beyond ``size`` bytes: what a full disk does, by the system itself."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def goes_on_like(cfg, tiny, *settings):
    """Resume ``cfg``, and train the same in one go elsewhere: the same weights."""
    train(cfg)
    other = tiny(*settings, "run.name=whole", folder=cfg.data.kwargs["root"])
    train(other)
    root = Path(cfg.run.root) / "balls"
    found, expected = (weights_of(root / name)[0] for name in (cfg.run.name, "whole"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cache_file_cut_short_in_the_middle_of_a_run(tiny, monkeypatch, workers):
    settings = ("train.steps=8", f"loader.workers={workers}", "loader.prefetch=1")
    cfg = tiny(*settings, "run.name=a")
    kept = {}

    def cut():
        for path in entries(cfg, "train"):
            kept[path / "image.npy"] = (path / "image.npy").read_bytes()
            os.truncate(path / "image.npy", 3000)

    with monkeypatch.context() as patch:
        at_step(patch, 2, cut)
        with pytest.raises(DataError, match=r"cache entry b_0\d-.* is damaged \(image\.npy ends after 3000 of") as told:
            train(cfg)
    assert len(str(told.value).splitlines()) == 1
    step = weights_of(folder_of(cfg))[1]["progress"]["step"]
    assert 2 <= step < 8, "what was learnt until then is saved"
    for path, content in kept.items():
        path.write_bytes(content)
    goes_on_like(cfg, tiny, *settings)


def test_a_case_that_cannot_be_scored_costs_itself_alone(tiny, monkeypatch, capsys):
    """Told in the middle of the run, which goes on; at its end the others are scored and the command fails. Once the case is
    mended, the same command scores all without training again."""
    cfg = tiny("run.name=a", "train.steps=5", "evaluation.share=0.9", "evaluation.overlap=0.5")
    kept = {}

    def cut():
        path = entries(cfg, "val")[0] / "native_label.npy"
        kept[path] = path.read_bytes()
        os.truncate(path, 500)

    at_step(monkeypatch, 2, cut)
    monkeypatch.setattr(Cadence, "due", lambda *_: True)
    with pytest.raises(DataError, match=r"(?s)1 of 2 validation cases could not be scored.*native_label\.npy ends"):
        train(cfg)
    folder = folder_of(cfg)
    found = json.loads((folder / "result.json").read_text())
    bad = entries(cfg, "val")[0].name[:4]
    assert (found["cases"], list(found["failed"]), found["steps"]) == (1, [bad], 5)
    assert found["mean_dice"] is not None
    assert (folder / "report.html").exists()
    said = [e for e in read_record(folder / "run.jsonl") if e.get("name") == "evaluation"]
    assert said[-1]["message"].startswith(f"{bad} was not scored")
    stamp = (folder / "last.pt").stat().st_mtime_ns
    for path, content in kept.items():
        path.write_bytes(content)
    result = train(cfg)
    assert (result["cases"], result["failed"]) == (2, {})
    assert (folder / "last.pt").stat().st_mtime_ns == stamp
    assert train(cfg) == result
    assert "already complete" in capsys.readouterr().out


@pytest.mark.slow
def test_no_case_can_be_scored(tiny, monkeypatch):
    cfg = tiny("run.name=a", "train.steps=2")

    def lost(*_):
        raise RuntimeError("device lost\nmore")

    at_step(monkeypatch, 1, lambda: monkeypatch.setattr(run, "evaluate_cases", lost))
    with pytest.raises(
        DataError, match=r"none of the 2 validation cases.*RuntimeError: device lost\)\. The weights of step 2"
    ):
        train(cfg)
    assert not (folder_of(cfg) / "result.json").exists()
    assert weights_of(folder_of(cfg))[1]["progress"]["step"] == 2


def test_a_disk_that_fills_up_during_a_save(tiny, monkeypatch):
    settings = ("train.steps=6", "save.every=0.001s")
    cfg = tiny(*settings, "run.name=a")
    with monkeypatch.context() as patch, small_files(resource.RLIM_INFINITY):
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))  # noqa: E731
        at_step(patch, 3, limit)
        with pytest.raises(RunStopped, match=r"last\.pt could not be written.*is the disk full\?.*intact") as stopped:
            train(cfg)
    assert stopped.value.exit_code == 1
    assert weights_of(folder_of(cfg))[1]["progress"]["step"] == 2
    assert not [p for p in folder_of(cfg).iterdir() if p.suffix == ".tmp"]
    goes_on_like(cfg, tiny, *settings)


def test_a_disk_that_fills_up_during_a_line(tmp_path):
    path = tmp_path / "run.jsonl"
    record = RunRecord(path)
    record.write("start", config={"a": 1})
    size = path.stat().st_size
    with small_files(size + 20), pytest.raises(RunStopped, match=r"run\.jsonl could not be written \(File too large"):
        record.write("evaluation", cases={"x": "y" * 100})
    assert path.stat().st_size == size + 20, "a part of the line is there"
    assert [e["kind"] for e in read_record(path)] == ["start"]
    RunRecord(path).write("end")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["kind"] for e in lines] == ["start", "end"]


@pytest.mark.parametrize(
    ("torn", "kinds"),
    [
        ('{"t": 2.0, "kind": "st', ["start"]),
        ('{"t": 2.0, "kind": "step", "name": "\u00e4"}'.encode()[:-4].decode(errors="ignore"), ["start"]),
        ('{"t": 2.0, "kind": "step"}', ["start", "step"]),  # whole but for its end
        ("12", ["start"]),
        ("\0\0\0\0", ["start"]),  # what a power cut leaves
    ],
)
def test_a_line_cut_off_by_a_kill(tmp_path, torn, kinds):
    path = tmp_path / "run.jsonl"
    RunRecord(path).write("start")
    with open(path, "a") as file:
        file.write(torn)
    assert [e["kind"] for e in read_record(path)] == kinds
    record = RunRecord(path)
    record.write("resume")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["kind"] for e in events] == [*kinds, "resume"]
    assert events[-1]["t"] >= events[-2]["t"]


def test_a_disk_that_fills_up_during_the_report(tiny, monkeypatch):
    cfg = tiny("run.name=a", "train.steps=2")
    with small_files(resource.RLIM_INFINITY), monkeypatch.context() as patch:
        written = outcome.write_report

        def full(folder):
            with small_files(2000):
                return written(folder)

        patch.setattr(outcome, "write_report", full)
        with pytest.raises(RunStopped, match="a file in .* could not be written .*disk full.*same command writes what"):
            train(cfg)
    folder = folder_of(cfg)
    assert json.loads((folder / "result.json").read_text())["steps"] == 2
    assert not (folder / "report.html").exists()
    assert train(cfg)["steps"] == 2
    assert "<svg" in (folder / "report.html").read_text()
    assert not (folder / ".report.html.tmp").exists()


def test_a_loss_that_explodes(tiny, monkeypatch):
    cfg = tiny("run.name=a", "save.every=0.001s")
    update, steps = Learner.update, []

    def exploding(self, batches, samples):
        loss, norm = update(self, batches, samples)
        steps.append(1)
        return (loss * 1e6, norm) if len(steps) == 3 else (loss, norm)

    monkeypatch.setattr(Learner, "update", exploding)
    with pytest.raises(RunStopped, match=r"step 3: the loss exploded to .*b_0\d.*lower optimizer\.lr") as stopped:
        train(cfg)
    assert stopped.value.exit_code == 1
    assert weights_of(folder_of(cfg))[1]["progress"]["step"] == 2, "the weights of that step are in no checkpoint"
    assert (folder_of(cfg) / "fault_step_000003.pt").exists()


def test_a_fault_on_a_full_disk_is_still_told(tiny, monkeypatch):
    cfg = tiny("run.name=a")
    update = Learner.update

    def spoilt(*given):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        return tuple(v * float("nan") for v in update(*given))

    monkeypatch.setattr(Learner, "update", spoilt)
    with (
        small_files(resource.RLIM_INFINITY),
        pytest.raises(RunStopped, match=r"step 1: the loss is nan.*could not be kept"),
    ):
        train(cfg)


MOMENTS = {"before the first step": 0, "in the middle of the run": 2, "at the end": 4}


@pytest.mark.parametrize(
    "moment",
    [
        "in the middle of the run",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("before the first step", "at the end")),
    ],
)
def test_a_signal_breaks_an_evaluation_off(tiny, monkeypatch, moment):
    """Within a window of the network, not within the minutes that a large cohort takes; and nothing is lost."""
    settings = ("train.steps=4", "evaluation.share=0.9", "evaluation.overlap=0.5", "evaluation.windows=1")
    cfg = tiny(*settings, "run.name=a")
    forward, after = run.Stoppable.forward, []

    def asked(self, windows):
        scores = forward(self, windows)
        if after:
            after.append(1)
        elif steps[-1] == MOMENTS[moment]:
            signal.raise_signal(signal.SIGTERM)
            after.append(0)
        return scores

    steps = [0]
    with monkeypatch.context() as patch:
        patch.setattr(Cadence, "due", lambda *_: moment == "in the middle of the run")
        note = Monitor.note
        patch.setattr(Monitor, "note", lambda self, s, *v: (note(self, s, *v), steps.append(s.number))[0])
        patch.setattr(run.Stoppable, "forward", asked)
        with pytest.raises(RunStopped, match=f"SIGTERM (before|after).*{'run.name=a|the same command'}") as stopped:
            train(cfg)
    assert stopped.value.exit_code == 143
    assert after == [0], "no window was predicted after the signal"
    kinds = [e["kind"] for e in read_record(folder_of(cfg) / "run.jsonl")]
    assert "end" not in kinds
    if moment == "in the middle of the run":
        assert weights_of(folder_of(cfg))[1]["progress"]["step"] == 2
    goes_on_like(cfg, tiny, *settings)


@pytest.mark.slow
def test_a_signal_during_the_report_lets_it_be_written(tiny, monkeypatch):
    cfg = tiny("run.name=a", "train.steps=2")
    written = outcome.write_report
    monkeypatch.setattr(outcome, "write_report", lambda f: (signal.raise_signal(signal.SIGTERM), written(f))[1])
    assert train(cfg)["steps"] == 2
    assert folder_of(cfg).joinpath("report.html").exists()


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="as on Linux")
def test_a_loader_process_outlives_the_signal_that_a_scheduler_sends_to_all():
    loader = TorchLoader(sampler([entry("a"), entry("b", seed=1)]), batch=2, workers=1, prefetch=1)
    batches = iter(loader)
    next(batches)
    (worker,) = loader.loader._iterator._workers
    for _ in range(2):
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    time.sleep(0.2)
    assert len(list(islice(batches, 4))) == 4
    assert worker.is_alive()
    worker.terminate()  # the main process's own
    worker.join(10)
    assert worker.exitcode == 0


def test_the_clock_may_jump(tiny, monkeypatch):
    """Days forward and back at every look: nothing that is timed notices."""
    jumps = iter(range(1, 10**9))
    monkeypatch.setattr(time, "time", lambda: 1.6e9 + (-1) ** (n := next(jumps)) * n * 86400.0)
    cfg = tiny("run.name=a", "train.budget=1s", "evaluation.share=0.3", "save.every=0.2s")
    result = train(cfg)
    assert next(jumps) >= 1
    times = [e["t"] for e in read_record(folder_of(cfg) / "run.jsonl")]
    assert times == sorted(times)
    assert 0.9 <= weights_of(folder_of(cfg))[1]["progress"]["elapsed"] < 30
    assert 0 < result["train_s"] <= result["total_s"] < 120


def test_what_times_a_run_asks_no_clock_that_can_be_set():
    package = Path(segspeed.__file__).parent
    paths = [package / f"{n}.py" for n in ("engine", "monitor", "run", "training", "outcome", "evaluation", "ceiling")]
    asked = [
        f"{path.name}: {ast.unparse(node)}"
        for path in (*paths, *(package / "speed").glob("*.py"), *(package / "record").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now", "datetime.utcnow")
    ]
    assert asked == ["run_folder.py: datetime.now"], "which names a folder"


def test_two_runs_in_one_folder(tiny):
    cfg = tiny("run.name=a")
    with (
        RunFolder(Path(cfg.run.root) / "balls/a").locked(),
        pytest.raises(DataError, match=r"another process.*run\.name"),
    ):
        train(cfg)
    assert train(cfg)["steps"] == 4


def test_a_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        (folder.path / "run.jsonl").touch()
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        child = context.Process(target=lambda: (begun.set(), time.sleep(30)))
        child.start()
        assert begun.wait(20)
    try:
        with folder.locked():
            assert child.is_alive()
    finally:
        child.kill()
        child.join()


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunFolder(tmp_path / "run").locked():
        assert "keeps no locks" in capsys.readouterr().out
    assert not run_folder._held


def test_what_a_kill_left_half_written_goes(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for name in (".last.pt.17.tmp", ".report.html.tmp", ".plan.json.3.tmp"):
        (folder.path / name).write_bytes(b"half")
    (folder.path / "last.pt").write_bytes(b"whole")
    with folder.locked():
        assert {p.name for p in folder.path.iterdir()} == {".lock", "last.pt"}


def test_half_built_entries_go_once_nobody_builds_them(tmp_path):
    now, old, done = (tmp_path / name for name in (".building-a-1", ".building-b-2", "c-3"))
    for path in (now, old, done):
        path.mkdir()
        (path / "image.npy").touch()
    for path in (old / "image.npy", old, done / "image.npy", done):
        os.utime(path, (time.time() - 7200,) * 2)
    assert wholeness.remove_abandoned(tmp_path) == 1
    assert now.exists()
    assert done.exists()
    assert not old.exists()
    assert wholeness.remove_abandoned(tmp_path / "none") == 0


def test_half_a_result_is_none(tiny):
    cfg = tiny("run.name=a", "train.steps=2")
    expected = train(cfg)
    (folder_of(cfg) / "result.json").write_text('{"mean_dice": 0.')
    found = train(cfg)
    assert found["dice"] == expected["dice"]
    assert json.loads((folder_of(cfg) / "result.json").read_text()) == found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("model.dropout=0.3", r"model\.dropout: .* -> 0\.3"),
        ("plan.features=[4,8]", r"plan\.features: \[4, 8, 16\] -> \[4, 8\]"),
        ("model=segresnet_ds", r"model\._target_: "),
        ("data.name=others", None),
    ],
)
def test_another_network_or_cohort_does_not_go_on(tiny, monkeypatch, change, text):
    cfg = tiny("run.name=a")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        with pytest.raises(RunStopped):
            train(cfg)
    other = tiny("run.name=a", change, folder=cfg.data.kwargs["root"])
    if text is None:  # a cohort of another name has a folder of its own
        assert train(other)["cohort"] == "others"
        return
    with pytest.raises(DataError, match=rf"(?s)holds a run with other settings.*{text}.*Give the old settings"):
        train(other)


def test_a_step_is_saved_once_whatever_asks_for_it(tiny):
    cfg = tiny("run.name=a", "save.every=0.001s", "train.steps=3")
    train(cfg)
    folder = folder_of(cfg)
    assert [e["step"] for e in read_record(folder / "run.jsonl") if e["kind"] == "save"] == [1, 2, 3]
    (folder / "result.json").unlink()
    train(cfg)
    assert [e["step"] for e in read_record(folder / "run.jsonl") if e["kind"] == "save"] == [1, 2, 3]


@pytest.mark.slow
def test_a_step_cut_for_want_of_memory_stays_cut_after_a_resume(tiny, monkeypatch):
    gradient = Learner._gradient

    def tight(self, batch, samples, last, sums):
        if len(batch.cases) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes")
        return gradient(self, batch, samples, last, sums)

    monkeypatch.setattr(Learner, "_gradient", tight)
    cfg = tiny("run.name=a", "plan.batch=2")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(RunStopped):
            train(cfg)
    goes_on_like(cfg, tiny, "plan.batch=2")
    events = [e["name"] for e in read_record(Path(cfg.run.root) / "balls/a/run.jsonl") if e["kind"] == "event"]
    assert events == ["memory", "resume"]


def test_what_was_noticed_and_told_outlives_a_resume():
    def looks(health, times):
        return [t for _ in range(times) for t in health.evaluated({"a": 0.9, "b": 0.0}, 0.45, 0.5)]

    whole, parts = Health(), Health()
    expected = looks(whole, LOOKS + 2)
    first = looks(parts, LOOKS - 1)
    again = Health()
    again.load_state_dict(parts.state_dict())
    then = looks(again, 1)
    later = Health()
    later.load_state_dict(again.state_dict())
    assert [*first, *then, *looks(later, 2)] == expected
    assert len(expected) == 1
    climbing = Health()
    for n in range(200):
        climbing.step(1 - 0.001 * n, 0.3)
    other = Health()
    other.load_state_dict(climbing.state_dict())
    assert other == climbing


@pytest.mark.slow
def test_a_diverging_learning_rate_is_named_in_the_run(tiny):
    """A rate that grows with the warmup until it is a thousand times too high: warned of, before or without an explosion."""
    settings = ("optimizer=sgd", "optimizer.lr=30", "train.clip=null", "schedule.warmup=0.9", "train.ema=null")
    cfg = tiny("run.name=a", "train.steps=150", "augment=none", *settings)
    stopped = ""
    try:
        train(cfg)
    except RunStopped as error:
        stopped = str(error)
    events = read_record(folder_of(cfg) / "run.jsonl")
    said = [e["message"] for e in events if e.get("name") == "health"] + [stopped]
    assert "optimizer.lr" in " ".join(said)
