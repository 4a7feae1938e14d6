"""Read every case once and say all that is wrong with it, before it costs a day."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segspeed.data.digest import Memo, hash_file, hash_text, stamp
from segspeed.data.geometry import Volume, VolumeError, off_grid_mm, read_channels, read_volume
from segspeed.data.labels import index_of_values, to_class_indices
from segspeed.data.pool import run_jobs
from segspeed.data.preprocess import AIR_HU, content_box, is_ct, label_on_grid, share_outside
from segspeed.data.thumbnail import save_thumbnail
from segspeed.jsonio import from_plain, to_plain
from segspeed.shards import Shard
from segspeed.types import Case, CaseFacts, Cohort, LabelTable, Problem, Severity

FORMAT = 3  # of the memo; raise it when CaseFacts or a rule changes
MOSTLY = 0.5  # of a label's foreground outside its image: it belongs to another
COARSE = 3.0  # an axis this many times coarser than the finest
SAMPLES = 2000  # foreground intensities kept a case and channel
TISSUE_HU = -500.0  # a whole CT has air: without any the values are hardly HU

SEVERITY: dict[str, Severity] = {
    "squeezed": "info",
    "rounded-label": "info",
    "direction-noise": "info",
    "anisotropic": "info",
    "below-air": "info",
    "mapped-values": "info",
    "no-picture": "info",
    "resampled-label": "warning",
    "maybe-ct": "warning",
    "maybe-one-patient": "warning",
    "maybe-one-class": "warning",
    "no-orientation": "warning",
    "two-orientations": "warning",
    "constant-image": "warning",
    "not-hu": "warning",
    "padding": "warning",
    "empty-label": "warning",
    "duplicate": "warning",
    "absent-class": "warning",
    "odd-spacing": "warning",
}  # every other kind is an error
ACCEPTABLE = ("shear", "no-orientation", "patient-overlap", "duplicate-overlap")  # errors that data.accept may lower


@dataclass(frozen=True)
class Rules:
    """What a case is held against. ``pictures``: a folder for a thumbnail of each case, if wanted."""

    labels: LabelTable
    channels: tuple[str, ...] = ()
    tolerance_mm: float = 0.1
    resample_labels: bool = False
    pictures: Path | None = None


def inspect_case(case: Case, rules: Rules) -> CaseFacts:
    """Facts and problems of one case. Bad data never raises: it is what this function is for."""
    found: list[Problem] = []

    def report(path: Path | None, kind: str, message: str) -> None:
        name = f"{path.parent.name}/{path.name}" if path is not None else ""
        found.append(Problem(case.id, name, SEVERITY.get(kind, "error"), kind, message))

    digest = case_digest(case)
    images = _images(case, report)
    first = next((v for v in images if v is not None), None)
    label, label_volume = _label(case, rules.labels, first, report)
    for path, channel, volume in zip(case.images, _names(case, rules), images, strict=True):
        if volume is None:
            continue
        if not case.stacked or volume is first:
            _header(report, path, volume, rules.tolerance_mm)
        _values(report, path, volume, channel)
        if first is not None and volume is not first:
            _same_grid(report, path, volume, first, rules.tolerance_mm, "the first channel")
    if label is not None and label_volume is not None and first is not None:
        off = _off_grid(label_volume, first, rules.tolerance_mm)
        if off and rules.resample_labels:
            lost = share_outside(label, label_volume, first)
            if lost > MOSTLY:
                text = f"{off}: {lost:.0%} of its foreground lies outside its image; is it another image's?"
                report(case.label, "label-elsewhere", text)
            else:
                label = label_on_grid(label, label_volume, first)
                gone = f"; {lost:.1%} of its foreground lies outside the image" if lost else ""
                report(case.label, "resampled-label", f"{off}; brought onto the image's grid{gone}")
        elif off:
            _same_grid(report, case.label, label_volume, first, rules.tolerance_mm, "its image")
        elif np.array_equal(label_volume.array, first.array):
            report(case.label, "image-is-label", "image and label hold the same voxels; one was copied over the other")
    if first is None or any(p.severity == "error" and p.kind not in ACCEPTABLE for p in found):
        return CaseFacts(id=case.id, digest=digest, problems=tuple(found))
    arrays = [v.array for v in images if v is not None]
    counts, foreground = _foreground(arrays, label, rules.labels)
    if label is not None and not sum(counts.values()):
        report(case.label, "empty-label", "the label has no foreground (fine for a healthy control)")
    box = content_box(arrays, label)
    a, b, c = (stop - start for start, stop in box)
    if rules.pictures is not None:
        try:
            save_thumbnail(picture_path(rules.pictures, digest), first.array, label, first.spacing)
        except (OSError, MemoryError) as error:
            report(None, "no-picture", f"its picture cannot be written: {error}")
    return CaseFacts(
        id=case.id,
        digest=digest,
        shape=first.shape,
        spacing=first.spacing,
        orientation=first.orientation,
        crop_shape=(a, b, c),
        class_voxels=counts,
        foreground=foreground,
        pixels=_pixels(first.array),
        problems=tuple(found),
    )


def _pixels(array: np.ndarray) -> str:
    total = hashlib.sha256(str(array.shape).encode())
    for plane in array:  # no copy of the whole as bytes
        total.update(plane.tobytes())
    return total.hexdigest()


def picture_path(folder: Path, digest: str) -> Path:
    """Where the thumbnail of a case lies, by its `CaseFacts.digest`."""
    return folder / f"{digest[:16]}.png"


def case_digest(case: Case) -> str:
    """SHA-256 over the digests of the case's files; a missing file counts as such."""
    total = hashlib.sha256()
    for path in (*case.images, *([case.label] if case.label else [])):
        try:
            total.update((hash_file(path) if path.is_file() else "missing").encode())
        except OSError:
            total.update(b"unreadable")  # reported with its reason when the volume was read
    return total.hexdigest()


def _names(case: Case, rules: Rules) -> Sequence[str]:
    return rules.channels if len(rules.channels) == len(case.images) else [""] * len(case.images)


def _images(case: Case, report) -> list[Volume | None]:  # type: ignore[no-untyped-def]
    if case.stacked:
        try:
            return list(read_channels(case))
        except VolumeError as error:
            report(case.images[0], error.kind, str(error))
            return [None] * len(case.images)
    found: list[Volume | None] = []
    for path in case.images:
        try:
            found.append(read_volume(path))
        except VolumeError as error:
            report(path, error.kind, str(error))
            found.append(None)
    return found


def _header(report, path: Path, volume: Volume, tolerance_mm: float) -> None:  # type: ignore[no-untyped-def]
    for kind, message in volume.notes:
        report(path, kind, message)
    if volume.forms_apart_mm > tolerance_mm:
        text = f"qform and sform are both coded and {volume.forms_apart_mm:.3g} mm apart; sform is used"
        report(path, "two-orientations", text)
    ratio = max(volume.spacing) / min(volume.spacing)
    if ratio >= COARSE:
        report(path, "anisotropic", f"spacing {_mm(volume)} mm: the coarse axis is resampled by a rule of its own")


def _values(report, path: Path, volume: Volume, channel: str) -> None:  # type: ignore[no-untyped-def]
    array = volume.array
    bad = int(array.size - np.isfinite(array).sum())
    if bad:
        report(path, "nan", f"{bad} voxels are NaN or infinite; replace them (0, or the air value of CT)")
        return
    low, high = float(array.min()), float(array.max())
    if low == high:
        report(path, "constant-image", f"every voxel is {low:g}; it teaches nothing")
        return
    lowest = float(np.percentile(array.ravel()[:: max(1, array.size // 100_000)], 1))
    if is_ct(channel):
        if low < AIR_HU:
            text = f"{int((array < AIR_HU).sum())} voxels below {AIR_HU:g} HU (down to {low:g}) count as {AIR_HU:g}"
            report(path, "below-air", text)
        if lowest > TISSUE_HU:
            report(
                path,
                "not-hu",
                f"99 % of the voxels are above {TISSUE_HU:g}: not in HU (RescaleSlope and RescaleIntercept were not applied?), "
                "or cut down to tissue",
            )
        return
    if low <= AIR_HU + 30 and lowest < TISSUE_HU and high < 5000:
        text = f"values from {low:g} to {high:g} look like HU; data.channels=[CT] normalises it as CT"
        report(path, "maybe-ct", text)
    if low <= -32768:
        text = (
            f"{int((array <= -32768).sum())} voxels are {low:g}, a padding value; they disturb its mean and deviation"
        )
        report(path, "padding", text)


def _label(case: Case, labels: LabelTable, image: Volume | None, report) -> tuple[np.ndarray | None, Volume | None]:  # type: ignore[no-untyped-def]
    if case.label is None:
        report(None, "missing-label", "the case has no label; training needs one (data.exclude leaves a case out)")
        return None, None
    if not case.label.is_file():
        report(case.label, "missing-label", f"the label file does not exist: {case.label.name}")
        return None, None
    volume = None
    try:
        volume = read_volume(case.label, scaled=False)
        indices = to_class_indices(volume, labels)
    except VolumeError as error:
        if error.kind in ("unknown-label", "non-integer-label") and image is not None and _like_labels(image, labels):
            text = "image and label seem to be swapped: the image holds label values, and the label does not"
            report(case.label, "swapped", text)
        else:
            mend = (
                ". Name them as a class, or in data.background or data.ignore" if error.kind == "unknown-label" else ""
            )
            report(case.label, error.kind, f"{error}{mend}")
        return None, volume
    for kind, message in volume.notes:
        if kind == "squeezed":
            report(case.label, kind, message)
    decimals = volume.array.dtype.kind == "f"
    if decimals and any(not np.array_equal(plane, np.rint(plane)) for plane in volume.array):
        report(case.label, "rounded-label", "label values were stored as decimals and rounded to whole numbers")
    return indices, volume


def _like_labels(image: Volume, labels: LabelTable) -> bool:
    """Whether an image holds nothing but label values, and more than one."""
    values = np.unique(image.array)
    return len(values) > 1 and bool(np.isin(values, list(index_of_values(labels))).all())


def _off_grid(volume: Volume, other: Volume, tolerance_mm: float) -> str:
    """How a volume lies off another's grid; "" if it does not."""
    apart = off_grid_mm(volume, other)
    if apart == float("inf"):
        return f"shape {volume.shape} (D, H, W), but its image has {other.shape}"
    return f"corners up to {apart:.2f} mm off its image's" if apart > tolerance_mm else ""


def _same_grid(report, path, volume: Volume, other: Volume, tolerance_mm: float, whose: str) -> None:  # type: ignore[no-untyped-def]
    mend = "Resample one onto the other" + (" (data.resample_labels=true does it)" if whose == "its image" else "")
    if volume.shape != other.shape:
        extents = (" x ".join(f"{n * s:.4g}" for n, s in zip(v.shape, v.spacing, strict=True)) for v in (volume, other))
        text = f"shape {volume.shape} (D, H, W), but {whose} has {other.shape}; {' against '.join(extents)} mm. {mend}"
        report(path, "shape-mismatch", text)
        return
    apart = off_grid_mm(volume, other)
    if apart > tolerance_mm:
        report(
            path,
            "affine-mismatch",
            f"lies elsewhere than {whose}: corners up to {apart:.2f} mm apart (tolerance {tolerance_mm:g} mm; "
            f"spacing {_mm(volume)} against {_mm(other)} mm). {mend}, or raise data.tolerance_mm",
        )


def _mm(volume: Volume) -> str:
    return " x ".join(f"{s:.3g}" for s in volume.spacing)


def _foreground(
    arrays: Sequence[np.ndarray], label: np.ndarray | None, labels: LabelTable
) -> tuple[dict[str, int], tuple[tuple[float, ...], ...]]:
    """Voxels a class, and evenly spaced samples of the foreground's intensities a channel."""
    if label is None:
        return dict.fromkeys(labels.classes, 0), tuple(() for _ in arrays)
    size = len(labels.classes) + 1 + bool(labels.ignore)
    counts = np.sum(
        [np.bincount(plane.ravel(), minlength=size) for plane in label], axis=0
    )  # counting takes 8 bytes a voxel
    flat = label.ravel()
    where = np.flatnonzero(flat if labels.ignore_index is None else (flat > 0) & (flat != labels.ignore_index))
    if len(where) > SAMPLES:
        where = where[np.linspace(0, len(where) - 1, SAMPLES).astype(np.int64)]
    values = tuple(tuple(float(v) for v in channel.ravel()[where]) for channel in arrays)
    return {name: int(counts[i + 1]) for i, name in enumerate(labels.classes)}, values


def inspect_cases(
    cohort: Cohort, rules: Rules, *, memo: Path | None, workers: int, shard: Shard | None = None
) -> Iterator[CaseFacts]:
    """Facts of every case as they come in, remembered under ``memo`` so that unchanged files are not read again.

    With a ``shard`` its own cases are read first. Of the others, those are read that no other process on this cohort has read
    by then: all facts are there at the end, whether the other shards run beside this one, are late or have died.
    Raises DataError when a worker process dies (most often for want of memory).
    """
    name = f"inspected-{shard.file_name}.jsonl" if shard else "inspected.jsonl"
    store = Memo(memo / name if memo is not None else None, beside="inspected*.jsonl")
    todo: list[tuple[Case, str | None]] = []
    for case in shard.own(cohort.cases) if shard else cohort.cases:
        key = _memo_key(case, rules)
        facts = _recalled(store, key)
        if facts is not None and (rules.pictures is None or _drawn(facts, rules.pictures)):
            yield facts
        else:
            todo.append((case, key))
    few = len(todo) < 8  # read before processes have started
    jobs = [(case, rules) for case, _ in todo]
    for number, facts in run_jobs(inspect_case, jobs, 1 if few else workers, "reads cases"):
        key = todo[number][1]
        if key is not None:
            store.put(key, to_plain(facts))
        yield facts
    if shard is not None:
        yield from _of_others(shard.rest(cohort.cases), rules, store, workers)


def _of_others(cases: Sequence[Case], rules: Rules, store: Memo, workers: int) -> Iterator[CaseFacts]:
    """Facts of the other shards' cases: looked up at the last moment before one would be read here."""
    recalled: deque[CaseFacts] = deque()
    keys: list[str | None] = []

    def missing() -> Iterator[tuple[Case, Rules]]:
        for case in cases:
            store.refresh()
            key = _memo_key(case, rules)
            facts = _recalled(store, key)
            if facts is None:
                keys.append(key)
                yield case, rules
            else:
                recalled.append(facts)

    for number, facts in run_jobs(inspect_case, missing(), workers, "reads cases"):
        key = keys[number]
        if key is not None:
            store.put(key, to_plain(facts))
        yield facts
        while recalled:
            yield recalled.popleft()
    yield from recalled


def _recalled(store: Memo, key: str | None) -> CaseFacts | None:
    known = store.get(key) if key is not None else None
    try:
        return from_plain(known, CaseFacts) if known is not None else None
    except ValueError:
        return None  # of another version, or damaged: the case is read again


def _drawn(facts: CaseFacts, pictures: Path) -> bool:
    return facts.shape == (0, 0, 0) or picture_path(pictures, facts.digest).exists()


def _memo_key(case: Case, rules: Rules) -> str | None:
    files = stamp((*case.images, *([case.label] if case.label else [])))
    if files is None:
        return None
    held = (list(rules.labels.classes.items()), rules.labels.background, rules.labels.ignore, rules.channels)
    return hash_text(f"{FORMAT}|{case.id}|{files}|{held}|{rules.tolerance_mm}|{rules.resample_labels}|{case.stacked}")
