"""The plain types every room may use. Nothing here imports torch, Hydra or another room.

Axis order: arrays are ``(C, D, H, W)`` and spacings ``(D, H, W)`` in mm; NIfTI files are ``(i, j, k)``.
The conversion is named where it happens: ``segspeed.data.geometry``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Severity = Literal["error", "warning", "info"]
Triple = tuple[float, float, float]
Shape3 = tuple[int, int, int]

BACKGROUND = "background"


class DataError(ValueError):
    """The user's data or settings are wrong; the text says which case, which file, what, and what to do."""


class SettingError(DataError):
    """A setting that turns out wrong once the data or the machine is known; commands end with 2 as for other settings."""


class RunStopped(RuntimeError):
    """A run ended before its end on purpose (signal, fault); what was earned is saved. ``exit_code`` is the command's:
    128 plus the signal's number, or 1."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def first_line(error: BaseException, limit: int = 160) -> str:
    """What an error says in one line of at most ``limit`` characters; its type's name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


def few(values: Iterable[object], most: int = 5) -> str:
    """The first ``most`` of ``values`` as a list in words, and how many more there are."""
    listed = [str(v) for v in values]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


@dataclass(frozen=True)
class Case:
    """One patient's study: one image path a channel, and the label map if there is one.

    ``stacked``: all channels lie along the fourth axis of one file, which ``images`` then names once a channel.
    """

    id: str
    images: tuple[Path, ...]
    label: Path | None = None
    patient: str = ""
    site: str = ""
    stacked: bool = False

    def __post_init__(self) -> None:
        if not self.patient:
            object.__setattr__(self, "patient", self.id)


@dataclass(frozen=True)
class Split:
    """The case ids one fold trains on and is judged on."""

    train: tuple[str, ...]
    val: tuple[str, ...]


@dataclass(frozen=True)
class LabelTable:
    """What the values of label files mean, and what a network is asked for.

    Arrays hold one index a voxel: 0 is background (and the values in ``background``), a class has the index of its place in
    ``classes`` plus one, and voxels of the values in ``ignore`` have the last index, `ignore_index`: they have no say in
    loss or Dice.

    Without ``regions`` the network tells the classes apart (softmax). With them it says of each region whether a voxel
    belongs to it (sigmoid): a region is a union of classes, and regions may overlap. Structures that overlap freely are kept
    as one class a combination, which loses nothing and needs one array, whatever their number.
    """

    classes: Mapping[str, tuple[int, ...]]
    background: tuple[int, ...] = ()
    ignore: tuple[int, ...] = ()
    regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def numbered(cls, count: int) -> LabelTable:
        """``count`` classes named by their value: "class_1" is 1."""
        return cls({f"class_{n}": (n,) for n in range(1, count + 1)})

    @property
    def ignore_index(self) -> int | None:
        """Index of ignored voxels in arrays; None where nothing is ignored."""
        return len(self.classes) + 1 if self.ignore else None

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of what is predicted and scored: the regions, else the classes."""
        return tuple(self.regions or self.classes)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Class indices of each target."""
        place = {name: n for n, name in enumerate(self.classes, start=1)}
        if not self.regions:
            return tuple((n,) for n in place.values())
        return tuple(tuple(place[name] for name in names) for names in self.regions.values())

    @property
    def outputs(self) -> int:
        """Channels of the network's logits: one a region, or one a class and one for the background."""
        return len(self.regions) or len(self.classes) + 1

    def values(self, target: str) -> tuple[int, ...]:
        """File values of a target."""
        names = self.regions[target] if self.regions else (target,)
        return tuple(v for name in names for v in self.classes[name])


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one file, as `data_prep.check` reports it."""

    case: str
    file: str
    severity: Severity
    kind: str
    message: str


@dataclass(frozen=True)
class Cohort:
    """Cases with the names of their channels and classes.

    ``labels`` maps a foreground class name to the values that mean it in the files (several values are merged).
    In arrays a class has the index of its place here plus one; 0 is background. ``background``, ``ignore`` and ``regions``
    as in `LabelTable`. ``splits`` is what the source itself prescribes (empty: the folds are drawn by
    ``segspeed.data.split``), ``problems`` what it found wrong: files that belong to no case.
    """

    name: str
    cases: tuple[Case, ...]
    labels: Mapping[str, tuple[int, ...]]
    channels: tuple[str, ...]
    splits: tuple[Split, ...] = ()
    background: tuple[int, ...] = ()
    ignore: tuple[int, ...] = ()
    regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def table(self) -> LabelTable:
        """What the values of its label files mean."""
        return LabelTable(self.labels, self.background, self.ignore, self.regions)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Foreground class names; index in arrays = position + 1."""
        return tuple(self.labels)

    @property
    def folder_name(self) -> str:
        """The name as one folder: it may come from a file that somebody else wrote."""
        return re.sub(r"[\\/:\0]|^\.+$", "_", self.name) or "cohort"

    @cached_property
    def _by_id(self) -> Mapping[str, Case]:
        return {case.id: case for case in reversed(self.cases)}  # the first of two with one id

    def case(self, case_id: str) -> Case:
        """The case of this id. Raises KeyError."""
        return self._by_id[case_id]


@dataclass(frozen=True)
class Geometry:
    """How a preprocessed array came from its file, enough to put a label map back.

    All fields after ``affine`` speak of the canonical (closest RAS), transposed ``(D, H, W)`` grid.
    """

    affine: tuple[tuple[float, ...], ...]  # 4x4, voxel (i, j, k) to world mm, as the file has it
    file_shape: Shape3  # (i, j, k)
    ornt: tuple[tuple[int, int], ...]  # nibabel orientation of the file axes towards RAS
    shape: Shape3  # canonical, before the crop
    crop: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # start, stop an axis
    spacing: Triple  # mm, before resampling
    target_shape: Shape3  # after resampling
    target_spacing: Triple  # mm, after resampling

    @property
    def crop_shape(self) -> Shape3:
        """(D, H, W) after the crop, before resampling."""
        a, b, c = (stop - start for start, stop in self.crop)
        return (a, b, c)

    @property
    def resampled(self) -> bool:
        """Whether resampling changes the number of voxels."""
        return self.crop_shape != self.target_shape


@dataclass(frozen=True)
class CaseFacts:
    """What reading one case once told us (all values measured, none guessed)."""

    id: str
    digest: str  # sha256 over the files' bytes, images then label
    shape: Shape3 = (0, 0, 0)  # canonical (D, H, W)
    spacing: Triple = (0.0, 0.0, 0.0)  # mm, (D, H, W)
    orientation: str = ""  # nibabel axis codes of the file, e.g. "LPS"
    crop_shape: Shape3 = (0, 0, 0)
    class_voxels: Mapping[str, int] = field(default_factory=dict)
    foreground: tuple[tuple[float, ...], ...] = ()  # sampled foreground intensities, one tuple a channel
    pixels: str = ""  # sha256 over the first channel's voxels in canonical order: equal in copies with other headers
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class ChannelNorm:
    """Normalisation of one channel: clip to [low, high], subtract mean, divide by std (raw intensity units)."""

    low: float
    high: float
    mean: float
    std: float


@dataclass(frozen=True)
class Fingerprint:
    """What a set of cases is like. ``intensity`` holds one mapping a channel with the foreground's
    mean, std, median, minimum, maximum and the percentiles 0.5 and 99.5."""

    cases: int
    spacings: tuple[Triple, ...]  # mm, one a case
    crop_shapes: tuple[Shape3, ...]
    class_voxels: Mapping[str, int]
    intensity: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class Plan:
    """What to do about the fingerprint. Readable JSON; ``reasons`` names the rule behind each value.

    ``normalisation`` is "ct" (constants of the training cases, in ``ct_norm``) or "zscore" (constants of each
    case, kept with its cache entry), one a channel.
    """

    spacing: Triple  # mm, (D, H, W)
    patch: Shape3
    batch: int
    accumulate: int
    features: tuple[int, ...]  # channels a level, finest first
    strides: tuple[Shape3, ...]  # first is (1, 1, 1)
    kernels: tuple[Shape3, ...]
    normalisation: tuple[str, ...]
    ct_norm: tuple[ChannelNorm | None, ...]
    coarse_axis: int | None = None  # 0, 1 or 2 of (D, H, W), where the data is anisotropic
    checkpointing: tuple[str, ...] = ()  # blocks whose activations are recomputed where memory.checkpointing=auto
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def divisor(self) -> Shape3:
        """Patch sides must be multiples of these (product of the strides)."""
        d, h, w = 1, 1, 1
        for stride in self.strides:
            d, h, w = d * stride[0], h * stride[1], w * stride[2]
        return (d, h, w)


@dataclass
class Batch:
    """``image[B, C, D, H, W]`` float, ``label[B, D, H, W]`` integer, on one device.

    ``norm[B, C, 4]`` holds low, high, mean, std of each channel; ``index[B]`` is the sample's number in the run,
    the seed of everything random about it.
    """

    image: torch.Tensor
    label: torch.Tensor
    norm: torch.Tensor
    index: torch.Tensor
    cases: tuple[str, ...]

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        """The same batch on another device; ``index`` stays where it is."""
        move = lambda t: t.to(device, non_blocking=non_blocking)  # noqa: E731
        return Batch(move(self.image), move(self.label), move(self.norm), self.index, self.cases)

    def pin_memory(self) -> Batch:
        """Called by DataLoader's pinning thread."""
        return Batch(self.image.pin_memory(), self.label.pin_memory(), self.norm.pin_memory(), self.index, self.cases)
