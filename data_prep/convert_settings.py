"""What a converted folder was made with, so that nothing of other settings is mixed into it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from segspeed.data.dicom_files import digest
from segspeed.jsonio import write_json
from segspeed.types import DataError, SettingError


def same_settings(out: Path, settings: Mapping[str, object], salt: str, overwrite: bool) -> list[str]:
    """Structures of an earlier conversion into ``out``, in order. Raises SettingError where its settings differ."""
    path = out / "settings.json"
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise SettingError("out is a folder with other files in it; give a new or an empty one")
        return []
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        before, structures = dict(earlier["settings"]), [str(s) for s in earlier["structures"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("settings.json in out cannot be read; convert into a new folder") from error
    now = _digests(settings, salt)
    other = [name for name in now if before.get(name) != now[name]]
    other = ["salt"] if "salt" in other else other  # with another salt every digest differs
    if other and not overwrite:
        raise SettingError(
            f"out was converted with other settings ({', '.join(other)}); give another out, or overwrite=true to convert it "
            "again"
        )
    if other:
        (out / "cohort.json").unlink(missing_ok=True)  # until all is converted again there is no whole cohort
        return []
    return structures


def _digests(settings: Mapping[str, object], salt: str) -> dict[str, str]:
    """Settings as salted digests: a pattern may quote a description, and a path may hold a name."""
    return {"salt": digest("salt", salt), **{k: digest(json.dumps(v), salt) for k, v in settings.items()}}


def write_settings(out: Path, settings: Mapping[str, object], salt: str, structures: Sequence[str]) -> None:
    """Remember what ``out`` is converted with."""
    write_json(out / "settings.json", {"settings": _digests(settings, salt), "structures": list(structures)})
