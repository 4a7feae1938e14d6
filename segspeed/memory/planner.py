"""Patch, micro-batch, accumulation and checkpointing that fit into a number of bytes, the best of them.

In this order: the largest patch that is useful (never larger than the median volume) and fits, with recomputed blocks if it
must; then the micro-batch that is fastest per patch; accumulation up to the batch that the Plan's rule wants; and of the blocks
only as many recomputed as are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from segspeed.memory.candidates import fewest, micro_batches, patches, recomputing, shape, voxels
from segspeed.memory.forecast import Forecast, Unsuitable, setting, small_setting
from segspeed.memory.limit import shown_bytes
from segspeed.memory.probe import Measured, Prober
from segspeed.memory.settings import Subject
from segspeed.types import Fingerprint, Plan, SettingError

MARGIN = 1.05  # over a prediction that no probe has confirmed
PROBES = 3  # micro-batches measured at the chosen patch
SECONDS = 40.0  # after which no further probe is begun
UPDATES = 3.5  # steps that a probe takes, its start included
SAME_SPEED = 0.03  # a difference that small decides nothing: the larger micro-batch is taken


@dataclass
class Option:
    """One way to train: what it is predicted to take, what it took, and why it was chosen or not."""

    plan: Plan
    predicted: int | None = None  # bytes, as said before this very setting was probed
    measured: Measured | None = None
    why: str = ""
    waiting: int = 0  # bytes of batches that the loader keeps ready; part of the prediction, not of a probe

    @property
    def done(self) -> bool:
        """Whether a probe ran it to its end."""
        return self.measured is not None and self.measured.outcome == "done"


@dataclass(frozen=True)
class Planning:
    """The choice, and everything it was chosen from, larger patches first."""

    limit: int  # bytes
    precision: str
    chosen: Option
    options: tuple[Option, ...]
    seconds: float
    probes: int


class Search:
    """The state of one planning."""

    def __init__(
        self, subject: Subject, fp: Fingerprint, limit: int, prober: Prober, tell: Callable[[str], None] | None = None
    ) -> None:
        self.subject, self.limit, self.prober = subject, limit, prober
        self.tell = tell or (lambda _: None)
        self.forecast = Forecast(subject)
        self.patches = patches(subject, fp)
        self.notes: dict[tuple[object, ...], Option] = {}
        self.began = time.perf_counter()
        self.probes = 0
        self.second_a_voxel = 0.0
        self._recomputed: tuple[str, ...] = ()

    def run(self) -> Planning:
        """Raises SettingError when nothing fits."""
        self._first_probe()
        while True:
            base = self._largest()
            options = self._options(base)
            for plan in {setting(p): p for p in (options[0], options[-1], options[len(options) // 2])}.values():
                if self.note(plan).measured is None and self.fits(plan):
                    self._probe(plan)
            if options and options == self._options(base):
                return self._planning(self._fastest(options), base)
            # a probe took more than predicted; the forecast knows better now, so look again

    def note(self, plan: Plan) -> Option:
        """What is known of ``plan``."""
        return self.notes.setdefault(setting(plan), Option(plan, waiting=self.forecast.waiting(plan)))

    # What fits

    def predict(self, plan: Plan) -> int:
        """Bytes; where a probe ran, what it measured. Raises Unsuitable."""
        found, note = self.forecast.predict(plan), self.note(plan)
        if note.measured is None:
            note.predicted = found
        return found

    def fits(self, plan: Plan) -> bool:
        """Whether ``plan`` is measured, or predicted with a margin, to stay within the limit."""
        note = self.note(plan)
        if note.measured is not None and note.measured.outcome in ("out of memory", "killed"):
            return False
        return self.predict(plan) * (1.0 if note.done else MARGIN) <= self.limit

    def _forms(self, plan: Plan) -> list[Plan]:
        """With nothing recomputed and with everything, as far as the settings leave that open."""
        choice = self.subject.cfg.memory.checkpointing
        if choice == "none":
            return [plan]
        names = choice if isinstance(choice, tuple) else tuple(b.name for b in self.forecast.blocks(plan))
        everything = recomputing(plan, names)
        return [plan, everything] if choice == "auto" else [everything]

    def _least(self, plan: Plan) -> Plan | None:
        """``plan`` with the fewest recomputed blocks that fit; None where nothing does."""
        forms = self._forms(plan)
        if self.fits(forms[0]):
            return forms[0]
        if len(forms) == 1 or not self.fits(forms[1]):
            return None
        return fewest(plan, forms[1].checkpointing, self.fits)

    def _options(self, base: Plan) -> list[Plan]:
        """The micro-batches of a patch that fit, the smallest first; larger ones recompute no more than it."""
        smallest, *larger = micro_batches(self.subject.cfg, base)
        first = self._least(smallest)
        if first is None:
            return []
        return [first, *(p for n in larger if self.fits(p := recomputing(n, first.checkpointing)))]

    def _largest(self) -> Plan:
        """The largest patch of which the smallest micro-batch fits, found by halving. Raises SettingError."""
        low, high = 0, len(self.patches)
        while low < high:
            middle = (low + high) // 2
            try:
                possible = self._possible(self.patches[middle])
            except Unsuitable as error:
                self.note(self.patches.pop(middle)).why = str(error)
                low, high = 0, len(self.patches)
                continue
            if possible:
                high = middle
            else:
                low = middle + 1
        if low == len(self.patches):
            raise self._too_small()
        return self.patches[low]

    def _possible(self, plan: Plan) -> bool:
        forms = self._forms(micro_batches(self.subject.cfg, plan)[0])
        if any(self.fits(form) for form in forms):
            return True
        self.note(forms[-1]).why = "too large, even with every block recomputed" if len(forms) > 1 else "too large"
        return False

    def _too_small(self) -> SettingError:
        if not self.patches:
            plan, why = [(n.plan, n.why) for n in self.notes.values() if n.why][-1]
            return SettingError(f"patch {list(plan.patch)}: {why}. Choose another plan.patch")
        form = self._forms(micro_batches(self.subject.cfg, self.patches[-1])[0])[-1]
        least = self.predict(form) * MARGIN
        enough = -(-int(least) // 10**8) / 10
        more = ", every block recomputed" if form.checkpointing else ""
        return SettingError(
            f"memory.limit={shown_bytes(self.limit)} is too small: patch {shape(form)} with a micro-batch of {form.batch}{more} "
            f"needs about {shown_bytes(least)}. The smallest that would do: memory.limit={enough:.1f}GB"
        )

    # Measuring

    def _left(self) -> float:
        return SECONDS - (time.perf_counter() - self.began)

    def _first_probe(self) -> None:
        """A small patch through the same network: what the process takes beside the tensors, and a voxel's time."""
        small = small_setting(self.patches[0])
        try:
            form = self._forms(small)[0]
            self.predict(form)
        except Unsuitable:
            return  # the patches themselves will tell what is wrong
        self._probe(form)
        self.note(form).why = "first probe: what the process takes besides"

    def _probe(self, plan: Plan) -> None:
        """Measure ``plan``, unless that would take too long."""
        step = self.second_a_voxel * voxels(plan) * plan.batch
        if UPDATES * step > self._left() and self.probes:
            self.note(plan).why = f"fits; not probed, a step takes about {step:.0f} s"
            return
        self.tell(f"probing patch {shape(plan)}, micro-batch {plan.batch}, {len(plan.checkpointing)} blocks recomputed")
        found = self.prober.probe(self.subject, plan, limit=self.limit, seconds=max(self._left(), 5.0) + 10.0)
        self.probes += 1
        self.note(plan).measured = found
        self.forecast.learn(plan, found)
        if found.outcome == "done":
            self.second_a_voxel = found.step_s / (voxels(plan) * plan.batch)
        elif found.outcome == "too slow":
            self.note(plan).why = "fits; the probe took too long"
        else:
            self.note(plan).why = f"does not fit: the probe was {found.outcome}".replace("was out", "ran out")

    # The choice

    def _fastest(self, options: list[Plan]) -> Plan:
        """The most patches a second; of nearly equals the largest micro-batch. Where none was measured, the smallest."""
        rates = {setting(p): n.measured.samples_per_s for p in options if (n := self.note(p)).done and n.measured}
        if not rates:
            return options[0]
        enough = (1 - SAME_SPEED) * max(rates.values())
        chosen = max((p for p in options if rates.get(setting(p), 0) >= enough), key=lambda p: p.batch)
        for plan in options:
            if setting(plan) in rates and plan is not chosen:
                slower = rates[setting(plan)] < enough
                self.note(plan).why = "slower a patch" if slower else "as fast, with more accumulation"
        return chosen

    def _planning(self, chosen: Plan, base: Plan) -> Planning:
        first = setting(base)[0] == setting(self.patches[0])[0]
        why = "chosen: the largest useful patch" if first else "chosen: the largest patch that fits"
        if "hand" in chosen.reasons.get("patch", ""):
            why = "chosen: patch set by hand"
        self.note(chosen).why = why + (
            f", {len(chosen.checkpointing)} blocks recomputed" if chosen.checkpointing else ""
        )
        self._recomputed = chosen.checkpointing
        self._describe(base)
        options = [n for n in self.notes.values() if n.why]  # the others are steps of a search
        options.sort(key=lambda o: (-voxels(o.plan), o.plan.batch, len(o.plan.checkpointing)))
        seconds = time.perf_counter() - self.began
        return Planning(self.limit, self.subject.precision, self.note(chosen), tuple(options), seconds, self.probes)

    def _describe(self, base: Plan) -> None:
        """A word on micro-batches that do not fit or were not probed, and on the next smaller patch."""
        for plan in micro_batches(self.subject.cfg, base):
            note = self.note(recomputing(plan, self._recomputed))
            self.predict(note.plan)
            note.why = note.why or ("fits; not probed" if self.fits(note.plan) else "too large")
        for plan in [p for p in self.patches if voxels(p) < voxels(base)][:1]:
            smallest = micro_batches(self.subject.cfg, plan)[0]
            try:
                self.predict(smallest)
                self.note(smallest).why = self.note(smallest).why or "a larger patch fits"
            except Unsuitable as error:
                self.note(smallest).why = str(error)


def find_plan(
    subject: Subject, fp: Fingerprint, limit: int, prober: Prober, tell: Callable[[str], None] | None = None
) -> Planning:
    """The best plan for ``limit`` bytes. Raises SettingError when nothing fits, with the smallest limit that would do."""
    return Search(subject, fp, limit, prober, tell).run()
