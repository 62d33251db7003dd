"""Replies of the model as tokens: the message that they are, and whether a thought is open before
them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded
from dschat_ppo.data.examples import Message
from dschat_ppo.data.replies import opens_thought, read_reply
from dschat_ppo.data.templates import without_final

LONGEST_MARK = 32  # tokens, of one byte each, with the white space after it


def ends_in_thought(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether tokens end with the mark that begins a thought, so what follows continues it."""
    return opens_thought(decoded(tokenizer, ids[-LONGEST_MARK:]))


def without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text without what special tokens are written as."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text


def reply_message(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], is_opened: bool = False
) -> Message:
    """The message that the tokens of a reply without calls are; no special token is in it.

    Its `content` is what follows the thoughts; if it has some, `reasoning_content` holds them, and
    `text` all that the model wrote. `is_opened`: whether what precedes the tokens ends inside a
    thought.
    """
    written, _ = without_final(tokenizer, decoded(tokenizer, ids))
    reply = read_reply(written, is_opened)
    text, _ = without_final(tokenizer, str(tokenizer.decode(ids, skip_special_tokens=True)))
    if not reply.thoughts and reply.rest == reply.text:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": without_special(tokenizer, reply.rest),
        "reasoning_content": reply.thoughts,
        "text": text,
    }
