"""A tree of DICOM files as a cohort: series chosen, labels matched, NIfTI written without anybody's identity."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from data_prep.cohort_file import cohort as cohort_from_file
from data_prep.cohort_file import write_cohort
from data_prep.convert_settings import keep_cases, same_settings, write_settings
from data_prep.dicom_cases import RULE, Found, Wanted, case_table, choose_cases, structure_names
from data_prep.dicom_convert import Job, Outcome, convert_case, known_outcome, source_key
from data_prep.dicom_labels import LabelObject, plain, read_object
from data_prep.dicom_match import strangers
from data_prep.dicom_paths import damaged_files, number, paths_file, where, write_paths
from data_prep.files import dataset_root, label_table
from data_prep.identity import words_of
from data_prep.pseudonyms import check_own_ids, keep_salt, people_of, read_ids, salt_file, salt_for
from segspeed.data.dicom_files import digest, read_tree
from segspeed.data.files import is_volume, stem
from segspeed.data.labels import regions_of
from segspeed.data.pool import run_jobs
from segspeed.jsonio import write_json
from segspeed.record.live import say, track
from segspeed.speed.cpus import available_cpus
from segspeed.types import Case, Cohort, DataError, SettingError

SHOWN = 20  # lines of one kind that are printed; the report has all
AT_ONCE = 4  # processes, since each holds a few copies of a volume


def dicom(
    root: str,
    out: str,
    series: str | None = None,
    channels: Mapping[str, str] | None = None,
    modality: str | None = None,
    structures: Sequence[str] | None = None,
    labels: str | None = None,
    class_names: Mapping[str, object] | None = None,
    ids: str | None = None,
    salt: str | None = None,
    resample: bool = False,
    workers: int | None = None,
) -> Cohort:
    """The cases of a DICOM tree, of which `convert_tree` writes to ``out`` what is not there yet.

    Cases that cannot be converted are told and left out. Raises DataError when none is left.
    """
    convert_tree(
        root, out, series=series, channels=channels, modality=modality, structures=structures, labels=labels,
        class_names=class_names, ids=ids, salt=salt, resample=resample, workers=workers,
    )  # fmt: skip
    return cohort_from_file(out)


def convert_tree(
    root: str,
    out: str,
    *,
    series: str | None = None,
    channels: Mapping[str, str] | None = None,
    modality: str | None = None,
    structures: Sequence[str] | None = None,
    labels: str | None = None,
    class_names: Mapping[str, object] | None = None,
    ids: str | None = None,
    salt: str | None = None,
    resample: bool = False,
    unlabelled: bool = False,
    overwrite: bool = False,
    paths: bool = False,
    workers: int | None = None,
) -> int:
    """Convert the studies under ``root`` into ``out`` and return how many things failed; report.json names each.

    One case a study: the series chosen by `RULE` among those whose description fits ``series``, or one series a channel for
    ``channels`` = {name: pattern}. With ``paths`` a table of the sources is written beside ``out``. Raises SettingError for
    settings that cannot work or that ``out`` was not made with, where a call would drop cases that ``out`` holds, and where a
    name or id that would be written holds a patient's; DataError when there is nothing to convert.
    """
    folder, target = dataset_root(root), Path(out).expanduser().absolute()
    if target.resolve() == folder.resolve():
        raise SettingError("out is the folder that is read (root); give another")
    if series is not None and channels is not None:
        raise SettingError("give series=PATTERN for one channel, or channels={NAME:PATTERN,...}; not both")
    own = read_ids(Path(ids).expanduser()) if ids is not None else None
    key_text, kept_salt = salt_for(target, salt)
    settings = {
        "series": series, "channels": channels and list(channels.items()), "modality": modality,
        "structures": structures and list(structures), "labels": labels, "resample": resample,
    }  # fmt: skip
    earlier = same_settings(target, settings, key_text, overwrite)
    tree = read_tree(folder, key_text)
    if not tree.series:
        raise DataError("there is no DICOM series of at least 3 slices under root. " + "; ".join(tree.notes))
    if paths:  # already here: what is refused below is to be found too
        write_paths(target, tree, {})
    found = Found(notes=list(tree.notes))
    if tree.damaged:
        found.problems.append(damaged_files(tree))
    objects = list(_objects(tree.objects, found)) if labels is None else []
    found.problems += strangers(objects, tree.series)
    words = words_of(tree.people.union(*(one.person for one in objects)))
    if own is not None:
        check_own_ids(own, people_of(tree.series))
    if structures is not None and objects:
        structure_names(objects, structures, earlier, words)
        asked = set(map(plain, structures))  # an object without any of them is no label
        objects = [one for one in objects if asked & set(map(plain, one.names.values()))]
    files = _label_files(labels)
    table = case_table(tree.series, key_text, own)
    choose_cases(
        found,
        tree.series,
        objects,
        files,
        series,
        channels,
        modality,
        table,
        own=own,
        root=folder,
        damaged=tree.damaged,
    )
    kept = [w for w in found.wanted if w.labelled or unlabelled]
    for w in found.wanted:
        if w not in kept:
            why = f"{where(w.channels)}: no label; unlabelled=true converts it all the same"
            found.left_out.append({"case": w.id, "why": why})
    names = _channel_names(kept, channels)
    if not kept:
        reasons = [
            *found.problems,
            *(f"{one['case']}: {one['why']}" for one in found.left_out if "no label" not in one["why"]),
        ]
        raise DataError(
            f"none of {number(len(found.wanted), 'study', 'studies')} has a label (DICOM SEG or RTSTRUCT of the chosen series, "
            "or a file in labels=FOLDER named as the case or as a folder below root that its series lies in); unlabelled=true "
            "converts images alone" + "".join(f". {text}" for text in reasons[:SHOWN])
        )
    used = list({id(one): one for w in kept for one in w.objects}.values())
    chosen = structure_names(used, structures, earlier, words) if used else list(structures or ())
    why = (
        f" ({number(len(found.left_out), 'study', 'studies')} of root left out: {found.left_out[0]['why']})"
        if found.left_out
        else ""
    )
    dropped = keep_cases(target, {w.id: w.patient for w in kept}, overwrite, why)
    if kept_salt:
        keep_salt(target, key_text)
    if paths:
        write_paths(target, tree, {s.place: w.id for w in kept for s in w.channels})
    write_settings(target, settings, key_text, chosen)
    stamp = digest(json.dumps(settings, sort_keys=True), key_text, 32)
    jobs = [Job(w, target, tuple(chosen), resample, source_key(w, stamp, key_text)) for w in kept]
    if dropped:
        say(dropped)
        found.notes.append(dropped)
    say(f"{number(len(kept), 'case')}: {RULE}" + (f"; structures {', '.join(chosen)}" if chosen else ""))
    _tell(found.choices)
    outcomes = list(_run(jobs, min(AT_ONCE, available_cpus()) if workers is None else workers))
    good = [o for o in outcomes if o.status != "failed"]
    if good:
        write_cohort(target, _cohort(target.name, good, names, chosen, class_names))
    failed = [o for o in outcomes if o.status == "failed"]
    at = {w.id: where(w.channels) for w in kept}
    problems = [*found.problems, *(f"{o.id}: {o.problem} ({at[o.id]})" for o in failed)]
    write_json(
        target / "report.json",
        {
            "rule": RULE,
            "structures": chosen,
            "cases": [{k: v for k, v in asdict(o).items() if k != "key"} for o in sorted(outcomes, key=lambda o: o.id)],
            "left_out": found.left_out,
            "choices": found.choices,
            "notes": found.notes,
            "problems": problems,
        },
    )
    _tell([f"failed: {text}" for text in problems])
    there = sum(o.status == "there" for o in outcomes)
    say(
        f"{len(good) - there} converted, {there} were there already, {len(found.left_out)} left out, {len(problems)} failed; "
        f"{sum(bool(o.notes) for o in good)} with notes. All of it: {target / 'report.json'}"
    )
    if paths:
        say(f"Where the sources lie: {paths_file(target)}. Keep it here: paths may hold names.")
    elif problems:
        say("paths=true writes where each series, label object and damaged file lies, into a table beside out")
    if kept_salt:
        say(f"The salt of the ids: {salt_file(target)}. Keep it here: whoever has it can test ids against names.")
    if not good:
        raise DataError("no case could be converted; report.json in out has the reasons")
    return len(problems)


def _tell(lines: Sequence[str]) -> None:
    for line in lines[:SHOWN]:
        say(line)
    if len(lines) > SHOWN:
        say(f"and {len(lines) - SHOWN} more, see report.json")


def _run(jobs: Sequence[Job], workers: int) -> Iterator[Outcome]:
    todo = []
    for job in jobs:
        known = known_outcome(job)
        if known is not None:
            yield known
        else:
            todo.append((job,))
    for _, outcome in track(run_jobs(convert_case, todo, min(workers, len(todo)), "converts"), len(todo), "converting"):
        yield outcome


def _objects(paths: Sequence[Path], found: Found) -> Iterator[LabelObject]:
    for place, path in enumerate(paths, start=1):
        try:
            yield read_object(path, place)
        except DataError as error:
            found.problems.append(f"label object {place} of the tree: {error}")


def _label_files(labels: str | None) -> dict[str, Path] | None:
    if labels is None:
        return None
    folder = Path(labels).expanduser()
    if not folder.is_dir():
        raise SettingError("labels=FOLDER does not exist or is no folder")
    return {stem(p): p for p in sorted(folder.iterdir()) if p.is_file() and is_volume(p)}


def _channel_names(wanted: Sequence[Wanted], channels: Mapping[str, str] | None) -> tuple[str, ...]:
    if channels is not None:
        return tuple(channels)
    counts = Counter(w.channels[0].modality or "image" for w in wanted)
    if len(counts) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        raise SettingError(
            f"the chosen series are of several modalities: {listed}. Choose one: modality={counts.most_common(1)[0][0]}"
        )
    return tuple(counts)


def _cohort(
    name: str,
    outcomes: Sequence[Outcome],
    channels: Sequence[str],
    structures: Sequence[str],
    class_names: Mapping[str, object] | None,
) -> Cohort:
    """The cohort of converted cases: classes, and regions where structures overlap. Paths are relative to its folder."""
    values = sorted({v for o in outcomes for v in o.values})
    if structures:
        named = {s: tuple(v for v in values if v >> n & 1) or (1 << n,) for n, s in enumerate(structures)}
    elif class_names is not None:
        table = label_table(class_names, "class_names")
        named = {target: table.values(target) for target in table.targets}
    else:
        named = {f"class_{v}": (v,) for v in values}
    classes, regions = regions_of(named)
    cases = tuple(
        Case(o.id, tuple(map(Path, o.images)), Path(o.label) if o.label else None, o.patient)
        for o in sorted(outcomes, key=lambda o: o.id)
    )
    return Cohort(name, cases, classes, tuple(channels), regions=regions)
