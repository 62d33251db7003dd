"""Tokenise prompts and answers, given as text or as chat messages. All three steps use these functions.

A text prompt is encoded unchanged. Chat messages are rendered with the tokenizer's chat template, followed by the
opening of the assistant's turn. An answer to chat messages ends with the end-of-turn token of the template; an answer
to a text prompt ends with the tokenizer's EOS. Generation stops at both (`answer_ends`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.errors import UserError, reading

Message = dict[str, Any]
Messages = list[Message]
_EXAMPLE = "An answer."


def is_messages(value: Any) -> bool:
    """Whether `value` is a non-empty list of `{"role": text, "content": text}`."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in value
        )
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> list[int]:
    """Token ids of a prompt. A BOS comes from the tokenizer (text) or the chat template (messages), never from both.

    Raises:
        UserError: the tokenizer or its chat template rejects the prompt, or there is no template. The message does not
            name the row.
    """
    if isinstance(prompt, str):
        starts_with_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        ids = _ids(tokenizer, prompt, add_special_tokens=not starts_with_bos)
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # some tokenizers append EOS to every text
            ids.pop()
        return ids
    return _ids(tokenizer, _render(tokenizer, prompt, open_answer=True), add_special_tokens=False)


@dataclass(frozen=True)
class TurnEnd:
    """The text that a chat template renders after an answer: `kept + dropped`.

    `kept` ends with the end-of-turn token, whose id is `token`, and belongs to the answer. `dropped`, such as the line
    break after ChatML's `<|im_end|>`, does not, because generation stops before it. If the template has no end-of-turn
    token, `kept` is empty and `token` is the tokenizer's EOS.
    """

    kept: str
    dropped: str
    token: int


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """The end of the assistant's turn in the tokenizer's chat template, found by rendering an example.

    The end-of-turn token is the first special token after the answer, or else the first other added token.
    """
    return _turn_end(tokenizer, str(tokenizer.chat_template), int(tokenizer.eos_token_id))


@lru_cache(maxsize=16)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str, eos_id: int) -> TurnEnd:
    """Cached: every answer needs it, and a tokenizer with thousands of added tokens takes 20 ms to list them.

    `template` and `eos_id` are arguments because a tokenizer can change, and the result depends on both.
    """
    closing = ""
    with suppress(UserError):  # no template, or it rejects the example; it may still accept the rows
        example = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _EXAMPLE}]
        rendered = _render(tokenizer, example, open_answer=False)
        closing = rendered.rpartition(_EXAMPLE)[2] if _EXAMPLE in rendered else ""
    added = [(number, token.content, token.special) for number, token in tokenizer.added_tokens_decoder.items()]
    added.append((eos_id, str(tokenizer.eos_token), True))
    found = [
        (not special, closing.index(token), -len(token), token, number)
        for number, token, special in added
        if token.strip() and token in closing  # some tokenizers have added tokens of spaces
    ]
    if not found:
        return TurnEnd("", closing, eos_id)
    _, first, _, token, number = min(found)
    last = first + len(token)
    return TurnEnd(closing[:last], closing[last:], number)


def answer_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: EOS, and the chat template's end-of-turn token if it differs."""
    return tuple(dict.fromkeys((int(tokenizer.eos_token_id), turn_end(tokenizer).token)))


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, answer: str | Message) -> list[int]:
    """Token ids of an answer to `prompt`, with exactly one final token.

    After a text prompt the final token is EOS. After chat messages the ids are those that the chat template renders, up
    to and including its end-of-turn token.

    Raises:
        UserError: as for `encode_prompt`.
    """
    assert isinstance(answer, str)
    eos = str(tokenizer.eos_token)
    end = TurnEnd("", "", int(tokenizer.eos_token_id)) if isinstance(prompt, str) else turn_end(tokenizer)
    final = (eos, str(tokenizer.convert_ids_to_tokens(end.token)))
    while answer.endswith(final):
        answer = answer.removesuffix(final[0]).removesuffix(final[1])
    if isinstance(prompt, str):
        ids = _ids(tokenizer, answer, add_special_tokens=False)
    else:
        ids = _encode_turn(tokenizer, prompt, answer, end)
    return ids if ids[-1:] == [end.token] else [*ids, end.token]


def encode_finished(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that holds prompt and answer, with exactly one final token.

    If the text contains the chat template's end-of-turn token, the template has rendered it and that token is the final
    one; otherwise EOS is.
    """
    ids = encode_prompt(tokenizer, text)
    turn = turn_end(tokenizer).token
    end = turn if turn in ids else int(tokenizer.eos_token_id)
    while ids and ids[-1] == end:
        ids.pop()
    return [*ids, end]


def _encode_turn(tokenizer: PreTrainedTokenizerBase, prompt: Messages, answer: str, end: TurnEnd) -> list[int]:
    """Token ids of the assistant's turn as the template renders it, after the prompt, up to the end-of-turn token."""
    opening = _render(tokenizer, prompt, open_answer=True)
    whole = _render(tokenizer, [*prompt, {"role": "assistant", "content": answer}], open_answer=False)
    turn = answer + end.kept  # for a template that renders the opening of a turn in two ways
    if whole.startswith(opening) and whole.endswith(end.kept + end.dropped):
        turn = whole[len(opening) : len(whole) - len(end.dropped)]
    # Encoded together with the prompt, because some tokenizers put a space before every text.
    prompt_ids = _ids(tokenizer, opening, add_special_tokens=False)
    ids = _ids(tokenizer, opening + turn, add_special_tokens=False)
    if ids[: len(prompt_ids)] == prompt_ids:
        return ids[len(prompt_ids) :]
    return _ids(tokenizer, turn, add_special_tokens=False)  # a token would span the end of the prompt


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, open_answer: bool) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            "the data holds chat messages, but the model's tokenizer has no chat template; give prompts as text, or "
            "save a `chat_template.jinja` in the folder of the tokenizer"
        )
    with reading("the chat template rejects these messages"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_answer))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    with reading("the tokenizer rejects this text"):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
