"""Gradients of weights computed later than those of inputs, for pipelines (zero bubble, arXiv 2401.10241).

The backward pass of y = x w^T has two products. The stage before waits for dx = dy w. Nothing waits for dw = dy^T x, so
a rank computes it where it would be idle: autograd runs a stage's backward pass with dx alone, each GEMM puts its dw
into the stage's queue, with both operands, and the schedule runs the queue later. Other weights (gains, embedding,
head) get their gradients in the first pass: they take little time, or are made with the loss.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[], Tensor]


class WeightGradientQueue:
    """Weight gradients that a stage's layers have yet to compute (`deferred` of a layer)."""

    def __init__(self) -> None:
        self._products: deque[tuple[Tensor, Product]] = deque()

    def put(self, weight: Tensor, product: Product) -> None:
        """Queue the gradient of a weight, a leaf of autograd. product: computes it; it holds the operands."""
        self._products.append((weight, product))

    def take(self) -> Callable[[], None]:
        """Empty the queue; return a function that computes what was in it, in the order of the backward pass."""
        products, self._products = self._products, deque()

        def run() -> None:
            while products:
                weight, product = products.popleft()
                with torch.no_grad():
                    gradient = product()
                torch.autograd.backward(weight, gradient)  # as autograd adds it, with the hooks of the weight

        return run
