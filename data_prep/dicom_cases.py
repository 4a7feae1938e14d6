"""Which series of a study becomes a case, by a stated rule, and which SEG or RTSTRUCT belongs to it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.dicom_labels import LabelObject, plain
from data_prep.dicom_match import objects_of
from data_prep.dicom_paths import where
from data_prep.identity import telling
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
        """Whether any label is known of the case."""
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


def structure_names(
    objects: Sequence[LabelObject],
    asked: Sequence[str] | None,
    earlier: Sequence[str],
    words: frozenset[str] = frozenset(),
) -> list[str]:
    """The structures of a cohort in order: those asked for, else the ``earlier`` ones and all others by name.

    Raises SettingError for more than `MAX_STRUCTURES`, for names that no object has, and for names that hold one of
    ``words``, which are those of all patients' names and ids; of these only their place is told.
    """
    counts = Counter(key for one in objects for key in {plain(name) for name in one.names.values()})
    spelled = {plain(n): re.sub(r"\s+", " ", n).strip() for one in reversed(objects) for n in one.names.values()}
    secret = {key for key in counts if telling(key, words)}
    listed = _listed(Counter({spelled[key]: c for key, c in counts.items() if key not in secret}))
    if asked is not None:
        _refuse_telling(asked, objects, words, listed)
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
        names = [*earlier, *(spelled[n] for n in sorted(counts) if n not in {plain(e) for e in earlier})]
    _refuse_telling(names, objects, words, listed)
    if len(names) > MAX_STRUCTURES:
        raise SettingError(
            f"{len(names)} structures; at most {MAX_STRUCTURES} fit one label map. Choose with structures=[liver,...]; "
            f"there are: {listed}"
        )
    return names


def _refuse_telling(names: Sequence[str], objects: Sequence[LabelObject], words: frozenset[str], listed: str) -> None:
    """Raises SettingError for ``names`` that hold one of ``words``: where they stand, and nothing of them."""
    keys = {plain(name) for name in names if telling(name, words)}
    if not keys:
        return
    at = [
        f"number {n} of label object {one.place}" for one in objects for n, v in one.names.items() if plain(v) in keys
    ]
    at = at or [f"number {n} of those named" for n, name in enumerate(names, 1) if plain(name) in keys]
    shown = ", ".join(at[:10]) + (f" and {len(at) - 10} more" if len(at) > 10 else "")
    one = len(at) == 1
    raise SettingError(
        f"structure{'' if one else 's'} {shown} {'holds' if one else 'hold'} a word of a patient's name or id; rename "
        f"{'it' if one else 'them'} or choose others with structures=[...]; there are: {listed or 'no others'}"
    )


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


def case_table(
    series: Sequence[Series], salt: str, own: Mapping[str, str] | None
) -> dict[tuple[str, str], tuple[str, str]]:
    """(Owner, study) -> (case id, patient code)."""
    return case_ids([(*_study(s), s.patient) for s in series], salt, own)


def _study(series: Series) -> tuple[str, str]:
    """Whose study: two patients may have one StudyInstanceUID. Without UIDs a folder is a study."""
    return series.owner, series.study or series.uid or series.files[0].parent.name


def choose_cases(
    found: Found,
    series: Sequence[Series],
    objects: Sequence[LabelObject],
    files: Mapping[str, Path] | None,
    pattern: str | None,
    channels: Mapping[str, str] | None,
    modality: str | None,
    table: Mapping[tuple[str, str], tuple[str, str]],
    own: Mapping[str, str] | None = None,
    root: Path | None = None,
    damaged: Sequence[Path] = (),
) -> None:
    """Fill ``found`` with a case a study of ``series`` and with what is left out. ``files`` are label maps by name, which may
    be the case's id, the patient's ``own`` one, or a folder of the series below ``root``; ``damaged`` are unreadable files.
    """
    hurt = Counter(path.parent for path in damaged)
    studies: dict[tuple[str, str], list[Series]] = defaultdict(list)
    for one in series:
        studies[_study(one)].append(one)
    known = frozenset(s.uid for s in series)
    missing = [members for study, members in studies.items() if study not in table]
    if missing:
        found.problems.append(
            f"{len(missing)} studies are of patients that the table of ids does not have; they are left out: "
            f"{where([one for members in missing for one in members])}"
        )
    for study, members in studies.items():
        if study not in table:
            continue
        case_id, patient = table[study]
        fitting = [s for s in members if modality is None or s.modality == modality]
        matched = {s.id: objects_of(s, objects, known) for s in fitting}
        file = {s.id: _file_of(s, files, (case_id, (own or {}).get(s.patient, case_id)), root) for s in fitting}
        pairs = [(s, bool(matched[s.id][0]) or file[s.id] is not None) for s in fitting]
        try:
            if not pairs:
                raise DataError(f"none of its series is {modality}")
            picked, lines = [], []
            for wish in list(channels.values()) if channels is not None else [pattern]:
                one, line = choose(pairs, wish)
                picked.append(one)
                lines += [f"{case_id}: {line}"] if line else []
            if len({s.id for s in picked}) < len(picked):
                raise DataError("two channels fit the same series; make their patterns more telling")
        except DataError as error:
            found.left_out.append({"case": case_id, "why": f"{where(members)}: {error}"})
            continue
        first = picked[0].id
        notes = list(matched[first][1])
        if not {s.id: has for s, has in pairs}[first] and any(has for _, has in pairs):
            notes.append("a label of this study belongs to another series than the (first) one chosen")
        if not picked[0].patient:
            notes.append("no PatientID: the study counts as a patient of its own")
        lost = sum(hurt[folder] for folder in {path.parent for s in picked for path in s.files})
        if lost:
            notes.append(
                f"{lost} {'file' if lost == 1 else 'files'} in the folder of its series cannot be read; if they are slices at "
                "an end, the volume is shorter than the scan"
            )
        found.choices += lines
        found.wanted.append(
            Wanted(case_id, patient, tuple(picked), tuple(matched[first][0]), file[first], tuple(notes))
        )
    _one_study_a_file(found, files)
    used = {id(one) for w in found.wanted for one in w.objects}
    idle = [str(one.place) for one in objects if id(one) not in used]
    if idle:
        shown = ", ".join(idle[:20]) + (f" and {len(idle) - 20} more" if len(idle) > 20 else "")
        found.notes.append(f"label objects of the tree that belong to no chosen series: number {shown}")


def _file_of(series: Series, files: Mapping[str, Path] | None, ids: Sequence[str], root: Path | None) -> Path | None:
    if files is None:
        return None
    parents = series.files[0].parents
    folders = [p.name for p in parents if root is not None and p != root and p.is_relative_to(root)]
    return next((files[name] for name in (*ids, *folders) if name in files), None)


def _one_study_a_file(found: Found, files: Mapping[str, Path] | None) -> None:
    """A label file whose name fits several studies is used for none."""
    claimed = Counter(w.label_file for w in found.wanted if w.label_file is not None)
    for place, w in enumerate(found.wanted):
        if w.label_file is not None and claimed[w.label_file] > 1:
            text = (
                f"{w.id}: the name of its label file fits {claimed[w.label_file]} studies; name it as the case "
                f"({where(w.channels)})"
            )
            found.problems.append(text)
            found.wanted[place] = replace(w, label_file=None)
    if files is not None and len(files) > len(claimed):
        found.notes.append(f"{len(files) - len(claimed)} files of labels=FOLDER belong to no case here")
