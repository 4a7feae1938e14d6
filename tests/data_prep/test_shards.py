"""A cohort prepared by several machines: the same entries, the same statistics, whoever builds them and whoever dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import check, prepare
from segspeed import build, preparation
from segspeed.config import CacheConfig
from segspeed.data import inspect
from segspeed.record.live import track
from segspeed.shards import Shard
from segspeed.types import SettingError
from tests.integration.test_doors import FAST, environment

WORDS = ("data=msd", *FAST, "run.root=outputs")


def start(folder, root, *more):
    command = [sys.executable, "-m", "data_prep.prepare", *WORDS, f"data.root={folder}", *more]
    return subprocess.Popen(
        command, cwd=root, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def contents(root):
    """Relative path -> bytes of every file of the cache's entries."""
    cache = root / "outputs/cache/balls"
    return {str(p.relative_to(cache)): p.read_bytes() for p in sorted(cache.rglob("*")) if p.is_file()}


@pytest.mark.long
def test_shards_side_by_side_build_the_bytes_of_one(msd_folder, tmp_path):
    folder = msd_folder(cases=7)
    roots = [tmp_path / "one", tmp_path / "three"]
    for root in roots:
        root.mkdir()
    running = [start(folder, roots[1], f"cache.shard={n}/3") for n in (1, 2, 3)] + [start(folder, roots[0])]
    said = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running] == [0] * 4, said
    one, three = map(contents, roots)
    assert len(one) == 7 * 5
    assert one == three
    assert [out.split("shard ")[1].split(" cases")[0] for out, _ in said[:3]] == [
        "1/3: 3 of 3", "2/3: 2 of 2", "3/3: 2 of 2",
    ]  # fmt: skip
    last = start(folder, roots[1])
    out, err = last.communicate(timeout=120)
    assert "0 of 7 cases built" in out, err
    for name in ("fingerprint.json", "plan.json"):
        assert len({(root / "outputs/balls" / name).read_bytes() for root in roots}) == 1


def test_what_a_dead_shard_left_is_built_by_the_next(tiny, capsys, monkeypatch):
    cfg = tiny("cache.shard=1/3", cases=6)
    folder = cfg.data.kwargs["root"]
    assert prepare.main(cfg) == 0
    assert "2 of 2 cases built" in capsys.readouterr().out
    memos = sorted(p.name for p in Path(cfg.run.root, "cache").glob("inspected*"))
    assert memos == ["inspected-1of3.jsonl"]
    read = []
    real = inspect.inspect_case
    monkeypatch.setattr(inspect, "inspect_case", lambda case, rules: read.append(case.id) or real(case, rules))
    assert prepare.main(tiny(folder=folder)) == 0
    assert "4 of 6 cases built, 2 were there" in capsys.readouterr().out
    assert read == [], "the first shard had nobody beside it, so it read all cases; nobody reads them again"


def test_a_shard_reads_only_what_nobody_else_has_read(tiny, monkeypatch):
    cfg = tiny("cache.shard=2/2", cases=6)
    folder = cfg.data.kwargs["root"]
    read = []
    real = inspect.inspect_case
    other = tiny("cache.shard=1/2", folder=folder)

    def inspected(case, rules):
        read.append(case.id)
        if len(read) == 4:  # meanwhile the other shard has read all but its first
            path = Path(cfg.run.root, "cache/inspected-1of2.jsonl")
            found = [real(c, rules) for c in build.cohort_from(other.data).cases[2::2]]
            store = inspect.Memo(path)
            for c, facts in zip(build.cohort_from(other.data).cases[2::2], found, strict=True):
                store.put(inspect._memo_key(c, rules), inspect.to_plain(facts))
        return real(case, rules)

    monkeypatch.setattr(inspect, "inspect_case", inspected)
    assert prepare.main(cfg) == 0
    assert read == ["b_01", "b_03", "b_05", "b_04", "b_00"], (
        "its own, one of the other's from behind, and the last that lacks"
    )


def test_every_shard_measures_the_whole_cohort(tiny):
    cfg = tiny(cases=5)
    cohort = build.cohort_from(cfg.data)
    whole = preparation.prepare(cfg, cohort, "cpu", track)
    parts = []
    for n in range(1, 4):
        shutil.rmtree(Path(cfg.run.root, "cache"))
        parts.append(preparation.prepare(cfg, cohort, "cpu", track, shard=Shard(n, 3)))
    for part in parts:
        assert (part.fingerprint, part.plan, part.split) == (whole.fingerprint, whole.plan, whole.split)
    assert sorted(i for p in parts for i in p.entries) == sorted(whole.entries)
    assert {e.path for p in parts for e in p.entries.values()} == {e.path for e in whole.entries.values()}


def test_more_shards_than_cases(tiny, capsys):
    assert prepare.main(tiny("cache.shard=5/5")) == 0
    assert "shard 5/5: 0 of 0 cases built" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["4/3", "0/3", "-1/3", "1/0", "2", "a/b", "1/2/3", "", "1.0/2"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="is no share"):
        CacheConfig(shard=text)


def test_a_share_is_for_prepare_alone(tiny):
    cfg = tiny("cache.shard=1/2")
    with pytest.raises(SettingError, match=r"cache\.shard=1/2 goes with python -m data_prep\.prepare"):
        check.main(cfg)
    with pytest.raises(SettingError, match=r"cache\.prune and cache\.verify"):
        prepare.main(tiny("cache.shard=1/2", "cache.prune=true", folder=cfg.data.kwargs["root"]))


@pytest.mark.parametrize(("items", "of"), [(7, 3), (3, 3), (2, 5), (0, 2), (10, 1)])
def test_shares_make_the_whole(items, of):
    whole = list(range(items))
    shards = [Shard(n, of) for n in range(1, of + 1)]
    assert sorted(i for s in shards for i in s.own(whole)) == whole
    for s in shards:
        assert sorted(s.own(whole) + s.rest(whole)) == whole
    assert Shard(2, 3).rest(list(range(7))) == [5, 2, 6, 3, 0]
    assert str(Shard.parse(" 2/8")) == "2/8"


@pytest.mark.long
def test_shards_killed_at_any_moment_leave_no_half_entry(msd_folder, tmp_path):
    folder = msd_folder(cases=12)
    (tmp_path / "whole").mkdir()
    assert start(folder, tmp_path / "whole").wait(120) == 0
    (tmp_path / "killed").mkdir()
    for number, seconds in ((1, 3.0), (2, 3.6), (3, 4.2)):
        running = start(folder, tmp_path / "killed", f"cache.shard={number}/3")
        time.sleep(seconds)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    last = start(folder, tmp_path / "killed")
    out, err = last.communicate(timeout=120)
    assert last.returncode == 0, err
    left = {n: b for n, b in contents(tmp_path / "killed").items() if not n.startswith(".building-")}
    assert left == contents(tmp_path / "whole")
    names = json.loads((tmp_path / "killed/outputs/balls/fingerprint.json").read_text())
    assert names == json.loads((tmp_path / "whole/outputs/balls/fingerprint.json").read_text())
    assert os.listdir(tmp_path / "killed/outputs/cache")
