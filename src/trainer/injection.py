"""Faults on demand: `debug.inject={step: N, where: loss|gradient|activation|weight, value: nan|inf|1e4}`.

For trying out recovery on a real run. In the chosen step's first microbatch the loss is multiplied by the value, or one
number is replaced by it: in an activation or its gradient at the end of the middle block's first sublayer, or in a
compute weight of that block (not in the master: the next step quantises it afresh). A value that is finite makes a
spike, which is dropped with `recovery.spikes.enabled=true` only.

`steps: 5` does so in five steps from N on, `windows: [BEGIN, END]` only in those that read one of these windows of the
run's stream (step N without rewinds reads windows (N - 1) B to N B - 1, where B is the global batch size): a fault of
the data, not of the moment, which does not come again where the data is left out.
"""

import numpy as np
import torch
from torch import Tensor, nn

from models import DeepSeek
from precision import Linear, Watch, gemm_layers
from trainer.config import InjectConfig, Where


class Injector:
    """Puts a fault into steps."""

    def __init__(self, config: InjectConfig, model: DeepSeek):
        self._config = config
        self._value = config.value
        self._armed = False
        self._reads = True
        _, block = model.iter_blocks()[len(model.layers) // 2]
        watch = next(m for m in block.modules() if isinstance(m, Watch))
        if config.where is Where.activation:
            watch.register_forward_pre_hook(self._spoil_activation)
        elif config.where is Where.gradient:
            watch.register_forward_hook(self._spoil_gradient)
        elif config.where is Where.weight:
            # not in `before`: where ranks share the weights, there is none before the block has gathered it
            block.register_forward_pre_hook(self._spoil_weight)
        self._layer = [layer for layer in gemm_layers(block) if isinstance(layer, Linear)][-1]

    def before(self, step: int, microbatch: int) -> None:
        """Call before each microbatch's forward pass, after the weights were made."""
        c = self._config
        self._armed = c.step <= step < c.step + c.steps and microbatch == 0 and self._reads

    def data(self, windows: np.ndarray) -> None:
        """Numbers, in the run's stream, of the windows that the next step reads; call it before each."""
        if self._config.windows is not None:
            begin, end = self._config.windows
            self._reads = bool(((windows >= begin) & (windows < end)).any())

    def loss(self, loss: Tensor) -> Tensor:
        """The loss, spoilt if it is its turn."""
        return loss * self._value if self._armed and self._config.where is Where.loss else loss

    def _spoil_activation(self, module: nn.Module, args: tuple[Tensor, ...]) -> Tensor | None:
        return self._spoilt(args[0]) if self._armed and torch.is_grad_enabled() else None

    def _spoil_gradient(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self._armed and output.requires_grad:
            output.register_hook(self._spoilt)

    @torch.no_grad()
    def _spoil_weight(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        operand = self._layer.operand
        if not self._armed or operand is None:
            return
        if operand.scale_inv is None:
            operand.data.view(-1)[0] = self._value
        else:  # E4M3 has no infinity: a spoilt scale stands for both
            operand.scale_inv.view(-1)[0] = self._value

    def _spoilt(self, x: Tensor) -> Tensor:
        first = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
        first[0] = True
        return torch.where(first.view(x.shape), self._value, x)
