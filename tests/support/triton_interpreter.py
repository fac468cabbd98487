"""Triton's interpreter, in which kernels run where there is no GPU: corrected where it errs, and twice as fast.

Imported before kernels run, by tests and by the processes that tests start. A private part of Triton, of 3.6 and 3.7.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Interpreted = interpreter.InterpretedFunction
Builder = interpreter.InterpreterBuilder
_create_dot, _get_np_dtype = Builder.create_dot, interpreter._get_np_dtype
_cast = Builder.cast_impl
_patch_lang_tensor, _call = interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__


def patch_index_too(tensor: Any, *scope: Any) -> None:
    """Triton 3.6 makes loop bounds of one-element arrays by int(), which numpy 2.4 refuses."""
    _patch_lang_tensor(tensor, *scope)
    scope[0].set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def create_dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """numpy has no BF16: the interpreter keeps its bits as integers, and multiplies those."""
    return _create_dot(self, _wide(a), _wide(b), *rest)


def _wide(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    bits = x.data.astype("uint32") << 16
    return interpreter.TensorHandle(bits.view("float32"), tl.float32)


def cast_with_rounding(self: Any, src: Any, dst_type: Any) -> Any:
    """To BF16 as a GPU does it, to nearest even; Triton's own cuts off."""
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return _cast(self, src, dst_type)
    bits = src.data.astype("float32", copy=False).view("uint32")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    kept = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded)
    return interpreter.TensorHandle(kept.astype("uint16"), tl.bfloat16)


_patched: set[Callable] = set()  # functions that the kernel that runs has called


def call_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forgets what was patched for the kernel before, as it was taken back."""
    _patched.clear()
    return _call(self, *args, **kwargs)


def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """One that a kernel calls: Triton's language is patched for the first call of it, not for each."""
    if self.fn not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn)
    return self.rewrite()(*args, **kwargs)


_np_dtypes: dict[Any, np.dtype] = {}


def np_dtype(dtype: Any) -> np.dtype:
    """Looked up by name, not in a table that is made for each call."""
    key = dtype.name
    if key not in _np_dtypes:
        _np_dtypes[key] = _get_np_dtype(dtype)
    return _np_dtypes[key]


@cache
def _shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    """As Triton's, but tensors of a shape share what says so."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(tuple(type.shape) if type.is_block() else ())


_make_block_type = tl.block_type.__init__
_block_types: dict[Any, tuple[Any, ...]] = {}


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """As Triton's, which writes a name anew for each tensor."""
    key = element_ty.name, *shape
    if key in _block_types:
        self.element_ty = element_ty
        self.shape, self.numel, self.name = _block_types[key]
    else:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = self.shape, self.numel, self.name


tl.block_type.__init__ = make_block_type
tl.tensor.__init__ = make_tensor
interpreter._patch_lang_tensor = patch_index_too
Builder.create_dot = create_dot_of_numbers  # type: ignore[method-assign]
Builder.cast_impl = cast_with_rounding  # type: ignore[method-assign]
interpreter.GridExecutor.__call__ = call_kernel
Interpreted.__call__ = call_function
interpreter._get_np_dtype = np_dtype
