"""One microbatch: forward and backward, launched kernel by kernel, or as one CUDA graph.

A step of a small model on a fast GPU waits for Python and for kernel launches. A CUDA graph is the whole sequence of
kernels of a forward and backward pass, recorded once and launched with one call. It runs the same kernels on the same
addresses each time, so

    tokens        are copied into one buffer before each launch
    gradients     stay where the recording put them. Two graphs: the first microbatch of a step *makes* the gradients
                  (nothing has to be zeroed, and no sum is read back), later ones add to them in place
    losses        are copied out after each launch
    weights       the GEMMs' operands are refreshed in place, scales and amaxes are rows of one arena: all at rest
    nothing       may wait for the host, or choose by a value that is on the device

A replay runs no Python, and so shows no observer what it casts (`precision.observe`). Microbatches of a step that is
sampled have a graph of their own, which adds to gradients, for the first one to zeros: that changes no bit of them.

Before a recording the same microbatch runs the plain way, on the stream that will record: kernels are compiled, tuned
and loaded, libraries take their workspaces. Amaxes are maxima, so that this leaves no trace. The first step that is
sampled is such a run itself; graphs that are there already are dropped before it, so that their memory is free, and
made again after it.

The graphs own a memory pool, the size of what a microbatch takes. Others (evaluation) cannot use it.
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

WARM_UP = 3  # passes before a recording; the second one on adds to gradients, as later microbatches do


class Microbatch(Protocol):
    """Runs microbatches."""

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """Forward and backward of microbatch `index` of the `count` of a step, tokens [B, S + 1] int64.

        Adds the gradients of total / count, times the loss scale if there is one, to the parameters' `grad`; index 0
        finds them at None and makes them.
        Returns the losses, detached.
        """
        ...

    def release(self) -> None:
        """Let go of what an evaluation has gathered."""
        ...

    def forget(self) -> None:
        """The next step's microbatches are of another shape or number, or the model's weights of losses are others."""
        ...


class EagerMicrobatch:
    """The plain way. spoil: what happens to the loss before its backward pass (`debug.inject`)."""

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
        """Nothing was gathered."""

    def forget(self) -> None:
        """Nothing was recorded."""


def loss_factor(model: DeepSeek, count: int, loss_scale: LossScale | None) -> Tensor | None:
    """What the loss of one of `count` microbatches is multiplied by before its backward pass, 0-d, for which the model
    is made ready; None: 1 / count."""
    model.loss_scale = None if loss_scale is None else loss_scale.scale / count
    return model.loss_scale


class _Unrecordable(Exception):
    """What stood in the way of a recording."""


class GraphedMicrobatch:
    """As CUDA graphs; see the module docstring. All microbatches are of one shape, all steps of one count, until
    `forget`.

    must: where recording fails, raise UserError; else warn and continue the plain way.
    """

    def __init__(self, model: DeepSeek, must: bool = True, loss_scale: LossScale | None = None):
        self._run = EagerMicrobatch(model, loss_scale=loss_scale)
        self._must = must
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._stream = torch.cuda.Stream()
        self._warm, self._failed = False, False
        self._observer: Observer | None = None  # who has seen a plain pass, and so may see a graph
        self._forget()

    def forget(self) -> None:
        """Drop what was recorded; the next call records again."""
        torch.cuda.synchronize()
        self._warm, self._observer = False, None
        self._forget()

    def _forget(self) -> None:
        """Let go of graphs, gradients and their memory."""
        self._tokens = torch.empty(0)
        self._gradients: list[Tensor | None] = []
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Losses]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`. The first call records, and the first one with index > 0, and the second sampled step."""
        seen_by = sampler()
        if self._failed:
            return self._run(tokens, index, count)
        if seen_by is not None and seen_by is not self._observer:
            if index == 0 and self._graphs:
                torch.cuda.synchronize()  # once a run: the last of them may still be at work
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
        """Nothing was gathered."""

    def _replay(self, tokens: Tensor, index: int, count: int, sampled: bool) -> Losses:
        if not self._graphs:
            self._tokens = tokens.clone()
            with unsampled():
                self._warm_up(count)
                self._graphs["first"] = self._record(0, count)
            self._gradients = [p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # the optimizer lets go of them after each step
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
            # thread_local: a checkpoint that is being written by another thread may use the GPU meanwhile
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                losses = self._run(self._tokens, index, count)
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a broken recording hides what broke it
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise _Unrecordable(str(cause).splitlines()[0]) from error
        return graph, losses
