"""A new fork: written whole or not at all, and, in the slow stage, one that passes its tests and trains."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from segspeed.new import NewConfig, main, package_name, rendered, write_fork
from segspeed.types import DataError, SettingError

ROOT = Path(__file__).resolve().parents[2]
OURS = ("data", "model", "loss")


def test_every_file_is_named_after_the_package(tmp_path):
    files = write_fork(tmp_path / "new", "my_organ")
    names = {str(p.relative_to(tmp_path / "new")) for p in files}
    assert {"my_organ/network.py", "conf/data/my_organ.yaml", "tests/test_contracts.py", ".gitignore"} <= names
    assert {".github/workflows/test.yml", "pyproject.toml", "README.md", "conf/experiment/my_organ.yaml"} <= names
    for path, text in rendered("my_organ").items():
        assert "@project@" not in text
        assert "@package@" not in text
        assert path.suffix != ".txt"
        if path.suffix == ".py":
            ast.parse(text)
    assert "@package _global_" in (tmp_path / "new/conf/experiment/my_organ.yaml").read_text(), "Hydra's own word stays"


def test_nothing_is_written_where_something_is(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="is not empty, and nothing is overwritten"):
        main(NewConfig(target=str(tmp_path / "full"), package="my_organ"))
    with pytest.raises(DataError, match="is a file"):
        main(NewConfig(target=str(tmp_path / "file"), package="my_organ"))
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert write_fork(tmp_path / "empty", "my_organ")


@pytest.mark.parametrize("name", ["My", "1organ", "my-organ", "class", "", "a b", "ö"])
def test_a_name_that_cannot_be_imported(name):
    with pytest.raises(SettingError, match="no package name.*package=my_organ"):
        package_name(Path("x"), name)


@pytest.mark.parametrize("name", ["segspeed", "json", "numpy", "tests"])
def test_a_name_that_is_taken(name):
    with pytest.raises(SettingError, match=f"{name} is taken already"):
        package_name(Path("x"), name)


def test_the_folder_names_the_package():
    assert package_name(Path("../My-organ 2"), None) == "my_organ_2"
    with pytest.raises(SettingError, match="its name makes no package name"):
        package_name(Path("3d"), None)


def command(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_itself(tmp_path):
    """Quick, since it loads no torch; a wrong name is one line and ends with 2."""
    told = command("segspeed.new", "target=organs", cwd=tmp_path)
    assert "python -m segspeed.train --config-dir conf experiment=organs data.root=example" in told
    done = subprocess.run(
        [sys.executable, "-m", "segspeed.new", "target=other", "package=not-a-name"], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert not (tmp_path / "other").exists()


def test_the_yaml_holds_every_key():
    text = (ROOT / "conf/new.yaml").read_text()
    assert set(re.findall(r"(?m)^(\w+):", text)) - {"defaults", "hydra"} == set(NewConfig.model_fields)


@pytest.mark.slow
def test_a_fork_passes_its_tests_and_trains_with_all_that_is_its_own(tmp_path):
    told = command("segspeed.new", "target=my-organ", cwd=tmp_path)
    assert "cd my-organ" in told
    fork = tmp_path / "my-organ"
    command("ruff", "check", "--no-cache", ".", cwd=fork)
    command("ruff", "format", "--no-cache", "--check", ".", cwd=fork)
    command("pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", cwd=fork)
    (run,) = (tmp_path / "base").rglob("result.json")
    assert json.loads(run.read_text())["metrics"]["volume_error_ml"]["mean"] is not None
    used = json.loads((run.parent / "config.json").read_text())["config"]
    targets = [used[group]["_target_"] for group in OURS] + [used["augment"]["extra"][0]["_target_"]]
    assert all(t.startswith("my_organ.") for t in targets), targets
    assert {p.name for p in fork.iterdir()} == {
        ".github", ".gitignore", "README.md", "conf", "my_organ", "pyproject.toml", "tests",
    }  # fmt: skip
