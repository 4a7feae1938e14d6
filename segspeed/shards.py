"""A share of the cases, so that several machines prepare one cohort: shard 2/8 is the second of eight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Number ``number`` of ``of`` shares, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``"2/8"``. Raises ValueError for what is no share."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        number, of = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= of:
            raise ValueError(f"{text!r} is no share; write 1/8 to 8/8 for the first to the last of eight")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def file_name(self) -> str:
        """The share as part of a file's name."""
        return f"{self.number}of{self.of}"

    def own(self, items: Sequence[T]) -> list[T]:
        """This share of ``items``: every one is in exactly one share, also where they do not divide."""
        return list(items[self.number - 1 :: self.of])

    def rest(self, items: Sequence[T]) -> list[T]:
        """The others, the next share's last items first: where the others are late or dead, their work is taken from the
        end that they reach last."""
        following = [(self.number + n) % self.of for n in range(self.of - 1)]
        return [item for start in following for item in reversed(items[start :: self.of])]
