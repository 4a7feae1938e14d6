import errno
import subprocess
import sys
import textwrap

import pytest

from segspeed.speed.descriptors import too_many_open_files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")


def limited(soft, hard, body):
    """Run ``body`` in a process of its own with these limits."""
    head = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    done = subprocess.run([sys.executable, "-c", head + textwrap.dedent(body)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_soft_limit_is_raised_as_far_as_needed():
    out = limited(64, 1024, """
        from segspeed.speed.descriptors import ensure_open_files
        ensure_open_files(100, "x")
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        ensure_open_files(10, "x")
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """)  # fmt: skip
    assert out.split() == ["356", "356"]


def test_a_hard_limit_that_is_too_low_is_refused_with_what_to_do():
    out = limited(64, 256, """
        from segspeed.speed.descriptors import ensure_open_files
        from segspeed.types import SettingError
        try:
            ensure_open_files(100, "lower loader.workers")
        except SettingError as error:
            print(error)
    """)  # fmt: skip
    assert "may open 256 files" in out
    assert "needs about 356" in out
    assert "lower loader.workers" in out
    assert "ulimit -n 356" in out


def test_a_cache_entry_is_not_called_damaged_for_want_of_descriptors(tmp_path):
    (tmp_path / "case.json").write_text('{"case": "a", "image_shape": [1, 2, 2, 2]}')
    out = limited(64, 64, f"""
        import os
        import numpy as np
        from pathlib import Path
        from segspeed.data.cache import CacheEntry
        from segspeed.types import DataError
        folder = Path({str(tmp_path)!r})
        np.save(folder / "image.npy", np.zeros((1, 2, 2, 2), np.float32))
        entry = CacheEntry(folder)
        entry.about
        held = []
        try:
            while True:
                held.append(open(os.devnull))
        except OSError:
            pass
        try:
            entry.image
        except DataError as error:
            print(error)
    """)  # fmt: skip
    assert "too many open files" in out
    assert "damaged" not in out


def test_how_the_limit_shows():
    assert too_many_open_files(OSError(errno.EMFILE, "Too many open files"))
    assert too_many_open_files(RuntimeError("received 0 items of ancdata"))
    assert not too_many_open_files(RuntimeError("something else"))
