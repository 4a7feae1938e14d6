"""What a setting will take: bookkeeping of its tensors, plus what probes of the same network showed besides."""

from __future__ import annotations

import dataclasses
from statistics import mean

from segspeed.memory.account import Account, BlockCost, Optimising, accounts, block_costs
from segspeed.memory.probe import Measured
from segspeed.memory.settings import Subject
from segspeed.types import Plan, first_line

# Before any probe: interpreter and libraries on CPU, kernels' workspaces.
BASE = {"cpu": 400_000_000, "cuda": 0}
OVERHEAD = {"cpu": 200_000_000, "cuda": 100_000_000}


ERRORS = (RuntimeError, ValueError, AssertionError, IndexError)  # how networks refuse a patch


class Unsuitable(ValueError):
    """The network cannot work on this patch."""


def _unsuitable(error: BaseException) -> Unsuitable:
    return Unsuitable(f"the network does not take it: {first_line(error)}")


class Forecast:
    """Predicts the peak of a training with a plan, in bytes; the better the more it has seen."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        kind = subject.device.split(":")[0]
        self.base, self._overhead = BASE.get(kind, 0), OVERHEAD.get(kind, OVERHEAD["cpu"])
        self.overheads: list[int] = []  # of every probe: the measured peak above base and tensors
        self._accounts: dict[tuple[object, ...], Account] = {}
        self._known: dict[tuple[object, ...], Optimising] = {}
        self._costs: dict[tuple[object, ...], list[BlockCost]] = {}
        self._seen: dict[tuple[object, ...], int] = {}

    def account(self, plan: Plan) -> Account:
        """Tensors of a step with ``plan.batch`` patches and ``plan.checkpointing``. Raises `Unsuitable`."""
        if plan.batch > 2:  # every activation is as large as the batch
            one, two = (self.account(dataclasses.replace(plan, batch=n)) for n in (1, 2))
            more = plan.batch - 1
            return Account(
                one.held, one.peak + more * (two.peak - one.peak), one.resident + more * (two.resident - one.resident)
            )
        key = setting(plan)
        if key not in self._accounts:
            try:
                network = (plan.strides, plan.kernels, plan.features)
                self._accounts[key], self._known[network] = accounts(
                    self.subject, plan, plan.checkpointing, self._known.get(network)
                )
            except ERRORS as error:
                raise _unsuitable(error) from error
        return self._accounts[key]

    def blocks(self, plan: Plan) -> list[BlockCost]:
        """Blocks that can be recomputed, best first."""
        key = (plan.patch, plan.strides, plan.kernels, plan.features)
        if key not in self._costs:
            try:
                self._costs[key] = block_costs(self.subject, dataclasses.replace(plan, batch=1))
            except ERRORS as error:
                raise _unsuitable(error) from error
        return self._costs[key]

    def predict(self, plan: Plan) -> int:
        """Bytes at the worst moment of a run: a step beside a copy of what is learnt, and the loader's waiting batches."""
        found = self.account(plan)
        tensors = self._seen.get(setting(plan), self.base + self._tensors(found) + self.overhead)
        return tensors + self.waiting(plan)

    def _tensors(self, found: Account) -> int:
        """With the copy of what is learnt; in RAM small blocks once had are kept."""
        return found.held + (found.peak if self.subject.device.startswith("cuda") else found.resident)

    def waiting(self, plan: Plan) -> int:
        """Bytes of batches that wait in the process's own memory; 0 on a GPU."""
        return 0 if self.subject.device.startswith("cuda") else self.subject.in_flight_bytes(plan)

    @property
    def overhead(self) -> int:
        """Bytes beside the tensors, as probes have shown so far."""
        return int(mean(self.overheads)) if self.overheads else self._overhead

    def learn(self, plan: Plan, found: Measured) -> None:
        """Take in what a probe of ``plan`` measured."""
        if found.outcome != "done":
            return
        self.base = found.base
        self.overheads.append(found.peak - found.base - self._tensors(self.account(plan)))
        self._seen[setting(plan)] = found.peak


def setting(plan: Plan) -> tuple[object, ...]:
    """What decides a step's memory."""
    return (plan.patch, plan.batch, plan.checkpointing, plan.strides, plan.kernels, plan.features)


def small_setting(plan: Plan, side: int = 32) -> Plan:
    """One patch about ``side`` wide that the same network takes, for a first quick probe."""
    d, h, w = (min(n, max(q, round(side / q) * q)) for n, q in zip(plan.patch, plan.divisor, strict=True))
    return dataclasses.replace(plan, patch=(d, h, w), batch=1, accumulate=1)
