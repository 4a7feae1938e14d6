"""A module imports from layers below its own, never from one above: read from the imports themselves."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "segspeed"

# Lowest first. Rooms of one set do not import each other.
LAYERS = [
    {"types", "shards"},
    {"config", "jsonio", "streams"},
    {"config_inference"},
    {"data", "augment", "model", "metric", "speed", "record", "validate"},
    {"loader", "cli"},
    {"infer"},
    {"evaluation", "scoring"},
    {"engine"},
    {"build", "ceiling"},
    {"memory"},
    {"preparation", "monitor", "trained", "inputs"},
    {"prediction", "stamp", "folds", "deploy"},
    {"benchmarks"},
    {"run"},
    {"outcome"},
    {"training"},
    {"proof"},
    {"ladder", "speedrun", "train", "bench", "predict", "evaluate", "plan", "export"},
]
RANK = {room: n for n, rooms in enumerate(LAYERS) for room in rooms}


def imports(path):
    """Names of segspeed modules that a file imports when it runs (imports for type checkers do not count)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules():
    return [p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"]


def test_every_room_has_its_layer():
    assert {room(p) for p in modules()} == set(RANK)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] != "data_prep", f"{path.name} imports data_prep; a _target_ names it instead"
        if parts[0] != "segspeed" or len(parts) < 2 or parts[1] not in RANK:
            continue
        if parts[1] != room(path):
            assert RANK[parts[1]] < RANK[room(path)], f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_doors_build_and_validation_know_hydra(path):
    knows = any(n.split(".")[0] in ("hydra", "omegaconf") for n in imports(path))
    assert not knows or room(path) in ("cli", "build", "validate")


def test_the_rule_can_fail(tmp_path, monkeypatch):
    bad = tmp_path / "segspeed" / "data" / "x.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("from segspeed.engine import fit\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "segspeed")
    with pytest.raises(AssertionError, match=r"x\.py imports segspeed\.engine\.fit"):
        test_imports_point_downwards(bad)


def test_settings_are_checked_without_torch():
    """A typo is answered before torch, MONAI or DALI are loaded."""
    code = "import json, sys, segspeed.cli, segspeed.validate; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "monai", "nvidia.dali", "numpy"} & set(json.loads(done.stdout))


def test_dali_is_not_needed_to_train():
    code = "import sys; sys.modules['nvidia.dali'] = None; import segspeed.training"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
