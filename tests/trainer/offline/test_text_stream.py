"""Text that comes token by token is the text of all tokens, and never half a character."""

import pytest
from tokenizers import Tokenizer, decoders, models

from trainer.data.tokenizer import train_tokenizer
from trainer.offline.text_stream import TextStream

TEXT = "naïve café — 日本語 and 🎉👩‍🔬 fin"
WORDS = {"▁the": 0, "▁cat": 1, "s": 2, "▁sat": 3}


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.put(token) for token in tokens), stream.end()]


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    """Each token a byte."""
    return train_tokenizer(["x"], 257, "<|end|>")


@pytest.mark.parametrize("cut", [0, 4, 7])
def test_characters_of_several_tokens(cut: int, of_bytes: Tokenizer) -> None:
    before, after = of_bytes.encode(TEXT[:cut]).ids, of_bytes.encode(TEXT[cut:]).ids
    found = pieces(of_bytes, before, after)
    assert "".join(found) == TEXT[cut:] and not any("\ufffd" in piece for piece in found)
    assert max(map(len, found)) == 1, "as soon as a character is whole"


def test_what_is_no_character_is_shown_all_the_same(of_bytes: Tokenizer) -> None:
    e, party = of_bytes.encode("é").ids, of_bytes.encode("🎉").ids
    x = of_bytes.encode("x").ids
    assert "".join(pieces(of_bytes, x, [*e[:1], *x, *party, *party[:3]])) == "\ufffdx🎉\ufffd"
    assert pieces(of_bytes, x, []) == [""]


def test_blanks_that_depend_on_what_stands_before() -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, "s"))
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    assert "".join(pieces(tokenizer, [0], [1, 2, 3, 0, 1])) == " cats sat the cat"
