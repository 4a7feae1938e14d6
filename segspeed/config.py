"""The typed schema of a run. ``conf/`` holds its values; ``segspeed.cli`` turns a wrong key into a helpful text.

Light to import on purpose: a typo must be answered before torch is loaded.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from segspeed.shards import Shard
from segspeed.types import Shape3


def parse_duration(value: Any) -> Any:
    """Seconds from ``90``, ``"90s"``, ``"10min"``, ``"1.5h"`` or ``"2d"``; anything else is refused."""
    if value is None or isinstance(value, bool) or not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|sec|m|min|h|d)?\s*", value)
    if not match:
        raise ValueError(f"{value!r} is not a duration; write 90s, 10min, 1.5h or 2d")
    unit = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2] or "s"]
    return float(match[1]) * unit


def parse_size(value: Any) -> Any:
    """Bytes from ``"8GB"`` (10^9), ``"500MB"``, ``"6GiB"`` (2^30) or a number of them that can be meant; "auto" stays."""
    if value is None or isinstance(value, bool) or value == "auto" or (isinstance(value, int) and value >= 10**6):
        return value
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(MB|GB|TB|MiB|GiB|TiB)\s*", str(value), re.IGNORECASE)
    if not match:
        raise ValueError(f"{value!r} is not a size of memory; write 8GB, 500MB, 6GiB or auto")
    unit = match[2].lower()
    base = 1024 if "i" in unit else 1000
    return int(float(match[1]) * base ** {"m": 2, "g": 3, "t": 4}[unit[0]])


def _share(text: str) -> str:
    return str(Shard.parse(text))


Seconds = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Millimetres = Annotated[float, Field(ge=0.001, le=1000.0)]
Processes = Annotated[int, Field(ge=0, le=1024)]
Range = tuple[float, float]
Labels = str | int | tuple[str | int, ...]  # classes by name or by value


class Section(BaseModel):
    """What all sections share: frozen, no infinities, and true is not the number 1."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and "bool" not in str(field.annotation):
            raise ValueError("true and false have no meaning here")
        return value


class Strict(Section):
    """A section in which every key must be known."""

    model_config = ConfigDict(extra="forbid")


class Component(Section):
    """An object named by ``_target_``; the other keys are its keyword arguments (checked against its signature)."""

    model_config = ConfigDict(extra="allow")
    target: str = Field(alias="_target_", description="importable name of the class or function")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the object."""
        return dict(self.model_extra or {})


def as_list(value: Any) -> Any:
    """One component, several of them, or none, as several."""
    return () if value is None else (value,) if isinstance(value, dict) else value


def as_named(value: Any) -> Any:
    """Components by name. Those of a list, and one that stands alone, are named by the last word of their target."""
    if value is None:
        return {}
    if isinstance(value, dict) and "_target_" not in value:
        return value
    named: dict[str, Any] = {}
    for item in as_list(value):
        name = str(item.get("_target_", "")).rpartition(".")[2] if isinstance(item, dict) else str(item)
        if name in named:
            raise ValueError(f"two of them are called {name}; name them: {{one: {{_target_: ...}}, other: ...}}")
        named[name] = item
    return named


class DataConfig(Component):
    """Where the cases come from; keys not listed here go to the source named by ``_target_``."""

    name: str | None = Field(None, description="cohort name; the source's own if empty")
    fold: int = Field(0, ge=0, description="which fold is validated")
    folds: int = Field(5, ge=2, description="folds drawn by patient, unless a split is given")
    split_seed: int = Field(0, ge=0, description="seed of the drawn folds")
    splits: str = Field(
        "auto", description="auto: splits.json or splits_final.json beside the data if there; draw; or a file"
    )
    exclude: tuple[str, ...] = Field((), description="case ids left out")
    tolerance_mm: float = Field(0.1, gt=0, description="image and label corners may lie this far apart, mm")
    swap_on_flip: tuple[tuple[str, str], ...] = Field(
        (), description="pairs of class names that trade places when left and right are mirrored"
    )
    classes: dict[str, Labels] | None = Field(
        None, description="classes under new names, or merged: {tumour: [core, edema], liver: hepar}"
    )
    background: tuple[str | int, ...] = Field((), description="classes or label values that count as background")
    ignore: tuple[str | int, ...] = Field(
        (), description="classes or label values without a say in loss and Dice (not annotated, uncertain)"
    )
    regions: dict[str, Labels] | None = Field(
        None, description="overlapping targets made of classes: {whole: [edema, core], core: core}; trained by sigmoid"
    )
    patient_pattern: str | None = Field(
        None, description="regular expression on case ids whose first group is the patient: 'p(\\d+)_'"
    )
    site_pattern: str | None = Field(None, description="the same for the site")
    accept: tuple[str, ...] = Field(
        (), description="kinds of problems of data_prep.check that are known and no errors: [shear, patient-overlap]"
    )
    resample_labels: bool = Field(False, description="labels on another grid are brought onto that of their image")


class PlanConfig(Strict):
    """Values of the Plan set by hand; ``auto`` leaves them to the rule."""

    spacing: Literal["auto"] | tuple[Millimetres, Millimetres, Millimetres] = Field(
        "auto", description="mm, (D, H, W) of the canonical grid"
    )
    patch: Literal["auto"] | Shape3 = Field("auto", description="voxels, (D, H, W)")
    batch: Literal["auto"] | Annotated[int, Field(ge=1)] = Field("auto", description="patches a micro-batch")
    width: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="channels of the finest level, doubled a level; features sets each by hand"
    )
    finest_width: Literal["auto", "half"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="channels of the finest level alone, where most of the time goes; half: of the width"
    )
    features: Literal["auto"] | tuple[Annotated[int, Field(ge=1)], ...] = Field(
        "auto", description="channels a level, finest first"
    )
    normalisation: Literal["auto"] | tuple[Literal["ct", "zscore"], ...] = Field(
        "auto", description="ct or zscore, one a channel"
    )


class CacheConfig(Strict):
    """Preprocessed volumes on the disk."""

    root: str | None = Field(None, description="folder of the preprocessed volumes; <run.root>/cache if empty")
    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        "auto", description="processes that build it"
    )
    format: Literal["npy", "blosc2"] = Field("npy", description="npy: memory-mapped; blosc2: compressed in chunks")
    dtype: Literal["float32", "float16"] = Field("float32", description="of the images; float16 halves them")
    resident: Literal["auto", "disk", "ram", "device"] = Field(
        "auto", description="where training reads patches from; auto: the GPU's memory, else RAM, else disk"
    )
    verify: bool = Field(
        False, description="data_prep.prepare reads every file again instead of trusting size and time"
    )
    prune: bool = Field(
        False, description="data_prep.prepare deletes the cohort's entries that these settings do not use"
    )
    shard: Annotated[str, AfterValidator(_share)] | None = Field(
        None, description="data_prep.prepare builds this share of the cases: 2/8 is the second of eight"
    )


class LoaderConfig(Component):
    """Patches into batches."""

    workers: Literal["auto"] | Processes = Field("auto", description="processes that read patches")
    prefetch: int = Field(4, ge=1, description="batches a worker keeps ready")
    pin_memory: Literal["auto"] | bool = Field("auto", description="page-locked batches; auto: on CUDA")
    timeout: Annotated[Seconds, Field(gt=0)] = Field(60.0, description="without a batch for so long, the run stops")
    foreground: Fraction = Field(0.5, description="share of patches centred on a foreground voxel")


class RotationConfig(Strict):
    """Rotation about the patch's centre."""

    probability: Fraction = Field(0.2, description="of a sample")
    degrees: tuple[float, float, float] = Field((15.0, 15.0, 15.0), description="largest angle about D, H, W")


class ScaleConfig(Strict):
    """Enlarging and shrinking."""

    probability: Fraction = Field(0.2, description="of a sample")
    range: Range = Field((0.7, 1.4), description="factor; over 1 enlarges")


class FlipConfig(Strict):
    """Mirroring."""

    probability: tuple[Fraction, Fraction, Fraction] = Field((0.5, 0.5, 0.5), description="along D, H, W")


class NoiseConfig(Strict):
    """Gaussian noise."""

    probability: Fraction = Field(0.1, description="of a sample")
    variance: Range = Field((0.0, 0.1), description="of the Gaussian noise, in normalised intensities")


class BlurConfig(Strict):
    """Gaussian blur."""

    probability: Fraction = Field(0.2, description="of a sample")
    sigma: Range = Field((0.5, 1.0), description="voxels")
    channel_probability: Fraction = Field(0.5, description="of a channel, once the sample is drawn")


class BrightnessConfig(Strict):
    """Intensities times a factor."""

    probability: Fraction = Field(0.15, description="of a sample")
    range: Range = Field((0.75, 1.25), description="factor")


class ContrastConfig(Strict):
    """Intensities spread about their mean."""

    probability: Fraction = Field(0.15, description="of a sample")
    range: Range = Field((0.75, 1.25), description="factor about the mean, clamped to the old range")


class LowResolutionConfig(Strict):
    """Fewer voxels, enlarged again."""

    probability: Fraction = Field(0.25, description="of a sample")
    zoom: Range = Field((0.5, 1.0), description="1 keeps the resolution, 0.5 halves it")
    channel_probability: Fraction = Field(0.5, description="of a channel, once the sample is drawn")


class GammaConfig(Strict):
    """Intensities to a power, on their own range."""

    probability: Fraction = Field(0.3, description="of a sample")
    range: Range = Field((0.7, 1.5), description="exponent")
    invert_probability: Fraction = Field(0.25, description="of those drawn, the share with inverted intensities")


class AugmentConfig(Strict):
    """Ranges and probabilities, applied in this order; defaults after nnU-Net v2's 3D list."""

    margin: float = Field(1.0, ge=1.0, le=2.0, description="patch read from the cache over the patch trained on")
    rotation: RotationConfig = RotationConfig()
    scale: ScaleConfig = ScaleConfig()
    flip: FlipConfig = FlipConfig()
    noise: NoiseConfig = NoiseConfig()
    blur: BlurConfig = BlurConfig()
    brightness: BrightnessConfig = BrightnessConfig()
    contrast: ContrastConfig = ContrastConfig()
    low_resolution: LowResolutionConfig = LowResolutionConfig()
    gamma: GammaConfig = GammaConfig()
    extra: Annotated[tuple[Component, ...], BeforeValidator(as_list)] = Field(
        (), description="your own, after these: one {_target_: my_package.fn} or a list; fn(image, label, seeds)"
    )

    @model_validator(mode="after")
    def _ordered(self) -> AugmentConfig:
        bad = []
        for section, key in (
            ("scale", "range"), ("noise", "variance"), ("blur", "sigma"), ("brightness", "range"),
            ("contrast", "range"), ("low_resolution", "zoom"), ("gamma", "range"),
        ):  # fmt: skip
            low, high = getattr(getattr(self, section), key)
            if low > high or low < 0 or (low == 0 and section in ("scale", "low_resolution", "gamma")):
                bad.append(f"{section}.{key}=({low}, {high})")
        if self.low_resolution.zoom[1] > 1:
            bad.append(f"low_resolution.zoom={self.low_resolution.zoom} (at most 1)")
        if bad:
            raise ValueError("ranges must be (low, high) and positive: " + ", ".join(bad))
        return self


class ScheduleConfig(Strict):
    """The learning rate over the run."""

    name: Literal["cosine", "poly", "constant"] = Field("cosine", description="shape after the warmup")
    warmup: Fraction = Field(0.05, description="share of the optimiser steps (or of the budget) that warms up")
    power: float = Field(0.9, gt=0, description="of poly")
    final: Fraction = Field(0.0, description="learning rate at the end over the peak")
    scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="of optimizer.lr with the effective batch (batch x accumulate x ranks) over reference_batch"
    )
    reference_batch: Annotated[int, Field(ge=1)] | None = Field(
        None, description="patches a step that optimizer.lr was chosen for"
    )

    @model_validator(mode="after")
    def _reference(self) -> ScheduleConfig:
        if self.scaling != "none" and self.reference_batch is None:
            raise ValueError(
                f"schedule.scaling={self.scaling} needs schedule.reference_batch=N, the patches a step that optimizer.lr is for"
            )
        return self


class TrainConfig(Strict):
    """How long, and how a step is made."""

    steps: Annotated[int, Field(ge=1)] | None = Field(None, description="optimiser steps; or give a budget")
    budget: Annotated[Seconds, Field(gt=0)] | None = Field(None, description="wall clock of training, e.g. 10min")
    accumulate: Literal["auto"] | Annotated[int, Field(ge=1)] = Field("auto", description="micro-batches a step")
    exact_batch_dice: bool = Field(
        False, description="loss.batch_dice pooled over all micro-batches of a step, for a second forward pass"
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(12.0, description="largest gradient norm")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(0.99, description="decay of averaged weights; null: off")
    deterministic: bool = Field(False, description="only kernels that give the same bits every time")

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.steps is None) == (self.budget is None):
            raise ValueError("give either train.steps=N or train.budget=10min (set the other to null)")
        return self


class EvaluationConfig(Strict):
    """Whole volumes by sliding window."""

    share: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="of the run that may go into evaluation")
    overlap: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="of neighbouring windows")
    windows: int = Field(2, ge=1, description="windows in one forward pass")
    mirror: bool = Field(False, description="average over mirrored inputs at the final evaluation")
    metrics: Annotated[dict[str, Component], BeforeValidator(as_named)] = Field(
        {}, description="your own, beside Dice: {name: {_target_: my_package.fn}}; fn(prediction, label, spacing)"
    )


class MemoryConfig(Strict):
    """What training may take."""

    limit: Annotated[Literal["auto"] | Size, BeforeValidator(parse_size)] | None = Field(
        None,
        description="of training, e.g. 8GB: patch, batch and checkpointing are made to fit; auto: most of what is free",
    )
    checkpointing: Literal["auto", "none", "all"] | tuple[str, ...] = Field(
        "auto", description="recomputed activations: none, all, module names; auto: as few blocks as the limit needs"
    )


class SaveConfig(Strict):
    """When the state of a run is saved."""

    every: Annotated[Seconds, Field(gt=0)] = Field(300.0, description="time between checkpoints, e.g. 5min")


def _plain_name(name: str) -> str:
    if not name.strip() or re.search(r"[\\/\0]", name) or name in (".", "..") or len(name.encode()) > 200:
        raise ValueError(f"{name[:80]!r} must be a plain folder name of at most 200 bytes")
    return name


FolderName = Annotated[str, AfterValidator(_plain_name)]


class RunConfig(Strict):
    """Where a run lies."""

    name: FolderName | None = Field(None, description="the same name resumes the run; date and time if empty")
    root: str = Field("outputs", description="runs go to <root>/<cohort>/<name>")
    experiment: str | None = Field(
        None, description="the recipe of the settings, for tables; that of experiment=... if empty"
    )


class InitConfig(Strict):
    """What training begins from, besides random weights."""

    run: str | None = Field(
        None, description="run folder whose last weights training begins from; its network and spacing are taken, too"
    )


class BenchConfig(Strict):
    """A benchmark; `segspeed.bench`."""

    name: str = Field("loader", description="which benchmark: loader, loader_small, memory, predict, scale")
    volume: Shape3 = Field((300, 512, 512), description="(D, H, W) of the generated volumes")
    cases: int = Field(3, ge=1, description="generated volumes")
    patch: Shape3 = Field((96, 96, 96), description="voxels, (D, H, W)")
    batch: int = Field(2, ge=1, description="patches a batch")
    workers: int = Field(0, ge=0, description="processes of each contender")
    rounds: int = Field(5, ge=1, description="of each contender, in turns")
    patches: int = Field(64, ge=1, description="a round")
    contenders: tuple[str, ...] = Field(
        ("segspeed torch", "segspeed dali", "monai", "batchgeneratorsv2"), description="who takes part"
    )
    classes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (3, 20), description="of bench=predict and bench=scale, one after the other"
    )
    sides: tuple[Annotated[int, Field(ge=16)], ...] = Field(
        (64, 96), description="of bench=memory and bench=scale: cubes, voxels"
    )
    counts: tuple[Annotated[int, Field(ge=10)], ...] = Field(
        (50, 500, 5000), min_length=1, description="of bench=scale: cases"
    )
    steps: int = Field(20, ge=4, description="of bench=scale: training")
    batches: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2), description="of bench=memory: patches a batch")
    precisions: tuple[Literal["fp32", "bf16", "fp16"], ...] = Field(
        ("fp32", "bf16"), description="of bench=memory, fp32 first: the others are given as ratios to it"
    )
    checkpointing: tuple[Literal["none", "auto", "all"], ...] = Field(
        ("none", "auto", "all"), description="of bench=memory; auto: half the memory of activations"
    )


class LadderConfig(Strict):
    """One speed technique after the other on the user's own data; `segspeed.ladder`."""

    name: FolderName = Field("first", description="folder <run.root>/<cohort>/ladder/<name>; the same name goes on")
    rungs: tuple[str, ...] = Field(
        ("baseline", "cache", "augmentation", "precision", "compile", "checkpointing", "accumulation"),
        description="in this order, the first being what the others are measured by",
    )
    own: dict[str, dict[str, Any]] | None = Field(
        None, description="further rungs as settings: {muon: {optimizer: {_target_: torch.optim.Muon, lr: 0.02}}}"
    )
    mode: Literal["cumulative", "single"] = Field(
        "cumulative", description="each rung on top of those before it, or alone on top of the first"
    )
    keep: Literal["faster", "all"] = Field(
        "faster", description="cumulative: rungs that the next ones stand on; faster leaves out those that did not pay"
    )
    equal: Literal["samples", "time"] = Field(
        "samples", description="every rung sees ladder.samples patches, or trains for train.budget"
    )
    samples: int = Field(1000, ge=1, description="patches that every rung trains on")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1, description="a run of every rung each")
    margin: float = Field(0.005, ge=0, description="of Dice, for the non-inferiority verdict")
    quick: bool = Field(False, description="throughput alone, no Dice")
    quick_time: Annotated[Seconds, Field(gt=0)] = Field(20.0, description="training of a rung in quick mode")


class SpeedrunConfig(Strict):
    """Time to a Dice that was named before; `segspeed.speedrun`."""

    name: FolderName | None = Field(None, description="folder <run.root>/speedruns/<name>; the same name goes on")
    target: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, description="mean Dice to reach")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1, 2), min_length=1, description="all are reported")
    report: bool = Field(False, description="a table of all records under run.root instead of a new one")
    compare: tuple[str, ...] = Field((), description="two records (folders): is the second faster? Welch's test")


class Dimension(Strict):
    """Where one setting may lie: between two bounds, or one of several choices."""

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None

    @model_validator(mode="after")
    def _bounds_or_choices(self) -> Dimension:
        bounds = self.low is not None and self.high is not None
        if bounds == bool(self.choices) or (self.choices and (self.low is not None or self.high is not None)):
            raise ValueError(
                "give low and high (log=true for orders of magnitude), or choices: {low: 1e-4, high: 1e-1}"
            )
        if self.low is not None and self.high is not None and not (0 if self.log else self.low) <= self.low < self.high:
            raise ValueError(f"low={self.low} must be less than high={self.high}")
        if self.log and not self.low:
            raise ValueError("log=true needs bounds above 0")
        return self


class SweepConfig(Strict):
    """A search over settings; `segspeed.sweep`."""

    name: FolderName = Field("first", description="folder <run.root>/sweeps/<name>; the same name goes on")
    space: dict[str, Dimension] | None = Field(
        None, description="settings to search: {optimizer.lr: {low: 1e-4, high: 1e-1, log: true}}"
    )
    trials: int = Field(20, ge=1, description="runs in all; more of them go on with the same search")


class Config(Strict):
    """A run, whole. One attribute a group of ``conf/``."""

    run: RunConfig = RunConfig()
    data: DataConfig
    plan: PlanConfig = PlanConfig()
    cache: CacheConfig = CacheConfig()
    loader: LoaderConfig
    augment: AugmentConfig = AugmentConfig()
    model: Component
    loss: Component
    optimizer: Component
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    memory: MemoryConfig = MemoryConfig()
    save: SaveConfig = SaveConfig()
    logger: Component = Component(target="segspeed.record.loggers.nothing")
    init: InitConfig = InitConfig()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: the fastest that is sound here"
    )
    compile: bool = Field(False, description="torch.compile the network")
    channels_last: Literal["auto"] | bool = Field("auto", description="auto: with half precision or compile")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="auto, cpu, cuda, cuda:1, mps")
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        "auto", description="CPU threads of the main process"
    )
    resume: Literal["auto", "never"] = Field("auto", description="never: refuse a run folder that exists")
    bench: BenchConfig | None = Field(None, description="settings of a benchmark, for python -m segspeed.bench")
    ladder: LadderConfig = LadderConfig()
    speedrun: SpeedrunConfig = SpeedrunConfig()
    sweep: SweepConfig = SweepConfig()
    seed: int = Field(0, ge=0, le=2**63 - 1, description="of weights, patches and augmentation")
