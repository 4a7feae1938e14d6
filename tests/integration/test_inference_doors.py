"""predict and evaluate as a person types them."""

import json

import nibabel as nib
import numpy as np
import pytest

from tests.integration.test_doors import FAST, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_cohort):
    """A run of two steps, and the folder of its data."""
    root = tmp_path_factory.mktemp("inference")
    data = make_cohort(root / "balls")
    done = run("segspeed.train", "data=msd", f"data.root={data}", *FAST, "run.root=outputs", "run.name=r", cwd=root)
    assert done.returncode == 0, done.stderr
    return root, data, root / "outputs/balls/r"


def test_evaluating_a_run_gives_the_dice_that_training_gave(trained):
    root, _, folder = trained
    done = run("segspeed.evaluate", f"run={folder}", cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "evaluation_balls/summary.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    assert found["mean_dice"] == pytest.approx(result["mean_dice"], abs=1e-9)
    assert (folder / "evaluation_balls/report.html").exists()
    assert "mean of classes" in done.stdout
    assert max(map(len, done.stdout.split("Report:")[0].splitlines())) <= 100


def test_predict_a_folder_and_score_it_as_anybodys(trained):
    root, data, folder = trained
    done = run("segspeed.predict", f"run={folder}", f"input={data / 'imagesTr'}", "output=maps", cwd=root)
    assert done.returncode == 0, done.stderr
    assert "4 predicted" in done.stdout
    summary = json.loads((root / "maps/summary.json").read_text())
    assert [c["status"] for c in summary["cases"]] == ["done"] * 4
    assert set(np.unique(nib.load(root / "maps/b_00.nii.gz").dataobj)) <= {0, 1, 3}
    again = run("segspeed.predict", f"run={folder}", f"input={data / 'imagesTr'}", "output=maps", cwd=root)
    assert "4 were there already" in again.stdout
    scored = run(
        "segspeed.evaluate", "predictions=maps", f"labels={data / 'labelsTr'}", "class_names={bright: 1, dark: 3}",
        "output=scores", cwd=root,
    )  # fmt: skip
    assert scored.returncode == 0, scored.stderr
    own = run("segspeed.evaluate", f"predictions={data / 'labelsTr'}", f"labels={data / 'labelsTr'}",
              "class_names={bright: 1, dark: 3}", "output=perfect", "workers=1", cwd=root)  # fmt: skip
    assert json.loads((root / "perfect/summary.json").read_text())["mean_dice"] == 1.0, own.stderr
    both = run("segspeed.evaluate", "compare=[scores/summary.json,perfect/summary.json]", cwd=root)
    assert both.returncode == 0, both.stderr
    assert "not inferior" in both.stdout


def test_another_hospital_with_other_label_values(trained, tmp_path, write):
    root, data, folder = trained
    for n in range(2):
        image, label = (nib.load(data / f"{part}Tr/b_{n:02d}.nii.gz") for part in ("images", "labels"))
        write(tmp_path / f"s{n}_mr.nii.gz", image.get_fdata().astype(np.float32))
        values = np.asarray(label.dataobj)
        write(tmp_path / f"s{n}_seg.nii.gz", np.choose(values, [0, 50, 9, 20]).astype(np.uint8))
    words = (
        "data=pairs", f"data.images={tmp_path}/*_mr.nii.gz", f"data.labels={tmp_path}/*_seg.nii.gz",
        "data.class_names={dark: 20, bright: 50}", "data.name=north", f"run={folder}", f"output={tmp_path / 'out'}",
    )  # fmt: skip
    done = run("segspeed.evaluate", *words, cwd=root)
    assert done.returncode == 0, done.stderr
    assert set(np.unique(nib.load(tmp_path / "out/predictions/s0.nii.gz").dataobj)) <= {0, 20, 50}
    assert json.loads((tmp_path / "out/summary.json").read_text())["cases"] == 2
    wrong = run("segspeed.evaluate", *words[:3], "data.class_names={dark: 20, light: 50}", *words[4:], cwd=root)
    assert wrong.returncode == 1
    assert "predicts bright, which" in wrong.stderr


@pytest.mark.parametrize(
    ("module", "words", "text"),
    [
        ("predict", ("run=x", "input=y"), "output is missing"),
        ("predict", ("run=x", "inptu=y", "output=z"), "did you mean input?"),
        ("predict", ("run=x", "input=y", "output=z", "train.steps=3"), "unknown key train.steps"),
        ("predict", ("run=x", "input=y", "output=z", "overlap=2"), "overlap=2"),
        ("predict", ("run=[]", "input=y", "output=z"), "run=[]"),
        ("evaluate", (), "give one of run=FOLDER"),
        ("evaluate", ("predictions=a",), "go together"),
        ("evaluate", ("compare=[a]",), "compare takes two"),
        ("evaluate", ("run=x", "data=nonsense"), "data=nonsense: there is no such choice"),
    ],
)
def test_wrong_settings_are_answered_at_once(tmp_path, module, words, text):
    done = run(f"segspeed.{module}", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_run(tmp_path):
    done = run("segspeed.predict", "run=nowhere", "input=y", "output=z", cwd=tmp_path)
    assert (done.returncode, "holds no run" in done.stderr) == (1, True)


def test_help(tmp_path):
    for module in ("predict", "evaluate"):
        done = run(f"segspeed.{module}", "--help", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "run" in done.stdout
        assert "overlap: 0.5" in done.stdout


def test_predict_a_tree_of_dicom_series(trained, tmp_path):
    pytest.importorskip("highdicom")
    from tests.data.test_dicom import NAME, write_series

    root, _, folder = trained
    write_series(tmp_path / NAME / "good")
    write_series(tmp_path / NAME / "gap", [(0.0, 0.0, float(z)) for z in (0, 1, 2, 3, 9, 10)], uid="1.2.5")
    done = run("segspeed.predict", f"run={folder}", f'input="{tmp_path / NAME}"', f"output={tmp_path / 'out'}",
               "dicom_seg=true", cwd=root)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "unevenly spaced" in done.stdout
    assert "1 predicted" in done.stdout
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert len([n for n in names if n.endswith(".nii.gz")]) == 1
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and not path.name.endswith(".dcm"):
            assert b"Muster" not in path.read_bytes()
        assert "Muster" not in path.name
    assert "Muster" not in done.stdout.replace(str(tmp_path), "")


def test_a_folder_of_other_maps_is_left_alone(trained, tmp_path):
    root, data, folder = trained
    before = {p.name: p.read_bytes() for p in (data / "labelsTr").iterdir()}
    for words in ((), ("overwrite=true",)):
        done = run(
            "segspeed.predict",
            f"run={folder}",
            f"input={data / 'imagesTr'}",
            f"output={data / 'labelsTr'}",
            *words,
            cwd=root,
        )
        assert done.returncode == 2
        assert "did not write" in done.stderr
    assert {p.name: p.read_bytes() for p in (data / "labelsTr").iterdir()} == before
