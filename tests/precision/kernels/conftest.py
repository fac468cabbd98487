"""Kernels run in Triton's interpreter where there is no GPU; it must be told before Triton is imported.

Where Triton is missing, each file of this folder skips itself.
"""

import importlib.util
import os

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor, scope) -> None:
        """Triton 3.6 makes loop bounds of one-element arrays by int(), which numpy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index_too

    create_dot = interpreter.InterpreterBuilder.create_dot

    def wide(x):
        """numpy has no BF16: the interpreter keeps its bits as integers, multiplies those. FP32 holds its numbers."""
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def create_dot_of_numbers(self, a, b, d, input_precision, max_num_imprecise_acc):
        return create_dot(self, wide(a), wide(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = create_dot_of_numbers
