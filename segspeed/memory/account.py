"""Memory of a training step by bookkeeping: the step runs on tensors without values, and every allocation is written down.

What the kernels of a device use beside the tensors (workspaces, blocked copies, pages that the allocator keeps) is not seen
here; `segspeed.memory.probe` measures it.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from segspeed import build
from segspeed.engine import Learner
from segspeed.memory.settings import Subject
from segspeed.model.checkpointing import block_names
from segspeed.speed.precision import Precision
from segspeed.types import Batch, Plan

# Seconds of recomputing: multiply-adds, and bytes passed over by everything else. Only their ratio matters here.
FLOP_S = {"cpu": 1 / 60e9, "cuda": 1 / 60e12}
BYTE_S = {"cpu": 3 / 8e9, "cuda": 3 / 2e12}
HEAP = (
    32 * 2**20
)  # glibc maps larger blocks on their own and gives them back; smaller ones come from a heap that only grows

# oneDNN copies what a convolution reads and writes into its own blocked layout, unless it lies there channels-last. What cuDNN
# takes is no larger; the probes tell.
COPYING = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True)
class Account:
    """Bytes of tensors: ``held`` between steps (weights, averaged weights, optimiser state), ``peak`` at the worst moment
    of a step, ``held`` included. ``resident`` is the peak where small blocks stay with the process once it had them: the
    most there ever were of them, plus the most of large ones."""

    held: int
    peak: int
    resident: int


@dataclass(frozen=True)
class BlockCost:
    """What recomputing one block saves (bytes of activations) and costs (a rough number of seconds)."""

    name: str
    saved: int
    seconds: float


class Ledger(TorchDispatchMode):
    """Counts the bytes of the storages that are alive while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.part, self.part_peak = [0, 0], [0, 0]  # live and peak of storages below `HEAP`, and of larger ones
        self._known: dict[int, int] = {}
        self.on_op: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.enter(leaf)
        if func in COPYING:
            one, two = (args[0], args[1]) if func is COPYING[1] else (args[0], out)
            copies = [t.numel() * t.element_size() for t in (one, two) if t.is_contiguous()]
            for size in copies:
                self._count(size)
            for size in copies:
                self._count(-size)
        if self.on_op is not None:
            self.on_op(func, args, kwargs or {}, out)
        return out

    def enter(self, tensor: Tensor) -> None:
        """Write down the storage of ``tensor`` (any shape) unless it stands there already."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._count(storage.nbytes())
            weakref.finalize(storage, self._leave, key)

    def forget_peaks(self) -> None:
        """Begin to look for the largest sums anew."""
        self.peak, self.part_peak = self.live, list(self.part)

    def _leave(self, key: int) -> None:
        self._count(-self._known.pop(key))

    def _count(self, size: int) -> None:
        kind = int(abs(size) >= HEAP)
        self.live += size
        self.part[kind] += size
        self.peak = max(self.peak, self.live)
        self.part_peak[kind] = max(self.part_peak[kind], self.part[kind])


@dataclass(frozen=True)
class Optimising:
    """Bytes of a network that no patch changes: what is held, the part of it that the optimiser makes in its first step, and the
    most that is live in its steps."""

    held: int
    state: int
    peak: int


class _Enough(Exception):
    """The forward and backward passes are over, and the rest is known."""


def account(subject: Subject, plan: Plan, checkpointing: tuple[str, ...], known: Optimising | None = None) -> Account:
    """The tensors of one optimiser step over micro-batches of ``plan.batch`` patches; with ``known`` in half the time."""
    return accounts(subject, plan, checkpointing, known)[0]


def accounts(
    subject: Subject, plan: Plan, checkpointing: tuple[str, ...], known: Optimising | None = None
) -> tuple[Account, Optimising]:
    """`account`, and the part of it that holds for every patch."""
    mode, ledger = FakeTensorMode(), Ledger()
    learner = _without_values(subject, plan, checkpointing, mode, ledger)
    with _quiet(), mode, ledger:
        batch = _batch(subject, plan)
        own = sum(t.untyped_storage().nbytes() for t in (batch.image, batch.label, batch.norm))
        before, passes, parts = ledger.live, 0, 0
        step = learner.precision.step

        def noted(*args: Any) -> Tensor:
            nonlocal passes, parts
            passes, parts = ledger.peak, sum(ledger.part_peak)
            if known is not None:
                raise _Enough
            ledger.forget_peaks()
            return step(*args)

        learner.precision.step = noted  # type: ignore[method-assign,assignment]
        ledger.forget_peaks()
        with suppress(_Enough):
            learner.update([batch], plan.batch)
        if known is None:
            known = Optimising(ledger.live - own, ledger.live - before, ledger.peak - own)
        peak = max(passes + known.state, known.peak + own)
        return Account(known.held, peak, max(parts + known.state, peak)), known


def block_costs(subject: Subject, plan: Plan) -> list[BlockCost]:
    """Every block that can be recomputed, the one that saves most for its time first."""
    kind = subject.device.split(":")[0]
    flop_s, byte_s = FLOP_S.get(kind, FLOP_S["cpu"]), BYTE_S.get(kind, BYTE_S["cpu"])
    mode, ledger = FakeTensorMode(), Ledger()
    learner = _without_values(subject, plan, (), mode, ledger)
    inside: list[str] = []
    seconds: dict[str, float] = defaultdict(float)
    saved: dict[str, dict[int, int]] = defaultdict(dict)
    given: dict[str, set[int]] = defaultdict(set)
    kept: list[Tensor] = []  # ids of storages stay unique while these live

    def count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if inside:
            made = sum(t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor))
            work = flop_registry.get(getattr(func, "overloadpacket", None))
            flops = work(*args, **kwargs, out_val=out) if work is not None else 0
            seconds[inside[-1]] += flops * flop_s + made * byte_s

    def pack(tensor: Tensor) -> Tensor:
        if inside:
            storage = tensor.untyped_storage()
            saved[inside[-1]][id(storage)] = storage.nbytes()
        kept.append(tensor)
        return tensor

    def watch(name: str, module: nn.Module) -> None:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            given[name] |= {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            inside.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                inside.pop()

        module.forward = watched

    weights = {id(p.untyped_storage()) for p in learner.model.parameters()}
    known = dict(learner.model.named_modules())
    for name in block_names(learner.model):
        watch(name, known[name])
    ledger.on_op = count
    with _quiet(), mode, ledger, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        learner.model.train()
        with learner.precision.autocast():
            learner.model(_batch(subject, plan).image)
    costs = [
        BlockCost(name, sum(n for key, n in saved[name].items() if key not in given[name] | weights), seconds[name])
        for name in seconds
    ]
    return sorted(costs, key=lambda c: (-c.saved / max(c.seconds, 1e-12), c.name))


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a traceback for every operation that a patch does not go with, beside raising it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _without_values(
    subject: Subject, plan: Plan, checkpointing: tuple[str, ...], mode: FakeTensorMode, ledger: Ledger
) -> Learner:
    """A learner whose tensors have shapes and types only. The network is made with values first: some cannot be made without."""
    plain = Subject(
        subject.cfg.model_copy(update={"compile": False}), subject.cohort, "cpu", subject.precision
    )  # compiled code cannot be followed, and the sizes are the same on every device
    real = plain.learner(plan, checkpointing, torch.device("cpu"))
    for module in real.model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for kind in tables:
            for key, value in kind.items():
                if value is not None:
                    fake = mode.from_tensor(value)
                    kind[key] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
    with mode, ledger:
        for tensor in (*real.model.parameters(), *real.model.buffers()):
            ledger.enter(tensor)
        return build_learner(plain, real.model)


def build_learner(subject: Subject, model: nn.Module) -> Learner:
    """Optimiser and averaged weights anew, of the parameters that ``model`` has now; no loss scaling, which reads values."""
    precision = Precision(subject.precision, torch.device("cpu"))
    learner = build.learner_from(subject.cfg, model, precision, subject.cohort.table)
    learner.precision.scaler = torch.amp.GradScaler("cpu", enabled=False)
    return learner


def _batch(subject: Subject, plan: Plan) -> Batch:
    """A micro-batch on the device, augmented: image and label of the patch's own size."""
    b, channels = plan.batch, len(subject.cohort.channels)
    image = torch.empty(b, channels, *plan.patch)
    if build.channels_last(subject.cfg, subject.precision):
        image = image.contiguous(memory_format=torch.channels_last_3d)
    label = torch.empty(b, *plan.patch, dtype=torch.int16)
    return Batch(image, label, torch.empty(b, channels, 4), torch.arange(b), ("none",) * b)
