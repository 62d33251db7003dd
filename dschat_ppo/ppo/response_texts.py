"""Responses as text: what the model wrote, and what of it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded
from dschat_ppo.data.examples import Message
from dschat_ppo.data.replies import read_reply
from dschat_ppo.data.templates import without_final
from dschat_ppo.episodes.shown_turns import turns_of
from dschat_ppo.episodes.tool_calls import said_and_called
from dschat_ppo.episodes.turns import LONGEST_MARK, ends_in_thought, read_action
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.types import FinishReason, Rollout

_CONTEXT = 16  # tokens of a prompt before which its response is decoded


def texts_of(
    tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor, skip_special_tokens: bool
) -> list[str]:
    """The real tokens of each row, `ids` and `mask` (B, T), as text."""
    ids, mask = ids.cpu(), mask.cpu()  # at once, not two waits for each row
    rows = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    return list(tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens))


def response_texts(
    tokenizer: PreTrainedTokenizerBase,
    rollout: Rollout,
    tools: Sequence[list[Any]] = (),
    messages: Sequence[list[Message] | None] = (),
) -> list[ResponseText]:
    """The texts of each response, without special tokens and without the end that the model wrote.

    Observations are in `episode` and `turns` alone. `final` is the last message of the model
    without its thoughts and calls; "" if it ends inside a thought. A response of one turn without
    thoughts has one text. `tools`: of each row, () if none has any; only the calls of an episode
    with tools are calls. `messages`: of each row those of its episode.
    """
    has_turns = rollout.episode_lengths is not None
    rows = zip(
        rollout.prompt_ids[:, -LONGEST_MARK:].tolist(),
        rollout.response_ids.tolist(),
        rollout.response_mask.tolist(),
        rollout.response_lengths.tolist(),
        episode_texts(tokenizer, rollout),
        turns_of(tokenizer, rollout),
        strict=True,
    )
    texts = list[ResponseText]()
    for row, (prompt, ids, mask, length, episode, turns) in enumerate(rows):
        own_tools = tools[row] if tools and has_turns else []
        spoken, finals, thoughts = list[str](), list[str](), list[str]()
        before, end = prompt, 0
        for is_action, run in groupby(mask[:length]):
            start, end = end, end + len(list(run))
            tokens = ids[start:end]
            if is_action:
                is_opened = ends_in_thought(tokenizer, before)
                final, thought = _said_and_thought(tokenizer, tokens, own_tools, is_opened)
                finals.append(final)
                thoughts.append(thought)
                bare = str(tokenizer.decode(tokens, skip_special_tokens=True))
                spoken.append(without_final(tokenizer, bare)[0])
            before = tokens
        is_plain = len(spoken) == 1 and not turns
        whole = episode if is_plain else "\n".join(spoken)
        final = finals[-1] if finals else ""
        if is_plain and not own_tools and "".join(spoken) == final:
            final = episode  # decoded where it stands
        texts.append(
            ResponseText(
                spoken=whole,
                final=final,
                thoughts="\n\n".join(filter(None, thoughts)),
                episode=episode,
                turns=turns or [{"role": "model", "text": whole}],
                messages=messages[row] if messages else None,
            )
        )
    return texts


def _said_and_thought(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], tools: list[Any], is_opened: bool
) -> tuple[str, str]:
    """What an action says, without its thoughts and calls, and its thoughts."""
    message, malformed = read_action(tokenizer, ids, tools, is_opened)
    said, thought = str(message["content"]), str(message.get("reasoning_content", ""))
    if malformed is not None:  # a call that cannot be read is a call
        text, _ = without_final(tokenizer, decoded(tokenizer, ids))
        reply = read_reply(said_and_called(text, is_opened)[0], is_opened)
        said, thought = reply.rest, reply.thoughts
    for token in tokenizer.all_special_tokens:
        said = said.replace(token, "")
    return said, thought


def episode_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """All tokens after each prompt as text, without special tokens and the EOS that ended them.
    They are decoded where they stand: tokenizers such as Llama's drop the space with which a text
    begins."""
    lengths = rollout.response_lengths - (rollout.finish_reason == FinishReason.EOS).long()  # (B,)
    columns = torch.arange(rollout.response_mask.shape[1], device=lengths.device)
    is_text = columns < lengths.unsqueeze(1)  # (B, R)
    # prompts are padded on the left
    near = slice(max(0, rollout.prompt_ids.shape[1] - _CONTEXT), None)
    ids, mask = rollout.prompt_ids[:, near], rollout.prompt_mask[:, near]
    prompts = texts_of(tokenizer, ids, mask, skip_special_tokens=True)
    all_ids = torch.cat([ids, rollout.response_ids], dim=1)
    joined = texts_of(tokenizer, all_ids, torch.cat([mask, is_text], dim=1), True)
    alone = texts_of(tokenizer, rollout.response_ids, is_text, skip_special_tokens=True)
    return [
        both.removeprefix(prompt) if both.startswith(prompt) else text
        for prompt, both, text in zip(prompts, joined, alone, strict=True)
    ]
