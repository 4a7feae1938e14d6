"""Image and label files by two globs, or listed in a CSV."""

from __future__ import annotations

import csv as csv_module
import glob
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.files import dataset_root, found_classes, label_table, own_splits, some, table_fields
from segspeed.data.files import is_volume, stem
from segspeed.types import Case, Cohort, DataError

COLUMNS = ("id", "image", "label", "patient", "site")


def pairs(
    root: str | None = None,
    images: str | None = None,
    labels: str | None = None,
    csv: str | None = None,
    class_names: Mapping[str, object] | None = None,
    channels: Sequence[str] | None = None,
) -> Cohort:
    """Cases from ``csv`` (columns id, image or image_0, image_1 ..., label, patient, site; only the image is needed),
    or from two globs; the text that their wildcards stand for is the case id and joins them. Relative paths start at
    ``root``, else at the CSV's folder, else where the command runs.

    ``class_names`` maps names to values ({liver: 1, tumour: [2, 3]}; names that share values are regions); without it
    every value found in the labels becomes a class. ``channels`` names the image files of a case; a channel called CT is
    normalised as CT.
    Raises DataError with every row or file that cannot be used.
    """
    base = dataset_root(root) if root is not None else None
    if (csv is None) == (images is None):
        raise DataError("data=pairs needs data.images and data.labels (two globs), or data.csv; one of the two ways")
    if csv is not None:
        table = (base / csv if base else Path(csv)).expanduser().absolute()
        cases = _from_csv(table, base or table.parent)
        name, folder = table.stem, table.parent
    else:
        assert images is not None
        if labels is None:
            raise DataError("data.images is given without data.labels: two globs make the pairs")
        here = base or Path.cwd()
        cases = _from_globs(here, images, labels)
        name, folder = here.name or "pairs", here
    selves = [c.id for c in cases if c.label in c.images]
    if selves:
        raise DataError(f"image and label are the same file in {len(selves)} cases: {some(selves)}")
    width = len(cases[0].images)
    if channels is not None and len(channels) != width:
        raise DataError(f"data.channels names {len(channels)} channels, but a case has {width} image files")
    return Cohort(
        name=name,
        cases=cases,
        **table_fields(
            label_table(class_names, "data.class_names") if class_names is not None else found_classes(cases)
        ),
        channels=tuple(channels) if channels is not None else tuple(f"image_{i}" for i in range(width)),
        splits=own_splits(folder),
    )


def _from_csv(table: Path, base: Path) -> tuple[Case, ...]:
    try:
        text = table.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"the table {table} cannot be read: {error.strerror} (data.csv)") from error
    first = text.split("\n", 1)[0]
    delimiter = ";" if first.count(";") > first.count(",") else ","
    rows = list(csv_module.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    header = [h.strip() for h in (rows[0] if rows else {}) if isinstance(h, str)]
    numbered = sorted((h for h in header if re.fullmatch(r"image_\d+", h)), key=lambda h: int(h[6:]))
    unknown = [h for h in header if h not in COLUMNS and h not in numbered]
    doubled = sorted({h for h in first.strip().split(delimiter) if h and first.strip().split(delimiter).count(h) > 1})
    if doubled:
        raise DataError(f"{table}: columns given twice: {', '.join(doubled)}")
    columns = numbered or ["image"]
    if not rows or columns[0] not in header:
        raise DataError(
            f"{table} needs a column image (or image_0, image_1 ...); it has: {', '.join(header) or 'none'}"
        )
    if unknown or (numbered and "image" in header):
        wrong = ", ".join(unknown) or "image beside image_0"
        raise DataError(f"{table}: columns {wrong}; known are id, image or image_0 ..., label, patient, site")
    problems, cases = [], []
    for line, row in enumerate(rows, start=2):
        cells = {k.strip(): (v or "").strip() for k, v in row.items() if isinstance(k, str)}
        if None in row:
            problems.append(f"line {line}: more cells than the header has columns")
            continue
        missing = [c for c in columns if not cells.get(c)]
        if missing:
            problems.append(f"line {line}: empty {', '.join(missing)}")
            continue
        paths = tuple(_resolve(base, cells[c]) for c in columns)
        label = _resolve(base, cells["label"]) if cells.get("label") else None
        case_id = cells.get("id") or stem(paths[0])
        cases.append(Case(case_id, paths, label, cells.get("patient", ""), cells.get("site", "")))
    if problems:
        raise DataError(f"{table}: " + "; ".join(problems[:20]))
    return tuple(cases)


def _resolve(base: Path, text: str) -> Path:
    return base / Path(text).expanduser()


def _by_wildcard(base: Path, pattern: str, key: str) -> dict[str, Path]:
    """Files of a glob by the text that its wildcards stand for, which is the case id."""
    folder, rest = _literal_start(base, os.path.expanduser(pattern))
    found = sorted(glob.glob(rest, root_dir=folder, recursive=True))
    volumes = [name for name in found if is_volume(folder / name)]
    if not volumes:
        others = f" ({len(found)} other files match)" if found else ""
        raise DataError(f"{key}={pattern} matches no .nii or .nii.gz file in {folder}{others}")
    if not any(c in rest for c in "*?["):
        return {stem(Path(rest)): folder / rest}
    shape = _groups(rest)
    out: dict[str, Path] = {}
    for name in volumes:
        match = shape.fullmatch(name)
        assert match, f"{name} was found by {rest} but does not have its shape"
        ending = len(name) - len(Path(name).name) + len(stem(Path(name)))  # .nii or .nii.gz is no part of an id
        parts = [
            name[a : min(b, ending)].strip("/") for a, b in map(match.span, range(1, shape.groups + 1)) if a < ending
        ]
        case_id = "_".join(part for part in parts if part).replace("/", "_") or stem(Path(name))
        if case_id in out:
            raise DataError(f"{key}={pattern}: {out[case_id].name} and {name} would both be case {case_id!r}")
        out[case_id] = folder / name
    return out


def _literal_start(base: Path, pattern: str) -> tuple[Path, str]:
    """The folder that a glob starts in, and the rest. Folders that exist by their very name are no patterns, so that
    brackets in a path do no harm."""
    path = Path(pattern)
    folder, parts = (Path(path.anchor), path.parts[1:]) if path.is_absolute() else (base, path.parts)
    count = 0
    while count < len(parts) - 1 and (folder / parts[count]).is_dir():
        folder = folder / parts[count]
        count += 1
    return folder, os.path.join(*parts[count:])


def _groups(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression whose groups are its wildcards."""
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    kinds = {"**/": "((?:.*/)?)", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}
    text = "".join(
        kinds.get(t) or (f"({t.replace('[!', '[^')})" if t.startswith("[") else re.escape(t)) for t in tokens
    )
    return re.compile(text, re.DOTALL)


def _from_globs(base: Path, images: str, labels: str) -> tuple[Case, ...]:
    image_of, label_of = _by_wildcard(base, images, "data.images"), _by_wildcard(base, labels, "data.labels")
    if len(image_of) == len(label_of) == 1:
        (case_id, image), (_, label) = *image_of.items(), *label_of.items()
        return (Case(case_id, (image,), label),)
    alone = [p.name for k, p in image_of.items() if k not in label_of]
    orphans = [p.name for k, p in label_of.items() if k not in image_of]
    if alone or orphans:
        parts = []
        if alone:
            parts.append(f"{len(alone)} images without a label: {some(alone)}")
        if orphans:
            parts.append(f"{len(orphans)} labels without an image: {some(orphans)}")
        raise DataError(
            "; ".join(parts) + ". An image and a label belong together when the wildcards of data.images and "
            "data.labels stand for the same text: 'images/*_ct.nii.gz' and 'labels/*_seg.nii.gz'. "
            "Or list the pairs in a CSV (data.csv)"
        )
    return tuple(Case(key, (image_of[key],), label_of[key]) for key in image_of)
