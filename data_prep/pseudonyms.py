"""Case and patient ids that name nobody: salted digests, or the user's own from a table that stays where it is."""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from segspeed.data.dicom_files import digest
from segspeed.types import DataError, SettingError

SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def salt_file(out: Path) -> Path:
    """Where the salt of a converted folder is kept: beside it, so that it does not travel with it."""
    return out.with_name(f"{out.name}.salt")


def salt_for(out: Path, given: str | None) -> tuple[str, bool]:
    """The salt of ``out``, and whether it lies in `salt_file`: the given one, else the kept one, else a new random one
    (mode 600). Raises SettingError for a given salt of fewer than 8 letters, which could be guessed."""
    if given is not None:
        if len(given) < 8:
            raise SettingError("salt has fewer than 8 letters, so ids could be guessed back; give a longer one or none")
        return given, False
    path = salt_file(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        kept = path.read_text(encoding="utf-8").strip()
        if len(kept) < 8:
            raise DataError(f"{path} holds no salt; delete it together with the folder it belongs to") from None
        return kept, True
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        made = secrets.token_hex(16)
        file.write(made + "\n")
    return made, True


def patient_code(patient: str, salt: str) -> str:
    return f"p{digest('patient|' + patient, salt)}"


def study_code(study: str, salt: str) -> str:
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
        elif own in found.values():
            problems.append(f"line {line}: the id is given to two patients")
        elif patient.casefold() in own.casefold():
            problems.append(f"line {line}: the id holds the patient_id itself")
        else:
            found[patient] = own
    if problems:
        raise SettingError(f"ids={path}: " + "; ".join(problems[:10]))
    return found


def case_ids(studies: Mapping[str, str], salt: str, own: Mapping[str, str] | None) -> dict[str, tuple[str, str]]:
    """Study -> (case id, patient code) for studies given as study -> PatientID.

    With a table of ``own`` ids a patient's only study has the patient's id, several have the id and a digest of the study;
    patients that the table lacks are not in the result.
    """
    patients = list(studies.values())
    found = {}
    for study, patient in studies.items():
        code = patient_code(patient or f"study|{study}", salt)  # without a PatientID each study is a patient of its own
        if own is None:
            found[study] = (f"{code}_{study_code(study, salt)}", code)
        elif patient in own:
            several = patients.count(patient) > 1
            found[study] = (f"{own[patient]}_{study_code(study, salt)}" if several else own[patient], code)
    return found
