"""Runs that learn nothing, noticed while there is time: a class that stays at 0, a Dice at chance, a loss that climbs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

EARLY = 0.1  # share of a run in which nothing is expected yet
DEAD = 0.005  # a Dice below it is 0
CHANCE = 0.05  # a mean Dice that guessing reaches
ALIVE = 0.3  # a Dice that shows that the other classes are learnt
LOOKS = 3  # evaluations in a row before anything is said
SMOOTHING = 0.98  # of the loss
CLIMB = 1.5  # times its lowest smoothed value, beyond a rise of `RISE`
RISE = 0.3


@dataclass
class Health:
    """Remembers what was seen and says each thing once."""

    dead: dict[str, int] = field(default_factory=dict)
    low: int = 0
    seen: int = 0
    smooth: float | None = None
    lowest: float = float("inf")
    told: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {**asdict(self), "told": sorted(self.told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was made."""
        for name, value in state.items():
            setattr(self, name, set(value) if name == "told" else value)

    def evaluated(self, dice: Mapping[str, float | None], mean: float | None, share: float) -> list[str]:
        """What to warn of after an evaluation at ``share`` of the run."""
        if share < EARLY or mean is None:
            return []
        best = max((d for d in dice.values() if d is not None), default=0.0)
        found = []
        for name, value in dice.items():
            self.dead[name] = self.dead.get(name, 0) + 1 if value is not None and value < DEAD else 0
            if self.dead[name] >= LOOKS and best > ALIVE:
                found.append(
                    (
                        name,
                        f"{name} is still at Dice 0 after {share:.0%} of the run while others are learnt. Likely: its value in "
                        "data.class_names or dataset.json; left and right mirrored without data.swap_on_flip; too rare for its "
                        "patches (loader.foreground=0.8)",
                    )
                )
        self.low = self.low + 1 if mean < CHANCE else 0
        if self.low >= LOOKS:
            found.append(
                (
                    "chance",
                    f"the mean Dice is {mean:.3f} after {share:.0%} of the run: no better than chance. Likely: labels that lie "
                    "elsewhere than their images (look at check.html), intensities that are not what plan.normalisation takes "
                    "them for, a learning rate that is too high or far too low (optimizer.lr)",
                )
            )
        return self._once(found)

    def step(self, loss: float, share: float) -> list[str]:
        """What to warn of after a step with ``loss``."""
        self.seen += 1
        self.smooth = loss if self.smooth is None else SMOOTHING * self.smooth + (1 - SMOOTHING) * loss
        if self.seen < 1 / (1 - SMOOTHING):
            return []
        self.lowest = min(self.lowest, self.smooth)
        if self.smooth < CLIMB * abs(self.lowest) + RISE:
            return []
        text = (
            f"the loss has climbed from {self.lowest:.3f} to {self.smooth:.3f} at {share:.0%} of the run. Likely: a learning rate "
            "that is too high (optimizer.lr, schedule.warmup), or half precision (precision=fp32)"
        )
        return self._once([("climb", text)])

    def _once(self, found: list[tuple[str, str]]) -> list[str]:
        new = [(key, text) for key, text in found if key not in self.told]
        self.told |= {key for key, _ in new}
        return [text for _, text in new]
