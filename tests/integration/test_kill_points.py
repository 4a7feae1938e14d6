"""A run is killed at any moment, again and again, and ends with the very weights of one that nobody touched."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_record import read_record
from tests.integration.test_doors import environment

STEPS, POINTS, SEED = 14, 50, 2024
SETTINGS = (
    "debug=default", "data=msd", "data.folds=2", "plan.patch=[16,16,16]", "plan.features=[4,8,16]", "cache.workers=1",
    f"train.steps={STEPS}", "train.ema=0.9", "augment=nnunet", "resume=auto", "save.every=0.05s", "evaluation.share=0.3",
    "threads=1", "run.name=a",
)  # fmt: skip
PHASES = ("preparation", "first evaluation", "steps", "steps", "save", "save", "final evaluation and report")
SIGNALS = (*[signal.SIGKILL] * 4, signal.SIGTERM, signal.SIGINT)


class Server:
    """`fork_server` and its conversation."""

    def __init__(self):
        script = Path(__file__).with_name("fork_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@dataclass
class Place:
    """A folder with a run and a cache of its own over the shared cohort."""

    server: Server
    path: Path
    data: Path
    extra: tuple = ()
    sessions: list = field(default_factory=list)  # exit code of each

    @property
    def run(self):
        return self.path / "balls/a"

    def start(self, hook=None, extra=()):
        self.path.mkdir(exist_ok=True)
        arguments = [f'data.root="{self.data}"', f'run.root="{self.path}"', *SETTINGS, *self.extra, *extra]
        return self.server.ask(start=arguments, log=str(self.path / "log.txt"), hook=hook)

    def wait(self, process):
        code = self.server.ask(wait=process)
        self.sessions.append(code)
        return code

    def kinds(self):
        return [e["kind"] for e in read_record(self.run / "run.jsonl")]

    def state(self):
        return load_checkpoint(self.run / "last.pt")

    def names(self):
        """Files of the run folder and of the cache, as a set."""
        cache = self.path / "cache"
        return {p.name for p in self.run.iterdir()} | {str(p.relative_to(cache)) for p in cache.rglob("*")}

    def grow_old(self):
        """What a killed builder left in the cache is taken for its own by nobody after an hour."""
        for left in (self.path / "cache").rglob(".building-*"):
            for path in (*left.iterdir(), left):
                os.utime(path, (time.time() - 7200,) * 2)


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.process.stdin.close()
    made.process.wait(timeout=20)


@pytest.fixture(scope="module")
def data(tmp_path_factory, make_cohort):
    return make_cohort(tmp_path_factory.mktemp("data") / "balls")


def uninterrupted(server, folder, data, extra=()):
    """A run that nobody killed, and the seconds of its phases."""
    place = Place(server, folder, data, extra)
    began = time.monotonic()
    process = place.start()
    marks = {}
    while "end" not in marks:
        events = read_record(place.run / "run.jsonl")
        now = time.monotonic() - began
        seen = [e["kind"] for e in events]
        for kind in ("start", "step", "end"):
            if kind in seen:
                marks.setdefault(kind, now)
        if any(e["kind"] == "save" and e["step"] == STEPS for e in events):
            marks.setdefault("trained", now)
        assert now < 120, (place.path / "log.txt").read_text()
        time.sleep(0.01)
    assert place.wait(process) == 0
    marks["over"] = time.monotonic() - began
    return place, marks


@pytest.fixture(scope="module")
def whole(server, data, tmp_path_factory):
    return uninterrupted(server, tmp_path_factory.mktemp("whole"), data)


def same(one, other):
    """Whether two nested states hold the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check(place, expected):
    """The run is over, and like the one that nobody killed; no trace is left of what was cut off."""
    assert place.sessions[-1] == 0, (place.path / "log.txt").read_text()[-3000:]
    found, other = place.state(), expected.state()
    for part in ("model", "ema", "optimizer", "scaler", "rng"):
        assert same(found[part], other[part]), part
    assert [found["progress"][k] for k in ("step", "sample")] == [other["progress"][k] for k in ("step", "sample")]
    assert place.names() == expected.names()
    lines = (place.run / "run.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    results = [json.loads((p.run / "result.json").read_text()) for p in (place, expected)]
    assert [r["dice"] for r in results] == [results[1]["dice"]] * 2
    assert (results[0]["cases"], results[0]["failed"], results[0]["steps"]) == (2, {}, STEPS)
    log = (place.path / "log.txt").read_text()
    assert "Traceback" not in log, log[-3000:]


def kill_in(place, phase, marks, rng, sent, extra=()):
    """Start the run and send a signal to its process group within ``phase``; returns whether it was still running."""
    process = place.start(extra=extra)
    began = time.monotonic()
    earlier = len(place.kinds())

    def until(arrived):
        while not arrived(place.kinds()[earlier:]) and time.monotonic() - began < 60 and alive(process):
            time.sleep(0.003)

    lengths = {
        "preparation": marks["start"], "first evaluation": marks["step"] - marks["start"],
        "steps": marks["trained"] - marks["step"], "save": 0.1, "final evaluation and report": marks["over"] - marks["trained"],
    }  # fmt: skip
    saves = rng.randrange(1, STEPS)
    begun = {
        "preparation": lambda kinds: True,
        "first evaluation": lambda kinds: bool(kinds),
        "steps": lambda kinds: "save" in kinds or "step" in kinds,
        "save": lambda kinds: kinds.count("save") >= saves or "end" in kinds,
        "final evaluation and report": lambda kinds: (
            bool(kinds)
            and any(e["kind"] == "save" and e["step"] == STEPS for e in read_record(place.run / "run.jsonl"))
        ),
    }
    until(begun[phase])
    time.sleep(rng.uniform(0, lengths[phase]))
    killed = alive(process)
    try:
        os.killpg(process, sent)
    except ProcessLookupError:
        killed = False
    asked = time.monotonic()
    code = place.wait(process)
    place.grow_old()
    early = code == -sent  # before the command could say anything
    assert early or code in {signal.SIGKILL: (0,), signal.SIGTERM: (143, 0), signal.SIGINT: (130, 0)}[sent], (
        phase,
        code,
    )
    return killed and code != 0, time.monotonic() - asked


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def points(number, seed):
    """(phases and signals of a run's kills, number of loader processes), drawn from a seed."""
    rng = random.Random(seed)
    for _ in range(number):
        kills = [(rng.choice(PHASES), rng.choice(SIGNALS)) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        yield kills, rng.choice((0, 0, 1)), random.Random(rng.random())


@pytest.mark.long
def test_fifty_kills_at_random_moments(server, data, whole, tmp_path, capsys):
    expected, marks = whole
    began, wrong, landed, slowest = time.monotonic(), [], 0, 0.0
    for number, (kills, workers, rng) in enumerate(points(POINTS, SEED)):
        place = Place(server, tmp_path / f"{number}", data, (f"loader.workers={workers}",))
        try:
            for phase, sent in kills:
                killed, seconds = kill_in(place, phase, marks, rng, sent)
                landed += killed
                slowest = max(slowest, seconds)
            place.wait(place.start())
            check(place, expected)
        except AssertionError as error:
            wrong.append(f"{number} {kills} workers {workers} {place.sessions}: {str(error)[:1500]}")
    with capsys.disabled():
        print(
            f"\n{POINTS - len(wrong)} of {POINTS} runs equal after {landed} kills, in {time.monotonic() - began:.0f} s; "
            f"a signal was answered within {slowest:.1f} s"
        )
    assert not wrong, "\n".join(wrong)
    assert landed >= 0.8 * POINTS, "most signals must meet a run that is under way"


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("nvidia.dali") is None, reason="needs NVIDIA DALI")
@pytest.mark.parametrize("workers", [0, 1])
def test_kills_with_dali(server, data, tmp_path, workers):
    extra = ("loader=dali", f"loader.workers={workers}")
    expected, marks = uninterrupted(server, tmp_path / "whole", data, extra)
    rng = random.Random(SEED)
    for number, sent in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)):
        place = Place(server, tmp_path / f"{number}", data, extra)
        kill_in(place, "steps", marks, rng, sent)
        place.wait(place.start())
        check(place, expected)


DIE = "import os, signal\ndie = lambda: os.killpg(0, signal.SIGKILL)\n"
HOOKS = {
    "in the middle of a checkpoint": DIE
    + """
import io, torch
save, seen = torch.save, []
def half(state, file):
    seen.append(1)
    if len(seen) == 4:
        whole = io.BytesIO()
        save(state, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        die()
    save(state, file)
torch.save = half
""",
    "between sync and rename": DIE
    + """
replace, seen = os.replace, []
def cut(source, target):
    seen.append(os.path.basename(target))
    if seen.count("previous.pt") == 3 and seen[-1] == "previous.pt":
        die()
    replace(source, target)
os.replace = cut
""",
    "between the two renames": DIE
    + """
replace, seen = os.replace, []
def cut(source, target):
    seen.append(os.path.basename(target))
    if seen.count("last.pt") == 4 and seen[-1] == "last.pt":
        die()
    replace(source, target)
os.replace = cut
""",
    "in the middle of a line": DIE
    + """
write, seen = os.write, []
def half(handle, data):
    seen.append(b'"kind": "save"' in data)
    if sum(seen) == 3 and seen[-1]:
        write(handle, data[: len(data) // 2])
        die()
    return write(handle, data)
os.write = half
""",
    "in the middle of the cache": DIE
    + """
import numpy as np
save, seen = np.save, []
def half(file, array):
    seen.append(1)
    if len(seen) == 6:
        file.write(array.tobytes()[:100])
        file.flush()
        die()
    save(file, array)
np.save = half
""",
    "in the final evaluation": DIE
    + """
import segspeed.run as run
mirrored, score, seen = run.build.mirrored, run.score, []
def last(*given):
    run.score = cut
    return mirrored(*given)
def cut(*given):
    seen.append(1)
    if len(seen) == 2:
        die()
    return score(*given)
run.build.mirrored = last
""",
    "between result and report": DIE
    + """
from pathlib import Path
replace = Path.replace
Path.replace = lambda self, target: die() if Path(target).name == "report.html" else replace(self, target)
""",
}


@pytest.mark.long
@pytest.mark.parametrize("name", HOOKS)
def test_the_hardest_moments(server, data, whole, tmp_path, name):
    expected, _ = whole
    place = Place(server, tmp_path / "run", data)
    assert place.wait(place.start(hook=HOOKS[name])) == -signal.SIGKILL
    place.grow_old()
    place.wait(place.start())
    check(place, expected)
