"""What all checks share."""

from __future__ import annotations

from typing import Any


class ContractError(AssertionError):
    """A component does not do what segspeed relies on; the text says what broke and what to do."""


def require(holds: bool, text: str) -> None:
    """Raise ContractError with ``text`` unless ``holds``."""
    if not holds:
        raise ContractError(text)


def name_of(component: Any) -> str:
    """The name to call a function, a class or an object by."""
    return str(getattr(component, "__name__", type(component).__name__))
