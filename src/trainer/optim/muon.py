"""Muon (Keller Jordan 2024; at scale: Moonlight, arXiv 2502.16982): momentum, orthogonalised matrix by matrix.

Per logical matrix W [A, B] (`models.matrices`) with gradient G, clipped by the global norm as AdamW's is:

    M <- mu M + G              U = mu M + G (Nesterov), else M
    O = Newton-Schulz(U)       see `orthogonalise`
    W <- W - lr (scale sqrt(max(A, B)) O + decay W)

An orthogonal O has entries of RMS 1 / sqrt(max(A, B)), so all entries of the update have RMS `scale` whatever the
shape. With 0.2, the RMS of AdamW's updates in practice, AdamW's learning rate and decay carry over.

AdamW updates the embedding, head, norms and (unless `optim.muon.router`) routers; both groups share schedule, rate and
clip. The momentum has the parameter's name, shape and sharding: checkpoints are independent of matrices and owners. If
ranks share weights, one owner (`owners`) orthogonalises each matrix. A matrix that only the owner holds needs no
message. The others travel in rounds (`exchange`) that overlap with the computation of the previous round and of
matrices without messages. Pipeline stages do this each for their own matrices, all at the same time.

A skipped step writes nothing: new momentum and weights are *selected* by `ok`, since NaN x 0 is NaN. An expert without
tokens still moves along its old momentum.

Matrices of one shape (up to transposition) are computed in batches of at most `AT_ONCE` elements, which bounds the
memory of a step. U is always rounded to the format in which it travels (`CARRIED`) first, so a message does not change
the result. On a GPU with Triton, the elementwise parts before and after the iteration are a kernel each
(`precision.kernels.muon`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig
from trainer.launch.world import World
from trainer.optim.adamw import LearningRate, Optimizer, foreach_norm
from trainer.optim.exchange import Fragment, Packing, PendingExchange, Round, fragment, rounds
from trainer.optim.orthogonalise import CARRIED, DTYPES, has_kernels, orthogonalise, polynomials
from trainer.optim.owners import Layout, Run, assign
from trainer.parallel.mesh import ONE_PROCESS, Degrees
from trainer.parallel.shard_views import local, shared_like

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AT_ONCE = 9 << 23
"""Elements in a batch: 144 MiB in BF16, 24 matrices of Moonlight's experts, as many as one of 8 ranks has of a block.
The iteration needs about four times that."""


@dataclass
class RoundInFlight:
    """A round in transit. matrices: those that this rank owns, [matrices, A, B] by run, in `batches` of one shape."""

    round: Round
    batches: list[tuple[list[Run], Tensor]]
    matrices: dict[Run, Tensor]
    parcel: PendingExchange


@dataclass
class Step:
    """Inputs of a step: the flag, the rate, clipping's divisor, and this rank's rows of each weight, [rows, K]."""

    ok: Tensor
    lr: Tensor
    divisor: Tensor | None
    weights: dict[str, Tensor]
    momenta: dict[str, Tensor]
    gradients: dict[str, Tensor]


class Muon(Optimizer):
    """Muon for the parameters in `layouts`, AdamW for the model's others; see `Optimizer`. With several ranks `step` is
    a collective, too. degrees: of the ranks; group: those of this rank's pipeline stage, None with one stage."""

    def __init__(
        self,
        model: nn.Module,
        no_decay: set[str],
        config: OptimConfig,
        schedule: LearningRate,
        device: torch.device,
        layouts: Mapping[str, Layout],
        world: World | None = None,
        degrees: Degrees = ONE_PROCESS,
        group: "ProcessGroup | None" = None,
    ):
        super().__init__(model, no_decay, config, schedule, device, world, elsewhere=layouts.keys())
        assert config.muon is not None
        self._muon, self._decay = config.muon, config.weight_decay
        self._layouts = {name: each for name, each in layouts.items() if not self._parts[name].is_meta}  # this stage's
        self._ranks, self._group = degrees.stage, group
        self._triples = polynomials(config.muon.coefficients, config.muon.steps)
        self._dtype, self._carried = DTYPES[config.muon.iteration], CARRIED[config.muon.iteration]
        self._momentum = {name: torch.zeros_like(self._parts[name], dtype=self._moments) for name in layouts}
        runs, _ = assign(self._layouts, len(self._triples), self._ranks)
        alone, self._rounds = rounds(runs, self._layouts, self._world.rank % self._ranks, AT_ONCE)
        self._alone = list(batches(alone, AT_ONCE))
        self._squares: dict[str, dict[Fragment, Tensor]] = {name: {} for name in self._layouts}  # of the last update
        self._place = torch.cat([self._place, self._places(self._layouts)])
        self._kernels = has_kernels(device)

    def step(self, ok: Tensor, committed: Tensor, norm: Tensor | None = None, attempted: int | None = None) -> Tensor:
        """Step as `Optimizer.step` does. A parameter without a gradient counts as one with a gradient of zero."""
        lr = super().step(ok, committed, norm, attempted)
        self._orthogonal_step(ok, lr, self._divisor(norm))
        return lr

    @torch.no_grad()
    def _orthogonal_step(self, ok: Tensor, lr: Tensor, divisor: Tensor | None) -> None:
        names = self._layouts
        step = Step(
            ok,
            lr,
            divisor,
            {name: self._parts[name].detach().flatten(0, -2) for name in names},
            {name: self._momentum[name].flatten(0, -2) for name in names},
            {name: self._gradient(name).contiguous().flatten(0, -2) for name in names},
        )
        turns = len(self._rounds) + 1  # between the rounds, a share of the matrices without messages
        coming, back = self._send(step, 0), None
        for turn in range(turns):
            following = self._send(step, turn + 1)
            for batch in self._alone[turn::turns]:
                self._update(step, batch)
            returning = None if coming is None else self._send_back(coming)
            if back is not None:
                self._finish(step, back)
            coming, back = following, returning
        if self._kernels:  # the kernels do not bump the version that copies of a parameter check
            torch.autograd.graph.increment_version([self._parts[name] for name in names])

    def _update(self, step: Step, batch: list[Run]) -> None:
        """Update matrices that only this rank holds."""
        x = self._buffer(batch, step.lr.device)
        rows = {run: fragment(run, self._layouts[run.name], run.first) for run in batch}
        for run, slot in slots(batch, x):
            self._advance(step, rows[run], slot)
        for run, update in slots(batch, orthogonalise(x, self._triples, self._dtype)):
            self._apply(step, rows[run], update)

    def _send(self, step: Step, number: int) -> RoundInFlight | None:
        """Start sending a round's matrices to their owners; None if there is no such round."""
        if number >= len(self._rounds):
            return None
        this, device = self._rounds[number], step.lr.device
        ready = [(batch, self._buffer(batch, device)) for batch in batches(this.owned, AT_ONCE)]
        matrices = {run: slot for batch, x in ready for run, slot in slots(batch, x)}
        packing = Packing(this.sends, self._carried, device)
        for rows in this.here:
            whole = matrices.get(rows.run)
            self._advance(
                step, rows, packing.slots.get((rows.run.owner, rows)) if whole is None else rows.within(whole)
            )
        return RoundInFlight(this, ready, matrices, packing.send(this.receives, self._ranks, self._group))

    def _send_back(self, coming: RoundInFlight) -> RoundInFlight:
        """Orthogonalise the received matrices, and start sending the updates to the ranks that need them."""
        this = coming.round
        for rows, arrived in coming.parcel.open().items():
            rows.within(coming.matrices[rows.run]).copy_(arrived)
        done = [(batch, orthogonalise(x, self._triples, self._dtype)) for batch, x in coming.batches]
        updates = {run: slot for batch, x in done for run, slot in slots(batch, x)}
        packing = Packing(this.returns, self._dtype, self._lr.device)
        for (_, rows), slot in packing.slots.items():
            slot.copy_(rows.within(updates[rows.run]))
        return RoundInFlight(this, done, updates, packing.send(this.awaits, self._ranks, self._group))

    def _finish(self, step: Step, back: RoundInFlight) -> None:
        """Apply the updates of a round to the rows of this rank."""
        arrived = back.parcel.open()
        for rows in back.round.here:
            whole = back.matrices.get(rows.run)
            self._apply(step, rows, arrived[rows] if whole is None else rows.within(whole))

    def _buffer(self, batch: list[Run], device: torch.device) -> Tensor:
        """Return an empty buffer for its matrices, [matrices, m, n]."""
        return torch.empty(sum(run.count for run in batch), *canonical(batch[0]), dtype=self._carried, device=device)

    def _advance(self, step: Step, rows: Fragment, slot: Tensor | None) -> None:
        """Compute M <- mu M + G if `ok`, and U into slot, rounded to its format. slot None: a replica sends U."""
        mu, nesterov = self._muon.momentum, self._muon.nesterov
        momentum, gradient = rows.of(step.momenta[rows.run.name]), rows.of(step.gradients[rows.run.name])
        if self._kernels:
            from precision.kernels import muon  # needs Triton

            slot = torch.empty_like(gradient, dtype=self._carried) if slot is None else slot
            divisor = torch.ones_like(step.lr) if step.divisor is None else step.divisor
            muon.advance(gradient, momentum, slot, step.ok, divisor, mu, nesterov)
            return
        gradient = gradient if step.divisor is None else gradient / step.divisor
        advanced = torch.add(gradient, momentum.float(), alpha=mu)
        momentum.copy_(torch.where(step.ok, advanced, momentum))
        if slot is not None:
            slot.copy_(torch.add(gradient, advanced, alpha=mu) if nesterov else advanced)

    def _apply(self, step: Step, rows: Fragment, update: Tensor) -> None:
        """Apply W <- W - lr (scale sqrt(max(A, B)) O + decay W) if `ok`, and keep its square for the update norm."""
        weight, times = rows.of(step.weights[rows.run.name]), self._muon.scale * max(canonical(rows.run)) ** 0.5
        squares = self._squares[rows.run.name]
        if self._kernels:
            from precision.kernels import muon  # needs Triton

            if rows not in squares:
                squares[rows] = step.lr.new_empty(muon.programs(weight))
            muon.apply(weight, update, squares[rows], step.ok, step.lr, times, self._decay)
            return
        change = torch.add(update.float() * times, weight, alpha=self._decay).mul_(step.lr)
        weight.copy_(torch.where(step.ok, weight - change, weight))
        square = torch.linalg.vector_norm(change).double().square()
        squares[rows] = torch.where(step.ok, square, 0.0)

    def _gradient(self, name: str) -> Tensor:
        gradient = self._named[name].grad
        return torch.zeros_like(self._parts[name]) if gradient is None else local(gradient)

    def _norms_of_parts(self) -> Tensor:
        parts = [self._parts[name].detach() for name in self._layouts]
        none = self._lr.new_zeros((), dtype=torch.float64)
        moved = torch.stack([sum((s.double().sum() for s in kept.values()), none) for kept in self._squares.values()])
        own = torch.stack([moved.sqrt(), torch.stack(foreach_norm(parts)).double()])
        return torch.cat([super()._norms_of_parts(), own], 1)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return AdamW's moments and step counts and Muon's momentum by parameter name, sharded as the parameters."""
        momenta = {name: {"momentum": shared_like(m, self._named[name])} for name, m in self._momentum.items()}
        return super().state_dict() | momenta


def canonical(run: Run) -> tuple[int, int]:
    """Return rows and columns for the iteration: no more rows than columns."""
    m, n = sorted((run.box.rows, run.box.columns))
    return m, n


def slots(batch: list[Run], x: Tensor) -> Iterator[tuple[Run, Tensor]]:
    """Yield each run with its matrices [matrices, A, B] in x [matrices of all, m, n]."""
    for run, x_run in zip(batch, x.split([run.count for run in batch]), strict=True):
        yield run, x_run.mT if run.box.rows > run.box.columns else x_run


def batches(runs: Iterable[Run], most: int) -> Iterator[list[Run]]:
    """Yield runs of matrices of one shape, with at most `most` elements, or one run."""
    by_shape: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in runs:
        by_shape[canonical(run)].append(run)
    for alike in by_shape.values():
        batch: list[Run] = []
        for run in alike:
            if batch and sum(r.numel for r in batch) + run.numel > most:
                yield batch
                batch = []
            batch.append(run)
        yield batch
