"""The loss on held-out text."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from models import DeepSeek
from models.stage import Pipeline
from precision import IGNORED
from trainer.launch.world import World
from trainer.parallel.collectives import all_sum, in_groups


@torch.no_grad()
def mean_loss(
    model: DeepSeek, batches: Iterable[Tensor], size: int, world: World, seen: Callable[[int], None] = lambda done: None
) -> float:
    """Return the mean language-model loss over windows, nats per token. A collective: the ranks of `world` take turns.

    batches: int64 [<= size, S + 1] each. seen: called regularly with the number of windows done. Leaves the model in
    training mode.
    """
    model.eval()
    done = 0
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # of losses, of sequences
    context, pipeline = 1 if model.context is None else model.context.size, model.pipeline
    readers = world.size // context // (1 if pipeline is None else pipeline.group.size())
    rank = world.rank // context % readers
    for group in in_groups(batches, readers):  # a batch for each rank, or for each group that shares sequences
        tokens = group[min(rank, len(group) - 1)]
        count = len(tokens) if rank < len(group) else 0
        # a smaller last batch is padded with unscored repeats: another shape would be compiled
        tokens = tokens[torch.arange(size) % len(tokens)].to(world.device)
        targets = tokens[:, 1:].clone()
        targets[max(count, 1) :] = IGNORED  # keep one sequence even without a batch; its weight is 0
        h = model.hidden(tokens[:, :-1]) if pipeline is None else _through(model, pipeline, tokens[:, :-1])
        if h is not None:
            loss = model.loss(h, model.scored(targets))
            sums += torch.stack([loss.double() * count, sums.new_tensor(count)])
        seen(done := done + sum(map(len, group)))
    model.train()
    total, weight = all_sum([sums], world)[0].tolist()
    return total / weight


def _through(model: DeepSeek, pipeline: Pipeline, tokens: Tensor) -> Tensor | None:
    """Return `DeepSeek.hidden` of tokens [B, S], stage by stage; None if another rank has the last stage. With several
    stages a rank, only one rank computes at a time."""
    h, rank = None, pipeline.group.rank()
    for stage in pipeline.stages:
        if not stage.is_first and pipeline.owners[stage.index - 1] != rank:
            shape = *model.own(tokens).shape, model.config.hidden_size
            h = pipeline.receive(stage, shape, tokens, model.embed.residual)
        h = model.hidden(tokens, h, stage)
        if not stage.is_last and pipeline.owners[stage.index + 1] != rank:
            pipeline.send(stage, h)
    return h if pipeline.has_last else None
