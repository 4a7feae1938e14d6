"""Folds: by patient, even in sites and rare classes, reproducible, or as a file prescribes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from segspeed.types import Case, CaseFacts, Cohort, DataError, SettingError, Split

NO_FACTS: Mapping[str, CaseFacts] = {}


def draw_splits(
    cases: Sequence[Case], folds: int, seed: int, facts: Mapping[str, CaseFacts] = NO_FACTS
) -> tuple[Split, ...]:
    """``folds`` splits in which all cases of a patient are on one side. A function of ids, patients, sites, the classes
    that ``facts`` finds in each case, and the seed.

    Sites, and classes that not every patient has, are spread evenly: the rarest first, each patient into the fold that
    lacks it most (iterative stratification, Sechidis et al. 2011). Raises DataError when there are fewer patients than folds.
    """
    patients = sorted({c.patient for c in cases})
    if len(patients) < 2:
        raise DataError(
            f"{len(cases)} case(s) of {len(patients)} patient(s): validation needs patients the model has not seen, "
            "so at least 2. To try the mechanics on one case use experiment=overfit with a split file"
        )
    if len(patients) < folds:
        raise DataError(f"{len(patients)} patients cannot be split into {folds} folds; set data.folds={len(patients)}")
    order = [patients[p] for p in np.random.default_rng(seed).permutation(len(patients))]
    fold_of = _stratified(order, _traits(cases, facts), folds)
    return tuple(
        Split(
            train=tuple(c.id for c in cases if fold_of[c.patient] != fold),
            val=tuple(c.id for c in cases if fold_of[c.patient] == fold),
        )
        for fold in range(folds)
    )


def _traits(cases: Sequence[Case], facts: Mapping[str, CaseFacts]) -> dict[str, set[str]]:
    """What tells patients apart: their site, and the classes that some patients have and others lack."""
    traits: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        traits[case.patient] |= {f"site {case.site}"} if case.site else set()
        found = facts.get(case.id)
        traits[case.patient] |= {f"class {n}" for n, voxels in found.class_voxels.items() if voxels} if found else set()
    common = set.intersection(*traits.values())
    return {patient: own - common for patient, own in traits.items()}


def _stratified(order: Sequence[str], traits: Mapping[str, Collection[str]], folds: int) -> dict[str, int]:
    """Fold of each patient. Without traits patients are dealt out in turn."""
    room = [len(order) / folds] * folds
    counted = Counter(t for patient in order for t in traits[patient])
    wanted = {t: [n / folds] * folds for t, n in counted.items()}
    fold_of: dict[str, int] = {}

    def place(patient: str, needs: Sequence[float]) -> None:
        with_room = [f for f in range(folds) if room[f] > 1e-9]  # folds of one size, whatever the traits want
        fold = min(with_room, key=lambda f: (-round(needs[f], 9), -round(room[f], 9), f))
        fold_of[patient] = fold
        room[fold] -= 1
        for t in traits[patient]:
            wanted[t][fold] -= 1

    for trait, _ in sorted(counted.items(), key=lambda pair: (pair[1], pair[0])):
        for patient in order:
            if patient not in fold_of and trait in traits[patient]:
                place(patient, wanted[trait])
    for patient in order:
        if patient not in fold_of:
            place(patient, room)
    return fold_of


def read_splits(path: Path) -> tuple[Split, ...]:
    """A JSON list of {"train": [ids], "val": [ids]} (nnU-Net's splits_final.json). Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        if any(not isinstance(s[side], list) for s in found for side in ("train", "val")):
            raise ValueError("train and val must be lists")
        splits = tuple(Split(tuple(map(str, s["train"])), tuple(map(str, s["val"]))) for s in found)
        if not splits:
            raise ValueError("an empty list")
        return splits
    except OSError as error:
        raise DataError(f"the split file {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f'{path} is no split file; it must be a JSON list of {{"train": [case ids], "val": [case ids]}}'
        ) from error


def choose_split(
    cohort: Cohort,
    *,
    fold: int,
    folds: int,
    seed: int,
    splits: str,
    excluded: Sequence[str] = (),
    facts: Mapping[str, CaseFacts] = NO_FACTS,
    accept: Collection[str] = (),
) -> Split:
    """The split of ``fold``. ``splits`` is "auto" (the cohort's own if it has some, else drawn), "draw" or a file.

    ``excluded`` cases drop out of a prescribed split; other ids that the cohort does not hold are an error.
    Raises DataError when an id is unknown, a side is empty, or a patient or an image is on both sides (unless ``accept``
    holds "patient-overlap" or "duplicate-overlap").
    """
    if splits == "auto":
        found = cohort.splits or draw_splits(cohort.cases, folds, seed, facts)
    elif splits == "draw":
        found = draw_splits(cohort.cases, folds, seed, facts)
    elif not Path(splits).is_file():
        raise SettingError(f"the split file does not exist: {splits} (data.splits)")
    else:
        found = read_splits(Path(splits))
    if fold >= len(found):
        raise SettingError(f"data.fold={fold}, but there are {len(found)} folds (0 to {len(found) - 1})")
    return check_split(cohort, found[fold], excluded, facts, accept)


def check_split(
    cohort: Cohort,
    split: Split,
    excluded: Sequence[str] = (),
    facts: Mapping[str, CaseFacts] = NO_FACTS,
    accept: Collection[str] = (),
) -> Split:
    """``split`` without repeats, if it makes sense for the cohort. Raises DataError."""
    known = {c.id: c for c in cohort.cases}
    unknown = [i for i in (*split.train, *split.val) if i not in known]
    unknown = [i for i in unknown if i not in set(excluded)]
    if unknown:
        raise DataError(
            f"the split names cases the cohort does not have: {', '.join(unknown[:10])}. Correct the split file, "
            "or draw new folds with data.splits=draw"
        )
    train = tuple(dict.fromkeys(i for i in split.train if i in known))
    val = tuple(dict.fromkeys(i for i in split.val if i in known))
    if not train or not val:
        raise DataError(f"the split leaves {len(train)} cases to train on and {len(val)} to validate; both need one")
    shared = {known[i].patient for i in train} & {known[i].patient for i in val}
    if shared and "patient-overlap" not in accept:
        both = sorted(i for i in {*train, *val} if known[i].patient in shared)
        raise DataError(
            f"{len(shared)} patient(s) are in training and in validation, which makes the Dice a lie: cases "
            f"{', '.join(both[:10])}. Correct the split file or the patient column (or data.accept=[patient-overlap])"
        )
    pixels = {i: facts[i].pixels for i in (*train, *val) if i in facts and facts[i].pixels}
    copies = {pixels[i] for i in train if i in pixels} & {pixels[i] for i in val if i in pixels}
    if copies and "duplicate-overlap" not in accept:
        same = sorted(i for i, digest in pixels.items() if digest in copies)
        raise DataError(
            f"the same image is in training and in validation, which makes the Dice a lie: cases {', '.join(same[:10])}. Give "
            "copies one patient (a patient column, data.patient_pattern), leave one out with data.exclude, or accept it with "
            "data.accept=[duplicate-overlap]"
        )
    return Split(train, val)
