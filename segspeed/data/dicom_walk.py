"""The files of a folder tree in order, through links to folders, each real folder once."""

from __future__ import annotations

import os
from pathlib import Path


def files_of(folder: Path) -> tuple[list[Path], int]:
    """Files below ``folder``, sorted by path, and how many folders may not be read; hidden files and pipes are left out.

    Links to folders are followed, as archives lay out patients by them. A folder that several links lead to is read once, and
    a link to a folder above ``folder`` (a circle, or other patients) is not followed.
    """
    root = folder.resolve()
    seen: set[Path] = set()
    found: list[Path] = []
    closed: list[OSError] = []
    linked: list[Path] = [folder]
    while linked:  # folders that lie in the tree itself come before those that links lead to
        for place, folders, names in os.walk(linked.pop(0), onerror=closed.append):
            here = Path(place)
            real = here.resolve()
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            links = [name for name in sorted(folders) if (here / name).is_symlink()]
            linked += [here / name for name in links if not root.is_relative_to((here / name).resolve())]
            folders[:] = sorted(set(folders) - set(links))
            found += [here / name for name in names if not name.startswith(".") and _is_file(here / name)]
    return sorted(found), len(closed)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be read; the error would name it
        return False
