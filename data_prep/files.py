"""What every layout needs of a folder: its files, their case ids, its dataset.json, its own split."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segspeed.data.geometry import VolumeError, read_volume
from segspeed.data.labels import regions_of
from segspeed.data.split import read_splits
from segspeed.data.wildcards import as_on_disk
from segspeed.types import Case, DataError, LabelTable, Split

MAX_GUESSED_CLASSES = 200  # more distinct values than this are no label map
SPLIT_FILES = ("splits.json", "splits_final.json")


def dataset_root(root: str | Path) -> Path:
    """The folder as an absolute path. Raises DataError when there is none."""
    path = as_on_disk(Path(os.path.expanduser(root)))
    if not os.path.exists(path):
        raise DataError(f"the data root does not exist: {path.absolute()} (data.root)")
    if not path.is_dir():
        raise DataError(f"the data root is a file; data.root names a folder: {path.absolute()}")
    return path.absolute()


def read_dataset_json(root: Path, layout: str) -> Mapping[str, Any]:
    """``dataset.json`` of a folder. Raises DataError that names what else might be meant."""
    path = root / "dataset.json"
    if not path.is_file():
        inner = sorted(p.parent.name for p in root.glob("*/dataset.json"))
        hint = f" Did you mean data.root={root / inner[0]}?" if inner else ""
        raise DataError(
            f"{root} has no dataset.json, so it is not in {layout} layout.{hint} "
            "Without one use data=pairs with data.images and data.labels"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise DataError(f"{path} must hold a JSON object")
    return found


def label_table(labels: Any, whence: str) -> LabelTable:
    """What label values mean, from {"0": "background", "1": "liver"} (Decathlon), from {"background": 0, "liver": 1}
    (nnU-Net v2), or from {"liver": [1, 2]} (merged values). A class called "ignore" is none; names that share values are
    regions, as in nnU-Net.

    Raises DataError when a value is no integer or there is no class.
    """
    if not isinstance(labels, Mapping) or not labels:
        raise DataError(f'{whence} must be a mapping such as {{"0": "background", "1": "liver"}}')
    found: dict[str, tuple[int, ...]] = {}
    for key, value in labels.items():
        name, values = (value, key) if isinstance(value, str) and not _integers(value) else (str(key), value)
        numbers = _integers(values)
        if numbers is None:
            raise DataError(f"{whence}: {key!r:.80}: {value!r:.80} joins no class name to whole numbers")
        if isinstance(value, str) and _integers(key) and _integers(value):
            raise DataError(
                f"{whence}: {key!r}: {value!r} could mean either way round; give the class a name with letters"
            )
        if 0 in numbers and len(numbers) > 1:
            raise DataError(f"{whence}: {name} names 0 among its values, which is the background")
        if 0 in numbers:
            continue  # the background, whatever it is called
        found[name] = (*found.get(name, ()), *numbers)
    ignore = found.pop("ignore", ())
    if not found:
        raise DataError(f"{whence} declares no class but the background")
    if clash := sorted({v for numbers in found.values() for v in numbers} & set(ignore)):
        raise DataError(f"{whence} gives the value {clash[0]} to ignore and to a class")
    classes, regions = regions_of(found)
    return LabelTable(classes, ignore=ignore, regions=regions)


def table_fields(table: LabelTable) -> dict[str, Any]:
    """The arguments of a `Cohort` that say the same as ``table``."""
    return {
        "labels": table.classes,
        "background": table.background,
        "ignore": table.ignore,
        "regions": table.regions,
    }


def found_classes(cases: Sequence[Case]) -> LabelTable:
    """Every whole number found in the labels as a class of its own. Labels that are missing, unreadable or no label maps are
    passed over: the check of the cases reports each. Raises DataError when none is left that shows a class."""
    values: set[int] = set()
    without: dict[str, list[str]] = {"no-label": [], "missing-file": [], "unreadable": [], "wide": [], "empty": []}
    for case in cases:
        if case.label is None:
            without["no-label"].append(case.id)
            continue
        try:
            volume = read_volume(case.label, scaled=False)
        except VolumeError as error:
            without[error.kind if error.kind in without else "unreadable"].append(case.label.name)
            continue
        finite = volume.array[np.isfinite(volume.array)]
        own = np.unique(np.rint(finite))[: MAX_GUESSED_CLASSES + 1]
        found = {int(v) for v in own} - {0}
        if len(own) > MAX_GUESSED_CLASSES:
            without["wide"].append(case.label.name)
        elif not found:
            without["empty"].append(case.label.name)
        values |= found if len(own) <= MAX_GUESSED_CLASSES else set()
    if not values:
        raise DataError(f"there is no class to learn: {_why_no_class(without)}. Otherwise give data.class_names")
    if len(values) > MAX_GUESSED_CLASSES:
        raise DataError(
            f"the labels hold more than {MAX_GUESSED_CLASSES} different values together; give those to learn as "
            "data.class_names, and the other values as data.background"
        )
    return LabelTable({f"class_{v}": (v,) for v in sorted(values)})


def _why_no_class(without: Mapping[str, Sequence[str]]) -> str:
    texts = {
        "no-label": "cases have no label",
        "missing-file": "label files do not exist",
        "unreadable": "labels cannot be read (python -m data_prep.check with data.class_names says why)",
        "wide": f"labels hold more than {MAX_GUESSED_CLASSES} different values, so they are no label maps (images taken for "
        "labels?)",
        "empty": "labels hold no value but 0",
    }
    return (
        "; ".join(f"{len(names)} {texts[why]}: {some(names)}" for why, names in without.items() if names) or "no case"
    )


def _integers(value: Any) -> tuple[int, ...] | None:
    items = value if isinstance(value, (list, tuple)) else [value]
    out = []
    for item in items:
        if isinstance(item, bool) or not re.fullmatch(r"\s*-?\d{1,15}(\.0*)?\s*", str(item)):
            return None
        out.append(int(float(item)))
    return tuple(out)


def own_splits(root: Path) -> tuple[Split, ...]:
    """The folds a folder brings along; none if there is no split file."""
    for name in SPLIT_FILES:
        if (root / name).is_file():
            return read_splits(root / name)
    return ()


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first few names of a list, for a message."""
    found = list(names)
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")
