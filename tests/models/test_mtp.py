"""Multi-token prediction equals transformers' MtpModel, at depth 1 and chained; its losses look far enough ahead."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from models import DeepSeek
from models.mtp import tokens_ahead

Build = Callable[..., DeepSeek]


def mtp_states(model: DeepSeek, tokens: Tensor) -> list[Tensor]:
    """The state of the main model and of each depth, [B, S, D] each, as `forward` makes them."""
    states = []
    norms = [model.norm, *(block.norm for block in model.mtp)]
    hooks = [norm.register_forward_hook(lambda module, args, out: states.append(out)) for norm in norms]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return states


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_logits_equal_mtp_model(
    depth: int, q_lora_rank: int | None, build: Build, save_as_hf: Callable, tokens: Tensor, tmp_path: Path
) -> None:
    model = build(num_mtp_layers=depth, q_lora_rank=q_lora_rank, num_expert_groups=2, num_groups_per_token=1)
    save_as_hf(model, tmp_path)
    main = DeepseekV3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    n = model.config.num_layers
    main._keys_to_ignore_on_load_unexpected = [rf"\.layers\.{n + k}\." for k in range(depth)]  # says which are MTP's
    theirs = MtpModel.from_pretrained(main)

    S = tokens.shape[1] - 1
    states = []
    for layer in theirs.layers:
        layer.register_forward_hook(lambda module, args, out: states.append(out))
    with torch.no_grad():
        h = main.model(tokens[:, :-1]).last_hidden_state
        theirs(
            input_ids=tokens[:, 1:],
            last_hidden_states=h,
            attention_mask=torch.ones(2, S, dtype=torch.int64),
            position_ids=torch.arange(1, S + 1).expand(2, -1),
            mtp_cache=MtpCache(config=main.config.get_mtp_config()),
        )
        ours = mtp_states(model, tokens)
        torch.testing.assert_close(ours[0], h, rtol=0, atol=1e-4)
        for k, (state, expected) in enumerate(zip(ours[1:], states, strict=True), start=1):
            valid = S - k + 1  # positions with a true input; beyond them it feeds the tokens it drafts
            logits, expected = model.logits(state[:, :valid]), main.lm_head(expected[:, :valid])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_the_loss_is_the_mean_over_depths_of_the_loss_k_tokens_further_on(build: Build, tokens: Tensor) -> None:
    model = build(num_mtp_layers=2)
    losses = model(tokens)
    main, *depths = mtp_states(model, tokens)
    S = tokens.shape[1] - 1
    lm = F.cross_entropy(model.logits(main).flatten(0, 1), tokens[:, 1:].flatten())
    mtp = [
        F.cross_entropy(model.logits(state[:, : S - k]).flatten(0, 1), tokens[:, k + 1 :].flatten())
        for k, state in enumerate(depths, start=1)
    ]
    torch.testing.assert_close(losses.lm, lm)
    torch.testing.assert_close(losses.mtp, torch.stack(mtp).mean())
    torch.testing.assert_close(losses.total, losses.lm + model.config.mtp_loss_weight * losses.mtp + losses.balance)


def test_chained_depths_equal_a_composition_on_their_valid_positions_only(build: Build, tokens: Tensor) -> None:
    model = build(num_mtp_layers=2)
    states = mtp_states(model, tokens)
    S = tokens.shape[1] - 1
    with torch.no_grad():
        h = model.hidden(tokens[:, :-1])
        for k, block in enumerate(model.mtp, start=1):
            embedded = model.embed(tokens[:, k : S + 1])
            h = block(h[:, : S - k + 1], model._rope(S - k + 1, h.device), embedded)[0]
            torch.testing.assert_close(states[k][:, : S - k + 1], h)


def test_no_token_sees_the_one_it_predicts(build: Build, tokens: Tensor) -> None:
    model = build(num_mtp_layers=2)
    before = mtp_states(model, tokens)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % model.config.vocab_size
    for k, (a, b) in enumerate(zip(before, mtp_states(model, changed), strict=True)):
        seen_from = 20 - k  # state i at depth k has seen tokens up to i + k
        torch.testing.assert_close(a[:, :seen_from], b[:, :seen_from])
        assert (a[:, seen_from] - b[:, seen_from]).abs().max() > 1e-3


def test_tokens_ahead_repeats_the_last_token_beyond_the_end() -> None:
    sequence = torch.arange(5)[None]
    assert tokens_ahead(sequence, 1, 4).tolist() == [[1, 2, 3, 4]]
    assert tokens_ahead(sequence, 3, 4).tolist() == [[3, 4, 4, 4]]


def test_a_sequence_too_short_for_the_depth_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="num_mtp_layers=2: too deep for a sequence of 2 positions; set at most 1"):
        build(num_mtp_layers=2)(torch.zeros(1, 3, dtype=torch.int64))
