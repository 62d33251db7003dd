"""Text or chat messages -> token ids. The one path by which prompts and answers become tokens, in every step.

A prompt given as text is taken as it stands; given as chat messages it goes through the tokenizer's chat template
with the opening of the assistant's turn. Every answer ends with the tokenizer's EOS, once.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.errors import UserError, reading

Messages = list[dict[str, Any]]


def is_messages(value: Any) -> bool:
    """True for a non-empty list of `{"role": text, "content": text}`."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in value
        )
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> list[int]:
    """Token ids of a prompt, with the BOS that the tokenizer (text) or its template (messages) puts, never two.

    Raises:
        UserError: the tokenizer or its chat template refuses the prompt, or there is no template; the row is not named.
    """
    if isinstance(prompt, str):
        starts_with_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        ids = _ids(tokenizer, prompt, add_special_tokens=not starts_with_bos)
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # some tokenizers close every text
            ids.pop()
        return ids
    return _ids(tokenizer, _render(tokenizer, prompt, open_answer=True), add_special_tokens=False)


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, answer: str) -> list[int]:
    """Token ids of an answer to `prompt`, ending with EOS; after messages, spaced as the chat template spaces it.

    Raises:
        UserError: as for `encode_prompt`.
    """
    text = answer
    if not isinstance(prompt, str):
        opening = _render(tokenizer, prompt, open_answer=True)
        whole = _render(tokenizer, [*prompt, {"role": "assistant", "content": answer}], open_answer=False)
        if whole.startswith(opening):
            text = whole[len(opening) :]
            text = text[: text.find(answer) + len(answer)] if answer in text else answer
    ids = _ids(tokenizer, text, add_special_tokens=False)
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return [*ids, tokenizer.eos_token_id]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, open_answer: bool) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            "the data holds chat messages, but the model's tokenizer has no chat template; give prompts as text, or "
            "save a `chat_template.jinja` beside the tokenizer"
        )
    with reading("the chat template does not take these messages"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_answer))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    with reading("the tokenizer does not take this text"):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
