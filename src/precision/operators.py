"""Custom operators of PyTorch with the least possible overhead.

`torch.library.custom_op` puts three layers of Python around each call: one asks whether autograd has to know (operators
here are called inside an `autograd.Function`, or of what needs no gradient), one counts versions (what is changed here
is a row of the arena, or a sum, and is not saved for backward), one keeps Dynamo away. They take as long as launching
a kernel does. Here autograd's keys fall through in C++, and the function is called.

Compiled graphs take these operators as they are, with a function that returns results of the right shape:

    @operator("twice")
    def twice(x: Tensor) -> Tensor: ...

    @torch.library.register_fake(twice)
    def _(x: Tensor) -> Tensor: ...
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

NAMESPACE = "octet"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the operator octet::NAME, on CPUs and on GPUs; its annotations become the schema. Results carry
    no gradient. mutates_args: what it changes in place."""

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
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define
