"""Splits a state tree into JSON and tensors, and joins them again.

State that survives a restart is a tree: dicts, lists and tuples whose leaves are tensors (or a rank's `ShardView` of
one), numbers, strings, booleans and None, such as `optimizer.state_dict()`. Pickle would write any of it and, on
loading, run any code, so it is not used. `split` moves every tensor out, under the path that leads to it, and leaves a
JSON skeleton that refers to the tensors by path. `join` is its inverse.

    {"model": {"embed": T1}, "seen": (3, 0.1)}
      -> skeleton {"model": {"embed": {"$tensor": "model/embed"}}, "seen": {"$tuple": [3, 0.1]}}
         tensors  {"model/embed": T1}

JSON keeps Python's ints exactly, and its floats too (`float.__repr__` round-trips; NaN and the infinities are written
by name). Types without a JSON equivalent are tagged by a one-key object whose key starts with `$`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer.checkpoint.shard_view import ShardView

_SCALARS = (type(None), bool, int, float, str)


def split(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor | ShardView]]:
    """Return `state` as (JSON skeleton, tensors by path). The tensors are the caller's own, not copies.

    Raises TypeError, naming the path, for a leaf or key that would not be restored unchanged (a NumPy scalar, an Enum,
    ...), and ValueError if two tensors would get the same path (`{"a/b": T, "a": {"b": T}}`).
    """
    tensors: dict[str, Tensor | ShardView] = {}
    return _split(state, "", tensors), tensors


def _split(node: Any, path: str, tensors: dict[str, Tensor | ShardView]) -> Any:
    if isinstance(node, Tensor | ShardView):
        if path in tensors:
            raise ValueError(f"checkpoint state has two tensors at {path!r}: rename one of the keys that lead there")
        tensors[path] = node
        return {"$tensor": path}
    if type(node) in _SCALARS:
        return node

    def below(key: object) -> str:
        return f"{path}/{key}" if path else str(key)

    if isinstance(node, Mapping):
        wrong = [key for key in node if type(key) not in (str, int)]
        if wrong:
            raise TypeError(f"checkpoint state has the key {wrong[0]!r} at {path or 'its root'!r}: keys are str or int")
        entries = [(key, _split(value, below(key), tensors)) for key, value in node.items()]
        if all(type(key) is str and not key.startswith("$") for key in node):
            return dict(entries)
        return {"$dict": [list(entry) for entry in entries]}
    if type(node) in (list, tuple):
        values = [_split(value, below(index), tensors) for index, value in enumerate(node)]
        return values if type(node) is list else {"$tuple": values}
    raise TypeError(
        f"checkpoint state has a {type(node).__name__} at {path or 'its root'!r}: only tensors, dicts, lists, tuples, "
        "str, bool, int, float and None can be saved"
    )


def join(skeleton: Any, tensors: Mapping[str, Tensor | ShardView]) -> Any:
    """Inverse of `split`. Dicts come back as plain dicts, in the order in which they were saved."""
    if isinstance(skeleton, list):
        return [join(value, tensors) for value in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        ((tag, value),) = skeleton.items()
        if tag == "$tensor":
            return tensors[value]
        if tag == "$tuple":
            return tuple(join(item, tensors) for item in value)
        if tag == "$dict":
            return {key: join(item, tensors) for key, item in value}
    return {key: join(value, tensors) for key, value in skeleton.items()}
