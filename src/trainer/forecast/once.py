"""Caches what depends on a precision plan alone: a search asks for many layouts of one plan."""

from collections.abc import Callable, Hashable
from copy import copy
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from precision import Plan

T = TypeVar("T")


def once(compute: Callable[..., T]) -> Callable[..., T]:
    """compute(plan, *key, config=...) is called once for each plan and key; what it returns is copied. config, no key,
    is of the model that the plan was made for."""
    known: WeakKeyDictionary[Plan, dict[Hashable, T]] = WeakKeyDictionary()

    @wraps(compute)
    def ask(plan: Plan, *key: Hashable, **config: Any) -> T:
        found = known.setdefault(plan, {})
        if key not in found:
            found[key] = compute(plan, *key, **config)
        return copy(found[key])

    return ask
