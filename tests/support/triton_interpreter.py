"""Triton's interpreter, in which kernels run where there is no GPU: corrected where it errs, and six times as fast.

Imported before kernels run, by tests and by the processes that tests start. A private part of Triton, of 3.6 and 3.7.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Interpreted = interpreter.InterpretedFunction
Builder = interpreter.InterpreterBuilder
Semantic = type(interpreter.interpreter_semantic)
_create_dot, _get_np_dtype = Builder.create_dot, interpreter._get_np_dtype
_cast, _convert, _semantic_cast = Builder.cast_impl, Builder.create_fp_to_fp, Semantic.cast
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
    """To BF16 as a GPU does it, to nearest even; Triton's own cuts off. From BF16 its bits become FP32's upper half."""
    names = src.dtype.scalar.name, dst_type.scalar.name
    if names == ("bf16", "fp32"):
        return _wide(src)
    if names != ("fp32", "bf16"):
        return _cast(self, src, dst_type)
    bits = src.data.astype("float32", copy=False).view("uint32")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    kept = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded)
    return interpreter.TensorHandle(kept.astype("uint16"), tl.bfloat16)


def convert(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
    """From FP8 by a table. FP32 to FP8, which kernels have rounded to a number of the format, by its upper bits."""
    kind, to = src.dtype.scalar, dst_type.scalar
    if kind.name in _FP8 and to.name == "fp32":
        return interpreter.TensorHandle(_FP8[kind.name][src.data], to)
    if kind.name == "fp32" and to.name in _FP8:
        return interpreter.TensorHandle(_codes(src.data, to.fp_mantissa_width, to.exponent_bias), to)
    return _convert(self, src, dst_type, rounding)


_FP8 = {
    name: torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    for name, dtype in (("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2))
}
"""The number of each code."""


def _codes(x: np.ndarray, mantissa: int, bias: int) -> np.ndarray:
    """FP8 codes of FP32 numbers: cut off between two numbers of the format, the largest beyond it, NaN for NaN."""
    x = np.ascontiguousarray(x)
    bits = x.view(np.int32)
    size = bits & 0x7FFFFFFF
    codes = np.minimum((size >> (23 - mantissa)) - ((127 - bias) << mantissa), 0x7E if mantissa == 3 else 0x7B)
    small = size < ((128 - bias) << 23)
    if small.any():
        codes = np.where(small, np.abs(x) * 2.0 ** (bias - 1 + mantissa), codes)
    codes = np.where(size > 0x7F800000, 0x7F, codes).astype(np.uint8)
    return codes | (bits >> 24).astype(np.uint8) & 0x80


_patched: set[tuple[int, ...]] = set()  # the modules of Triton's language that the kernel that runs has met


def call_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forgets what was patched for the kernel before, as it was taken back."""
    _patched.clear()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a GPU says nothing of Inf and NaN
        return _call(self, *args, **kwargs)


def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """One that a kernel calls: Triton's language, by each name of it, is patched once a kernel, not at each call."""
    modules = _modules(self.fn)
    if modules not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(modules)
    return self.rewrite()(*args, **kwargs)


@cache
def _modules(function: Callable) -> tuple[int, ...]:
    return tuple(sorted({id(value) for value in function.__globals__.values() if value is tl or value is tl.core}))


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


_NO_SHAPE = _shape(())


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    """As Triton's, but tensors of a shape share what says so; `sort` is type and shape in one word."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        self.sort, (self.numel, self.shape) = type.sort, type.as_constants
    else:
        self.sort, (self.numel, self.shape) = type.name, _NO_SHAPE


_make_block_type = tl.block_type.__init__
_block_types: dict[Any, tuple[Any, ...]] = {}


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """As Triton's, which writes a name again for each tensor."""
    self.sort = key = element_ty.name, *shape
    if key in _block_types:
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.as_constants = _block_types[key]
    else:
        _make_block_type(self, element_ty, shape)
        self.as_constants = _shape(tuple(self.shape))
        _block_types[key] = self.shape, self.numel, self.name, self.as_constants


_check_types, _broadcast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value
_constants: dict[Any, tl.tensor] = {}


def check_types(self: Any, lhs: Any, rhs: Any, *options: bool) -> Any:
    """As Triton's, at once where there is nothing to cast; a number becomes a tensor of each sort once."""
    if type(lhs) is not tl.tensor:
        return _check_types(self, lhs, rhs, *options)
    if type(rhs) is tl.tensor:
        divides = len(options) == 4 and options[3]  # which widens halves
        if divides or lhs.dtype.name != rhs.dtype.name or lhs.dtype.is_ptr():
            return _check_types(self, lhs, rhs, *options)
        return (lhs, rhs) if lhs.sort == rhs.sort else _broadcast_types(self, lhs, rhs)
    key = rhs, type(rhs), lhs.sort, options
    if key in _constants:
        return lhs, _constants[key]
    cast, constant = _check_types(self, lhs, rhs, *options)
    if cast is lhs:
        _constants[key] = constant
    return cast, constant


_broadcasts: dict[Any, tuple[Any, Any]] = {}  # the types of both once they have one shape


def _broadcast_types(self: Any, lhs: Any, rhs: Any) -> Any:
    """Both as tensors of one shape. Their numbers stay as they are: numpy spreads them in the operation that comes."""
    key = lhs.sort, rhs.sort
    if key not in _broadcasts:
        _broadcasts[key] = tuple(x.type for x in self.broadcast_impl_value(lhs, rhs))
    left, right = _broadcasts[key]
    return (
        lhs if lhs.type is left else tl.tensor(lhs.handle, left),
        rhs if rhs.type is right else tl.tensor(rhs.handle, right),
    )


def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """As Triton's, at once where there is nothing to spread."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.sort[1:] == rhs.sort[1:]:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Callable) -> None:
    """That integers did not overflow, as Triton finds out by eight operations of its own."""
    if lhs.dtype.int_bitwidth < 64:
        wide = _operations[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        least, most = lhs.dtype.get_int_min_value(), lhs.dtype.get_int_max_value()
        assert wide.min() >= least and wide.max() <= most, f"{lhs.dtype} overflow in {binary_op.__name__}"


_operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_unwrap = tl.core._unwrap_if_constexpr


def unwrap(x: Any) -> Any:
    """As Triton's, with the questions first that are asked most."""
    kind = type(x)
    return x.value if kind is tl.constexpr else x if kind in _PLAIN else _unwrap(x)


_PLAIN = {tl.tensor, tl.dtype, tl.block_type, int, float, bool, str, type(None)}


def is_same(self: Any, other: Any) -> bool:
    """Whether two types are: most often, they are one object."""
    return self is other or (self.name == other.name if type(other) is tl.dtype else _is_same(self, other))


_is_same = tl.dtype.__eq__


def cast(self: Any, x: Any, to: Any, rounding: Any = None) -> Any:
    """As Triton's, at once where there is nothing to cast."""
    return x if rounding is None and x.dtype.name == to.scalar.name else _semantic_cast(self, x, to, rounding)


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """As Triton's, which looks through all names of the package, and wraps its functions anew, for each kernel."""
    own = vars(package)
    for name, call in _interpreted(package):
        if own.get(name) is not call:
            scope.set_attr(package, name, call)


@cache
def _interpreted(package: Any) -> list[tuple[str, Callable]]:
    """Each builtin of an unpatched package, and what it is to the interpreter."""
    return [(name, _call_of(member)) for name, member in inspect.getmembers(package, tl.core.is_builtin)]


def _call_of(member: Callable) -> Callable:
    """As Triton's, without a copy of the keywords and a second wrapper for each call."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


for each in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
    _interpreted(each)  # before any is patched


Semantic.binary_op_type_checking_impl = check_types  # type: ignore[method-assign]
Semantic.broadcast_impl_value = broadcast
Semantic.binary_op_sanitize_overflow_impl = check_overflow
interpreter._patch_builtin = patch_builtins
interpreter.TensorHandle.__post_init__ = lambda self: None  # type: ignore[method-assign]  # a check of Triton's own operations
tl.core._unwrap_if_constexpr = unwrap
tl.dtype.__eq__ = is_same
Semantic.cast = cast  # type: ignore[method-assign, assignment]
Builder.create_fp_to_fp = convert  # type: ignore[method-assign]
tl.block_type.__init__ = make_block_type
tl.tensor.__init__ = make_tensor
interpreter._patch_lang_tensor = patch_index_too
Builder.create_dot = create_dot_of_numbers  # type: ignore[method-assign]
Builder.cast_impl = cast_with_rounding  # type: ignore[method-assign]
interpreter.GridExecutor.__call__ = call_kernel
Interpreted.__call__ = call_function
interpreter._get_np_dtype = np_dtype
