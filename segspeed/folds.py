"""The runs of a cross-validation: which belong together, and which cases each of them has not seen."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from segspeed.data.split import read_splits
from segspeed.data.wildcards import as_on_disk, is_pattern
from segspeed.record.run_folder import RunFolder, differing_keys
from segspeed.trained import StoredRun, read_run
from segspeed.types import Case, DataError, few

LISTED = 10  # names in a message
MAY_DIFFER = ("data.fold", "seed")  # from one fold's run to the next


@dataclass(frozen=True)
class Fold:
    """One run, the number of its fold, and its validation cases."""

    name: str
    run: StoredRun
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Folds:
    """A cross-validation in the order of its folds. ``wanted`` is how many folds the data has (None where nobody knows any
    more), ``missing`` names those without a run, ``unscored`` the cases that no run holds out; ``notes`` is what else to know."""

    each: tuple[Fold, ...]
    wanted: int | None
    missing: tuple[str, ...]
    unscored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """A heading for the report."""
        of = f" of {self.wanted}" if self.missing else ""
        cohort = self.each[0].run.cohort.name
        return f"{cohort}: cross-validation over {len(self.each)}{of} folds"

    @property
    def told(self) -> str:
        """What is not in the figures; "" where every case is."""
        missing = f"no run of fold {', '.join(self.missing)} (of {self.wanted})" if self.missing else ""
        lost = (
            f"{len(self.unscored)} cases that no run holds out: {few(self.unscored, LISTED)}" if self.unscored else ""
        )
        return "; ".join(text for text in (missing, lost) if text)

    @property
    def folder_name(self) -> str:
        """A folder for the report, from what the names of the runs have in common."""
        common = os.path.commonprefix([f.run.folder.resolve().name for f in self.each]).rstrip("_-. ")
        return f"cross_validation_{common}" if common else "cross_validation"


def find_runs(named: str | Sequence[str]) -> list[Path]:
    """Run folders by name, or those that a glob matches (files are passed over). Raises DataError where there is none, and
    where one is named twice."""
    found: list[Path] = []
    for text in [named] if isinstance(named, str) else named:
        if not is_pattern(text):
            found.append(as_on_disk(Path(os.path.expanduser(text))))
            continue
        matched = sorted(Path(p) for p in glob.glob(os.path.expanduser(text), recursive=True) if os.path.isdir(p))
        if not matched:
            raise DataError(f"runs={text} matches no folder; runs lie in <run.root>/<cohort>/<run.name>")
        found += matched
    real = [p.resolve() for p in found]
    twice = sorted({str(p) for p in found if real.count(p.resolve()) > 1})
    if twice:
        raise DataError(f"runs names a folder twice: {', '.join(twice)}")
    return found


def read_folds(folders: Sequence[Path]) -> Folds:
    """The cross-validation that the runs in ``folders`` make up.

    Raises DataError with everything that keeps them from being one: other classes, channels, cases, files or ways to split;
    a case that two runs hold out, or that the run which would score it was trained on.
    """
    runs = sorted((read_run(folder) for folder in folders), key=lambda run: run.cfg.data.fold)
    digests = [_digests(run.folder) for run in runs]
    problems = [*_strangers(runs), *_other_files(runs, digests), *_held_out_twice(runs)]
    for run, held in zip(runs, digests, strict=True):
        problems += _seen(run, held)
    if problems:
        listed = "\n".join(f"- {p}" for p in problems)
        raise DataError(f"these runs cannot be pooled to one cross-validation:\n{listed}")
    held_out = {case for run in runs for case in run.split.val}
    wanted, have = _wanted(runs[0]), {run.cfg.data.fold for run in runs}
    return Folds(
        each=tuple(Fold(str(run.cfg.data.fold), run, tuple(run.cohort.case(i) for i in run.split.val)) for run in runs),
        wanted=wanted,
        missing=tuple(str(n) for n in range(wanted or 0) if n not in have),
        unscored=tuple(c.id for c in runs[0].cohort.cases if c.id not in held_out),
        notes=tuple(_notes(runs)),
    )


def _digests(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Case -> digest of its files, for "train" and "val", as the run began with them."""
    path = folder / "data.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {side: {str(k): str(v) for k, v in found[side].items()} for side in ("train", "val")}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}); train this fold again") from error


def _strangers(runs: Sequence[StoredRun]) -> list[str]:
    """Runs on other classes, channels or cases than the first, or split in another way."""
    first, found = runs[0], []
    for run in runs[1:]:
        a, b = first.cohort, run.cohort
        different = [
            name
            for name, one, other in (
                ("classes", list(a.labels.items()), list(b.labels.items())),
                ("regions", list(a.regions.items()), list(b.regions.items())),
                ("background values", sorted(a.background), sorted(b.background)),
                ("ignored values", sorted(a.ignore), sorted(b.ignore)),
                ("channels", a.channels, b.channels),
                ("folds of the data's own", a.splits, b.splits),
                ("data.folds", first.cfg.data.folds, run.cfg.data.folds),
                ("data.split_seed", first.cfg.data.split_seed, run.cfg.data.split_seed),
                ("data.splits", first.cfg.data.splits, run.cfg.data.splits),
            )
            if one != other
        ]
        ids, theirs = ({i for part in (r.split.train, r.split.val) for i in part} for r in (first, run))
        if ids != theirs:
            different.append(f"cases ({few(sorted(ids ^ theirs), LISTED)} in one of them only)")
        if different:
            found.append(f"{run.folder} has other {', '.join(different)} than {first.folder}")
    return found


def _other_files(runs: Sequence[StoredRun], digests: Sequence[Mapping[str, Mapping[str, str]]]) -> list[str]:
    """Cases whose image or label changed between two runs."""
    first, found = {**digests[0]["train"], **digests[0]["val"]}, []
    for run, held in zip(runs[1:], digests[1:], strict=True):
        changed = [i for side in held.values() for i, digest in side.items() if first.get(i, digest) != digest]
        if changed:
            found.append(
                f"{run.folder} was trained on other files than {runs[0].folder}: cases {few(sorted(changed), LISTED)}"
            )
    return found


def _held_out_twice(runs: Sequence[StoredRun]) -> list[str]:
    holders: dict[str, list[str]] = {}
    for run in runs:
        for case in run.split.val:
            holders.setdefault(case, []).append(str(run.folder))
    twice: dict[tuple[str, ...], list[str]] = {}
    for case, folders in holders.items():
        if len(folders) > 1:
            twice.setdefault(tuple(folders), []).append(case)
    return [
        f"{' and '.join(folders)} both hold out {few(cases, LISTED)}; each case is scored once, so name one of the runs"
        for folders, cases in twice.items()
    ]


def _seen(run: StoredRun, held: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Cases, or copies of them under another id, that the run which would score them was trained on."""
    trained = {*run.split.train, *held["train"]}
    copies = set(held["train"].values())
    seen = [i for i in run.split.val if i in trained or held["val"].get(i) in copies]
    if not seen:
        return []
    return [f"{run.folder} was trained on {few(seen, LISTED)}, which it would have to score; train this fold again"]


def _wanted(run: StoredRun) -> int | None:
    """How many folds the data of a run has."""
    data = run.cfg.data
    if data.splits == "auto" and run.cohort.splits:
        return len(run.cohort.splits)
    if data.splits in ("auto", "draw"):
        return data.folds
    try:
        return len(read_splits(Path(data.splits)))
    except DataError:
        return None  # the file has gone or changed: the cases that nobody holds out are told all the same


def _notes(runs: Sequence[StoredRun]) -> list[str]:
    notes = []
    unfinished = [str(run.folder) for run in runs if not RunFolder(run.folder).finished]
    if unfinished:
        notes.append(f"not trained to the end: {', '.join(unfinished)}")
    first = runs[0].cfg.model_dump(mode="json", by_alias=True)
    for run in runs[1:]:
        changed = differing_keys(first, run.cfg.model_dump(mode="json", by_alias=True))
        changed = [c for c in changed if c.partition(":")[0] not in MAY_DIFFER]
        if changed:
            notes.append(
                f"{run.folder} was trained with other settings than {runs[0].folder}: {'; '.join(changed[:5])}"
            )
    return notes
