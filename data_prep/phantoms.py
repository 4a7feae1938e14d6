"""Generated CT-like and MR-like abdomens: something to train on with nothing to download, and no free lunch.

Organs vary in place, size and shape, touch each other, share intensities with the bowel and muscle around them, and
lie in files of different spacing and orientation. A threshold or an average anatomy fails on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform
from scipy import ndimage

from segspeed.data.files import stem
from segspeed.record.live import track
from segspeed.types import Case, Cohort, DataError

VERSION = 1  # raise it when the same seed gives other volumes
CLASSES = ("liver", "spleen", "kidney_left", "kidney_right", "aorta")
EXTENT = np.array([168.0, 128.0, 132.0])  # mm, right-left, posterior-anterior, inferior-superior
ORIENTATIONS = ("RAS", "LPS", "LAS", "RPI", "PSR", "AIL", "SRP", "LPI")

# Mean intensity of each tissue: HU, and arbitrary units of a T1-like MR. Organs, muscle and bowel overlap.
CT = {
    "air": -1000.0, "fat": -95.0, "muscle": 48.0, "bone": 380.0, "bowel": 28.0,
    "liver": 64.0, "spleen": 52.0, "kidney_left": 34.0, "kidney_right": 34.0, "aorta": 92.0,
}  # fmt: skip
MR = {
    "air": 0.0, "fat": 820.0, "muscle": 330.0, "bone": 160.0, "bowel": 400.0,
    "liver": 470.0, "spleen": 360.0, "kidney_left": 300.0, "kidney_right": 300.0, "aorta": 110.0,
}  # fmt: skip


def phantoms(root: str, kind: str = "ct", cases: int = 24, seed: int = 0) -> Cohort:
    """A cohort of generated cases under ``root``, written as .nii.gz in Decathlon layout unless it is there already.

    ``kind`` is "ct" (int16, HU) or "mr" (bias field, Rician noise, arbitrary units). The same arguments give the same
    bytes. Raises DataError for an unknown kind.
    """
    if kind not in ("ct", "mr"):
        raise DataError(f"data.kind={kind}: phantoms are ct or mr")
    if cases < 1:
        raise DataError(f"data.cases={cases}: at least 1")
    folder = Path(root).expanduser().absolute() / f"{kind}_{cases}_seed{seed}_v{VERSION}"
    ids = [f"{kind}_{n:03d}" for n in range(cases)]
    found = tuple(Case(i, (folder / "imagesTr" / f"{i}.nii.gz",), folder / "labelsTr" / f"{i}.nii.gz") for i in ids)
    todo = [(n, c) for n, c in enumerate(found) if not (c.images[0].exists() and c.label and c.label.exists())]
    for number, case in track(todo, len(todo), "generating volumes"):
        assert case.label is not None
        image, label, affine = make_phantom(kind, seed, number)
        _write(case.images[0], image, affine)
        _write(case.label, label, affine)
    _describe(folder, kind, found)
    return Cohort(
        name=f"phantoms_{kind}",
        cases=found,
        labels={name: (value,) for value, name in enumerate(CLASSES, start=1)},
        channels=(kind.upper(),),
    )


def make_phantom(kind: str, seed: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image (int16), label (uint8, values 1 to 5 in the order of `CLASSES`) and affine of one case, axes as the file's
    orientation has them."""
    rng = np.random.default_rng([seed, number, 0 if kind == "ct" else 1, VERSION])
    spacing = np.array([rng.uniform(1.8, 2.3)] * 2 + [rng.uniform(3.2, 4.4)])  # mm, along R, A, S
    body = _Body(rng, spacing)
    tissue, label = _anatomy(body)
    image = _render(body, tissue, CT if kind == "ct" else MR, kind)
    codes = ORIENTATIONS[rng.integers(len(ORIENTATIONS))]
    return _orient(image, label, _affine(rng, spacing, body.shape), codes)


@dataclass
class _Body:
    """The grid of a case: world coordinates in mm from its centre, bent a little so that no two bodies are alike."""

    rng: np.random.Generator
    spacing: np.ndarray

    def __post_init__(self) -> None:
        extent = EXTENT * self.rng.uniform(0.92, 1.08, 3)
        self.shape = tuple(int(n) for n in np.round(extent / self.spacing))
        axes = [(np.arange(n) - (n - 1) / 2) * s for n, s in zip(self.shape, self.spacing, strict=True)]
        self.at = np.stack(np.meshgrid(*axes, indexing="ij")).astype(np.float32)
        self.warped = self.at + np.stack([self.field(28.0) * 4.0 for _ in range(3)])

    def field(self, length: float) -> np.ndarray:
        """Smooth noise of standard deviation 1; ``length`` is its correlation in mm."""
        noise = self.rng.standard_normal(self.shape).astype(np.float32)
        smooth = ndimage.gaussian_filter(noise, length / 2 / self.spacing, mode="reflect")
        return (smooth - smooth.mean()) / smooth.std()

    def ellipsoid(self, centre: tuple[float, ...], radii: tuple[float, ...], tilt: float = 0.0) -> np.ndarray:
        """Below 1 inside. ``tilt`` (radians) turns it in the right-anterior plane."""
        x, y, z = (self.warped[a] - centre[a] for a in range(3))
        c, s = np.cos(tilt), np.sin(tilt)
        return np.sqrt(((c * x + s * y) / radii[0]) ** 2 + ((c * y - s * x) / radii[1]) ** 2 + (z / radii[2]) ** 2)

    def near(self, centre: tuple[float, ...], by: float) -> tuple[float, ...]:
        """A place around ``centre``, in mm."""
        return tuple(c + d for c, d in zip(centre, self.rng.uniform(-by, by, 3), strict=True))

    def sized(self, radii: tuple[float, ...], by: float = 0.22) -> tuple[float, ...]:
        """Radii that differ from case to case, as a whole and an axis."""
        whole = self.rng.uniform(1 - by, 1 + by)
        return tuple(r * whole * v for r, v in zip(radii, self.rng.uniform(0.9, 1.1, 3), strict=True))


def _anatomy(body: _Body) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Masks of the tissues, background tissues first, and the label map. Later organs give way to earlier ones."""
    rng = body.rng
    shift = rng.uniform(-14, 14, 3) * (1.0, 0.6, 1.0)  # the whole anatomy within the field of view

    def put(centre: tuple[float, float, float], by: float) -> tuple[float, ...]:
        return body.near(tuple(c + s for c, s in zip(centre, shift, strict=True)), by)

    trunk = body.ellipsoid(tuple(shift), (76, 56, 400)) + 0.03 * body.field(30)
    tissue = {"fat": trunk < 1, "muscle": (trunk > 0.84) & (trunk < 0.94)}
    spine = put((0, -34, 0), 3)
    tissue["muscle"] |= _either(body, [(spine[0] - 20, spine[1] - 2), (spine[0] + 20, spine[1] - 2)], 11)
    tissue["bone"] = _column(body, spine, 11.5, wave=2)
    bowel = np.zeros(body.shape, dtype=bool)
    for _ in range(7):  # loops as bright as organs, anywhere in front
        loop = body.ellipsoid(
            put((rng.uniform(-40, 40), rng.uniform(0, 34), rng.uniform(-55, 10)), 6), body.sized((15, 10, 12))
        )
        bowel |= loop < 1
    tissue["bowel"] = bowel & (trunk < 0.84)

    liver = body.ellipsoid(put((34, 8, 26), 7), body.sized((37, 34, 32)), rng.uniform(-0.4, 0.4)) + 0.07 * body.field(
        20
    )
    lobe = body.ellipsoid(put((4, 20, 34), 6), body.sized((30, 16, 15))) + 0.07 * body.field(20)
    organs = {
        "aorta": _column(
            body, (spine[0] - rng.uniform(4, 12), spine[1] + rng.uniform(17, 22), 0), rng.uniform(7, 10), 4
        ),
        "kidney_right": _kidney(body, put((37, -22, -18), 6)),
        "kidney_left": _kidney(body, put((-37, -22, -8), 6)),
        "liver": np.minimum(liver, lobe) < 1,
        "spleen": body.ellipsoid(put((-46, -4, 32), 7), body.sized((17, 25, 24)), rng.uniform(-0.5, 0.5))
        + 0.08 * body.field(16)
        < 1,
    }
    free = (trunk < 0.9) & ~tissue["bone"]
    label = np.zeros(body.shape, dtype=np.uint8)
    for name, mask in organs.items():
        tissue[name] = mask & free
        label[tissue[name]] = CLASSES.index(name) + 1
        free &= ~mask
    return tissue, label


def _kidney(body: _Body, centre: tuple[float, ...]) -> np.ndarray:
    """A bean: an ellipsoid with a notch towards the spine."""
    radii = body.sized((15, 14, 27))
    bean = body.ellipsoid(centre, radii, body.rng.uniform(-0.4, 0.4)) + 0.06 * body.field(14)
    inward = -np.sign(centre[0]) or 1.0
    notch = body.ellipsoid(
        (centre[0] + inward * radii[0], centre[1], centre[2]), (radii[0] * 0.6, radii[1], radii[2] * 0.4)
    )
    return (bean < 1) & (notch > 1)


def _column(body: _Body, centre: tuple[float, ...], radius: float, wave: float) -> np.ndarray:
    """A tube along the body whose axis sways by ``wave`` mm."""
    z = body.at[2]
    phase = body.rng.uniform(0, 2 * np.pi, 2)
    x = body.warped[0] - centre[0] - wave * np.sin(z / 35 + phase[0])
    y = body.warped[1] - centre[1] - wave * np.sin(z / 45 + phase[1])
    return np.hypot(x, y) < radius


def _either(body: _Body, centres: list[tuple[float, float]], radius: float) -> np.ndarray:
    masks = [np.hypot(body.warped[0] - x, body.warped[1] - y) < radius for x, y in centres]
    return np.logical_or.reduce(masks)


def _render(body: _Body, tissue: dict[str, np.ndarray], means: dict[str, float], kind: str) -> np.ndarray:
    """Intensities: each tissue with its own mean and texture, blurred as a scanner does, then bias field and noise."""
    rng = body.rng
    scale = 1.0 if kind == "ct" else 7.0  # HU of spread against MR units of spread
    image = np.full(body.shape, means["air"], dtype=np.float32)
    for name, mask in tissue.items():
        texture = scale * (5.0 * body.field(5.0) + 3.0 * body.field(18.0))
        image[mask] = (means[name] + scale * rng.normal(0, 5) + texture)[mask]
    image = ndimage.gaussian_filter(image, 0.9 / body.spacing)  # partial volume at every boundary
    if kind == "ct":
        image += 10.0 * rng.standard_normal(body.shape)
        return np.clip(np.rint(image), -1024, 3071).astype(np.int16)
    image *= np.exp(0.22 * body.field(70.0)) * rng.uniform(0.6, 1.6)  # coil sensitivity and gain
    noise = rng.standard_normal((2, *body.shape)) * 30.0
    return np.clip(np.rint(np.hypot(image + noise[0], noise[1])), 0, 32767).astype(np.int16)


def _affine(rng: np.random.Generator, spacing: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """RAS affine about the isocentre; every third case lies a few degrees oblique in the scanner."""
    turn = np.eye(3)
    if rng.random() < 1 / 3:
        a, b = rng.uniform(-0.12, 0.12, 2)
        about_x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
        about_z = np.array([[np.cos(b), -np.sin(b), 0], [np.sin(b), np.cos(b), 0], [0, 0, 1]])
        turn = about_z @ about_x
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag(spacing)
    affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2) + rng.uniform(-20, 20, 3)
    return affine


def _orient(
    image: np.ndarray, label: np.ndarray, affine: np.ndarray, codes: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    change = ornt_transform(axcodes2ornt(("R", "A", "S")), axcodes2ornt(tuple(codes)))
    turn: Callable[[np.ndarray], np.ndarray] = lambda a: nib.orientations.apply_orientation(a, change)  # noqa: E731
    return turn(image), turn(label), affine @ inv_ornt_aff(change, image.shape)


def _write(path: Path, array: np.ndarray, affine: np.ndarray) -> None:
    """As .nii.gz, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    image = nib.Nifti1Image(np.ascontiguousarray(array), affine)
    image.set_sform(affine, code=1)
    image.set_qform(affine, code=1)
    nib.save(image, temporary)
    os.replace(temporary, path)


def _describe(folder: Path, kind: str, cases: tuple[Case, ...]) -> None:
    """dataset.json, so that the folder can be read as data=msd as well."""
    about = {
        "name": f"phantoms_{kind}",
        "description": "generated, no patient",
        "modality": {"0": kind.upper()},
        "labels": {"0": "background", **{str(i): n for i, n in enumerate(CLASSES, start=1)}},
        "numTraining": len(cases),
        "training": [
            {"image": f"./imagesTr/{stem(c.images[0])}.nii.gz", "label": f"./labelsTr/{c.id}.nii.gz"} for c in cases
        ],
    }
    text = json.dumps(about, indent=1) + "\n"
    path = folder / "dataset.json"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
