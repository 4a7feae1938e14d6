"""Where the wall clock goes: setup, cache, train, evaluation; and the share of training that waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds a named part of a run; earlier sessions of a resumed run are loaded into ``spent``."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the time of the block, in seconds, to ``part``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - start

    def add(self, part: str, seconds: float) -> None:
        """Count so many seconds to ``part``."""
        self.spent[part] = self.spent.get(part, 0.0) + seconds

    def __getitem__(self, part: str) -> float:
        return self.spent.get(part, 0.0)
