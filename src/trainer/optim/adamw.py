"""AdamW on FP32 masters, its learning-rate schedule, and clipping: all on the device, and all can be skipped.

A step may turn out bad after its backward pass, and nothing here asks the host. The flag `ok` reaches the kernel, which
leaves parameters, moments and step counts unchanged if it is false; the warm-up reads the number of *committed* steps,
a tensor. Clipping is a divisor, `max(1, norm / clip)`, that the same kernel applies, without a separate pass over the
gradients. Weight decay (decoupled, arXiv 1711.05101) spares norms, the embedding and the router.

The kernel is `precision.kernels.adamw` on a GPU with Triton (it returns norms, too), else torch's fused AdamW, which
takes flag and divisor as `found_inf` and `grad_scale` (the arguments of torch.amp.GradScaler). On a GPU the latter is
slower: it writes the scaled gradients back.

If ranks share the weights, each updates its own part of them: AdamW works element by element. Norms are added up over
the parts.
"""

import importlib.util
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from precision import gemm_layers
from precision.formats import BY_NAME
from precision.proof import OPTIMIZER, refused
from trainer.config import OptimConfig, Schedule
from trainer.config.phases import Shape
from trainer.launch.world import World
from trainer.optim.update_norms import update_norms
from trainer.parallel.collectives import all_sum
from trainer.parallel.shard_views import copies, local, shared_like

if TYPE_CHECKING:
    from precision.kernels.adamw import FusedAdamW
    from precision.kernels.gradient_norms import GradientNorms

# The first part of torch.nn.utils.clip_grad_norm_; the verdict on a step needs every single norm.
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


Move = tuple[int, int, float, Shape]
"""Steps before it, its last step, its target rate, and its shape."""


class LearningRate:
    """Learning rate as a function of the steps so far: committed ones for the warm-up, all of them for the decay.

    It rises linearly over `warmup_steps`, stays at `lr`, and falls to `lr * min_lr_ratio` over the last
    `decay_fraction` of the run: on a straight line (wsd, arXiv 2404.06395) or half a cosine (arXiv 1608.03983; a
    fraction of 1 starts it after the warm-up). `max_steps` and the decay count skipped steps: the decay ends with the
    run. With `schedule=phases` it is `lr` until the first of the `moves`, each of which changes it to another rate: at
    once, or by its end on a line or half a cosine.
    """

    def __init__(
        self, config: OptimConfig, max_steps: int, warmup: int | None = None, moves: Sequence[Move] = ()
    ) -> None:
        """warmup: `warmup_steps` in steps, if the config has another unit. moves: of `trainer.phases`, in order."""
        self._config, self._moves = config, moves
        self._warmup = int(config.warmup_steps) if warmup is None else warmup
        self._start = max(self._warmup, max_steps - round(config.decay_fraction * max_steps))
        self._length = max(max_steps - self._start, 1)
        self._lowered = (1.0, 0)

    def lower(self, factor: float, until: int) -> None:
        """Multiply the rate by `factor` until this many steps are committed. Replaces an earlier factor."""
        self._lowered = factor, until

    def at(self, committed: Tensor, attempted: int | None = None) -> Tensor:
        """Return the learning rate, 0-d FP32 on the same device, of the step after `committed` (0-d, any device) of
        `attempted` steps; None: all were committed. Does not synchronise."""
        c = self._config
        steps = committed if attempted is None else torch.full_like(committed, attempted)
        warm = ((committed.float() + 1) / max(self._warmup, 1)).clamp(max=1.0)
        factor, until = self._lowered
        if c.schedule is Schedule.phases:
            return self._moved(steps) * warm * torch.where(committed < until, factor, 1.0)
        fallen = ((steps.float() - self._start + 1) / self._length).clamp(0.0, 1.0)
        if c.schedule is Schedule.cosine:
            fallen = 0.5 * (1 - torch.cos(math.pi * fallen))
        return c.lr * warm * (1 - fallen * (1 - c.min_lr_ratio)) * torch.where(committed < until, factor, 1.0)

    def _moved(self, steps: Tensor) -> Tensor:
        """Return the rate after `steps` steps, 0-d FP32: the first rate plus the progress of each move."""
        rate, before = torch.full_like(steps, self._config.lr, dtype=torch.float64), self._config.lr
        for begin, end, after, shape in self._moves:
            length = 1 if shape is Shape.constant else max(end - begin, 1)
            done = ((steps.double() - begin + 1) / length).clamp(0.0, 1.0)
            if shape is Shape.cosine:
                done = 0.5 * (1 - torch.cos(math.pi * done))
            rate, before = torch.where(done < 1, rate + done * (after - before), after), after
        return rate.clamp(min=0.0).float()


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None and OPTIMIZER not in refused


class Optimizer:
    """Fused AdamW over a model's named parameters, with clipping by global norm. world: the ranks that share them.
    elsewhere: names that a subclass updates; they come last in `names`."""

    def __init__(
        self,
        model: nn.Module,
        no_decay: set[str],
        config: OptimConfig,
        schedule: LearningRate,
        device: torch.device,
        world: World | None = None,
        elsewhere: Collection[str] = (),
    ):
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert named.keys() >= set(elsewhere)
        self._elementwise = [name for name in named if name not in elsewhere]
        self._named = {name: named[name] for name in (*self._elementwise, *elsewhere)}
        self._parts = {name: local(p) for name, p in self._named.items()}
        self._world = world or World(device)
        self._copies = torch.tensor([copies(p) for p in self._named.values()], dtype=torch.float64, device=device)
        self.names = list(self._named)
        self.schedule = schedule
        self._clip = config.clip
        here = [name for name in self._elementwise if not named[name].is_meta]
        decayed, spared = [n for n in here if n not in no_decay], [n for n in here if n in no_decay]
        groups = [
            {"params": [self._parts[n] for n in decayed], "weight_decay": config.weight_decay},
            {"params": [self._parts[n] for n in spared], "weight_decay": 0.0},
        ]
        self._place = self._places([*decayed, *spared])
        self._lr = torch.tensor(config.lr, dtype=torch.float32, device=device)
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=self._lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
        for group in self._adamw.param_groups:
            group["lr"] = self._lr
        self._moments = moments = BY_NAME[config.moments.value].dtype
        for name in self._elementwise:  # made now, so that a checkpoint can be loaded into them
            p = self._parts[name]
            self._adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(p, dtype=moments),
                "exp_avg_sq": torch.zeros_like(p, dtype=moments),
            }
        self._kernel = self._make_kernel(config, model) if _has_kernel(device) else None
        self._grad_norms = self._make_grad_norms(device) if self._kernel is not None else self._plain_norms

    def _make_kernel(self, config: OptimConfig, model: nn.Module) -> "FusedAdamW":
        from precision.kernels.adamw import FusedAdamW  # needs Triton

        pairs = [(p, group["weight_decay"]) for group in self._adamw.param_groups for p in group["params"]]
        parameters, decays = zip(*pairs, strict=True)
        layers = {layer.weight: layer for layer in gemm_layers(model)}
        self._layers = [layers.get(p) for p in parameters]
        first, second, steps = (
            [self._adamw.state[p][key] for p in parameters] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        return FusedAdamW(parameters, first, second, steps, decays, (config.betas[0], config.betas[1]), config.eps)

    def _make_grad_norms(self, device: torch.device) -> "GradientNorms":
        from precision.kernels.gradient_norms import GradientNorms  # needs Triton

        return GradientNorms([0 if part.is_meta else part.numel() for part in self._parts.values()], device)

    def _plain_norms(self, gradients: Sequence[Tensor | None]) -> Tensor:
        present, zero = [g for g in gradients if g is not None], self._lr.new_zeros(())
        norms = iter(foreach_norm(present)) if present else iter(())
        return torch.stack([zero if g is None else next(norms) for g in gradients])

    @torch.no_grad()
    def unscale(self, scale: Tensor) -> None:
        """Divide all gradients by `scale`, 0-d FP32, in place."""
        if present := [local(p.grad) for p in self._named.values() if p.grad is not None]:
            torch._foreach_div_(present, scale)  # pyright: ignore[reportPrivateImportUsage]

    def grad_norms(self) -> Tensor:
        """Return the L2 norm of each parameter's gradient, [P] FP32, in the order of `names`; 0 without a gradient."""
        gradients = [None if p.grad is None else local(p.grad) for p in self._named.values()]
        return self._of_all_parts(self._grad_norms(gradients))

    def norms(self, ok: Tensor) -> tuple[Tensor, Tensor]:
        """Return L2 norms, 0-d FP64: of all master weights, and of the last step's updates (0 unless `ok`, 0-d bool).
        Call it before the next step. A collective if there are several ranks."""
        norms = self._norms_of_parts()
        norms = norms.new_zeros(2, len(self.names)).index_copy_(1, self._place, norms)  # 0 for other pipeline stages
        updates, parameters = self._of_all_parts(norms)
        return parameters.norm(), updates.norm() * ok

    def _norms_of_parts(self) -> Tensor:
        """Return norms of this rank's parts, [2, len(self._place)] FP64: of the last updates, of the parameters. Their
        order is `_place`'s; here AdamW's only."""
        if self._kernel is not None:
            return self._kernel.norms(self._lr)
        updates, parts = [], []
        for group in self._adamw.param_groups:
            parts += group["params"]
            states = [self._adamw.state[p] for p in group["params"]]
            settings = group["betas"], group["eps"], group["weight_decay"]
            updates.append(update_norms(group["params"], states, self._lr, *settings))
        return torch.stack([torch.cat(updates), torch.stack(foreach_norm(parts)).detach().double()])

    def _places(self, names: Collection[str]) -> Tensor:
        """Return where they are in `names`."""
        place = {name: i for i, name in enumerate(self.names)}
        return torch.tensor([place[name] for name in names], device=self._copies.device)

    def _of_all_parts(self, norms: Tensor) -> Tensor:
        """Reduce norms of this rank's parts [..., P] to norms of the whole."""
        if not self._world.is_distributed:
            return norms
        squares = norms.double().square() / self._copies
        return all_sum([squares], self._world)[0].sqrt().to(norms.dtype)

    def step(self, ok: Tensor, committed: Tensor, norm: Tensor | None = None, attempted: int | None = None) -> Tensor:
        """Update everything if `ok` (0-d bool), nothing otherwise. Return the learning rate, 0-d.

        committed, attempted: steps before this one, as for `LearningRate.at`. norm: global norm of the gradients, 0-d;
        gradients count as if scaled down to a norm of `clip`. None: no clipping.
        """
        self._lr.copy_(self.schedule.at(committed, attempted))
        for name in self._elementwise:
            if (p := self._parts[name]).is_meta:  # its stage counts the same: a checkpoint saves rank 0's counts
                self._adamw.state[p]["step"] += ok
        divisor = self._divisor(norm)
        for name in self._elementwise:
            p = self._named[name]
            if self._parts[name] is not p:
                self._parts[name].grad = None if p.grad is None else local(p.grad)
        if self._kernel is not None:
            made = self._kernel.step(
                ok, self._lr, divisor, [None if layer is None else layer.made_ahead() for layer in self._layers]
            )
            for layer, is_made in zip(self._layers, made, strict=True):
                if layer is not None and is_made:
                    layer.mark_ahead()
            return self._lr
        self._adamw.found_inf = (~ok).float()  # type: ignore[attr-defined]
        self._adamw.grad_scale = divisor  # type: ignore[attr-defined]
        self._torch_step()
        # torch's kernel does not bump the version that copies of a parameter check
        torch.autograd.graph.increment_version([p for n in self._elementwise if (p := self._parts[n]).grad is not None])
        return self._lr

    def _torch_step(self) -> None:
        """Run torch's fused kernel. It needs moments in the parameters' format: BF16 moments are widened, one parameter
        at a time, and rounded to nearest afterwards. A skipped step restores the same bits."""
        if self._moments is torch.float32:
            self._adamw.step()
            return
        for group in self._adamw.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._adamw.state[p]
                first, second = state["exp_avg"], state["exp_avg_sq"]
                wide = first.float(), second.float()
                adamw(
                    *([p], [p.grad], [wide[0]], [wide[1]], [], [state["step"]]),
                    fused=True,
                    grad_scale=self._adamw.grad_scale,  # type: ignore[attr-defined]
                    found_inf=self._adamw.found_inf,  # type: ignore[attr-defined]
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=self._lr,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                first.copy_(wide[0])
                second.copy_(wide[1])

    def _divisor(self, norm: Tensor | None) -> Tensor | None:
        """Return the divisor that clips gradients of this global norm, 0-d; None: no clipping."""
        if norm is None or self._clip is None:
            return None
        return ((norm + 1e-6) / self._clip).clamp(min=1.0)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)
        for p in self._named.values():
            p.grad = None

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return moments and step counts by parameter name, sharded as the parameters are. A checkpoint is read into
        them."""
        return {
            name: {
                key: shared_like(tensor, p) if tensor.dim() else tensor
                for key, tensor in self._adamw.state[self._parts[name]].items()
            }
            for name in self._elementwise
            for p in (self._named[name],)
        }
