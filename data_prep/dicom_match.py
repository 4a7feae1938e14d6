"""Which SEG and RTSTRUCT belong to a series, by the UIDs and the patient that they name."""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.dicom_labels import LabelObject
from segspeed.data.dicom_files import Series


def objects_of(
    series: Series, objects: Sequence[LabelObject], known: frozenset[str]
) -> tuple[list[LabelObject], list[str]]:
    """SEG and RTSTRUCT of a series: those that refer to it; those that refer to no series that is there (``known``: all
    SeriesInstanceUIDs) belong to it if they share its frame of reference. Those of another PatientID never do.

    One that names the series by its UIDs but another frame of reference is used, with a note: de-identification tools give
    new UIDs tag by tag, and its planes must lie on the series' slices all the same.
    """
    found, notes = [], []
    images = {f.uid for f in series.frames}
    for one in objects:
        if other_patient(one, series) or (one.study != series.study and not (one.images & images)):
            continue
        if series.uid in one.series or one.images & images:
            if not one.images or one.images & images:  # of a series that holds several volumes
                found.append(one)
                if one.references and series.reference and series.reference not in one.references:
                    notes.append(
                        f"a {one.kind} names this series but another frame of reference; it is used as its UIDs fit: look at it"
                    )
        elif not known.intersection(one.series) and series.reference and series.reference in one.references:
            found.append(one)
            notes.append(f"a {one.kind} names no series that is here; it was matched by its frame of reference")
    return found, notes


def other_patient(one: LabelObject, series: Series) -> bool:
    """Whether a label object and a series both name their patient, and not the same one."""
    return bool(one.patient and series.patient and one.patient != series.patient)


def strangers(objects: Sequence[LabelObject], series: Sequence[Series]) -> list[str]:
    """A line for each SEG or RTSTRUCT that names series or images of other patients only."""
    lines = []
    for one in objects:
        named = [s for s in series if s.uid in one.series or one.images & {f.uid for f in s.frames}]
        if named and all(other_patient(one, s) for s in named):
            lines.append(
                f"label object {one.place} of the tree ({one.kind}) has another PatientID than the series it names (series "
                f"{named[0].place} of the tree); it is not used"
            )
    return lines
