"""The model computes what transformers computes from the same weights: logits and gradients."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tensors import from_hf
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from models import DeepSeek, RouterScoring, YarnConfig

Build = Callable[..., DeepSeek]
Save = Callable[[DeepSeek, Path], None]
YARN = YarnConfig(factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.7)
SHAPES: dict[str, dict[str, Any]] = {
    "direct queries, one group": {},
    "query latent, four groups of which two": {"q_lora_rank": 24, "num_expert_groups": 4, "num_groups_per_token": 2},
    "no dense blocks, two shared experts": {"num_dense_layers": 0, "num_shared_experts": 2, "num_experts_per_token": 3},
    "two dense blocks": {"num_dense_layers": 2},
    "dense blocks only": {"num_dense_layers": 3, "num_mtp_layers": 0},
    "weights not normalised": {"norm_topk_prob": False, "rms_norm_eps": 1e-4},
    "YaRN": {"rope_scaling": YARN},
    "YaRN without mscale": {"rope_scaling": replace(YARN, mscale=0.0, mscale_all_dim=0.0)},
    "YaRN as published for V3": {"rope_scaling": YarnConfig(), "rope_theta": 50000.0},
    "YaRN without a slow pair": {"rope_scaling": YarnConfig(factor=4.0), "rope_theta": 2.0},
    "YaRN without a fast pair": {"rope_scaling": replace(YARN, original_max_position_embeddings=1)},
}
SOFTMAX = {
    "router_scoring": RouterScoring.softmax,
    "router_bias_update_rate": 0.0,
    "norm_topk_prob": False,
    "num_mtp_layers": 0,
    "routed_scaling_factor": 1.0,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_deepseek_v3(shape: str, build: Build, save_as_hf: Save, tokens: Tensor, tmp_path: Path) -> None:
    model = build(**SHAPES[shape])
    save_as_hf(model, tmp_path)
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        ours = model.logits(model.hidden(tokens))
        expected = theirs(tokens).logits
    assert expected.std() > 0.5, "logits are large enough to compare"
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope_scaling", [None, YARN], ids=["RoPE", "YaRN"])
def test_logits_equal_deepseek_v2_with_its_softmax_router(
    rope_scaling: YarnConfig | None, build: Build, save_as_hf: Save, tokens: Tensor, tmp_path: Path
) -> None:
    model = build(**SOFTMAX, rope_scaling=rope_scaling)
    save_as_hf(model, tmp_path)
    theirs = DeepseekV2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model.hidden(tokens)), theirs(tokens).logits, rtol=0, atol=1e-4)


def test_loss_and_gradients_equal_deepseek_v3(build: Build, save_as_hf: Save, tokens: Tensor, tmp_path: Path) -> None:
    shape = {"q_lora_rank": 24, "num_expert_groups": 4, "num_groups_per_token": 2}
    model = build(**shape, num_mtp_layers=0, balance_loss_weight=0.0)
    save_as_hf(model, tmp_path)
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    losses = model(tokens)
    losses.total.backward()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(losses.lm, expected, rtol=1e-5, atol=0)

    grads = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            grads[name] = parameter.grad
            continue
        stem, part = name.rsplit(".", 1)
        for e, grad in enumerate(parameter.grad):
            halves = grad.chunk(2) if part == "gate_up_proj" else [grad]
            names = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
            grads |= {f"{stem}.{e}.{n}.weight": half for n, half in zip(names, halves, strict=True)}
    grads |= {n: b for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")}
    grads = from_hf(model.config, grads)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        atol = 1e-4 * grads[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
