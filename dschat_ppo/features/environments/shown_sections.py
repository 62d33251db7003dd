"""Episodes as people read them: what the model said, its tool calls, and what environments and
tools answered."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded
from dschat_ppo.data.model_replies import reply_of_text
from dschat_ppo.data.reply_tokens import LONGEST_MARK, ends_in_thought
from dschat_ppo.data.templates import without_final
from dschat_ppo.features.environments.observations import observed_text
from dschat_ppo.types import Rollout


def sections_of(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[list[dict[str, Any]]]:
    """The sections of each row that has observations; [] of the others.

    A section has a `text` and a `role`: "model" for what the model says, "call" for its tool calls,
    "environment" for what came back, "context" for the prompt of a conversation that starts anew.
    The last section of an action has its `reward`, if the rollout has rewards of turns.
    """
    sections_of_rows = list[list[dict[str, Any]]]()
    lengths = rollout.response_lengths.tolist()
    chosen = rollout.response_mask.tolist()
    contexts = torch.zeros_like(rollout.response_ids)  # (B, R)
    if rollout.contexts is not None:
        contexts = rollout.contexts
    rewards: list[Any] = [None] * len(lengths)
    if "turn_rewards" in rollout.extra:
        rewards = rollout.extra["turn_rewards"].tolist()
    rows = zip(
        rollout.prompt_ids[:, -LONGEST_MARK:].tolist(),
        rollout.response_ids.tolist(),
        chosen,
        contexts.tolist(),
        lengths,
        rewards,
        strict=True,
    )
    for prompt, ids, mask, contexts_of_row, length, rewards_of_row in rows:
        sections = list[dict[str, Any]]()
        sections_of_rows.append(sections)
        if all(mask[:length]):
            continue  # the model chose all tokens: there is no observation
        before = prompt
        end = 0
        last_context = 0  # of the actions so far
        runs = groupby(zip(mask[:length], contexts_of_row, strict=False))
        for (is_action, context), tokens in runs:
            start = end
            end = start + len(list(tokens))
            if is_action:
                sections += _action_sections(tokenizer, ids[start:end], before)
                if rewards_of_row is not None:
                    sections[-1]["reward"] = rewards_of_row[end - 1]
                last_context = context
            elif context > last_context:
                text = str(tokenizer.decode(ids[start:end], skip_special_tokens=True))
                sections.append({"role": "context", "text": text.strip()})
            else:
                seen = observed_text(tokenizer, ids[start:end])
                sections.append({"role": "environment", "text": seen})
            before = ids[start:end]
    return sections_of_rows


def _action_sections(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], before: list[int]
) -> list[dict[str, Any]]:
    """What an action says, and its calls; `before`: the tokens that precede it."""
    text, _ = without_final(tokenizer, decoded(tokenizer, ids))
    reply = reply_of_text(tokenizer, text, None, ends_in_thought(tokenizer, before))
    sections = list[dict[str, Any]]()
    if reply.said or not reply.called:
        sections.append({"role": "model", "text": reply.said})
    if reply.called:
        sections.append({"role": "call", "text": reply.called})
    return sections
