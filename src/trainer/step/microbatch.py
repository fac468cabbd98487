"""One microbatch: forward and backward, launched kernel by kernel, or as one CUDA graph.

A step of a small model on a fast GPU waits for Python and for kernel launches. A CUDA graph is the whole sequence of
kernels of a forward and backward pass, recorded once and launched with one call. It runs the same kernels on the same
addresses each time:

    tokens        are copied into one buffer before each launch
    gradients     stay where the recording put them. Two graphs: the first microbatch of a step *makes* the gradients
                  (without zeroing or reading a sum), later ones add to them in place
    losses        are copied out after each launch
    weights       keep their addresses: operands are refreshed in place, scales and amaxes are rows of one arena
    nothing       may wait for the host, or branch on a value on the device

A replay runs no Python, so no observer sees its casts (`precision.observe`). Microbatches of a sampled step have a
graph of their own, which adds to gradients. The first one adds to zeros, which changes no bit.

Before a recording the same microbatch runs eagerly on the recording stream: kernels are compiled, tuned and loaded,
libraries allocate their workspaces. Amaxes are maxima, so this leaves no trace. The first sampled step is such an eager
run itself; existing graphs are dropped before it, to free their memory, and recorded again after it.

The graphs own a memory pool, as large as a microbatch needs. Other passes (evaluation) cannot use it.
"""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from models import DeepSeek, Losses
from precision.errors import UserError
from precision.observe import Observer, sampler, unsampled
from trainer.optim.loss_scale import LossScale

WARM_UP = 3  # passes before a recording; from the second on they add to gradients, as later microbatches do


class Microbatch(Protocol):
    """Runs microbatches."""

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """Run forward and backward of microbatch `index` of the `count` of a step, tokens [B, S + 1] int64.

        Adds the gradients of total / count, times the loss scale if there is one, to the parameters' `grad`; index 0
        finds them at None and makes them. Returns the losses, detached.
        """
        ...

    def release(self) -> None:
        """Free the weights that an evaluation has gathered."""
        ...

    def forget(self) -> None:
        """Forget recordings: shape or number of microbatches, or the model's loss weights, change."""
        ...


class EagerMicrobatch:
    """Runs microbatches eagerly. spoil: applied to the loss before its backward pass (`debug.inject`)."""

    def __init__(
        self, model: DeepSeek, spoil: Callable[[Tensor], Tensor] | None = None, loss_scale: LossScale | None = None
    ):
        self._model, self._spoil, self._loss_scale = model, spoil, loss_scale

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`."""
        factor = loss_factor(self._model, count, self._loss_scale)
        losses = self._model(tokens)
        total = losses.total if self._spoil is None else self._spoil(losses.total)
        (total / count if factor is None else total * factor).backward()
        return losses.detached(total)

    def release(self) -> None:
        """Do nothing: no weights are gathered."""

    def forget(self) -> None:
        """Do nothing: nothing is recorded."""


def loss_factor(model: DeepSeek, count: int, loss_scale: LossScale | None) -> Tensor | None:
    """Return the factor of the loss of one of `count` microbatches before its backward pass, 0-d, and set it on the
    model; None: 1 / count."""
    model.loss_scale = None if loss_scale is None else loss_scale.scale / count
    return model.loss_scale


class _Unrecordable(Exception):
    """The recording failed."""


class GraphedMicrobatch:
    """Runs microbatches as CUDA graphs; see the module docstring. Until `forget`, all microbatches have one shape and
    all steps one count.

    must: if recording fails, raise UserError; else warn and continue eagerly, unless the step has begun (index > 0).
    """

    def __init__(self, model: DeepSeek, must: bool = True, loss_scale: LossScale | None = None):
        self._run = EagerMicrobatch(model, loss_scale=loss_scale)
        self._must = must
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._stream = torch.cuda.Stream()
        self._warm, self._failed = False, False
        self._observer: Observer | None = None  # the observer of an eager pass, which a sampled graph may serve
        self._forget()

    def forget(self) -> None:
        """Drop the recordings; the next call records again."""
        torch.cuda.synchronize()
        self._warm, self._observer = False, None
        self._forget()

    def _forget(self) -> None:
        """Free graphs, gradients and their memory."""
        self._tokens = torch.empty(0)
        self._gradients: list[Tensor | None] = []
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Losses]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`. The first call records; so do the first one with index > 0, and the second sampled step."""
        seen_by = sampler()
        if self._failed:
            return self._run(tokens, index, count)
        if seen_by is not None and seen_by is not self._observer:
            if index == 0 and self._graphs:
                torch.cuda.synchronize()  # once a run: the last replay may still run
                self._forget()
            losses = self._run(tokens, index, count)
            if index == count - 1:
                self._observer = seen_by
            return losses
        try:
            return self._replay(tokens, index, count, seen_by is not None)
        except _Unrecordable as error:
            what = f"the forward and backward pass cannot be recorded ({error})"
            if self._must or index > 0:
                raise UserError(
                    f"cuda_graph={'true' if self._must else 'auto'}: {what}; set cuda_graph=false"
                ) from error
            self._failed = True
            warnings.warn(f"cuda_graph=auto: {what}; this run continues without", stacklevel=2)
        self._forget()
        for parameter in self._parameters:
            parameter.grad = None
        return self._run(tokens, index, count)

    def release(self) -> None:
        """Do nothing: no weights are gathered."""

    def _replay(self, tokens: Tensor, index: int, count: int, sampled: bool) -> Losses:
        if not self._graphs:
            self._tokens = tokens.clone()
            with unsampled():
                self._warm_up(count)
                self._graphs["first"] = self._record(0, count)
            self._gradients = [p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # the optimizer drops them after each step
        if sampled and index == 0:
            for gradient in self._gradients:
                if gradient is not None:
                    gradient.zero_()
        self._tokens.copy_(tokens)
        which = "sampled" if sampled else "later" if index > 0 else "first"
        if which not in self._graphs:
            self._graphs[which] = self._record(index, count)
        graph, losses = self._graphs[which]
        graph.replay()
        return Losses(*(loss.clone() for loss in losses))

    def _warm_up(self, count: int) -> None:
        if self._warm:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for index in range(WARM_UP):
                self._run(self._tokens, index, count)
        torch.cuda.current_stream().wait_stream(self._stream)
        for parameter in self._parameters:
            parameter.grad = None
        self._warm = True

    def _record(self, index: int, count: int) -> tuple[torch.cuda.CUDAGraph, Losses]:
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread that writes a checkpoint may use the GPU meanwhile
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                losses = self._run(self._tokens, index, count)
        except RuntimeError as error:
            cause = error.__context__ or error  # the error at the end of a failed recording hides its cause
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise _Unrecordable(str(cause).splitlines()[0]) from error
        return graph, losses
