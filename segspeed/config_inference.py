"""The typed schemas of ``python -m segspeed.predict``, ``segspeed.evaluate`` and ``segspeed.export``; their values stand in
``conf/predict.yaml``, ``conf/evaluate.yaml`` and ``conf/export.yaml``. Light to import, as `segspeed.config` is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from segspeed.config import DataConfig, Processes, Strict

Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], Field(min_length=1)]
Millimetre = Annotated[float, Field(gt=0, le=1000)]


class InferenceConfig(Strict):
    """How a run's network goes over whole volumes."""

    weights: Literal["last", "best"] = Field("last", description="last (averaged) weights, or those best on validation")
    overlap: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="of neighbouring windows")
    windows: int = Field(2, ge=1, description="windows in one forward pass")
    mirror: bool = Field(False, description="average over mirrored inputs, along the axes that training mirrored")
    precision: Literal["run", "fp32", "bf16", "fp16"] = Field("run", description="run: as it was trained")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="auto, cpu, cuda, cuda:1, mps")
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field("auto", description="CPU threads")
    overwrite: bool = Field(False, description="predict again what the output folder holds already")
    trust: tuple[str, ...] = Field(
        (), description="packages besides segspeed, monai and torch a run may take objects from"
    )


class PredictConfig(InferenceConfig):
    """Label maps of new volumes."""

    run: Name | Names = Field(description="a run folder, or several: their probabilities are averaged")
    input: Name = Field(description="a NIfTI file, a folder of them or a glob, or a folder tree of DICOM series")
    output: Name = Field(description="folder of the label maps")
    dicom_seg: bool = Field(False, description="of DICOM input: also DICOM SEG, which carries the patient's identity")
    probabilities: bool = Field(False, description="also a map of each class's probability")


class EvaluateConfig(InferenceConfig):
    """Scores of a run on a data set, of anybody's predictions, or a comparison of two."""

    run: Name | Names | None = Field(None, description="a run folder, or several as an ensemble")
    runs: Name | Names | None = Field(
        None, description="the folds of a cross-validation, or a glob: each run's validation cases by that run"
    )
    data: DataConfig | None = Field(None, description="cases to score on; empty: the run's own validation cases")
    predictions: str | None = Field(None, description="folder of label maps, anybody's, or a glob")
    labels: str | None = Field(None, description="folder of reference label maps of the same names, or a glob")
    class_names: dict[str, int | tuple[int, ...]] | None = Field(
        None, description="{liver: 1, lesion: [2, 3]}; empty: every value found is a class"
    )
    ignore: tuple[int, ...] = Field((), description="values of the labels whose voxels are in no score")
    compare: tuple[str, ...] = Field((), description="two summary.json: the second against the first")
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(0.005, description="of Dice, for the non-inferiority verdict")
    output: str | None = Field(None, description="folder of the report; beside the run or the predictions if empty")
    tolerances: tuple[Millimetre, ...] = Field((1.0, 2.0), min_length=1, description="of the surface Dice, mm")
    tolerance_mm: float = Field(0.1, gt=0, description="prediction and label corners may lie this far apart, mm")
    lesions: bool = Field(False, description="count found, missed and invented components")
    workers: Literal["auto"] | Processes = Field("auto", description="processes that score")

    @model_validator(mode="after")
    def _one_task(self) -> EvaluateConfig:
        tasks = {
            "run": self.run is not None,
            "runs": self.runs is not None,
            "predictions": self.predictions is not None,
            "compare": bool(self.compare),
        }
        if sum(tasks.values()) != 1:
            raise ValueError(
                "give one of run=FOLDER, runs=[FOLD,FOLD], predictions=FOLDER labels=FOLDER, or compare=[A.json,B.json]"
            )
        if (self.predictions is None) != (self.labels is None):
            raise ValueError("predictions=FOLDER and labels=FOLDER go together")
        if self.compare and len(self.compare) != 2:
            raise ValueError("compare takes two files: compare=[A/summary.json,B/summary.json]")
        if self.data is not None and self.run is None:
            raise ValueError("data=... says what to predict and score on, so it needs run=FOLDER (runs=... takes none)")
        return self


class ExportConfig(Strict):
    """The network of a run for other programs."""

    run: Name | Names = Field(description="a run folder")
    format: Literal["bundle", "onnx", "torchscript"] = Field(description="bundle: MONAI's, with preprocessing")
    target: Name | None = Field(None, description="a folder that does not exist; <run>/export_<format> if empty")
    weights: Literal["last", "best"] = Field("last", description="last (averaged) weights, or those best on validation")
    tolerance: float = Field(0.001, gt=0, description="largest difference of logits to the run's network")
    batch: Literal["dynamic"] | Annotated[int, Field(ge=1)] = Field("dynamic", description="patches, of onnx")
    overlap: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="of neighbouring windows, of bundle")
    windows: int = Field(2, ge=1, description="windows in one forward pass, of bundle")
    trust: tuple[str, ...] = Field(
        (), description="packages besides segspeed, monai and torch a run may take objects from"
    )

    @model_validator(mode="after")
    def _one_network(self) -> ExportConfig:
        if not isinstance(self.run, str) and len(self.run) > 1:
            raise ValueError(
                f"run={list(self.run)}: an export holds one network, so export them one by one (segspeed.predict averages several)"
            )
        if self.batch != "dynamic" and self.format != "onnx":
            raise ValueError(f"batch={self.batch} is for format=onnx; TorchScript takes any number of patches")
        return self
