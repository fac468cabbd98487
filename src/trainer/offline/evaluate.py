"""Loss on held-out text: while a run trains, and of one of its checkpoints afterwards.

In FP8 and in BF16 it is the same model with the same weights (`precision.plain`); the difference is what the casts
cost. On one process, on the device that the run had, the loss in the run's recipe is the one that it logged.
"""

import math
from dataclasses import dataclass

from precision.errors import UserError
from precision.plain import in_bf16
from trainer.config.timeline import Timeline
from trainer.data import Bins, Prepared, validation_batches
from trainer.data.document_masking import set_document_masking
from trainer.launch.world import World
from trainer.offline.saved_model import TOKENIZER, Saved
from trainer.step.evaluation import mean_loss


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

    UserError if the text is in other tokens than the model's or shorter than a sequence, or Transformer Engine serves
    the model.
    """
    own = saved.run / TOKENIZER
    saved.tokenizer()
    if data.tokenizer_path.read_bytes() != own.read_bytes():
        given = saved.config.data.tokenizer or "null"
        raise UserError(f"data.tokenizer={given}: the text is not in the tokens of the run; set data.tokenizer={own}")
    if saved.plan.served_by("transformer_engine"):
        raise UserError(
            "precision.backend=auto: it chose Transformer Engine, whose modules cannot leave FP8 for a while; "
            "set precision.backend=reference"
        )
    t, world = saved.config.trainer, World(saved.device)
    shape = Timeline(t).at(max(saved.step, 1))
    size, length = shape.microbatch, shape.length
    data.validation.check_length(length)
    set_document_masking(saved.model, t, data)
    has_fp8 = any(row.recipe.is_fp8 for row in saved.plan.gemms.values())
    scores = []
    for source, bins in held_out(data):

        def loss(bins: Bins = bins) -> float:
            windows = None if most is None else most * size
            batches = validation_batches(bins, length, size, windows)
            return mean_loss(saved.model, batches, size, world)

        windows = bins.num_windows(length)
        mine, plain = loss() if windows else math.nan, None
        if has_fp8 and windows:
            with in_bf16(saved.model):
                plain = loss()
        windows = windows if most is None else min(windows, most * size)
        scores.append(Scores(source, windows, mine, plain))
    return scores


def perplexity(loss: float) -> float:
    """exp(loss): of how many tokens, all equally likely, a model with this loss would be as sure."""
    return math.exp(min(loss, 700.0))
