"""Where the sources of a conversion lie, for whoever converts: as numbers, and on request as a table of paths.

Reports name a source by its place in the sorted tree, since its path may hold a name. The table of what lies where is written
beside the converted folder.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from segspeed.data.dicom_files import Series, Tree

COLUMNS = ("kind", "number", "files", "case", "path")


def paths_file(out: Path) -> Path:
    """Beside the converted folder, like the salt, so that it does not travel with it."""
    return out.with_name(f"{out.name}.paths.csv")


def write_paths(out: Path, tree: Tree, cases: Mapping[int, str]) -> Path:
    """Write the folder of each series, the label objects and the damaged files under the numbers that reports give them.

    ``cases`` are case ids by number of the series. The table (mode 600) holds the paths as they are, names of people too.
    """
    rows: list[Sequence[object]] = []
    for one in sorted(tree.series, key=lambda s: s.place):
        folders = Counter(path.parent for path in one.files)
        rows += [("series", one.place, n, cases.get(one.place, ""), at) for at, n in sorted(folders.items())]
    rows += [("label object", n, 1, "", path) for n, path in enumerate(tree.objects, 1)]
    rows += [("damaged file", n, 1, "", path) for n, path in enumerate(tree.damaged, 1)]
    path = paths_file(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.with_name(f"{path.name}.part")
    torn.unlink(missing_ok=True)
    handle = os.open(torn, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    torn.replace(path)
    return path


def where(series: Sequence[Series]) -> str:
    """Series as whoever has the tree can find them: their places in it and numbers of files."""
    shown = [f"series {s.place} of the tree, {len(s.files)} files" for s in series[:6]]
    return "; ".join(shown) + (f" and {len(series) - 6} more" if len(series) > 6 else "")


def damaged_files(tree: Tree) -> str:
    """How many files cannot be read, and beside which series they lie."""
    lying = {path.parent for path in tree.damaged}
    beside = [s for s in sorted(tree.series, key=lambda s: s.place) if any(p.parent in lying for p in s.files)]
    text = f"{len(tree.damaged)} DICOM files are damaged or cut short; whatever they hold is not used"
    return text + (f". They lie in the folders of {where(beside)}" if beside else "")


def number(count: int, one: str, more: str | None = None) -> str:
    """``count`` with the word in singular or plural."""
    return f"{count} {one if count == 1 else more or one + 's'}"
