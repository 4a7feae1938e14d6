"""The package as it is installed: what pyproject lists, and a wheel that runs outside the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[1]


def listed():
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("packages = [", 1)[1].split("]", 1)[0]
    return {line.strip().strip('",') for line in block.splitlines() if line.strip()}


def test_every_package_is_listed():
    assert listed() == {*find_packages(str(ROOT), include=["segspeed*", "data_prep*"]), "segspeed._conf"}


@pytest.mark.slow
def test_a_wheel_carries_conf_and_runs_elsewhere(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    yamls = {str(p.relative_to(ROOT / "conf")) for p in (ROOT / "conf").rglob("*.yaml")}
    assert {str(p.relative_to(site / "segspeed/_conf")) for p in (site / "segspeed/_conf").rglob("*.yaml")} == yamls
    assert (site / "segspeed/py.typed").exists()
    template = {str(p.relative_to(ROOT)) for p in (ROOT / "segspeed/template").rglob("*") if p.is_file()}
    assert {str(p.relative_to(site)) for p in (site / "segspeed/template").rglob("*") if p.is_file()} == template
    assert all(name.endswith(".txt") for name in template), "pyproject takes these only"
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv = ['train', 'debug=default', 'data.cases=4', 'data.folds=2']\n"
        "import segspeed; assert 'site/segspeed' in segspeed.__file__, segspeed.__file__\n"
        "from segspeed.cli import door; from segspeed.train import main; door(main)()"
    )
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(work.glob("outputs/debug/phantoms_ct/*/result.json"))
