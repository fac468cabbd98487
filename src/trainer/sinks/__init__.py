"""Where the words and numbers of a run go: console, `metrics.jsonl`, `events.jsonl`, the log file, W&B, TensorBoard."""

from trainer.sinks.sinks import RunSummary, Sinks

__all__ = ["RunSummary", "Sinks"]
