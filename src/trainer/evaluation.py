"""The loss on text that was held out: while a run trains, and of one of its checkpoints afterwards.

In FP8 and in BF16 it is the same model with the same weights (`precision.plain`); the difference is what the casts
cost. On one process, on the device that the run had, the loss in the run's recipe is the one that it logged.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from models import DeepSeek
from precision import IGNORED
from precision.plain import in_bf16
from trainer.data import Bins, Prepared, validation_batches
from trainer.distributed import World
from trainer.documents import tell_documents
from trainer.parallel.totals import added_up, in_groups
from trainer.saved import TOKENIZER, Saved


@torch.no_grad()
def mean_loss(
    model: DeepSeek, batches: Iterable[Tensor], size: int, world: World, seen: Callable[[int], None] = lambda done: None
) -> float:
    """Mean language-model loss over windows, nats per token. A collective: the ranks of `world` take turns.

    batches: int64 [<= size, S + 1] each. seen: told now and then how many windows are done. The model, in any mode, is
    left in that of training.
    """
    model.eval()
    done = 0
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # of losses, of sequences
    for group in in_groups(batches, world.size):  # a batch for each rank
        tokens = group[min(world.rank, len(group) - 1)]
        count = len(tokens) if world.rank < len(group) else 0
        # a last batch that is smaller repeats itself, unscored: another shape would be compiled for it
        tokens = tokens[torch.arange(size) % len(tokens)].to(world.device)
        targets = tokens[:, 1:].clone()
        targets[max(count, 1) :] = IGNORED  # one sequence at least is looked at; without a batch it counts nothing
        loss = model.loss(model.hidden(tokens[:, :-1]), targets)
        sums += torch.stack([loss.double() * count, sums.new_tensor(count)])
        seen(done := done + sum(map(len, group)))
    model.train()
    total, weight = added_up([sums], world)[0].tolist()
    return total / weight


@dataclass
class Scores:
    """Of one source's held-out text. Losses in nats per token; own: not a number if the text is shorter than a window;
    bf16: None if the run computes no GEMM in FP8."""

    source: str
    windows: int
    own: float
    bf16: float | None

    @property
    def gap(self) -> float | None:
        """How much the casts cost, nats per token."""
        return None if self.bf16 is None else self.own - self.bf16


def held_out(data: Prepared) -> list[tuple[str, Bins]]:
    """Validation text by the name of its source; of several first all together, which is what a run logs."""
    together = [("all", data.validation)] if len(data.validations) > 1 else []
    return [*together, *data.validations]


def evaluate(saved: Saved, data: Prepared, most: int | None) -> list[Scores]:
    """The model on each source's held-out text. most: microbatches of each, spread evenly; None for all windows.

    ValueError if the text is in other tokens than the model's or shorter than a sequence, or Transformer Engine serves
    the model.
    """
    own = saved.run / TOKENIZER
    if data.tokenizer_path.read_bytes() != own.read_bytes():
        given = saved.config.data.tokenizer or "null"
        raise ValueError(f"data.tokenizer={given}: the text is not in the tokens of the run; set data.tokenizer={own}")
    if saved.plan.served_by("transformer_engine"):
        raise ValueError(
            "precision.backend=auto: it chose Transformer Engine, whose modules cannot leave FP8 for a while; "
            "set precision.backend=reference"
        )
    t, world = saved.config.trainer, World(saved.device)
    data.validation.check_length(t.sequence_length)
    tell_documents(saved.model, t, data)
    has_fp8 = any(row.recipe.is_fp8 for row in saved.plan.gemms.values())
    scores = []
    for source, bins in held_out(data):

        def loss(bins: Bins = bins) -> float:
            batches = validation_batches(bins, t.sequence_length, t.microbatch_size, most)
            return mean_loss(saved.model, batches, t.microbatch_size, world)

        windows = bins.num_windows(t.sequence_length)
        mine, plain = loss() if windows else math.nan, None
        if has_fp8 and windows:
            with in_bf16(saved.model):
                plain = loss()
        windows = windows if most is None else min(windows, most * t.microbatch_size)
        scores.append(Scores(source, windows, mine, plain))
    return scores


def perplexity(loss: float) -> float:
    """exp(loss): of how many tokens, all equally likely, a model with this loss would be as sure."""
    return math.exp(min(loss, 700.0))
