"""Custom PyTorch operators with the least possible overhead.

`torch.library.custom_op` puts three layers of Python around each call. One checks whether autograd is involved
(operators here are called inside an `autograd.Function`, or on tensors without gradients), one counts versions (these
operators mutate rows of the arena, or sums, which are not saved for backward), one keeps Dynamo out. Together they take
as long as a kernel launch. Here autograd's keys fall through in C++, and the function is called.

Compiled graphs hold these operators as they are, given a function that returns results of the right shape:

    @operator("twice")
    def twice(x: Tensor) -> Tensor: ...

    @fake(twice)
    def _(x: Tensor) -> Tensor: ...
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

NAMESPACE = "octet"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_functions: dict[Any, Callable[..., Any]] = {}

on_trace: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], None] | None = None
"""Called with an operator's function and its arguments, with fake tensors, where a graph with it is traced on a GPU."""


def operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator octet::NAME, on CPUs and GPUs; its annotations become the schema. Results
    carry no gradient. mutates_args: the arguments it changes in place."""

    def define(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))

        def call(*args: Any, **more: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **more)
            with torch.no_grad():
                return function(*args, **more)

        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _library.impl(name, call, key)
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        _functions[made := getattr(getattr(torch.ops, NAMESPACE), name).default] = call
        return made

    return define


def fake(made: Any) -> Callable[[Callable[..., Any]], None]:
    """Register a function that returns results like those of this operator, for graphs that are traced."""

    def define(function: Callable[..., Any]) -> None:
        def call(*args: Any, **more: Any) -> Any:
            if on_trace is not None and args[0].is_cuda:
                on_trace(_functions[made], args, more)
            return function(*args, **more)

        torch.library.register_fake(made)(call)

    return define
