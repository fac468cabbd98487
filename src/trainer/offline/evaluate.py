"""Loss on held-out text: of a training run, or afterwards of one of its checkpoints.

FP8 and BF16 evaluate the same model with the same weights (`precision.plain`); the difference is the cost of the casts.
On one process, on the run's device, the loss in the run's recipe is the one that it logged.
"""

import math
from dataclasses import dataclass

from precision.errors import UserError
from precision.plain import in_bf16
from trainer.config.data import TOKENIZER, Source, source_configs
from trainer.config.paths import as_typed
from trainer.data import Bins, Prepared, validation_batches
from trainer.data.document_masking import set_document_masking
from trainer.launch.world import World
from trainer.offline.saved_model import Saved
from trainer.step.evaluation import mean_loss


@dataclass
class Scores:
    """Losses on one source's held-out text, nats per token. own: NaN if the text is shorter than a window. bf16: None
    if the run computes no GEMM in FP8."""

    source: str
    windows: int
    own: float
    bf16: float | None

    @property
    def gap(self) -> float | None:
        """Cost of the casts, nats per token."""
        return None if self.bf16 is None else self.own - self.bf16


def held_out(data: Prepared) -> list[tuple[str, Bins]]:
    """Return validation text by source name; several are preceded by all together, as a run logs them."""
    together = [("all", data.validation)] if len(data.validations) > 1 else []
    return [*together, *data.validations]


def evaluate(saved: Saved, data: Prepared, most: int | None) -> list[Scores]:
    """Evaluate the model on each source's held-out text. most: microbatches of each, spread evenly; None for all
    windows.

    Raises UserError if the text has other tokens than the model's or is shorter than a sequence, or Transformer Engine
    serves the model.
    """
    own = saved.run / TOKENIZER
    saved.tokenizer()
    if data.tokenizer_path.read_bytes() != own.read_bytes():
        fix = as_typed("data.tokenizer", str(own))
        if source_configs(saved.config.data)[0].source is Source.bins:
            fix = f"{data.folder} was prepared with another; prepare that text again, with {fix}"
            raise UserError(f"data.source=bins: the tokenizer of the run is {own}, and {fix}")
        given = saved.config.data.tokenizer or "null"
        raise UserError(f"data.tokenizer={given}: this is not the tokenizer of the run; set {fix}")
    if saved.plan.served_by("transformer_engine"):
        raise UserError(
            "precision.backend=auto: it chose Transformer Engine, whose modules cannot be evaluated in BF16; "
            "set precision.backend=reference"
        )
    t, world = saved.config.trainer, World(saved.device)
    size, length = saved.shape.microbatch, saved.shape.length
    data.validation.check_length(length)
    set_document_masking(saved.model, t, data)
    scores = []
    for source, bins in held_out(data):

        def loss(bins: Bins = bins) -> float:
            windows = None if most is None else most * size
            batches = validation_batches(bins, length, size, windows)
            return mean_loss(saved.model, batches, size, world)

        windows = bins.num_windows(length)
        mine, plain = loss() if windows else math.nan, None
        if saved.plan.has_fp8 and windows:
            with in_bf16(saved.model):
                plain = loss()
        windows = windows if most is None else min(windows, most * size)
        scores.append(Scores(source, windows, mine, plain))
    return scores


def perplexity(loss: float) -> float:
    """Return exp(loss): the number of equally likely tokens that gives this loss."""
    return math.exp(min(loss, 700.0))
