"""Injected faults: `debug.inject={step: N, where: loss|gradient|activation|weight, value: nan|inf|1e4}`.

They test recovery on a real run. In the first microbatch of the chosen step the loss is multiplied by the value, or one
element is replaced by it: in an activation or its gradient at the end of the middle block's first sublayer, or in a
compute weight of that block (not in the master: the next step quantises it afresh). A finite value makes a spike, which
is skipped only with `recovery.spikes.enabled=true`.

`steps: 5` injects the fault in five steps from N on. `windows: [BEGIN, END]` injects it only in steps that read one of
these windows of the run's stream (step N without rewinds reads windows (N - 1) B to N B - 1, where B is the global
batch size): such a fault belongs to the data and disappears when the data is left out.
"""

import numpy as np
import torch
from torch import Tensor, nn

from models import DeepSeek
from precision import AmaxProbe, Linear, gemm_layers
from trainer.config import InjectConfig, InjectPlace
from trainer.parallel.shard_views import local


class Injector:
    """Injects a fault into steps."""

    def __init__(self, config: InjectConfig, model: DeepSeek):
        self._config = config
        self._value = config.value
        self._armed = False
        self._reads = True
        _, block = model.iter_blocks()[len(model.layers) // 2]
        self._probe: FaultyProbe | None = None
        if config.where in (InjectPlace.activation, InjectPlace.gradient):
            device = next(block.parameters()).device
            self._probe = FaultyProbe(block.attn_probe, config.where, config.value, device)
            block.add_module("attn_probe", self._probe)
        elif config.where is InjectPlace.weight:
            # not in `before`: sharded weights exist only after the block has gathered them
            block.register_forward_pre_hook(self._spoil_weight)
        self._layer = [layer for layer in gemm_layers(block) if isinstance(layer, Linear)][-1]

    def before(self, step: int, microbatch: int) -> None:
        """Arm or disarm the fault. Call it before each microbatch's forward pass, after the weights were made."""
        c = self._config
        self._armed = c.step <= step < c.step + c.steps and microbatch == 0 and self._reads
        if self._probe is not None:
            self._probe.armed.fill_(self._armed)

    def data(self, windows: np.ndarray) -> None:
        """Take the windows, numbered in the run's stream, of the next step; call it before each step."""
        if self._config.windows is not None:
            begin, end = self._config.windows
            self._reads = bool(((windows >= begin) & (windows < end)).any())

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss, with the fault if it is armed."""
        return loss * self._value if self._armed and self._config.where is InjectPlace.loss else loss

    def _spoil_weight(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        operand = self._layer.operand
        if not self._armed or operand is None or not torch.is_grad_enabled():  # an evaluation is not a step
            return
        master = local(self._layer.weight)
        with torch.no_grad():
            if operand.data.untyped_storage().data_ptr() == master.untyped_storage().data_ptr():  # as FP32 does
                operand = self._layer.operand = operand._replace(data=operand.data.clone())
            spoilt = operand.data if operand.scale_inv is None else operand.scale_inv  # E4M3 has no infinity
            spoilt.view(-1)[:1].fill_(self._value)  # one element suffices; item assignment would wait for the GPU


class FaultyProbe(nn.Module):
    """A probe that, while armed, replaces an element of its input or of the gradient.

    It is a module class of its own, not a hook: all blocks whose modules have the same classes share a compiled graph,
    whatever their hooks. A tensor arms it, so that the graph stays the same.
    """

    def __init__(self, probe: AmaxProbe, where: InjectPlace, value: float, device: torch.device):
        super().__init__()
        self.probe, self.where = probe, where
        self.value = torch.tensor(value, device=device)
        self.armed = torch.zeros((), dtype=torch.bool, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return x, with the fault if armed."""
        if not torch.is_grad_enabled():
            return self.probe(x)
        if self.where is InjectPlace.activation:
            return self.probe(_injected(x, self.armed, self.value))
        return _InjectIntoGradient.apply(self.probe(x), self.armed, self.value)


class _InjectIntoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, armed: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(armed, value)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _injected(grads[0], *ctx.saved_tensors), None, None


def _injected(x: Tensor, armed: Tensor, value: Tensor) -> Tensor:
    """Return x with `value` as its first element if `armed`."""
    first = (torch.arange(x.numel(), device=x.device) == 0).view(x.shape)
    return torch.where(first & armed, value.to(x.dtype), x)
