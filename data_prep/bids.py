"""BIDS: sub-01/ses-02/anat/sub-01_ses-02_T1w.nii.gz, and label maps under derivatives/ or beside the images."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.bids_cases import cases_of, join, studies_of
from data_prep.bids_names import BidsFile, allowed, check_fixed, fixed_entities, named, volumes
from data_prep.bids_tables import sites_of, table_of
from data_prep.files import dataset_root, found_classes, label_table, own_splits, some, table_fields
from segspeed.data.files import stem
from segspeed.data.wildcards import as_on_disk
from segspeed.types import Case, Cohort, DataError, SettingError

KINDS = ("dseg", "mask")  # discrete segmentation, binary mask


def bids(
    root: str,
    suffix: str = "T1w",
    channels: Sequence[str] | None = None,
    derivative: str | None = None,
    label: str | None = None,
    session: str | int | Sequence[str | int] | None = None,
    entities: Mapping[str, object] | None = None,
    class_names: Mapping[str, object] | None = None,
    unlabelled: str = "error",
    incomplete: str = "error",
    exclude: Sequence[str] = (),
) -> Cohort:
    """One case a subject, session and run. ``suffix`` names the images, or ``channels`` several a case (T1w, FLAIR).

    Labels are looked for in all of ``derivatives/`` and beside the images; ``derivative`` names one place ("raw" is
    beside the images; or a path), ``label`` the suffix of the files (without it dseg, and mask where there is no dseg).
    ``entities`` ({acq: highres, space: null}) decides between files of one case: names with another value are left out,
    and those with the value go before those without the entity. ``unlabelled=skip`` and ``incomplete=skip`` leave cases
    out that have no label or lack a channel, and say so. Classes come from ``class_names``, else from dseg.tsv, else a mask
    is one class, named after its label- or desc-, else every value found is a class; cases of ``exclude`` have no say.

    Raises DataError with everything that does not fit, and SettingError for settings that choose nothing.
    """
    for key, value in (("unlabelled", unlabelled), ("incomplete", incomplete)):
        if value not in ("error", "skip"):
            raise SettingError(f"data.{key}={value}: must be error or skip")
    folder = dataset_root(root)
    wanted = (suffix,) if channels is None else tuple(map(str, channels))
    if not wanted or len(set(wanted)) != len(wanted):
        raise SettingError(f"data.channels={list(wanted)}: name each suffix once, such as [T1w,FLAIR]")
    problems: list[str] = []
    fixed = fixed_entities(entities, session)
    images = _images(folder, wanted, problems)
    places = _places(folder, derivative)
    kind, labels = _labels(places, label, wanted, problems)
    check_fixed(fixed, [*images, *(f for files in labels.values() for f in files)])
    studies = studies_of([f for f in images if allowed(f, fixed)], fixed)
    orphans = join(studies, labels, fixed, wanted, problems)
    if orphans:
        problems.append(f"{len(orphans)} labels without an image: {some(p.path.name for p in orphans)}")
    cases, chosen, skipped = cases_of(studies, wanted, fixed, unlabelled, incomplete, problems)
    if problems:
        raise DataError(f"{folder}:\n" + "\n".join(f"  {p}" for p in problems))
    chosen = [label for case, label in zip(cases, chosen, strict=True) if case.id not in set(exclude)]
    if not cases:
        raise DataError(f"{folder}: no case has both its images and a label ({some(skipped)})")
    table = (
        label_table(class_names, "data.class_names")
        if class_names is not None
        else table_of(chosen, kind, [folder, *places.values()])
        or found_classes([c for c in cases if c.id not in set(exclude)])
    )
    if skipped:
        from segspeed.record.live import say

        say(f"{folder.name}: {len(skipped)} cases left out: {some(skipped)}")
    sites = sites_of(folder / "participants.tsv", {c.patient for c in cases})
    return Cohort(
        name=_name(folder),
        cases=tuple(Case(c.id, c.images, c.label, c.patient, sites.get(c.patient, "")) for c in cases),
        channels=wanted,
        splits=own_splits(folder),
        **table_fields(table),
    )


def _images(root: Path, wanted: Sequence[str], problems: list[str]) -> list[BidsFile]:
    paths = volumes(root)
    if not paths:
        inner = [p.parent for p in sorted(root.glob("*/sub-*")) if p.is_dir() and p.parent.name != "derivatives"]
        hint = f". Did you mean data.root={inner[0]}?" if inner else ""
        raise DataError(f"{root} has no folder sub-... with .nii or .nii.gz files, so it is not in BIDS layout{hint}")
    found = named(paths, root, wanted, problems)
    for channel in wanted:
        if not any(f.suffix == channel for f in found) and not problems:
            there = sorted({stem(p).rpartition("_")[2] for p in paths})
            key = "data.suffix" if len(wanted) == 1 else "data.channels"
            raise DataError(f"{root} has no image ..._{channel}.nii.gz ({key}); its files end in: {some(there)}")
    return found


def _places(root: Path, derivative: str | None) -> dict[str, Path]:
    """Where labels may lie: name to folder."""
    inner = root / "derivatives"
    pipelines = sorted(p for p in inner.iterdir() if p.is_dir() and p.name[:1] != "." and p.name[:4] != "sub-") if (
        inner.is_dir()
    ) else []  # fmt: skip
    if derivative is None:
        places = {"raw": root, **{p.name: p for p in pipelines}}
        return {**places, "derivatives": inner} if any(inner.glob("sub-*")) else places
    if derivative == "raw":
        return {"raw": root}
    for folder in (inner / derivative, root / derivative, Path(os.path.abspath(os.path.expanduser(derivative)))):
        if os.path.isdir(found := as_on_disk(folder)):
            return {derivative: found}
    names = some(p.name for p in pipelines) or "none"
    raise DataError(f"data.derivative={derivative}: there is no such folder; in {inner} there are: {names}")


def _labels(
    places: Mapping[str, Path], label: str | None, wanted: Sequence[str], problems: list[str]
) -> tuple[str, dict[str, list[BidsFile]]]:
    """The suffix of the labels, and the label files of each place that has some."""
    paths = {name: volumes(folder) for name, folder in places.items()}
    found: dict[str, dict[str, list[BidsFile]]] = {}
    for kind in KINDS if label is None else (label,):
        if kind in wanted:
            raise SettingError(f"data.label={kind} is the suffix of the images as well")
        of_place = {name: named(paths[name], folder, (kind,), problems) for name, folder in places.items()}
        found[kind] = {name: files for name, files in of_place.items() if files}
    kinds = [kind for kind, of_place in found.items() if of_place]
    if len(kinds) == 2 and (apart := found["mask"].keys() - found["dseg"].keys()):
        raise SettingError(
            f"there are label maps (_dseg) in {', '.join(found['dseg'])} and masks (_mask) in {', '.join(sorted(apart))}: "
            f"choose with data.derivative={sorted(apart)[0]} or data.label=dseg"
        )
    if kinds or problems:
        return (kinds[0], found[kinds[0]]) if kinds else (label or "dseg", {})
    there = sorted({stem(p).rpartition("_")[2] for files in paths.values() for p in files} - set(wanted))
    looked = "_dseg or _mask" if label is None else f"_{label}"
    raise DataError(
        f"no label file ...{looked}.nii.gz in {', '.join(map(str, places.values()))}; other files there end in: "
        f"{some(there) or 'none'} (data.label, data.derivative)"
    )


def _name(root: Path) -> str:
    try:
        about: Any = json.loads((root / "dataset_description.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):  # it says nothing that is needed
        return root.name
    return str(about["Name"]) if isinstance(about, dict) and about.get("Name") else root.name
