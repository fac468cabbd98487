"""Attention that stays within documents gives each what it would get alone: logits, losses, gradients, MTP's depths."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from models import DeepSeek
from models.documents import beyond, bounds_of, documents_of
from precision import IGNORED, refresh_weights

Build = Callable[..., DeepSeek]
END = 7  # of the 96 entries
LENGTHS = [[9, 1, 2, 17, 11], [40]]  # of documents; the first of each sequence began in the one before


def packed(lengths: list[list[int]]) -> Tensor:
    """[B, S + 1]: each document but the first of a sequence begins with END; the last token is the next one's END."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for sequence in lengths:
        row = torch.randint(8, 96, (sum(sequence) + 1,), generator=generator)
        row[torch.tensor(sequence).cumsum(0)] = END
        rows.append(row)
    return torch.stack(rows)


def alone(lengths: list[list[int]], tokens: Tensor) -> list[tuple[int, int, Tensor]]:
    """Of each document its row, its first position, and its tokens [1, length + 1], targets' included."""
    found = []
    for row, sequence in enumerate(lengths):
        starts = [0, *torch.tensor(sequence).cumsum(0).tolist()]
        found += [(row, a, tokens[row : row + 1, a : b + 1]) for a, b in pairwise(starts)]
    return found


def masked(model: DeepSeek) -> DeepSeek:
    model.end_of_text = END
    return model


def grads(model: DeepSeek) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_documents_begin_with_the_end_of_text() -> None:
    tokens = torch.tensor([[4, 5, END, 6, 6, END, END, 8, END]])
    documents = documents_of(tokens, END)
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 4]]
    assert bounds_of(documents).tolist() == [[[0, 0, 2, 2, 2, 5, 6, 6, 8]], [[2, 2, 5, 5, 5, 6, 8, 8, 9]]]
    assert beyond(documents, 1, 8).int().tolist() == [[0, 1, 0, 0, 1, 1, 0, 1]]
    assert beyond(documents, 2, 8).int().tolist() == [[1, 1, 0, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_each_document_has_the_logits_it_has_alone(build: Build, q_lora_rank: int | None) -> None:
    model = masked(build(q_lora_rank=q_lora_rank))
    tokens = packed(LENGTHS)
    with torch.no_grad():
        together = model.logits(model.hidden(tokens[:, :-1]))
        model.end_of_text = None
        for row, start, document in alone(LENGTHS, tokens):
            expected = model.logits(model.hidden(document[:, :-1]))
            length = document.shape[1] - 1
            torch.testing.assert_close(together[row, start : start + length], expected[0], rtol=0, atol=1e-5)
        unmasked = model.logits(model.hidden(tokens[:, :-1]))
    assert (unmasked[0, 9:] - together[0, 9:]).abs().max() > 1e-2  # without it, they see each other
    torch.testing.assert_close(unmasked[1], together[1], rtol=0, atol=1e-5)


def test_losses_and_gradients_are_those_of_the_documents_alone(build: Build) -> None:
    """Every target counts, the first token of a document and the end-of-text behind it included. The routers' balance
    loss is of whole sequences, and left out."""
    model = masked(build(num_mtp_layers=2, balance_loss_weight=0.0))
    tokens = packed(LENGTHS)
    losses = model(tokens)
    losses.total.backward()
    ours = grads(model)
    model.end_of_text = None
    refresh_weights(model)
    documents = [document for _, _, document in alone(LENGTHS, tokens)]
    valid = [sum(max(d.shape[1] - 1 - k, 0) for d in documents) for k in range(3)]  # targets of the depths
    assert valid[0] == tokens[:, 1:].numel()
    lm, mtp = torch.zeros(()), torch.zeros(())
    for document in documents:
        count = document.shape[1] - 1
        if count <= 2:  # too short to be a sequence of its own with two depths: behind it, nothing is ever seen
            document = torch.cat([document, document[:, -1:].expand(-1, 3)], 1)
        shares, sums = [count, count - 1, count - 2], losses_by_depth(model, document, count)
        lm = lm + sums[0] / valid[0]
        for k, share in enumerate(shares[1:], start=1):
            mtp = mtp + (sums[k] / valid[k] / 2 if share > 0 else 0)
    torch.testing.assert_close(losses.lm, lm, rtol=0, atol=1e-5)
    torch.testing.assert_close(losses.mtp, mtp, rtol=0, atol=1e-5)
    (lm + model.config.mtp_loss_weight * mtp).backward()
    for name, expected in grads(model).items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_in_microbatches_is_the_step_as_a_whole(build: Build, size: int) -> None:
    """Microbatches have different numbers of MTP targets; one of one sequence here has none at depth 2."""
    model = masked(build(num_mtp_layers=2))
    tokens = packed([*LENGTHS, [1] * 40, [2] * 20, [30, 10], [5, 35]])
    whole = model(tokens)
    whole.total.backward()
    expected = grads(model)
    targets = model.mtp_targets(tokens)
    assert targets is not None
    model.expect(targets, len(tokens) // size)
    parts = [model(part) for part in tokens.split(size)]
    for losses in parts:
        (losses.total / len(parts)).backward()
    for key in ("lm", "mtp", "balance", "total"):
        mean = torch.stack([getattr(losses, key) for losses in parts]).mean()
        torch.testing.assert_close(mean, getattr(whole, key), rtol=0, atol=1e-5)
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def losses_by_depth(model: DeepSeek, document: Tensor, count: int) -> list[Tensor]:
    """Summed cross entropy of the main model and each depth over a document of `count` positions."""
    states: list[Tensor] = []
    norms = [model.norm, *(block.norm for block in model.mtp)]
    hooks = [norm.register_forward_hook(lambda module, args, out: states.append(out)) for norm in norms]
    model(document)
    for hook in hooks:
        hook.remove()
    sums = []
    for k, state in enumerate(states):
        valid = max(count - k, 0)
        targets = torch.full(state.shape[:2], IGNORED)
        targets[:, :valid] = document[:, k + 1 : k + 1 + valid]
        sums.append(model.loss(state, targets) * valid)
    return sums


def test_a_depth_is_given_nothing_of_the_next_document(build: Build) -> None:
    """Changing a document changes no state of any depth in another one, what it was routed to included."""
    model = masked(build(num_mtp_layers=3))
    tokens = packed([[20, 20]])
    changed = tokens.clone()
    changed[:, 21:] = (changed[:, 21:] + 11 - 8) % 88 + 8  # all behind the end-of-text at 20
    for before, after in zip(depth_states(model, tokens), depth_states(model, changed), strict=True):
        assert torch.equal(before[:, :20], after[:, :20])
        assert not torch.equal(before[:, 20:], after[:, 20:])


def depth_states(model: DeepSeek, tokens: Tensor) -> list[Tensor]:
    """What each depth hands on [B, S, D]."""
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, a, out: states.append(out[0])) for block in model.mtp]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return states


def test_a_sequence_without_an_end_of_text_is_as_without_a_mask(build: Build) -> None:
    model = build(num_mtp_layers=1)
    tokens = packed([[40], [40]])[:, :-1]
    plain = model(tokens)
    within = masked(model)(tokens)
    for a, b in zip(plain, within, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
