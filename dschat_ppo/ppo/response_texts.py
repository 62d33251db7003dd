"""Responses as text: what the model wrote, what of it is scored, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.model_replies import reply_of_tokens
from dschat_ppo.data.prompt_contents import unpadded_ids
from dschat_ppo.data.reply_tokens import LONGEST_MARK, ends_in_thought
from dschat_ppo.features import hooks
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.types import FinishReason, Rollout

_CONTEXT = 16  # tokens of a prompt before which its response is decoded


def texts_of(
    tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor, skip_special_tokens: bool
) -> list[str]:
    """The real tokens of each row, `ids` and `mask` (B, T), as text."""
    rows = unpadded_ids(ids, mask)
    return list(tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens))


def response_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[ResponseText]:
    """The texts of each response, without special tokens and without the end that the model wrote.
    `final` is the response without its thoughts; "" if it ends inside one. A response without
    thoughts has one text."""
    rows = zip(
        rollout.prompt_ids[:, -LONGEST_MARK:].tolist(),
        rollout.response_ids.tolist(),
        rollout.response_lengths.tolist(),
        whole_texts(tokenizer, rollout),
        strict=True,
    )
    texts = list[ResponseText]()
    for prompt, ids, length, spoken in rows:
        reply = reply_of_tokens(tokenizer, ids[:length], (), ends_in_thought(tokenizer, prompt))
        final = reply.content
        if final == reply.text:
            final = spoken  # decoded after its prompt, the text may begin with a space
        texts.append(ResponseText.of(spoken, final, reply.thoughts))
    return texts


def whole_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """All tokens after each prompt as text, without special tokens and the EOS that ended them.
    They are decoded after the end of their prompt: tokenizers such as Llama's drop the space with
    which a text begins."""
    lengths = rollout.response_lengths - (rollout.finish_reason == FinishReason.EOS).long()  # (B,)
    columns = torch.arange(rollout.response_mask.shape[1], device=lengths.device)
    is_text = columns < lengths.unsqueeze(1)  # (B, R)
    # the last tokens of each prompt, which is padded on the left
    first = max(0, rollout.prompt_ids.shape[1] - _CONTEXT)
    prompt_ids = rollout.prompt_ids[:, first:]
    prompt_mask = rollout.prompt_mask[:, first:]
    prompts = texts_of(tokenizer, prompt_ids, prompt_mask, skip_special_tokens=True)
    joined_ids = torch.cat([prompt_ids, rollout.response_ids], dim=1)
    joined_mask = torch.cat([prompt_mask, is_text], dim=1)
    joined = texts_of(tokenizer, joined_ids, joined_mask, skip_special_tokens=True)
    alone = texts_of(tokenizer, rollout.response_ids, is_text, skip_special_tokens=True)
    texts = []
    for prompt, prompt_and_response, response in zip(prompts, joined, alone, strict=True):
        if prompt_and_response.startswith(prompt):
            texts.append(prompt_and_response.removeprefix(prompt))
        else:
            texts.append(response)
    return texts


def shown_sections(
    tokenizer: PreTrainedTokenizerBase, rollout: Rollout
) -> list[list[dict[str, Any]]]:
    """The sections of each row in which it is shown: of `text` and `role`, some with a `reward`.
    [] of a row that is shown as its text. A feature offers them as `shown_sections.sections_of`,
    with these arguments."""
    sections: list[list[dict[str, Any]]] = [[] for _ in rollout.response_ids]
    for sections_of in hooks("shown_sections.sections_of"):
        sections = sections_of(tokenizer, rollout)
    return sections


def heading(section: Mapping[str, Any]) -> str:
    """Role and reward of a section."""
    if "reward" in section:
        return f"{section['role']}, reward {section['reward']:.3f}"
    return str(section["role"])
