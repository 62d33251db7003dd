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
from dschat_ppo.types import Rollout


def turns_of(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[list[dict[str, Any]]]:
    """The parts of each row that has observations; [] of the others.

    A part has a `text` and a `role`: "model" for what the model says, "call" for its tool calls,
    "environment" for what came back. The last part of an action has its `reward`, if the rollout
    has rewards of turns.
    """
    found = list[list[dict[str, Any]]]()
    lengths, chosen = rollout.response_lengths.tolist(), rollout.response_mask.tolist()
    rewards = (
        [None] * len(lengths) if rollout.turn_rewards is None else rollout.turn_rewards.tolist()
    )
    for ids, mask, length, own in zip(
        rollout.response_ids.tolist(), chosen, lengths, rewards, strict=True
    ):
        parts, end = list[dict[str, Any]](), 0
        for is_action, tokens in groupby(mask[: 0 if all(mask[:length]) else length]):
            start, end = end, end + len(list(tokens))
            parts += _parts(tokenizer, ids[start:end], is_action)
            if is_action and own is not None:
                parts[-1]["reward"] = own[end - 1]
        found.append(parts)
    return found


def _parts(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], is_action: bool
) -> list[dict[str, Any]]:
    if not is_action:
        return [{"role": "environment", "text": observed_text(tokenizer, ids)}]
    said, called = said_and_called(without_final(tokenizer, decoded(tokenizer, ids))[0])
    parts = [{"role": "model", "text": said}] if said or not called else []
    return parts + ([{"role": "call", "text": called}] if called else [])


def heading(part: Mapping[str, Any]) -> str:
    """Role and reward of a part of `turns_of`."""
    return part["role"] + (f", reward {part['reward']:.3f}" if "reward" in part else "")
