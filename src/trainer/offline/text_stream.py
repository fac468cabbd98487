"""Converts tokens to text as they come. A character may be spread over several tokens, each some bytes of its UTF-8,
and a token's text may depend on the one before it (the blank that some tokenizers put between words). So tokens are
decoded together with the piece before them, and held back while their text ends inside a character."""

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""The decoder's output for bytes that do not, or not yet, form a character."""
ENOUGH = 8
"""Tokens of the prompt that decide how the next one is decoded: more than the bytes of a character."""


class TextStream:
    """The text after a prompt. Call `put` for each token and `end` once; the joined results are the text."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self._tokenizer = tokenizer
        self._before = prompt[-ENOUGH:]  # ends with a whole character, like all returned text
        self._waiting: list[int] = []

    def put(self, token: int) -> str:
        """Return the text that is certain now."""
        self._waiting.append(token)
        text = self._text()
        return "" if text.endswith(BROKEN) else self._give(text)

    def end(self) -> str:
        """Return the text held back."""
        return self._give(self._text()) if self._waiting else ""

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        return self._tokenizer.decode([*self._before, *self._waiting], skip_special_tokens=False)[len(before) :]

    def _give(self, text: str) -> str:
        self._before, self._waiting = self._waiting, []
        return text
