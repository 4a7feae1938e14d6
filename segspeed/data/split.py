"""Folds: by patient, reproducible, or as a file prescribes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segspeed.types import Case, Cohort, DataError, Split


def draw_splits(cases: Sequence[Case], folds: int, seed: int) -> tuple[Split, ...]:
    """``folds`` splits in which all cases of a patient are on one side. A function of ids, patients and seed only.

    Raises DataError when there are fewer patients than folds.
    """
    patients = sorted({c.patient for c in cases})
    if len(patients) < 2:
        raise DataError(
            f"{len(cases)} case(s) of {len(patients)} patient(s): validation needs patients the model has not seen, "
            "so at least 2. To try the mechanics on one case use experiment=overfit with a split file"
        )
    if len(patients) < folds:
        raise DataError(f"{len(patients)} patients cannot be split into {folds} folds; set data.folds={len(patients)}")
    order = np.random.default_rng(seed).permutation(len(patients))
    fold_of = {patients[p]: place % folds for place, p in enumerate(order)}
    return tuple(
        Split(
            train=tuple(c.id for c in cases if fold_of[c.patient] != fold),
            val=tuple(c.id for c in cases if fold_of[c.patient] == fold),
        )
        for fold in range(folds)
    )


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
    cohort: Cohort, *, fold: int, folds: int, seed: int, splits: str, excluded: Sequence[str] = ()
) -> Split:
    """The split of ``fold``. ``splits`` is "auto" (the cohort's own if it has some, else drawn), "draw" or a file.

    ``excluded`` cases drop out of a prescribed split; other ids that the cohort does not hold are an error.
    Raises DataError when an id is unknown, a patient is on both sides, or a side is empty.
    """
    if splits == "auto":
        found = cohort.splits or draw_splits(cohort.cases, folds, seed)
    elif splits == "draw":
        found = draw_splits(cohort.cases, folds, seed)
    else:
        found = read_splits(Path(splits))
    if fold >= len(found):
        raise DataError(f"data.fold={fold}, but there are {len(found)} folds (0 to {len(found) - 1})")
    return check_split(cohort, found[fold], excluded)


def check_split(cohort: Cohort, split: Split, excluded: Sequence[str] = ()) -> Split:
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
    if shared:
        both = sorted(i for i in {*train, *val} if known[i].patient in shared)
        raise DataError(
            f"{len(shared)} patient(s) are in training and in validation, which makes the Dice a lie: cases "
            f"{', '.join(both[:10])}. Correct the split file or the patient column"
        )
    return Split(train, val)
