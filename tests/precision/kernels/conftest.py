"""Kernels run in Triton's interpreter where there is no GPU; it must be told before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor, scope) -> None:
        """Triton 3.6 makes loop bounds of one-element arrays by int(), which numpy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index_too
