"""What a record says of the code that made it."""

import hashlib
import subprocess

import pytest

from segspeed.record import versions
from segspeed.record.versions import git_changes, git_state


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a package, a settings file and a table, all committed; git(...) runs in it."""

    def git(*words):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words],
            check=True,
            capture_output=True,
        )

    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("ONE = 1\n")
    (tmp_path / "run.yaml").write_text("lr: 1\n")
    (tmp_path / "cases.csv").write_text("id,name\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return package, git


def test_an_unchanged_checkout_has_no_changes(checkout):
    package, _ = checkout
    state = git_state(package)
    assert len(state["commit"]) == 40
    assert (state["changed"], state["changes_sha256"], git_changes(package)) == (False, None, b"")


def test_changes_of_code_and_settings_are_kept_and_tables_are_not(checkout):
    package, git = checkout
    (package / "__init__.py").write_text("ONE = 2\n")
    (package.parent / "run.yaml").write_text("lr: 3\n")
    git("add", "run.yaml")  # staged counts as changed
    (package.parent / "cases.csv").write_text("id,name\n7,Erika Muster\n")
    (package / "new.py").write_text("NOT_TRACKED = 1\n")
    found = git_changes(package)
    assert b"-ONE = 1\n+ONE = 2\n" in found
    assert b"+lr: 3" in found
    assert b"Muster" not in found
    assert b"NOT_TRACKED" not in found
    assert git_state(package)["changes_sha256"] == hashlib.sha256(found).hexdigest()
    assert git_state(package)["changed"] is True


def test_the_kept_changes_bring_the_code_back(checkout):
    package, git = checkout
    (package / "__init__.py").write_text("ONE = 2\n")
    kept = package.parent / "changes.diff"
    kept.write_bytes(git_changes(package))
    git("checkout", "-q", ".")
    assert (package / "__init__.py").read_text() == "ONE = 1\n"
    git("apply", str(kept))
    assert (package / "__init__.py").read_text() == "ONE = 2\n"


def test_large_changes_are_cut_off(checkout, monkeypatch):
    package, _ = checkout
    (package / "__init__.py").write_text("x = 1\n" * 1000)
    whole = len(git_changes(package))
    monkeypatch.setattr(versions, "MOST_CHANGES", 500)
    found = git_changes(package)
    assert found[500:] == f"\n[cut off: {whole} bytes in all]\n".encode()


def test_an_installed_copy_inside_somebody_elses_checkout_tells_nothing_of_it(checkout):
    package, _ = checkout
    inside = package.parent / "venv/site-packages/segspeed"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("")
    (package / "__init__.py").write_text("ONE = 2\n")
    assert git_state(inside) is None
    assert git_changes(inside) == b""


def test_outside_a_checkout(tmp_path):
    assert git_state(tmp_path) is None
    assert git_changes(tmp_path / "nowhere") == b""
