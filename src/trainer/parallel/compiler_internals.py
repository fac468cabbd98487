"""Octet's only uses of private parts of torch.compile: switches and a warning that are not public."""

import functools
import hashlib
import logging
from pathlib import Path

import torch
from torch._functorch import config as autograd_config

import precision

ADVICE = "Detected that context_fn is passed"
ADVISER = "torch._higher_order_ops.wrap"


def allow_graphs(count: int) -> None:
    """Let Dynamo compile a function at least `count` times: blocks of one class differ in their plan rows."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def reuse_graphs() -> None:
    """Let torch.compile load a graph that an earlier process compiled, without tracing its backward pass again: it does
    not by default where there are autograd functions. Its key for such a graph has the calls of our operators, not what
    they do, so a digest of their source joins it."""
    autograd_config.autograd_cache_allow_custom_autograd_functions = True
    if (tag := f"octet-{_source()}") not in (known := torch.compiler.config.cache_key_tag):
        torch.compiler.config.cache_key_tag = known + tag


@functools.cache
def _source() -> str:
    """Return a digest of the source of `precision`, which defines the operators."""
    root, digest = Path(precision.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}".encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def silence_advice_on_recomputation() -> None:
    """Silence torch's advice against in-place ops in recomputed code: ours raise amaxes, which may happen twice."""
    logging.getLogger(ADVISER).addFilter(_is_not_advice)


def _is_not_advice(record: logging.LogRecord) -> bool:
    return ADVICE not in record.getMessage()
