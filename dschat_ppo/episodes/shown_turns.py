"""Episodes as people read them: what the model said, its tool calls, and what environments and
tools answered."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded
from dschat_ppo.data.templates import without_final
from dschat_ppo.episodes.observations import observed_text
from dschat_ppo.episodes.tool_calls import said_and_called
from dschat_ppo.episodes.turns import LONGEST_MARK, ends_in_thought
from dschat_ppo.types import Rollout


def turns_of(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[list[dict[str, Any]]]:
    """The parts of each row that has observations; [] of the others.

    A part has a `text` and a `role`: "model" for what the model says, "call" for its tool calls,
    "environment" for what came back. The last part of an action has its `reward`, if the rollout
    has rewards of turns.
    """
    found = list[list[dict[str, Any]]]()
    lengths, chosen = rollout.response_lengths.tolist(), rollout.response_mask.tolist()
    rewards: list[Any] = [None] * len(lengths)
    if rollout.turn_rewards is not None:
        rewards = rollout.turn_rewards.tolist()
    rows = zip(
        rollout.prompt_ids[:, -LONGEST_MARK:].tolist(),
        rollout.response_ids.tolist(),
        chosen,
        lengths,
        rewards,
        strict=True,
    )
    for prompt, ids, mask, length, rewards_of_row in rows:
        parts = list[dict[str, Any]]()
        before, end = prompt, 0
        for is_action, tokens in groupby(mask[: 0 if all(mask[:length]) else length]):
            start, end = end, end + len(list(tokens))
            if is_action:
                parts += _action_parts(tokenizer, ids[start:end], before)
            else:
                seen = observed_text(tokenizer, ids[start:end])
                parts.append({"role": "environment", "text": seen})
            before = ids[start:end]
            if is_action and rewards_of_row is not None:
                parts[-1]["reward"] = rewards_of_row[end - 1]
        found.append(parts)
    return found


def _action_parts(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], before: list[int]
) -> list[dict[str, Any]]:
    """What an action says, and its calls; `before`: the tokens that precede it."""
    text, _ = without_final(tokenizer, decoded(tokenizer, ids))
    said, called = said_and_called(text, ends_in_thought(tokenizer, before))
    parts = list[dict[str, Any]]()
    if said or not called:
        parts.append({"role": "model", "text": said})
    if called:
        parts.append({"role": "call", "text": called})
    return parts


def heading(part: Mapping[str, Any]) -> str:
    """Role and reward of a part of `turns_of`."""
    return part["role"] + (f", reward {part['reward']:.3f}" if "reward" in part else "")
