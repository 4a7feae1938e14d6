"""Case and patient ids that name nobody: salted digests, or the user's own from a table that stays where it is."""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from data_prep.identity import telling, words_of
from segspeed.data.dicom_files import Series, digest
from segspeed.types import DataError, SettingError

SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def salt_file(out: Path) -> Path:
    """Where the salt of a converted folder is kept: beside it, so that it does not travel with it."""
    return out.with_name(f"{out.name}.salt")


def salt_for(out: Path, given: str | None) -> tuple[str, bool]:
    """The salt of ``out``, and whether it belongs into `salt_file`: the given one, else the kept one, else a new random one,
    which `keep_salt` writes once there is something to keep it for. Raises SettingError for a given salt of fewer than 8
    letters, which could be guessed, and DataError for a file that holds none."""
    if given is not None:
        if len(given) < 8:
            raise SettingError("salt has fewer than 8 letters, so ids could be guessed back; give a longer one or none")
        return given, False
    path = salt_file(out)
    try:
        kept = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return secrets.token_hex(16), True
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as the salt of the ids ({type(error).__name__}); put back the file of the first "
            "conversion, or delete it together with the folder it belongs to"
        ) from error
    if len(kept) < 8:
        raise DataError(f"{path} holds no salt; delete it together with the folder it belongs to")
    return kept, True


def keep_salt(out: Path, salt: str) -> None:
    """Write a salt to `salt_file` (mode 600). Raises DataError when another call has kept another one meanwhile."""
    path = salt_file(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if salt_for(out, None)[0] != salt:
            raise DataError(f"another call has just made {path}; wait for it, then call again") from None
        return
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(salt + "\n")


def patient_code(patient: str, salt: str) -> str:
    """Code of a patient, the same for the same salt."""
    return f"p{digest('patient|' + patient, salt)}"


def study_code(study: str, salt: str) -> str:
    """Code of a study, the same for the same salt."""
    return f"s{digest('study|' + study, salt, 6)}"


def read_ids(path: Path) -> dict[str, str]:
    """PatientID -> the user's own id, from a CSV with the columns patient_id and id.

    Raises SettingError with the lines that cannot be used; their cells, which may be names, are not quoted.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"ids={path} cannot be read ({type(error).__name__}); give a CSV file in UTF-8") from error
    first = text.split("\n", 1)[0]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=";" if first.count(";") > first.count(",") else ",")
    names = [str(n).strip() for n in rows.fieldnames or []]
    if "patient_id" not in names or "id" not in names:
        raise SettingError(f"ids={path} needs the columns patient_id and id")
    found: dict[str, str] = {}
    problems = []
    for line, row in enumerate(rows, start=2):
        cells = {str(k).strip(): str(v or "").strip() for k, v in row.items() if k is not None}
        patient, own = cells["patient_id"], cells["id"]
        if not patient or patient in found:
            problems.append(f"line {line}: patient_id is {'given twice' if patient else 'empty'}")
        elif not SAFE.fullmatch(own):
            problems.append(f"line {line}: an id is up to 64 of the letters a to z, digits, '.', '_', '-'")
        elif own.casefold() in {known.casefold() for known in found.values()}:
            problems.append(f"line {line}: the id is given to two patients")
        elif patient.casefold() in own.casefold():
            problems.append(f"line {line}: the id holds the patient_id itself")
        else:
            found[patient] = own
    if problems:
        raise SettingError(f"ids={path}: " + "; ".join(problems[:10]))
    return found


def people_of(series: Sequence[Series]) -> dict[str, frozenset[str]]:
    """Names and ids by PatientID."""
    found: dict[str, frozenset[str]] = {}
    for one in series:
        found[one.patient] = found.get(one.patient, frozenset()) | one.person
    return found


def check_own_ids(own: Mapping[str, str], people: Mapping[str, Iterable[str]]) -> None:
    """Raises SettingError where an id of ``own`` (PatientID -> id) holds a word of that patient's names and ids, which
    ``people`` has by PatientID; which row, and nothing of it."""
    rows = [n for n, (patient, mine) in enumerate(own.items(), 1) if telling(mine, words_of(people.get(patient, ())))]
    if rows:
        raise SettingError(
            f"ids: the id in row {', '.join(map(str, rows[:10]))} (without the heading) holds a word of that patient's name or "
            "id; choose ids that say nothing"
        )


def case_ids(
    studies: Iterable[tuple[str, str, str]], salt: str, own: Mapping[str, str] | None
) -> dict[tuple[str, str], tuple[str, str]]:
    """(Owner, study) -> (case id, patient code), for studies given as (owner, study, PatientID).

    With a table of ``own`` ids a patient's only study has the patient's id, several have the id and a digest of the study;
    patients that the table lacks are not in the result. Raises DataError where two cases get one id.
    """
    wanted = sorted(set(studies))
    counts = Counter(patient for _, _, patient in wanted)
    found = {}
    for owner, study, patient in wanted:
        # Without a PatientID each study is a patient of its own
        code = patient_code(patient or f"study|{study}|{owner}", salt)
        if own is None:
            found[owner, study] = (f"{code}_{study_code(study, salt)}", code)
        elif patient in own:
            several = counts[patient] > 1
            found[owner, study] = (f"{own[patient]}_{study_code(study, salt)}" if several else own[patient], code)
    twice = [name for name, count in Counter(name for name, _ in found.values()).items() if count > 1]
    if twice:
        raise DataError(f"two cases get the same id ({twice[0]}): give another salt or other ids")
    return found
