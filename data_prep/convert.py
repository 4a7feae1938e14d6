"""Patients' files as training data: python -m data_prep.convert source=dicom root=TREE out=FOLDER

Sorts a tree of DICOM files into series, picks one a study, lays DICOM SEG or RTSTRUCT on it, and writes NIfTI with
cohort.json for data=cohort. No name, date, UID, description or path of the source is written; ids are salted digests.
What is there already is not converted again, and no case that is there is dropped without overwrite=true. Exit code 1 if
anything failed; report.json has every case and reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from segspeed.cli import Frame, door
from segspeed.config import Processes, Strict
from segspeed.types import SettingError

Name = Annotated[str, Field(min_length=1)]
OF_DICOM = ("series", "channels", "modality", "structures", "ids", "resample", "unlabelled", "paths")


class ConvertConfig(Strict):
    """What to convert, and what to call it."""

    source: Literal["dicom", "msd", "nnunet", "bids", "pairs"] = Field(
        "dicom", description="the layout of what is converted"
    )
    root: Name | None = Field(None, description="folder of the source")
    out: Name = Field(description="a new folder, or one of an earlier call")
    series: Name | None = Field(None, description="text or regular expression that the series' description holds")
    channels: dict[Name, Name] | None = Field(None, description="{CT: portal, PET: ac}: a series a channel")
    modality: Name | None = Field(None, description="CT, MR, PT: only series of it")
    structures: tuple[Name, ...] | None = Field(
        None, description="structures of SEG and RTSTRUCT, in order; all if null"
    )
    labels: Name | None = Field(
        None, description="of dicom: a folder of NIfTI label maps, named as the cases or folders; of pairs: a glob"
    )
    images: Name | None = Field(None, description="of pairs: a glob")
    csv: Name | None = Field(None, description="of pairs: a table of the files")
    class_names: dict[str, int | tuple[int, ...]] | None = Field(
        None, description="of labels: {liver: 1, lesion: [2, 3]}; every value found is a class if null"
    )
    ids: Name | None = Field(None, description="CSV with the columns patient_id and id: your own case ids")
    salt: Name | None = Field(None, description="of the ids; a random one is kept beside out if null")
    resample: bool = Field(False, description="further channels onto the first one's grid")
    unlabelled: bool = Field(False, description="also studies without a label")
    overwrite: bool = Field(False, description="convert again what was made with other settings")
    paths: bool = Field(False, description="write where each source lies to OUT.paths.csv, beside out")
    workers: Literal["auto"] | Processes = Field("auto", description="processes that convert")


def main(cfg: ConvertConfig) -> int:
    """Convert what ``cfg`` names; 0 when nothing failed."""
    from segspeed.record.live import say

    workers = None if cfg.workers == "auto" else int(cfg.workers)
    if cfg.source == "dicom":
        from data_prep.dicom import convert_tree

        _refuse(cfg, ("images", "csv"))
        if cfg.root is None:
            raise SettingError("root is missing: give root=TREE, the folder of the DICOM files")
        failed = convert_tree(
            cfg.root, cfg.out, series=cfg.series, channels=cfg.channels, modality=cfg.modality,
            structures=cfg.structures, labels=cfg.labels, class_names=cfg.class_names, ids=cfg.ids, salt=cfg.salt,
            resample=cfg.resample, unlabelled=cfg.unlabelled, overwrite=cfg.overwrite, paths=cfg.paths,
            workers=workers,
        )  # fmt: skip
    else:
        from data_prep.anonymous import convert_cohort

        _refuse(cfg, (*OF_DICOM, *(() if cfg.source == "pairs" else ("images", "labels", "csv", "class_names"))))
        failed = convert_cohort(_cohort(cfg), cfg.out, salt=cfg.salt, overwrite=cfg.overwrite, workers=workers)
    say(f"Next: python -m data_prep.check data=cohort data.root={cfg.out}")
    return int(failed > 0)


def _refuse(cfg: ConvertConfig, names: tuple[str, ...]) -> None:
    """Settings of another source would be without effect."""
    given = [n for n in names if getattr(cfg, n) not in (None, False)]
    if given:
        raise SettingError(f"source={cfg.source} takes no {', '.join(given)}")


def _cohort(cfg: ConvertConfig) -> Any:
    import importlib

    keywords: dict[str, Any] = {"root": cfg.root}
    if cfg.source == "pairs":
        keywords |= {"images": cfg.images, "labels": cfg.labels, "csv": cfg.csv, "class_names": cfg.class_names}
    elif cfg.root is None:
        raise SettingError("root is missing: give root=FOLDER")
    return getattr(importlib.import_module(f"data_prep.{cfg.source}"), cfg.source)(**keywords)


if __name__ == "__main__":
    door(main, Frame(ConvertConfig, "convert"))()
