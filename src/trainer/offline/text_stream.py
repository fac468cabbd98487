"""Tokens to text as they come. A character may be spread over several tokens, each some bytes of its UTF-8, and what a
token reads as may depend on the one before it (the blank that some tokenizers put between words). So tokens are read
together with the piece before them, and held back while their text ends inside a character."""

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""What a decoder puts for bytes that are no character, or not yet."""
ENOUGH = 8
"""Tokens of the prompt that decide how the next one is decoded: more than a character has bytes."""


class TextStream:
    """The text that follows a prompt's. `put` token after token, `end` once; what they return, joined, is the text."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self._tokenizer = tokenizer
        self._before = prompt[-ENOUGH:]  # ends with a whole character, like all that is given out
        self._waiting: list[int] = []

    def put(self, token: int) -> str:
        """The text that is certain now."""
        self._waiting.append(token)
        text = self._text()
        return "" if text.endswith(BROKEN) else self._give(text)

    def end(self) -> str:
        """What was held back."""
        return self._give(self._text()) if self._waiting else ""

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        return self._tokenizer.decode([*self._before, *self._waiting], skip_special_tokens=False)[len(before) :]

    def _give(self, text: str) -> str:
        self._before, self._waiting = self._waiting, []
        return text
