"""From a ``_target_`` to the object it names: the one room below `segspeed.build` that instantiates anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from segspeed.config import Component
from segspeed.types import DataError, SettingError


def make(component: Component, /, *args: Any, **supplied: Any) -> Any:
    """Build the object a component names. Of ``supplied``, only what its signature knows and the user left open."""
    accepted = _signature(component)
    anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    given = component.kwargs
    own = set(type(component).model_fields) - {"target"}
    wanted = {k: v for k, v in supplied.items() if k not in given and (k in accepted or (anything and k not in own))}
    factory = _bound(component)
    try:
        return factory(*args, **wanted)
    except DataError:
        raise
    except (ValueError, TypeError) as error:
        raise SettingError(f"{component.target}: {error}") from error


def callable_from(component: Component, section: str) -> Callable[..., Any]:
    """What a component of ``section`` names, ready to be called: a function with the user's keys bound to it, or an object of
    a class that was made with them.

    Raises SettingError where such an object cannot be made or called.
    """
    if not inspect.isclass(get_object(component.target)):
        return _bound(component)
    made = make(component)
    if not callable(made):
        raise SettingError(
            f"{section} names the class {component.target}, whose objects cannot be called; give it a __call__, or "
            "name a function"
        )
    found: Callable[..., Any] = made
    return found


def accepted_by(component: Component) -> set[str]:
    """Names of the arguments that a component's object takes."""
    return set(_signature(component))


def _bound(component: Component) -> Callable[..., Any]:
    """The function or class with the user's own keys bound to it."""
    # partial: Hydra resolves what the user wrote; what we supply (a Plan, parameters) never becomes configuration
    try:
        found: Callable[..., Any] = instantiate(
            {"_target_": component.target, "_convert_": "all", "_partial_": True, **component.kwargs}
        )
    except InstantiationException as error:
        raise SettingError(f"{component.target}: {error.__cause__ or error}") from error
    return found


def _signature(component: Component) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(get_object(component.target)).parameters
    except ValueError:  # a builtin that tells nothing about itself gets nothing but the user's own keys
        return {}
