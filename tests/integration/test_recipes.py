"""Every recipe of conf/experiment: composed, headed by what it is, and run for two steps."""

import pytest

from segspeed.cli import config_folder
from segspeed.proof.rungs import RUNGS
from segspeed.training import train

FOLDER = config_folder() / "experiment"
RECIPES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
TINY = ("plan.spacing=[8,8,8]",
        "plan.patch=[16,16,16]", "plan.width=auto", "plan.finest_width=auto", "plan.features=[4,8,16]", "compile=false",
        "cache.workers=1", "loader.workers=0", "evaluation.overlap=0", "evaluation.share=0", "data.folds=2",
        "precision=fp32", "train.steps=2")  # fmt: skip


def header(name):
    """The comment lines that a recipe begins with."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# @package _global_"
    return lines[1 : next(n for n, line in enumerate(lines) if not line.startswith("#"))]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_headed_by_its_command_its_hardware_and_what_it_reached(name):
    lines = header(name)
    assert not lines[0].startswith("#   "), "what it is for comes first"
    assert any(line.startswith(f"#   python -m segspeed.train experiment={name}") for line in lines)
    assert any(line.startswith("# Hardware: ") for line in lines)
    assert any(line.startswith("# Reached: ") for line in lines)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes(name, settings):
    given = ["init.run=somewhere"] if name == "finetune" else []
    cfg = settings(f"experiment={name}", *given)
    assert cfg != settings(*given) or name == "demo"


def test_baseline_is_the_first_rung_of_the_ladder(settings):
    own = settings()
    assert settings("experiment=baseline") == RUNGS["baseline"].change(own, own)


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory):
    from data_prep.phantoms import phantoms

    folder = tmp_path_factory.mktemp("recipes")
    phantoms(str(folder / "phantoms"), cases=4)
    return folder


@pytest.mark.slow
def test_every_recipe_runs(settings, phantoms, monkeypatch):
    """Two steps each, on a small network; pictures, and planning for a memory, are not a matter of the recipe and cost most."""
    monkeypatch.setattr("segspeed.outcome.draw_overlays", lambda run, summary: [])
    monkeypatch.setattr("segspeed.outcome.write_report", lambda folder: folder / "report.html")
    for name in [n for n in RECIPES if n != "finetune"] + ["finetune"]:
        tiny = [t for t in TINY if name != "finetune" or not t.startswith("plan.")]
        if name == "finetune":
            tiny.append(f"init.run={phantoms}/runs/phantoms_ct/demo")
        if name == "small_gpu":
            tiny.append("memory.limit=null")
        cfg = settings(f"experiment={name}", f"data.root={phantoms}/phantoms", "data.cases=4", "plan.batch=1", *tiny,
                       f"run.root={phantoms}/runs", f"run.name={name}")  # fmt: skip
        assert train(cfg)["steps"] == 2, name
