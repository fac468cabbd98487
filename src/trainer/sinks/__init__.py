"""Outputs of a run: console, `metrics.jsonl`, `events.jsonl`, the log file, W&B, TensorBoard."""

from trainer.sinks.sinks import Sinks, Summary
