"""FOG-MLA against its equations (docs/fully_fp8.md), written down again in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models import DeepSeek, ModelConfig, NormPosition, YarnConfig
from models.block import DenseBlock, MoEBlock
from models.config import Activation
from models.hf import to_hf_config
from models.layers import qk_bound, rope_table
from precision import Linear, Operand, Plan, apply_rope, begin_step, bind
from precision.plain import in_bf16

Build = Callable[..., DeepSeek]
FOG: dict[str, Any] = {"norm_position": NormPosition.post, "qk_norm": True, "qk_scale": 2.0}


def norm(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


@pytest.mark.parametrize("activation", Activation)
def test_a_dense_block_is_its_equations(activation: Activation, build: Build) -> None:
    model = build(**FOG, activation=activation).double()
    block, c = model.layers[0], model.config
    assert isinstance(block, DenseBlock) and block.attn_post_norm and block.ffn_post_norm
    w = {name: p.detach() for name, p in block.named_parameters()}
    h = torch.randn(2, 12, c.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = rope_table(12, c.qk_rope_head_dim, c.rope_theta, None, torch.device("cpu")).double()
    low, k_r = (h @ w["attn.kv_a.weight"].T).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
    k_c, v = (norm(low) @ w["attn.kv_b.weight"].T).unflatten(-1, (c.num_heads, -1)).split(block.attn.kv_widths, -1)
    q = norm((h @ w["attn.q.weight"].T).unflatten(-1, (c.num_heads, -1)))
    k = norm(torch.cat([k_c, k_r[:, :, None].expand(-1, -1, c.num_heads, -1)], -1))
    turned = []
    for x in (q, k):
        nope, last = x.split(block.attn.q_widths, -1)
        turned.append(torch.cat([nope, apply_rope(last, rope)], -1))
        assert float(x.abs().max()) <= c.qk_head_dim**0.5, "what the static scale of FP8 attention rests on"
    score = torch.einsum("bihd,bjhd->bhij", *turned) * 2 / c.qk_head_dim**0.5
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    out = torch.einsum("bhij,bjhv->bihv", score.masked_fill(future, -torch.inf).softmax(-1), v).flatten(2)
    h1 = h + norm(out @ w["attn.o.weight"].T, w["attn_post_norm.weight"])
    if activation is Activation.swiglu:
        gate, up = (h1 @ w["ffn.gate_up.weight"].T).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
    else:
        up = h1 @ w["ffn.up.weight"].T
        inner = torch.nn.functional.gelu(up)
    if activation is Activation.xielu:
        a_p, a_n = (torch.log1p(w[f"ffn.activation.{name}"].exp()) for name in ("positive", "negative"))
        inner = torch.where(up > 0, a_p * up.square(), (a_n + 0.5) * (torch.expm1(up) - up)) + up / 2
    y = inner @ w["ffn.down.weight"].T
    want = h1 + norm(y, w["ffn_post_norm.weight"])
    got = build(**FOG, activation=activation).layers[0](h.float(), rope.float())[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("yarn", [None, YarnConfig(), YarnConfig(mscale=0.0), YarnConfig(mscale=0.5)])
def test_rope_keeps_normed_queries_and_keys_within_their_bound(yarn: YarnConfig | None) -> None:
    """The largest element of a norm's result is sqrt(d), all others 0; YaRN without mscale multiplies it."""
    d, growth = 16, 0.1 * math.log(YarnConfig().factor) + 1 if yarn == YarnConfig(mscale=0.0) else 1.0
    x = d**0.5 * torch.eye(d)[None, None]
    turned = apply_rope(x, rope_table(1, d, 1e4, yarn, torch.device("cpu")))
    largest = max(float(x.max()), float(turned.abs().max()))  # the part without RoPE stays
    assert largest == pytest.approx(growth * d**0.5) == pytest.approx(qk_bound(d, yarn))


def test_starting_values(build: Build, tokens: Tensor) -> None:
    model = build(**FOG, num_mtp_layers=1)
    model.init_weights(0)
    names = dict(model.named_parameters())
    gains = {name: p for name, p in names.items() if p.dim() == 1}
    kinds = ("attn_post_norm.weight", "ffn_post_norm.weight")
    blocks = [name for name, _ in model.iter_blocks()]
    assert gains.keys() == {*(f"{block}.{kind}" for block in blocks for kind in kinds), "mtp.0.proj_norm.weight"}
    for name, gain in gains.items():
        assert torch.equal(gain, torch.full_like(gain, 1.0 if "proj" in name else model.config.num_layers**-0.5))
    assert gains.keys() <= model.no_decay()
    stream = model.embed(tokens)
    assert float(stream.detach().square().mean().sqrt()) == pytest.approx(1.0, rel=0.05), (
        "the embedding over its deviation"
    )


def test_the_router_reads_a_norm_of_its_own_and_one_norm_is_over_all_experts(build: Build) -> None:
    model = build(**FOG)
    block = model.layers[1]
    assert isinstance(block, MoEBlock) and block.moe.router_norm is not None
    x = 50 * torch.randn(24, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    block.moe.router.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    block.moe(x, 2)
    torch.testing.assert_close(seen[0], norm(x), rtol=1e-5, atol=1e-5)
    assert not any("norm" in name for name, _ in block.moe.named_parameters()), "none on a part of the sum"


def test_fp8_reads_the_stream_once_for_queries_and_latents(build: Build) -> None:
    model = build("fp8_delayed", **FOG, hidden_size=64, v_head_dim=32)
    attn = model.iter_blocks()[0][1].attn
    assert isinstance(attn.q, Linear)
    seen: list[object] = []
    for layer in (attn.q, attn.kv_a):
        layer.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        model.hidden(torch.zeros(1, 8, dtype=torch.int64))
    assert seen[0] is seen[1] and isinstance(seen[0], Operand)


def test_hugging_face_has_no_such_architecture(build: Build) -> None:
    for key, value in {**FOG, "activation": Activation.gelu}.items():
        with pytest.raises(ValueError, match=rf"model\.{key}=.*no architecture of transformers"):
            to_hf_config(build(**{key: value}).config)


@pytest.mark.parametrize(("activation", "compiled"), [(Activation.swiglu, False), (Activation.xielu, True)])
def test_fp8_attention_in_a_model(
    activation: Activation, compiled: bool, on_meta: Callable[..., tuple[DeepSeek, Plan]], tokens: Tensor
) -> None:
    """Every GEMM of a block but the router's is in FP8; recomputed or compiled, gradients are the same bits; in BF16
    aside, no cast is made."""
    config = ModelConfig(vocab_size=96, hidden_size=32, num_layers=2, num_mtp_layers=1, intermediate_size=32, **FOG)
    config, tokens = replace(config, activation=activation), tokens[:1, :17]
    model, plan = on_meta(replace(config, num_experts=2, moe_intermediate_size=16), "fp8_full")
    assert plan.fp8_shares_at(64)[1] > plan.blocks_fp8_share > 0.98 and not plan.notes
    assert [row.name for row in plan.gemms.values() if not row.recipe.is_fp8 and row.op != "lm_head"] == [
        "layers.1.moe.router",
        "mtp.0.moe.router",
    ]
    model.to_empty(device="cpu").init_weights(0)
    arena = bind(model, plan, "cpu")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        begin_step(model, arena)
        model(tokens).total.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    assert bool((arena.amax > 0).all()) and bool(arena.finite())
    amax = arena.amax.clone()
    for _, block in model.iter_blocks():
        block.around_attention = lambda function, *args: checkpoint(function, *args, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    for _, block in model.iter_blocks():
        block.around_attention = None
    if compiled:
        _, block = model.iter_blocks()[0]
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        for a, b in zip(plain, gradients(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * float(a.abs().max()))
        assert torch.equal(arena.amax > 0, amax > 0)
        del block.forward
    arena.begin_step()
    with in_bf16(model):
        model(tokens)
    casts = [i for i, name in enumerate(arena.names) if ".core" in name]
    assert casts and not arena.amax[casts].any()
