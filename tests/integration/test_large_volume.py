"""A cohort of volumes of 512 x 512 x 600 voxels is trained on and predicted in under 6 GB of resident memory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import psutil
import pytest

LIMIT = 6e9  # bytes, of all processes of a command together
SHAPE = (512, 512, 600)  # (i, j, k) as a scanner writes it
SPACINGS = (
    (0.92, 0.92, 0.5),
    (0.92, 0.92, 0.5),
    (0.96, 0.96, 0.45),
)  # mm; the third is resampled to that of the others


def make_cohort(label_map, folder):
    """A Decathlon folder of three cases: a real label map, turned and moved, with intensities made from it.

    As a CT scanner leaves it: int16, air of -1024 outside a round field of view, tissue and noise within.
    """
    stored = np.asanyarray(nib.load(label_map).dataobj).astype(np.uint8)  # (k, j, i) in this file
    label = np.ascontiguousarray(stored[: SHAPE[2]].transpose(2, 1, 0))
    del stored
    assert label.shape == SHAPE
    x, y = np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE[:2]), indexing="ij")
    body = (x / 0.9) ** 2 + (y / 0.7) ** 2 < 1
    view = x**2 + y**2 < 1
    values = np.array([40, 130, 80], np.int16)
    nib.openers.Opener.default_compresslevel = 1
    for n, spacing in enumerate(SPACINGS):
        rng = np.random.default_rng(n)
        turned = np.roll(label[::-1] if n == 1 else label, 40 * n, axis=2)
        image = np.empty(SHAPE, np.int16)
        for k in range(SHAPE[2]):  # a slice at a time: this process has its memory counted by nobody, but it is shared
            noise = rng.normal(0, 20, SHAPE[:2]).astype(np.int16) // 4 * 4
            tissue = np.where(body, values[turned[:, :, k]], -1000) + noise
            image[:, :, k] = np.where(view, tissue, -1024)
        for name, array in (("imagesTr", image), ("labelsTr", turned)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            made = nib.Nifti1Image(array, np.diag([*spacing, 1.0]))
            made.set_sform(made.affine, code=1)
            nib.save(made, folder / name / f"ct_{n}.nii.gz")
    about = {
        "name": "large",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "kidney", "2": "tumour"},
        "training": [
            {"image": f"./imagesTr/ct_{n}.nii.gz", "label": f"./labelsTr/ct_{n}.nii.gz"} for n in range(len(SPACINGS))
        ],
    }
    (folder / "dataset.json").write_text(json.dumps(about))
    (folder / "splits_final.json").write_text(json.dumps([{"train": ["ct_0", "ct_1"], "val": ["ct_2"]}]))
    return folder


def peak_of(arguments, folder):
    """Most resident bytes of a command and all its children together, looked at ten times a second.

    A page that several processes map is counted once a process, so this is an upper bound. Returns it with the time (s from
    the start) at which it was seen.
    """
    start, peak, at = time.perf_counter(), 0, 0.0
    with open(folder / "log.txt", "w") as out:
        command = psutil.Popen([sys.executable, "-m", *arguments], cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        while command.poll() is None:
            total = 0
            try:
                for process in (command, *command.children(recursive=True)):
                    total += process.memory_info().rss
            except psutil.NoSuchProcess:  # one that ends while it is looked at
                continue
            if total > peak:
                peak, at = total, time.perf_counter() - start
            time.sleep(0.1)
    assert command.returncode == 0, Path(out.name).read_text()[-3000:]
    return peak, at


@pytest.mark.long
def test_a_large_volume_is_trained_on_and_predicted_in_6_gb(real_data, tmp_path):
    cohort = make_cohort(real_data / "ct_labels" / "case_00000.nii.gz", tmp_path / "large")
    common = ("threads=1", "device=cpu")
    # Patch and batch as the Plan makes them; the network is narrow, since two whole volumes go through it on one core.
    trained, at = peak_of(
        ("segspeed.train", "data=msd", f'data.root="{cohort}"', f'run.root="{tmp_path / "runs"}"', "run.name=a",
         "train.steps=3", "plan.features=[4,8,16,32,64]", "evaluation.overlap=0", *common),
        tmp_path,
    )  # fmt: skip
    assert trained < LIMIT, f"training took {trained / 1e9:.2f} GB after {at:.0f} s"
    new = tmp_path / "new"  # two cases: while one is in the network, the next is read and resampled
    new.mkdir()
    for name in ("ct_1", "ct_2"):
        (cohort / "imagesTr" / f"{name}.nii.gz").rename(new / f"{name}.nii.gz")
    predicted, at = peak_of(
        ("segspeed.predict", f'run="{tmp_path / "runs" / "large" / "a"}"', f'input="{new}"',
         f'output="{tmp_path / "out"}"', "overlap=0", *common),
        tmp_path,
    )  # fmt: skip
    assert predicted < LIMIT, f"prediction took {predicted / 1e9:.2f} GB after {at:.0f} s"
    for name in ("ct_1", "ct_2"):
        assert nib.load(tmp_path / "out" / f"{name}.nii.gz").shape == SHAPE
    print(f"training {trained / 1e9:.2f} GB, prediction {predicted / 1e9:.2f} GB")
