"""A cache for results that depend on a precision plan only: a search tries many layouts of one plan."""

from collections.abc import Callable, Hashable
from copy import copy
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from precision import Plan

T = TypeVar("T")


def cached_per_plan(compute: Callable[..., T]) -> Callable[..., T]:
    """Decorator: compute(plan, *key, config=...) is called once for each plan and key, and its result is copied. config
    is not part of the key: it belongs to the plan's model."""
    known: WeakKeyDictionary[Plan, dict[Hashable, T]] = WeakKeyDictionary()

    @wraps(compute)
    def cached(plan: Plan, *key: Hashable, **config: Any) -> T:
        found = known.setdefault(plan, {})
        if key not in found:
            found[key] = compute(plan, *key, **config)
        return copy(found[key])

    return cached
