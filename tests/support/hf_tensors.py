"""A model's whole state dict as Hugging Face tensors and back, by `models.hf.name_map`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from models import ModelConfig
from models.hf import mtp_copies, name_map


def to_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of a DeepSeek -> Hugging Face tensors: views, MTP's copies of embedding and head among them."""
    tensors = {}
    for ours, theirs in name_map(config).items():
        rows = state[ours].flatten(0, -2) if state[ours].dim() > 1 else state[ours]
        tensors |= dict(zip(theirs, rows.chunk(len(theirs)), strict=True))
    return tensors | {copy: tensors[original] for copy, original in mtp_copies(config)}


def from_hf(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face tensors -> state dict of a DeepSeek, in their dtype."""
    state = {}
    for ours, theirs in name_map(config).items():
        joined = torch.cat([tensors[name] for name in theirs])
        state[ours] = joined.unflatten(0, (config.num_experts, -1)) if ".experts." in ours else joined
    return state
