"""The Dockerfiles, read rather than built: what they copy exists, and what they start is a door."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / ".docker/Dockerfile", ROOT / ".docker/Dockerfile.cpu"]


def instructions(path):
    """(keyword, rest) pairs, continued lines joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def let_through():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "*", "everything is left out but what is named"
    return {line[1:] for line in lines if line.startswith("!")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_what_is_copied_exists_and_reaches_the_build(path):
    sources = [s for word, rest in instructions(path) if word == "COPY" for s in rest.split()[:-1]]
    assert {"pyproject.toml", "segspeed", "data_prep", "conf"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in let_through(), f".dockerignore keeps {source} out"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_base_is_pinned_and_nobody_is_root(path):
    found = instructions(path)
    (base,) = [rest for word, rest in found if word == "FROM"]
    assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-\S+", base), base
    assert [rest for word, rest in found if word == "USER"][-1] != "root"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_what_starts_is_a_door(path):
    found = dict(instructions(path))
    assert json.loads(found["ENTRYPOINT"]) == ["python", "-m"]
    module = json.loads(found["CMD"])[0]
    assert find_spec(module) is not None
