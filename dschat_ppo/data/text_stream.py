"""Tokens to text as they arrive."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what decoders write for a part of a character


class TextStream:
    """Decodes an answer token by token. The pieces together are the text of all tokens.

    A token's text can depend on the tokens before it (spaces of SentencePiece), and a character can span tokens. So
    each piece is the difference of two decodings that begin at the same earlier token, and it waits until its last
    character is complete.

    Args:
        tokenizer: of the model; special tokens give no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # where both decodings begin
        self.shown = 0  # tokens whose text is out

    def add(self, token: int) -> str:
        """The text that is complete with this token, "" if there is none."""
        self.ids.append(token)
        before, after = self._text(self.shown), self._text(len(self.ids))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return after[len(before) :]

    def rest(self) -> str:
        """The text of tokens at the end that complete no character."""
        rest = self._text(len(self.ids))[len(self._text(self.shown)) :]
        self.start = self.shown = len(self.ids)
        return rest

    def _text(self, end: int) -> str:
        return str(self.tokenizer.decode(self.ids[self.start : end], skip_special_tokens=True))
