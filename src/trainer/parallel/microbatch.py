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

A replay runs no Python, and so shows nobody what it casts (`precision.observe`). Microbatches of a step that is sampled
therefore run the plain way, into the gradients of the graphs: those of the first one are added to zeros, which changes
no bit of them. Their activations take memory beside the graphs'.

Before the recording the same microbatch runs a few times the plain way, on the stream that will record: kernels are
compiled, tuned and loaded, libraries take their workspaces. Amaxes are maxima, so that this leaves no trace.

The graphs own a memory pool, the size of what a microbatch takes. Others (evaluation) cannot use it.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from models import DeepSeek, Losses
from precision.observe import is_sampled, unsampled

WARM_UP = 3  # passes before a recording; the second one on adds to gradients, as later microbatches do


class Microbatch(Protocol):
    """Runs microbatches."""

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """Forward and backward of microbatch `index` of the `count` of a step, tokens [B, S + 1] int64.

        Adds the gradients of total / count to the parameters' `grad`; index 0 finds them at None and makes them.
        Returns the losses, detached.
        """
        ...

    def release(self) -> None:
        """Let go of what an evaluation has gathered."""
        ...


class Eager:
    """The plain way. spoil: what happens to the loss before its backward pass (`debug.inject`)."""

    def __init__(self, model: DeepSeek, spoil: Callable[[Tensor], Tensor] | None = None):
        self._model, self._spoil = model, spoil

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`."""
        losses = self._model(tokens)
        total = losses.total if self._spoil is None else self._spoil(losses.total)
        (total / count).backward()
        return losses.detached(total)

    def release(self) -> None:
        """Nothing was gathered."""


class Graphed:
    """As CUDA graphs; see the module docstring. All microbatches are of one shape, all steps of one count."""

    def __init__(self, model: DeepSeek):
        self._run = Eager(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._tokens = torch.empty(0)
        self._gradients: list[Tensor | None] = []
        self._first: tuple[torch.cuda.CUDAGraph, Losses] | None = None
        self._later: tuple[torch.cuda.CUDAGraph, Losses] | None = None

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`. The first call, and the first one with index > 0, record. ValueError if that fails."""
        if self._first is None:
            self._tokens = tokens.clone()
            with unsampled():
                self._warm_up(count)
                self._first = self._record(0, count)
            self._gradients = [p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # the optimizer lets go of them after each step
        if is_sampled():
            if index == 0:
                for gradient in self._gradients:
                    if gradient is not None:
                        gradient.zero_()
            return self._run(tokens, index, count)
        self._tokens.copy_(tokens)
        if index > 0 and self._later is None:
            self._later = self._record(index, count)
        recorded = self._first if index == 0 else self._later
        assert recorded is not None
        graph, losses = recorded
        graph.replay()
        return Losses(*(loss.clone() for loss in losses))

    def release(self) -> None:
        """Nothing was gathered."""

    def _warm_up(self, count: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for index in range(WARM_UP):
                self._run(self._tokens, index, count)
        torch.cuda.current_stream().wait_stream(self._stream)
        for parameter in self._parameters:
            parameter.grad = None

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
            raise ValueError(
                "cuda_graph=true: the forward and backward pass cannot be recorded "
                f"({str(cause).splitlines()[0]}); set cuda_graph=false"
            ) from error
        return graph, losses
