"""Octet's only uses of private parts of torch.compile: a limit and a warning that have no public switch."""

import logging

import torch

ADVICE = "Detected that context_fn is passed"
ADVISER = "torch._higher_order_ops.wrap"


def allow_graphs(count: int) -> None:
    """Let Dynamo compile a function at least `count` times: blocks of one class differ in their plan rows."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def silence_advice_on_recomputation() -> None:
    """Silence torch's advice against in-place ops in recomputed code: ours raise amaxes, which may happen twice."""
    logging.getLogger(ADVISER).addFilter(_is_not_advice)


def _is_not_advice(record: logging.LogRecord) -> bool:
    return ADVICE not in record.getMessage()
