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
    if out.exists() and not out.is_dir():
        raise SettingError("out is a file; give a new folder")
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


def earlier_cases(out: Path) -> dict[str, str]:
    """Cases that ``out`` holds of earlier calls: id -> patient code, of cohort.json and, where a call was cut off, the records.

    Raises DataError when cohort.json cannot be read.
    """
    found: dict[str, str] = {}
    for path in sorted((out / "records").glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found[str(record["id"])] = str(record["patient"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # torn by a kill: the case is made again
    if (out / "cohort.json").is_file():
        try:
            cases = json.loads((out / "cohort.json").read_text(encoding="utf-8"))["cases"]
            found |= {str(c["id"]): str(c.get("patient") or "") for c in cases}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("cohort.json in out cannot be read; convert into a new folder") from error
    return found


def keep_cases(out: Path, now: Mapping[str, str], overwrite: bool, why: str) -> str | None:
    """Whether a call that makes the cases ``now`` (id -> patient code) keeps all that ``out`` holds; a line on those it drops.

    Raises SettingError where cases would be dropped or become another patient's, unless ``overwrite``; then their records
    are deleted. ``why`` says what else may have become of them.
    """
    earlier = earlier_cases(out)
    gone = [i for i in earlier if i not in now]
    other = [i for i in earlier if i in now and earlier[i] and earlier[i] != now[i]]
    if not gone and not other:
        return None
    text = f"{len(gone)} of its {len(earlier)} cases are not among those of this call{why}" if gone else ""
    text += (" and " if gone and other else "") + (f"{len(other)} ids are those of other patients now" if other else "")
    if not overwrite:
        raise SettingError(
            f"out holds a conversion of other data: {text}. Name another folder, or overwrite=true to drop them"
        )
    for case_id in gone:
        (out / "records" / f"{case_id}.json").unlink(missing_ok=True)
    return f"overwrite=true: {text}; cohort.json holds the cases of this call alone, the NIfTI files of the others stay"
