"""The tables of a BIDS dataset: what label values mean (dseg.tsv), and where a subject was scanned (participants.tsv)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from data_prep.bids_names import BidsFile, parse, same
from data_prep.files import MAX_GUESSED_CLASSES, label_table, some
from segspeed.types import DataError, LabelTable

MEANING = ("label", "seg", "atlas", "desc")  # entities that say what a label map shows


class Tables:
    """The lookup tables of label files (``dseg.tsv``): beside the file or in a folder above, by BIDS's inheritance."""

    def __init__(self) -> None:
        self._of_folder: dict[tuple[Path, str], list[BidsFile]] = {}
        self._read: dict[Path, dict[int, str]] = {}

    def find(self, label: BidsFile, roots: Collection[Path]) -> Path | None:
        """The nearest table whose name says nothing that the label's does not; the most specific one of a folder."""
        folders = [p for p in label.path.parents if any(root == p or root in p.parents for root in roots)]
        for folder in folders:
            fits = [
                f
                for f in self._tables(folder, label.suffix)
                if all(label.get(key) == value for key, value in f.entities.items())
            ]
            if fits:
                return max(fits, key=lambda f: len(f.entities)).path
        return None

    def _tables(self, folder: Path, suffix: str) -> list[BidsFile]:
        key = (folder, suffix)
        if key not in self._of_folder:
            paths = [p for p in folder.glob(f"*{suffix}.tsv") if p.stem == suffix or p.stem.endswith(f"_{suffix}")]
            self._of_folder[key] = [f for p in sorted(paths) if (f := parse(p, p.stem)) is not None]
        return self._of_folder[key]

    def read(self, path: Path) -> dict[int, str]:
        """Names by value. Raises DataError when it is no such table."""
        if path not in self._read:
            rows = read_tsv(path)
            if any("index" not in row or "name" not in row for row in rows) or not rows:
                raise DataError(f"{path} needs the columns index and name, separated by tabs; or give data.class_names")
            found: dict[int, str] = {}
            for row in rows:
                name = row["name"] if row["name"] not in ("", "n/a") else row.get("abbreviation", "")
                if not re.fullmatch(r"\d{1,15}(\.0*)?", row["index"]) or not name:
                    raise DataError(f"{path}: the row {str(row)[:200]} joins no whole number to a name")
                value = int(float(row["index"]))
                if found.setdefault(value, name) != name:
                    raise DataError(f"{path} names {value} twice: {found[value]} and {name}")
            self._read[path] = found
        return self._read[path]


def read_tsv(path: Path) -> list[dict[str, str]]:
    """The rows of a table with tabs; column names in small letters. Raises DataError when it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    rows = [[cell.strip() for cell in line.split("\t")] for line in lines if line.strip()]
    header = [h.lower() for h in rows[0]] if rows else []
    return [dict(zip(header, row, strict=False)) for row in rows[1:]]


def table_of(labels: Sequence[BidsFile], kind: str, roots: Sequence[Path]) -> LabelTable | None:
    """The classes by the tables beside the labels; a mask without one is one class. None: nothing says."""
    tables = Tables()
    names: dict[int, tuple[str, Path]] = {}
    for label in labels:
        path = tables.find(label, roots)
        for value, name in tables.read(path).items() if path is not None else ():
            assert path is not None
            known, where = names.setdefault(value, (name, path))
            if known != name:
                raise DataError(f"{value} is {known} in {where}, but {name} in {path}; give data.class_names")
    if len(names) > MAX_GUESSED_CLASSES:
        raise DataError(
            f"{next(iter(names.values()))[1]} names {len(names)} structures; give those to learn as data.class_names, and "
            "the other values as data.background"
        )
    if names:
        merged: dict[str, list[int]] = defaultdict(list)
        for value, (name, _) in sorted(names.items()):
            merged["background" if value == 0 else name].append(value)
        return label_table(merged, "dseg.tsv")
    _same_meaning(labels, "masks" if kind == "mask" else "labels")
    if kind != "mask":
        return None
    name = next((v for key in ("label", "desc") for label in labels if (v := label.get(key))), "mask")
    return LabelTable({name: (1,)})


def _same_meaning(labels: Sequence[BidsFile], what: str) -> None:
    """Raises DataError where the names say that not all of ``labels`` show the same thing: their values would mean one."""
    for key in MEANING:
        of_value: dict[str | None, BidsFile] = {}
        for label in labels:
            of_value.setdefault(label.get(key), label)
        if len(of_value) > 1:
            listed = some(sorted(f"{value or 'none named'}" for value in of_value))
            value = min(v for v in of_value if v is not None)
            absent = f" (or {{{key}: null}} those without)" if None in of_value else ""
            raise DataError(
                f"the {what} are of different structures ({listed}), such as {some((f.path.name for f in of_value.values()), 3)}: "
                f"'data.entities={{{key}: {value}}}' chooses one{absent}, with data.unlabelled=skip for the subjects that have "
                "another; data.class_names={NAME: 1} takes all of them for the same"
            )


def sites_of(path: Path, subjects: set[str]) -> dict[str, str]:
    """Site of each subject, by the column site of participants.tsv. Nothing else of that table is read."""
    if not path.is_file():
        return {}
    rows = read_tsv(path)
    column = next((c for c in ("site", "site_id") if rows and c in rows[0]), None)
    if column is None:
        return {}
    listed = {row.get("participant_id", "").removeprefix("sub-"): row.get(column, "") for row in rows}
    found = {}
    for subject in subjects:
        label = subject.removeprefix("sub-")
        near = [label] if label in listed else [k for k in listed if same(k, label)]
        if len(near) == 1 and listed[near[0]] not in ("", "n/a"):
            found[subject] = listed[near[0]]
    return found
