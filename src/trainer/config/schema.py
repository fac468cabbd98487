"""Dataclasses as a schema: the allowed keys, the type of each, and the nearest key to a misspelt one.

A key is a dotted path, `optim.lr`; the entries of a list are `precision.rules.exceptions[0].match`.
"""

import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from enum import Enum
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from precision.errors import UserError
from trainer.config.phases import LARGEST, Notation
from trainer.config_diff import printable

LARGEST_FP32 = (2 - 2**-23) * 2.0**127
GOOD_MATCH = 0.7  # similarity from which on a key is suggested
ELSEWHERE = 0.88  # the same for a key of another section, for which only the name speaks
NO_FREE_TEXT = {"run.resume": "never, auto, or the path of a run or of one of its checkpoints"}
"""Keys whose text must have one of these forms."""


class Switch(Enum):
    """On, off, or automatic."""

    auto = "auto"
    true = "true"
    false = "false"


class Dispatch(Enum):
    """How tokens travel to experts on other ranks. auto: symmetric if the GPUs of a node can share memory, else
    all_to_all; all_to_all: exact sizes in one collective; two_hops: the same to nodes, then within each; slots: fixed
    slots in collectives of equal parts; symmetric: fixed slots over shared memory."""

    auto = "auto"
    all_to_all = "all_to_all"
    two_hops = "two_hops"
    slots = "slots"
    symmetric = "symmetric"


class PipelineSchedule(Enum):
    """Order of a pipeline's passes: one forward, one backward, over stages in turn; or zero bubble over stages in a
    V."""

    interleaved = "interleaved"
    zbv = "zbv"


class Recompute(Enum):
    """What the backward pass recomputes: nothing, attention without its core, or the inside of every block."""

    none = "none"
    selective = "selective"
    full = "full"


def keys_of(schema: type, prefix: str = "") -> dict[str, Any]:
    """Return every key below a dataclass, sections included, with its annotation. In lists keys are `key[].name`."""
    keys: dict[str, Any] = {}
    hints = get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        key, annotation = prefix + field.name, hints[field.name]
        keys[key] = annotation
        inner = _without_none(annotation)
        if get_origin(inner) is list:
            key, inner = f"{key}[]", get_args(inner)[0]
        if dataclasses.is_dataclass(inner):
            keys |= keys_of(cast(type, inner), f"{key}.")
    return keys


def generic(key: str) -> str:
    """Return the key as `keys_of` spells it: without list indices."""
    return re.sub(r"\[\d+\]", "[]", key)


def describe(annotation: Any) -> str:
    """Describe the accepted values in words."""
    inner = _without_none(annotation)
    or_null = " or null" if inner is not annotation else ""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if inner in names:
        return names[inner] + or_null
    if (written := _notation(inner)) is not None:
        return written.what + or_null
    if get_origin(inner) is list:
        entry = get_args(inner)[0]
        entries = {int: "whole numbers", float: "numbers", str: "texts"}
        return f"a list of {entries.get(entry, 'sections')}, as [a,b]{or_null}"
    if isinstance(inner, type) and issubclass(inner, Enum):
        return f"one of {', '.join(inner.__members__)}{or_null}"
    names_inside = ", ".join(field.name for field in dataclasses.fields(inner))
    return f"a section with the keys {names_inside}{or_null}"


def nearest(wrong: str, keys: Iterable[str], least: float = GOOD_MATCH) -> str | None:
    """Return the key that was probably meant, or None if none is at least `least` similar. The last part weighs most:
    `trainer.lr` finds `optim.lr`."""

    def score(key: str) -> float:
        (*wrong_path, wrong_name), (*path, name) = wrong.split("."), key.split(".")
        initials = "".join(part[:1] for part in wrong_name.split("_"))  # learning_rate -> lr
        alike = max(_ratio(wrong_name, name), 0.9 * max(_ratio(wrong_name, part) for part in name.split("_")))
        alike = max(alike, 0.9 * (initials == name and len(name) > 1))
        return alike + 0.1 * _ratio(".".join(wrong_path), ".".join(path)) + 0.01 * _ratio(wrong_name, name)

    best = max(keys, key=score, default=None)
    return best if best is not None and score(best) >= least else None


def fit(tree: Any, annotation: Any, unknown: Callable[[str, Any], str], key: str = "") -> Any:
    """Convert a plain tree to a dataclass, list or value of a type. Raises UserError for the first thing that does not
    fit.

    OmegaConf's structured configs check types too, but turn `off` into the text "False", name no key inside a list, and
    want Enum members called `true` and `false` as text, where YAML reads booleans. unknown(key, value): returns the
    message for an unknown key.
    """
    inner = _without_none(annotation)
    if tree is None and inner is not annotation:
        return None
    if dataclasses.is_dataclass(inner):
        if not isinstance(tree, dict):
            raise _wrong(key, tree, annotation)
        return _fit_section(tree, cast(type, inner), unknown, key)
    if (written := _notation(inner)) is not None:
        amount = written.read(tree) if isinstance(tree, int | float | str) else None
        if amount is None:
            raise _wrong(key, tree, annotation)
        if not amount.number:  # "0%" and "0K", too
            return 0
        return int(tree) if isinstance(tree, float) and tree.is_integer() else tree
    if get_origin(inner) is list:
        if not isinstance(tree, list):
            raise _wrong(key, tree, annotation)
        return [fit(value, get_args(inner)[0], unknown, f"{key}[{i}]") for i, value in enumerate(tree)]
    if issubclass(inner, Enum):
        name = str(tree).lower() if isinstance(tree, bool) else tree
        if not isinstance(name, str) or name not in inner.__members__:
            raise _wrong(key, tree, annotation)
        return inner[name]
    if inner is str:
        return _fit_text(tree, annotation, key)
    if inner is bool:
        if not isinstance(tree, bool):
            raise _wrong(key, tree, annotation)
        return tree
    return _fit_number(tree, inner, annotation, key)


def _fit_text(tree: Any, annotation: Any, key: str) -> str:
    if key in NO_FREE_TEXT and not isinstance(tree, str):
        raise UserError(f"{key}={shown(tree)}: must be {NO_FREE_TEXT[key]}")
    if isinstance(tree, bool | float):
        raise _wrong(key, tree, annotation, f"; quote it: \"{key}='{shown(tree)}'\"")
    if not isinstance(tree, str | int):
        raise _wrong(key, tree, annotation)
    return str(tree)


def _fit_number(tree: Any, kind: type[int] | type[float], annotation: Any, key: str) -> int | float:
    if kind is float and isinstance(tree, str) and re.fullmatch("[+-]?(nan|inf)", tree, re.IGNORECASE):
        return float(tree)
    if kind is int and isinstance(tree, float) and tree.is_integer():  # 1e3
        tree = int(tree)
    if isinstance(tree, bool) or not isinstance(tree, int if kind is int else int | float):
        raise _wrong(key, tree, annotation)
    if kind is float and LARGEST_FP32 < abs(tree) < math.inf:
        raise _wrong(key, tree, annotation, f" that FP32 can hold, at most {LARGEST_FP32:.1e}")
    if isinstance(tree, int) and not -LARGEST <= tree <= LARGEST:
        raise _wrong(key, tree, annotation, f", and no more than {LARGEST}")
    return kind(tree)


def _wrong(key: str, value: Any, annotation: Any, fix: str = "") -> UserError:
    return UserError(f"{key}={shown(printable(key, value))}: must be {describe(annotation)}{fix}")


def _fit_section(tree: dict[str, Any], section: type, unknown: Callable[[str, Any], str], key: str) -> Any:
    hints, stem = get_type_hints(section, include_extras=True), f"{key}." if key else ""
    for name, value in tree.items():
        if name not in hints:
            raise UserError(unknown(*_first_leaf(f"{stem}{name}", value)))
    for field in dataclasses.fields(section):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in tree:
            raise UserError(f"{stem}{field.name}: has no value; it must be {describe(hints[field.name])}")
    return section(**{name: fit(value, hints[name], unknown, f"{stem}{name}") for name, value in tree.items()})


def _first_leaf(key: str, value: Any) -> tuple[str, Any]:
    """Return the first key below one that is not a section itself."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key, value


def shown(value: Any) -> str:
    """Return a value as written on the command line, shortened."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def _notation(annotation: Any) -> Notation | None:
    """Return how a value can be written, if there are several ways."""
    return annotation.__metadata__[0] if get_origin(annotation) is Annotated else None


def _without_none(annotation: Any) -> Any:
    """Return X of `X | None`."""
    if get_origin(annotation) in (types.UnionType, Union):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        if len(inner) == 1:
            return inner[0]
    return annotation
