"""NIfTI cohorts without names: copies with blank headers under salted ids, and cohort.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nibabel as nib
import numpy as np

from data_prep.cohort_file import write_cohort
from data_prep.convert_settings import keep_cases, same_settings, write_settings
from data_prep.dicom_convert import Outcome, known_outcome_at, record_path
from data_prep.pseudonyms import keep_salt, patient_code, salt_file, salt_for, study_code
from segspeed.data.dicom_files import digest
from segspeed.data.files import save_nifti
from segspeed.data.geometry import UNREADABLE
from segspeed.data.pool import run_jobs
from segspeed.jsonio import write_json
from segspeed.record.live import say, track
from segspeed.speed.cpus import available_cpus
from segspeed.types import Case, Cohort, DataError, Split

LAYOUT = {"layout": "NIfTI"}  # a folder of converted DICOM is another


@dataclass(frozen=True)
class Job:
    """A case to be copied under its new id. The source stays out of its ``repr``: file names may be names of people."""

    id: str
    patient: str
    case: Case = field(repr=False)
    out: Path = field(repr=False)
    key: str = ""


def convert_cohort(cohort: Cohort, out: str, *, salt: str | None, overwrite: bool, workers: int | None) -> int:
    """Copy a cohort into ``out`` without identity and return how many cases failed. Sites are left out, folds are kept.

    Raises SettingError when ``out`` holds other files or ids of another salt, and DataError when no case could be copied.
    """
    target = Path(out).expanduser().absolute()
    key_text, kept = salt_for(target, salt)
    settings = {**LAYOUT, "source": cohort.name}
    same_settings(target, settings, key_text, overwrite)
    new = {c.id: f"{patient_code(c.patient, key_text)}_{study_code(c.id, key_text)}" for c in cohort.cases}
    if len(set(new.values())) < len(new):
        raise DataError("two cases get the same id by chance; delete the salt file beside out, or give another salt")
    codes = {new[c.id]: patient_code(c.patient, key_text) for c in cohort.cases}
    dropped = keep_cases(target, codes, overwrite, "")
    if kept:
        keep_salt(target, key_text)
    write_settings(target, settings, key_text, ())
    if dropped:
        say(dropped)
    jobs = [Job(new[c.id], patient_code(c.patient, key_text), c, target, _key(c, key_text)) for c in cohort.cases]
    outcomes = list(_run(jobs, overwrite, available_cpus() if workers is None else workers))
    good = sorted((o for o in outcomes if o.status != "failed"), key=lambda o: o.id)
    failed = [o for o in outcomes if o.status == "failed"]
    problems = [f"{o.id}: {o.problem}" for o in failed]
    write_json(
        target / "report.json", {"problems": problems, "cases": [{"id": o.id, "status": o.status} for o in outcomes]}
    )
    for text in problems[:20]:
        say(f"failed: {text}")
    if not good:
        raise DataError("no case could be copied; report.json in out has the reasons")
    ids = {o.id for o in good}
    cases = tuple(Case(o.id, tuple(map(Path, o.images)), Path(o.label) if o.label else None, o.patient) for o in good)
    stacked = any(c.stacked for c in cohort.cases)
    if stacked:
        cases = tuple(dataclasses.replace(c, images=c.images * len(cohort.channels), stacked=True) for c in cases)
    splits = tuple(
        Split(*(tuple(new[i] for i in part if new.get(i) in ids) for part in (s.train, s.val))) for s in cohort.splits
    )
    write_cohort(target, dataclasses.replace(cohort, name=target.name, cases=cases, splits=splits))
    there = sum(o.status == "there" for o in good)
    say(f"{len(good) - there} copied, {there} were there already, {len(failed)} failed: {target}")
    if kept:
        say(f"The salt of the ids: {salt_file(target)}. Keep it here: whoever has it can test ids against names.")
    return len(failed)


def _key(case: Case, salt: str) -> str:
    parts = []
    for path in (*case.images, *([case.label] if case.label is not None else [])):
        info = path.stat() if path.is_file() else None
        parts.append(f"{path}|{info.st_size}|{info.st_mtime_ns}" if info is not None else f"{path}|none")
    return digest("\n".join(parts), salt, 32)


def _run(jobs: list[Job], overwrite: bool, workers: int) -> Iterator[Outcome]:
    todo = []
    for job in jobs:
        known = None if overwrite else known_outcome_at(job.out, job.id, job.key)
        if known is not None:
            yield known
        else:
            todo.append((job,))
    for _, outcome in track(run_jobs(copy_case, todo, min(workers, len(todo)), "copies"), len(todo), "copying"):
        yield outcome


def copy_case(job: Job) -> Outcome:
    """Copy one case: voxels, scaling and affine, nothing else of the headers."""
    sources = job.case.images[:1] if job.case.stacked else job.case.images
    images = tuple(f"images/{job.id}_{n:04d}.nii.gz" for n in range(len(sources)))
    label = f"labels/{job.id}.nii.gz" if job.case.label is not None else None
    try:
        for source, name in zip(sources, images, strict=True):
            save_nifti(blank(source), job.out / name)
        if label is not None and job.case.label is not None:
            save_nifti(blank(job.case.label), job.out / label)
    except UNREADABLE as error:  # the text would name the file, and so maybe a person
        return Outcome(job.id, job.patient, "failed", problem=f"cannot be read ({type(error).__name__})")
    made = Outcome(job.id, job.patient, "converted", images, label, key=job.key)
    write_json(record_path(job.out, job.id), made)
    return made


def blank(path: Path) -> nib.Nifti1Image:
    """A NIfTI file's stored voxels, scaling, affine and units under a new header. Raises what a damaged file raises."""
    image = nib.load(path)
    stored = np.asanyarray(image.dataobj.get_unscaled())
    slope, offset = image.dataobj.slope, image.dataobj.inter
    made = nib.Nifti1Image(stored, image.affine)
    made.header.set_data_dtype(stored.dtype)
    made.header.set_slope_inter(slope, offset)
    made.header.set_xyzt_units("mm")
    for name in ("sform", "qform"):
        form, code = getattr(image, f"get_{name}")(coded=True)
        getattr(made, f"set_{name}")(form if code else None, int(code))
    return made
