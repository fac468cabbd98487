"""Muon (Keller Jordan 2024; at scale: Moonlight, arXiv 2502.16982): momentum, orthogonalised matrix by matrix.

Per logical matrix W [A, B] (`models.matrices`) with gradient G, clipped by the global norm as AdamW's is:

    M <- mu M + G              U = mu M + G (Nesterov), else M
    O = Newton-Schulz(U)       see `orthogonalise`
    W <- W - lr (scale sqrt(max(A, B)) O + decay W)

An orthogonal O has entries of RMS 1 / sqrt(max(A, B)). So all entries of the update have RMS `scale` whatever the
shape. With 0.2, the RMS of AdamW's updates in practice, AdamW's learning rate and decay carry over.

Embedding, head, norms and (unless `optim.muon.router`) routers are AdamW's; both groups share schedule, rate and clip.
The momentum has the parameter's name and shape: checkpoints know nothing of matrices and batches. A rank needs whole
matrices: parameters may be replicated, not sharded (`forecast.preflight` refuses that).

A step that is dropped writes nothing: new momentum and weights are *selected* by `ok`, since NaN x 0 is NaN. An expert
without tokens moves all the same, along its old momentum.

Matrices of one shape (up to transposition) are computed in batches of at most `_AT_ONCE` numbers, which bounds what
a step takes in memory. U is rounded to the format of the iteration before anything else.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.matrices import Division
from precision.formats import BY_NAME
from trainer.config import OptimConfig
from trainer.launch.world import World
from trainer.optim.adamw import Optimizer, foreach_norm
from trainer.optim.orthogonalise import DTYPES, orthogonalise, polynomials
from trainer.parallel.shard_views import local, shared_like

_AT_ONCE = 1 << 26  # numbers in a batch: 128 MiB in BF16, of which the iteration has about four


class Piece(NamedTuple):
    """Matrices of a rank's part of a parameter: [begin:end] of view number `index` of its division."""

    name: str
    index: int
    begin: int
    end: int
    shape: torch.Size

    def of(self, views: Mapping[str, list[Tensor]]) -> Tensor:
        return views[self.name][self.index][self.begin : self.end]

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.shape[:-2].numel()


class Muon(Optimizer):
    """Muon for the parameters that `divisions` names, AdamW for the others of the model; see `Optimizer`."""

    def __init__(
        self,
        model: nn.Module,
        no_decay: set[str],
        config: OptimConfig,
        max_steps: int,
        device: torch.device,
        divisions: Mapping[str, Division],
        world: World | None = None,
    ):
        super().__init__(model, no_decay, config, max_steps, device, world, elsewhere=divisions.keys())
        assert config.muon is not None
        self._divisions, self._muon, self._decay = dict(divisions), config.muon, config.weight_decay
        self._triples = polynomials(config.muon.coefficients, config.muon.steps)
        self._dtype = DTYPES[config.muon.iteration]
        moments = BY_NAME[config.moments.value].dtype
        self._momentum = {name: torch.zeros_like(self._parts[name], dtype=moments) for name in divisions}
        self._batches = list(batches(divisions, {name: self._parts[name].shape for name in divisions}))
        self._moved = {name: torch.zeros((), dtype=torch.float64, device=device) for name in divisions}

    def step(self, ok: Tensor, committed: Tensor, norm: Tensor | None = None, attempted: int | None = None) -> Tensor:
        """As `Optimizer.step`. A parameter without a gradient counts as one whose gradient is zero."""
        lr = super().step(ok, committed, norm, attempted)
        self._orthogonal_step(ok, lr, self._divisor(norm))
        return lr

    @torch.no_grad()
    def _orthogonal_step(self, ok: Tensor, lr: Tensor, divisor: Tensor | None) -> None:
        for square in self._moved.values():
            square.zero_()
        weights = self._views({name: self._parts[name].detach() for name in self._divisions})
        momenta = self._views(self._momentum)
        gradients = self._views({name: self._gradient(name) for name in self._divisions})
        for batch in self._batches:
            count, shape = sum(p.count for p in batch), canonical(batch[0].shape)
            x = torch.empty(count, *shape, dtype=self._dtype, device=lr.device)
            for piece, slot in slots(batch, x):
                slot.copy_(self._advance(ok, piece.of(momenta), piece.of(gradients), divisor))
            for piece, update in slots(batch, orthogonalise(x, self._triples, self._dtype)):
                self._moved[piece.name] += self._apply(ok, lr, piece.of(weights), update)

    def _advance(self, ok: Tensor, momentum: Tensor, gradient: Tensor, divisor: Tensor | None) -> Tensor:
        """M <- mu M + G if `ok`; returns U, FP32."""
        mu = self._muon.momentum
        gradient = gradient if divisor is None else gradient / divisor
        advanced = torch.add(gradient, momentum.float(), alpha=mu)
        momentum.copy_(torch.where(ok, advanced, momentum))
        return torch.add(gradient, advanced, alpha=mu) if self._muon.nesterov else advanced

    def _apply(self, ok: Tensor, lr: Tensor, weight: Tensor, update: Tensor) -> Tensor:
        """W <- W - lr (scale sqrt(max(A, B)) O + decay W) if `ok`; returns the square of that, 0-d FP64."""
        times = self._muon.scale * max(weight.shape[-2:]) ** 0.5
        change = torch.add(update.float() * times, weight, alpha=self._decay).mul_(lr)
        weight.copy_(torch.where(ok, weight - change, weight))
        return torch.where(ok, torch.linalg.vector_norm(change).double().square(), 0.0)

    def _gradient(self, name: str) -> Tensor:
        gradient = self._named[name].grad
        return torch.zeros_like(self._parts[name]) if gradient is None else local(gradient)

    def _views(self, parts: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        return {name: self._divisions[name].views(part) for name, part in parts.items()}

    def _norms_of_parts(self) -> Tensor:
        mine = [self._parts[name].detach() for name in self._divisions]
        moved = torch.stack([self._moved[name].sqrt() for name in self._divisions])
        return torch.cat([super()._norms_of_parts(), torch.stack([moved, torch.stack(foreach_norm(mine)).double()])], 1)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's moments and step counts, Muon's momentum, by parameter name; shared as the parameters are."""
        momenta = {name: {"momentum": shared_like(m, self._named[name])} for name, m in self._momentum.items()}
        return super().state_dict() | momenta


def canonical(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns as they are iterated on: no more rows than columns."""
    m, n = sorted(shape[-2:])
    return m, n


def slots(batch: list[Piece], x: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with its place in x [matrices, m, n], in the piece's shape."""
    for piece, mine in zip(batch, x.split([piece.count for piece in batch]), strict=True):
        place = mine.mT if piece.shape[-2] > piece.shape[-1] else mine
        yield piece, place.unflatten(0, piece.shape[:-2])


def batches(divisions: Mapping[str, Division], shapes: Mapping[str, torch.Size]) -> Iterator[list[Piece]]:
    """The matrices of parts of these shapes, grouped: a function of shapes alone."""
    by_shape: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for name, division in divisions.items():
        for index, view in enumerate(division.views(torch.empty(shapes[name], device="meta"))):
            if not view.numel():
                continue
            most = max(_AT_ONCE // view[0].numel(), 1)
            for begin in range(0, len(view), most):
                end = min(begin + most, len(view))
                piece = Piece(name, index, begin, end, view[begin:end].shape)
                by_shape[canonical(piece.shape)].append(piece)
    for pieces in by_shape.values():
        batch: list[Piece] = []
        for piece in pieces:
            if batch and sum(p.shape.numel() for p in batch) + piece.shape.numel() > _AT_ONCE:
                yield batch
                batch = []
            batch.append(piece)
        yield batch
