"""The notebooks: stripped, compiling, with commands that exist; and (slow) executed from top to bottom at a tiny size."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from segspeed.cli import Frame, prepare_arguments
from segspeed.config_inference import EvaluateConfig, PredictConfig

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FRAMES = {
    "segspeed.ladder": Frame(section="ladder"),
    "segspeed.predict": Frame(PredictConfig, "predict"),
    "segspeed.evaluate": Frame(EvaluateConfig, "evaluate"),
}


def cells(path):
    """Source texts of the code cells."""
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in found if c["cell_type"] == "code"]


def commands(text):
    """Shell lines of a cell, continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [line.strip()[1:] for line in joined.splitlines() if line.strip().startswith("!")]


def test_there_are_five():
    assert [p.stem[:2] for p in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped_and_cells_compile(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    for text in cells(path):
        plain = re.sub(r"^%%writefile .*\n", "", text).replace("\\\n", " ")
        compile(re.sub(r"(?m)^!.*$", "pass", plain), path.name, "exec")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_commands_name_doors_and_keys_that_exist(path):
    found = [c for text in cells(path) for c in commands(text)]
    assert found, "a notebook shows at least one command"
    for command in found:
        python, flag, module, *arguments = shlex.split(re.sub(r"(?<!\{)\{(\w+)\}(?!\})", "X", command))
        assert (python, flag) == ("python", "-m")
        assert find_spec(module) is not None, f"{path.name}: there is no {module}"
        given = [a.replace("{{", "{").replace("}}", "}") for a in arguments if a != "X"]
        prepare_arguments(given, FRAMES.get(module, Frame()))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("SEGSPEED_NOTEBOOK_SCALE", "tiny")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:  # IPython goes on after a command that failed
        if cell.cell_type == "code":
            cell.source = re.sub(r"(?m)^(!(?:.*\\\n)*.*)$", r"\1\nassert _exit_code == 0", cell.source)
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    pictures = [o for c in book.cells if c.cell_type == "code" for o in c.outputs if "image/png" in o.get("data", {})]
    assert pictures
