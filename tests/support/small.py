"""A small run that trains in a second: real text, a model of every mechanism."""

from pathlib import Path

from trainer.config.timeline import Segment

SMALL_MODEL = [
    *("model.vocab_size=320", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2"),
    *("model.kv_lora_rank=32", "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16"),
    *("model.intermediate_size=96", "model.moe_intermediate_size=32", "model.num_experts=4"),
]
SMALL = [
    *SMALL_MODEL,
    *("trainer.max_steps=6", "trainer.global_batch_size=4", "trainer.microbatch_size=2", "trainer.sequence_length=24"),
    *("trainer.device=cpu", "optim.warmup_steps=2", "eval.every=0", "eval.batches=2", "eval.at_end=4"),
    *("logging.every=1", "logging.console.enabled=false", "checkpoint.every=0", "health.dashboard=false"),
    *("data=text", "data.validation_fraction=0.05"),
]


def steady(length: int, batch: int) -> list[Segment]:
    """The segments of a run with one sequence length and one batch."""
    return [Segment(1, 0, batch, batch, length, 0)]


def write_corpus(folder: Path, lines: int = 60, factor: int = 1, names: int = 17) -> Path:
    """Twelve text files in a new folder, of so many lines, with functions of up to `names` names."""
    folder.mkdir(exist_ok=True)
    for i in range(12):
        words = " ".join(f"def f{i * j * factor % names}(x): return x + {j}\n" for j in range(lines))
        (folder / f"file{i}.txt").write_text(words)
    return folder
