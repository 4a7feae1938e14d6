"""What a DICOM header says of the patient, for telling patients apart and for finding their names where they must not be."""

from __future__ import annotations

from typing import Any

WHO = ("PatientName", "PatientID", "OtherPatientIDs", "OtherPatientNames", "PatientBirthName", "PatientBirthDate")
# The modalities the standard knows for images; another text in the tag may be anything, a name too
MODALITIES = frozenset(
    [
        "BI",
        "BDUS",
        "BMD",
        "CR",
        "CT",
        "DG",
        "DX",
        "ES",
        "EPS",
        "GM",
        "HC",
        "IO",
        "IVOCT",
        "IVUS",
        "LS",
        "MG",
        "MR",
        "NM",
    ]
    + ["OAM", "OCT", "OP", "OPM", "OPT", "OT", "PA", "PT", "PX", "RF", "RG", "SM", "ST", "TG", "US", "XA", "XC"]
)


def person_of(head: Any) -> frozenset[str]:
    """Names, ids and birth date of the patient, as a header has them."""
    found = []
    for keyword in WHO:
        value = head.get(keyword, None)
        several = hasattr(value, "__iter__") and not isinstance(value, str) and not hasattr(value, "family_name")
        found += [str(one) for one in (value if several else [value]) if one]
    return frozenset(text for text in found if text.strip())


def patient_id(head: Any) -> str:
    """PatientID without what pads it."""
    return str(head.get("PatientID", "") or "").strip(" \0\t\r\n")


def owner_of(head: Any) -> str:
    """What tells patients apart: the PatientID, or the name where it is empty."""
    return patient_id(head) or str(head.get("PatientName", "") or "").strip()


def modality_of(head: Any) -> str:
    """The modality where it is one of `MODALITIES`, else nothing."""
    code = str(head.get("Modality", "") or "").strip().upper()
    return code if code in MODALITIES else ""
