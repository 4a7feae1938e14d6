"""A folder with cohort.json: what `data_prep.convert` writes, or anybody in the same form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from data_prep.files import dataset_root
from segspeed.jsonio import from_plain, write_json
from segspeed.types import Case, Cohort, DataError

NAME = "cohort.json"


def cohort(root: str) -> Cohort:
    """The cohort that ``cohort.json`` in a folder describes, with its paths made absolute.

    Raises DataError when there is none, when it is not in this form, and when a path is absolute or leads out of the folder.
    """
    folder = dataset_root(root)
    path = folder / NAME
    if not path.is_file():
        raise DataError(
            f"{folder} has no {NAME}. Write it with python -m data_prep.convert source=dicom root=TREE out={folder}, or use "
            "data=msd, data=nnunet or data=pairs for other layouts"
        )
    try:
        found = from_plain(json.loads(path.read_text(encoding="utf-8-sig")), Cohort)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} holds no cohort: {_short(error)}") from error
    if not found.cases or not found.channels:
        raise DataError(f"{path} names no cases or no channels")
    wrong = [c.id for c in found.cases if not c.stacked and len(c.images) != len(found.channels)]
    if wrong:
        raise DataError(f"{path}: {wrong[0]} has another number of images than the {len(found.channels)} channels")
    return dataclasses.replace(found, cases=tuple(_inside(folder, case) for case in found.cases))


def _short(error: Exception) -> str:
    """The first thing that is wrong, in one line; pydantic counts them first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[1:3] if len(lines) > 2 else lines[:1])[:300]


def _inside(folder: Path, case: Case) -> Case:
    def whole(path: Path) -> Path:
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{folder / NAME}: the paths of {case.id} must be relative and lie inside the folder")
        found = folder / path
        if not found.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{folder / NAME}: a path of {case.id} is a link that leads out of the folder")
        return found

    return dataclasses.replace(
        case, images=tuple(map(whole, case.images)), label=whole(case.label) if case.label is not None else None
    )


def write_cohort(folder: Path, made: Cohort) -> None:
    """Write ``cohort.json``; the paths of ``made`` are relative to ``folder``. Fields that hold nothing are left out."""
    plain = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    needed = {f.name for f in dataclasses.fields(made) if f.default is f.default_factory is dataclasses.MISSING}
    write_json(folder / NAME, {name: value for name, value in plain.items() if value or name in needed})
