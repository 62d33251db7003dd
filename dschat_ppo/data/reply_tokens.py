"""Replies of the model as tokens: whether a thought is open before them, and special tokens in
their text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded
from dschat_ppo.data.replies import opens_thought

LONGEST_MARK = 32  # tokens, of one byte each, with the white space after it


def ends_in_thought(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether tokens end with the mark that begins a thought, so what follows continues it."""
    return opens_thought(decoded(tokenizer, ids[-LONGEST_MARK:]))


def without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text without what special tokens are written as."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text
