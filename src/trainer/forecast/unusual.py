"""Settings that are allowed but rarely intended: a line each, with the usual range and its source.

Learning rate. Two laws, fitted on AdamW runs, with C the training FLOPs without vocabulary:

    DeepSeek LLM (arXiv 2401.02954)       0.3118 C^-0.125     dense models
    Ling's MoE law (arXiv 2507.17702)     1.1576 C^-0.1529    64 experts, top-4

C is that of at least 20 tokens an active parameter (Chinchilla, arXiv 2203.15556): a trial of a few steps is judged as
the full run that it prepares. The usual range is ours: from a quarter of the lower law to twice the higher one. It
contains the published rates of DeepSeek-V3, V2-Lite and Moonlight.
"""

import math

from models.flops import count_parameters
from trainer.config import Config, OptimizerName
from trainer.config.timeline import Timeline

TOKENS_A_PARAMETER = 20.0
EPOCHS = 4.0
"""Up to here repeated data is nearly as good as new data (arXiv 2305.16264)."""
SMALL_WEIGHTS = 0.25
"""Of 1 / sqrt(features): smaller initial weights cost 0.5 nats and more in short runs (docs/benchmarks.md)."""
OCCURRENCES = 100
"""Average occurrences of a vocabulary entry in the text; our choice."""


def unusual(config: Config, tokens: int | None = None, documents: int | None = None) -> list[str]:
    """Return a line for each setting outside its usual range. tokens, documents: of the training text, if known."""
    t, o, m = config.trainer, config.optim, config.model
    timeline = Timeline(t)
    endless = timeline.epochs is not None
    trained = 0 if endless else timeline.tokens(timeline.steps)
    steps, warmup = timeline.steps, timeline.steps_of(o.warmup_steps)
    key = "trainer.max_tokens" if t.max_steps is None else "trainer.max_steps"
    size = t.max_tokens if t.max_steps is None else t.max_steps
    count = count_parameters(m)
    active = count.active - m.vocab_size * m.hidden_size  # the head counts once, however often it is used
    low, high = usual_rates(active, trained)
    lines, from_scratch = [], config.run.init_from is None

    def note(key: str, value: object, what: str) -> None:
        lines.append(f"{key}={value}: {what}")

    if from_scratch and not low <= o.lr <= high:
        laws = "laws of arXiv 2401.02954 and 2507.17702"
        note("optim.lr", f"{o.lr:g}", f"{low:.1e} to {high:.1e} is usual for this size ({laws})")
    whole = 1 / math.sqrt(m.hidden_size)  # keeps the size of a product's input
    if from_scratch and o.name is OptimizerName.adamw and m.init_std < SMALL_WEIGHTS * whole:
        what = f"small for {m.hidden_size:,} features; 1 / sqrt(features), {whole:.2g}, is usual with AdamW (ours)"
        note("model.init_std", f"{m.init_std:g}", what)
    if 2 * warmup > steps > 1:
        about = f"1 % of the steps is usual (arXiv 2507.17702), here {max(steps // 100, 1)}"
        what = "the whole run" if warmup >= steps else "more than half of the run"
        note("optim.warmup_steps", o.warmup_steps, f"{what}, {key}={size}; {about}")
    equal = math.log(t.sequence_length)
    if o.qk_clip is not None and o.qk_clip <= equal:
        what = f"log-sum-exps of equal scores over {t.sequence_length:,} positions reach {equal:.1f}"
        note(
            "optim.qk_clip",
            f"{o.qk_clip:g}",
            f"{what}, so q and k shrink in every step; 100 is usual (Kimi K2, arXiv 2507.20534)",
        )
    if from_scratch and trained < count.total and not endless:
        usual = f"20 an active parameter, here {TOKENS_A_PARAMETER * active:,.0f}, are usual (arXiv 2203.15556)"
        what = f"{trained:,} tokens for {count.total:,} parameters; {usual}"
        note(key, size, what)
    if tokens is None:
        return lines
    if trained > EPOCHS * tokens:
        what = f"{trained / tokens:.1f} epochs of the text; up to 4 are nearly as good as new text (arXiv 2305.16264)"
        note(key, size, what)
    if tokens < OCCURRENCES * m.vocab_size:
        what = f"the text has {tokens / m.vocab_size:.0f} tokens an entry; {OCCURRENCES} or more are usual (ours)"
        note("model.vocab_size", m.vocab_size, what)
    if documents and t.sequence_length * 2 < tokens / documents:
        length = f"a document has {tokens / documents:,.0f} tokens on average, and is cut"
        what = f"{length}; 4,096 are usual in pretraining (DeepSeek-V3, arXiv 2412.19437)"
        note("trainer.sequence_length", t.sequence_length, what)
    return lines


def usual_rates(active: float, tokens: float) -> tuple[float, float]:
    """Return the usual range of the peak learning rate. active: parameters per token, without vocabulary."""
    flops = 6.0 * active * max(tokens, TOKENS_A_PARAMETER * active)
    laws = 0.3118 * flops**-0.125, 1.1576 * flops**-0.1529
    return min(laws) / 4, max(laws) * 2
