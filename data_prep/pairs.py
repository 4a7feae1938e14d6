"""Image and label files by two globs, or listed in a CSV."""

from __future__ import annotations

import codecs
import csv as csv_module
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.files import dataset_root, found_classes, label_table, own_splits, some, table_fields
from segspeed.data.files import stem
from segspeed.data.wildcards import as_on_disk, by_wildcard
from segspeed.types import Case, Cohort, DataError, Problem

COLUMNS = ("id", "image", "label", "patient", "site")
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux


def pairs(
    root: str | None = None,
    images: str | None = None,
    labels: str | None = None,
    csv: str | None = None,
    class_names: Mapping[str, object] | None = None,
    channels: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> Cohort:
    """Cases from ``csv`` (columns id, image or image_0, image_1 ..., label, patient, site; only the image is needed),
    or from two globs; the text that their wildcards stand for is the case id and joins them. Relative paths start at
    ``root``, else at the CSV's folder, else where the command runs.

    ``class_names`` maps names to values ({liver: 1, tumour: [2, 3]}; names that share values are regions); without it
    every value found in the labels becomes a class, those of ``exclude`` not looked at. ``channels`` names the image files
    of a case; a channel called CT is normalised as CT.

    An image without a label is a case without one; a label without an image, and a label that is its own image, are
    problems of the cohort. Raises DataError when no image has its label, and with every row of a CSV that cannot be used.
    """
    base = dataset_root(root) if root is not None else None
    if (csv is None) == (images is None):
        raise DataError("data=pairs needs data.images and data.labels (two globs), or data.csv; one of the two ways")
    if csv is not None:
        if not csv.strip():
            raise DataError("data.csv is empty; it names a table, such as data.csv=cases.csv")
        table = as_on_disk(Path(os.path.abspath((base or Path.cwd()) / os.path.expanduser(csv))))
        cases, problems = _from_csv(table, base or table.parent)
        name, folder = table.stem, table.parent
    else:
        assert images is not None
        if labels is None:
            raise DataError("data.images is given without data.labels: two globs make the pairs")
        here = base or Path.cwd()
        cases, problems = _from_globs(here, images, labels)
        name, folder = here.name or "pairs", here
    selves = [c for c in cases if c.label in c.images]
    if len(selves) == len(cases):
        raise DataError(f"image and label are the same file in {len(selves)} cases: {some(c.id for c in selves)}")
    problems += [_problem(c.id, c.label, "image-is-label", "image and label are the same file") for c in selves]
    width = len(cases[0].images)
    if channels is not None and len(channels) != width:
        raise DataError(f"data.channels names {len(channels)} channels, but a case has {width} image files")
    left_out = {*exclude, *(c.id for c in selves)}
    return Cohort(
        name=name,
        cases=cases,
        **table_fields(
            label_table(class_names, "data.class_names")
            if class_names is not None
            else found_classes([c for c in cases if c.id not in left_out])
        ),
        channels=tuple(channels) if channels is not None else tuple(f"image_{i}" for i in range(width)),
        splits=own_splits(folder),
        problems=tuple(problems),
    )


def _problem(case: str, path: Path | None, kind: str, message: str) -> Problem:
    return Problem(case, f"{path.parent.name}/{path.name}"[:200] if path is not None else "", "error", kind, message)


def _from_csv(table: Path, base: Path) -> tuple[tuple[Case, ...], list[Problem]]:
    rows = _rows(table)
    header = [cell.strip() for cell in rows[0][1]] if rows else []
    numbered = sorted((h for h in header if re.fullmatch(r"image_\d{1,4}", h)), key=lambda h: int(h[6:]))
    unknown = [h for h in header if h and h not in COLUMNS and h not in numbered]
    if doubled := sorted({h for h in header if h and header.count(h) > 1}):
        raise DataError(f"{table}: columns given twice: {', '.join(doubled)}")
    columns = numbered or ["image"]
    if len(rows) < 2 or columns[0] not in header:
        has = ", ".join(header)[:300] or "none"
        raise DataError(
            f"{table} holds a header and no row below it"
            if columns[0] in header
            else f"{table} needs a column image (or image_0, image_1 ...); it has: {has}"
        )
    if unknown or (numbered and "image" in header):
        wrong = ", ".join(unknown)[:300] or "image beside image_0"
        raise DataError(f"{table}: columns {wrong}; known are id, image or image_0 ..., label, patient, site")
    wrong_rows, cases, problems = [], [], []
    for line, row in rows[1:]:
        if len(row) > len(header):
            wrong_rows.append(f"line {line}: more cells than the header has columns")
            continue
        cells = {name: cell.strip() for name, cell in zip(header, row, strict=False)}
        missing = [c for c in columns if not cells.get(c)]
        if missing:
            wrong_rows.append(f"line {line}: empty {', '.join(missing)}")
            continue
        paths = tuple(_resolve(base, cells[c]) for c in columns)
        label = _resolve(base, cells["label"]) if cells.get("label") else None
        case_id = cells.get("id") or stem(paths[0])
        if long := [p for p in (*paths, label) if p is not None and _too_long(p)]:
            case_id = case_id[:100]
            text = (
                f"line {line} of {table.name}: no file can have a name of more than {LONGEST_NAME} bytes or such a path"
            )
            problems.append(_problem(case_id, Path(long[0].name), "path-too-long", text))
            continue
        cases.append(Case(case_id, paths, label, cells.get("patient", ""), cells.get("site", "")))
    if wrong_rows or not cases:
        raise DataError(f"{table}: " + "; ".join([*wrong_rows, *(p.message for p in problems)][:20]))
    return tuple(cases), problems


def _rows(table: Path) -> list[tuple[int, list[str]]]:
    """The rows of a CSV that are not blank, with the number of their first line. Raises DataError."""
    text = _text(table)
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv_module.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, line = [], 1
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append((line, row))
            line = reader.line_num + 1
    except csv_module.Error as error:
        raise DataError(
            f"{table}, line {line}: {error}. A cell that begins with a quotation mark ends with one; a mark inside it is "
            "written twice"
        ) from error
    return rows


def _text(table: Path) -> str:
    try:
        raw = table.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"the table {table} cannot be read: {reason} (data.csv)") from error
    remedy = 'In Excel save it as "CSV UTF-8"; in LibreOffice choose the character set UTF-8'
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or raw[:64].count(0) > 8:
        raise DataError(f"{table} is in UTF-16, not UTF-8. {remedy}")
    if raw.startswith(b"PK\x03\x04"):
        raise DataError(f"{table} is an Excel workbook or a zip, not a CSV. {remedy}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{table}, line {line}: a letter is not in UTF-8; the table is probably in Windows-1252 or Latin-1. {remedy}"
        ) from error
    return text.replace(
        "\0", "\u2400"
    )  # no file has such a name: its case is reported as missing, with a mark that shows


def _resolve(base: Path, text: str) -> Path:
    return as_on_disk(base / os.path.expanduser(text))


def _too_long(path: Path) -> bool:
    return len(os.fsencode(path)) > LONGEST_PATH or any(len(os.fsencode(p)) > LONGEST_NAME for p in path.parts)


def _from_globs(base: Path, images: str, labels: str) -> tuple[tuple[Case, ...], list[Problem]]:
    image, label = by_wildcard(base, images, "data.images"), by_wildcard(base, labels, "data.labels")
    image_of, label_of = image.files, label.files
    if len(image_of) == len(label_of) == 1 and not (image.wild and label.wild):
        case_id = next(iter(image_of if image.wild or not label.wild else label_of))
        return (Case(case_id, tuple(image_of.values()), next(iter(label_of.values()))),), []
    orphans = [key for key in label_of if key not in image_of]
    if len(orphans) == len(label_of):
        raise DataError(
            f"no image has its label: {len(image_of)} images without a label in {image.folder}: {some(image_of)}; "
            f"{len(orphans)} labels without an image in {label.folder}: {some(label_of)}. An image and a label belong together "
            "when the wildcards of data.images and data.labels stand for the same text: 'images/*_ct.nii.gz' and "
            "'labels/*_seg.nii.gz'. Or list the pairs in a CSV (data.csv)"
        )
    text = "a label without an image: nothing that data.images matches has this text for its wildcards"
    problems = [_problem(key, label_of[key], "label-without-image", text) for key in orphans]
    return tuple(Case(key, (path,), label_of.get(key)) for key, path in image_of.items()), problems
