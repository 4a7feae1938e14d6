"""Which series of a study becomes a case, by a stated rule, and which SEG or RTSTRUCT belongs to it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.dicom_labels import LabelObject, plain
from data_prep.pseudonyms import case_ids
from segspeed.data.dicom_files import Series
from segspeed.types import DataError, SettingError

RULE = "of each study the series that has a label, then the one with the most slices"
MAX_STRUCTURES = 16


@dataclass(frozen=True)
class Wanted:
    """One case to be converted. What identifies the patient stays out of its ``repr``."""

    id: str
    patient: str  # code
    channels: tuple[Series, ...] = field(repr=False)
    objects: tuple[LabelObject, ...] = field(default=(), repr=False)
    label_file: Path | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        return bool(self.objects) or self.label_file is not None


@dataclass
class Found:
    """What a tree holds, turned into cases; and what does not become one."""

    wanted: list[Wanted] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)


def matches(series: Series, pattern: str) -> bool:
    """Whether a description holds ``pattern`` as text or as a regular expression, in any case of letters."""
    if pattern.casefold() in series.description.casefold():
        return True
    try:
        return re.search(pattern, series.description, re.IGNORECASE) is not None
    except re.error:
        return False  # text with brackets that is no expression


def objects_of(
    series: Series, objects: Sequence[LabelObject], known: frozenset[str]
) -> tuple[list[LabelObject], list[str]]:
    """SEG and RTSTRUCT of a series: those that refer to it; those that refer to no series that is there (``known``: all
    SeriesInstanceUIDs) belong to it if they share its frame of reference."""
    found, notes = [], []
    images = {f.uid for f in series.frames}
    for one in objects:
        if one.study != series.study and not (one.images & images):
            continue
        if series.uid in one.series or one.images & images:
            if not one.images or one.images & images:  # of a series that holds several volumes
                found.append(one)
        elif not known.intersection(one.series) and series.reference and series.reference in one.references:
            found.append(one)
            notes.append(f"a {one.kind} names no series that is here; it was matched by its frame of reference")
    return found, notes


def choose(candidates: Sequence[tuple[Series, bool]], pattern: str | None) -> tuple[Series, str | None]:
    """The series of a study by `RULE`, of pairs (series, has a label), and a line where there was a choice.

    Raises DataError when no description fits ``pattern``.
    """
    fitting = [pair for pair in candidates if pattern is None or matches(pair[0], pattern)]
    if not fitting:
        raise DataError(f"none of its {len(candidates)} series has a description that fits the pattern given")
    fitting.sort(key=lambda pair: (not pair[1], -len(pair[0].frames), pair[0].id))
    series, labelled = fitting[0]
    if len(candidates) == 1:
        return series, None
    return series, (
        f"{series.id} ({series.modality}, {len(series.frames)} slices{', labelled' if labelled else ''}) chosen of "
        f"{len(candidates)} series" + (f", {len(fitting)} of them fit the pattern" if pattern is not None else "")
    )


def structure_names(objects: Sequence[LabelObject], asked: Sequence[str] | None, earlier: Sequence[str]) -> list[str]:
    """The structures of a cohort in order: those asked for, else the ``earlier`` ones and all others by name.

    Raises SettingError for more than `MAX_STRUCTURES`, for names that no object has, and for names that hold a patient's.
    """
    counts = Counter(plain(name) for one in objects for name in set(one.names.values()) if plain(name))
    person = {word for one in objects for word in one.person}
    telling = [n for n in counts if person & set(re.findall(r"\w{4,}", n))]
    listed = _listed(Counter({n: c for n, c in counts.items() if n not in telling}))
    if asked is not None:
        twice = [n for n, c in Counter(map(plain, asked)).items() if c > 1]
        if twice:
            raise SettingError(f"structures names {twice[0]} twice")
        unknown = [n for n in asked if plain(n) not in counts]
        if unknown:
            raise SettingError(
                f"structures names {', '.join(unknown)}, which no SEG or RTSTRUCT here has; there are: {listed}"
            )
        names = list(asked)
    else:
        if telling:
            raise SettingError(
                f"{len(telling)} structure names hold a word of a patient's name or id; choose with structures=[liver,...]"
            )
        spelled = {plain(n): re.sub(r"\s+", " ", n).strip() for one in objects for n in one.names.values()}
        names = [*earlier, *(spelled[n] for n in sorted(counts) if n not in {plain(e) for e in earlier})]
    if len(names) > MAX_STRUCTURES:
        raise SettingError(
            f"{len(names)} structures; at most {MAX_STRUCTURES} fit one label map. Choose with structures=[liver,...]; "
            f"there are: {listed}"
        )
    return names


def _listed(counts: Counter[str]) -> str:
    shown = ", ".join(f"{name} ({count})" for name, count in counts.most_common(40))
    return shown + (f" and {len(counts) - 40} more" if len(counts) > 40 else "")


def numbers_for(objects: Sequence[LabelObject], structures: Sequence[str]) -> Mapping[str, tuple[LabelObject, int]]:
    """Structure -> (object, its number there). Raises DataError where two of a case's objects or segments share a name."""
    found: dict[str, tuple[LabelObject, int]] = {}
    for name in structures:
        having = [(one, n) for one in objects for n, label in one.names.items() if plain(label) == plain(name)]
        if len(having) > 1:
            raise DataError(
                f"the structure {name} is drawn {len(having)} times for this series (versions, or two readers); keep one"
            )
        if having:
            found[name] = having[0]
    return found


def case_table(series: Sequence[Series], salt: str, own: Mapping[str, str] | None) -> dict[str, tuple[str, str]]:
    """Study -> (case id, patient code)."""
    return case_ids({_study(s): s.patient for s in series}, salt, own)


def _study(series: Series) -> str:
    return series.study or series.uid


def choose_cases(
    found: Found,
    series: Sequence[Series],
    objects: Sequence[LabelObject],
    files: Mapping[str, Path] | None,
    pattern: str | None,
    channels: Mapping[str, str] | None,
    modality: str | None,
    table: Mapping[str, tuple[str, str]],
) -> None:
    studies: dict[str, list[Series]] = defaultdict(list)
    for one in series:
        studies[_study(one)].append(one)
    known = frozenset(s.uid for s in series)
    missing = sum(study not in table for study in studies)
    if missing:
        found.problems.append(
            f"{missing} studies are of patients that the table of ids does not have; they are left out"
        )
    for study, members in studies.items():
        if study not in table:
            continue
        case_id, patient = table[study]
        fitting = [s for s in members if modality is None or s.modality == modality]
        matched = {s.id: objects_of(s, objects, known) for s in fitting}
        file = {s.id: _file_of(s, files, case_id) for s in fitting}
        pairs = [(s, bool(matched[s.id][0]) or file[s.id] is not None) for s in fitting]
        try:
            if not pairs:
                raise DataError(f"none of its {len(members)} series is {modality}")
            picked, lines = [], []
            for wish in list(channels.values()) if channels is not None else [pattern]:
                one, line = choose(pairs, wish)
                picked.append(one)
                lines += [f"{case_id}: {line}"] if line else []
            if len({s.id for s in picked}) < len(picked):
                raise DataError("two channels fit the same series; make their patterns more telling")
        except DataError as error:
            found.left_out.append({"case": case_id, "why": str(error)})
            continue
        first = picked[0].id
        notes = list(matched[first][1])
        if not {s.id: has for s, has in pairs}[first] and any(has for _, has in pairs):
            notes.append("a label of this study belongs to another series than the (first) one chosen")
        if not picked[0].patient:
            notes.append("no PatientID: the study counts as a patient of its own")
        found.choices += lines
        found.wanted.append(
            Wanted(case_id, patient, tuple(picked), tuple(matched[first][0]), file[first], tuple(notes))
        )
    _one_study_a_file(found, files)


def _file_of(series: Series, files: Mapping[str, Path] | None, case_id: str) -> Path | None:
    if files is None:
        return None
    own = case_id.rsplit("_s", 1)[0]
    folders = [parent.name for parent in series.files[0].parents]
    return next((files[name] for name in (case_id, own, *folders) if name in files), None)


def _one_study_a_file(found: Found, files: Mapping[str, Path] | None) -> None:
    """A label file whose name fits several studies is used for none."""
    claimed = Counter(w.label_file for w in found.wanted if w.label_file is not None)
    for place, w in enumerate(found.wanted):
        if w.label_file is not None and claimed[w.label_file] > 1:
            text = f"{w.id}: the name of its label file fits {claimed[w.label_file]} studies; name it as the case"
            found.problems.append(text)
            found.wanted[place] = replace(w, label_file=None)
    if files is not None and len(files) > len(claimed):
        found.notes.append(f"{len(files) - len(claimed)} files of labels=FOLDER belong to no case here")
