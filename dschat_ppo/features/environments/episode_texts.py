"""Responses of episodes as text: what the model wrote in its actions, and what of it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Message
from dschat_ppo.data.model_replies import reply_of_tokens
from dschat_ppo.data.replies import read_reply
from dschat_ppo.data.reply_tokens import LONGEST_MARK, ends_in_thought, without_special
from dschat_ppo.data.templates import without_final
from dschat_ppo.features.environments.shown_sections import sections_of
from dschat_ppo.ppo.response_texts import whole_texts
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.types import Rollout


def episode_texts(
    tokenizer: PreTrainedTokenizerBase,
    rollout: Rollout,
    tools: Sequence[list[Any]] = (),
    messages: Sequence[list[Message] | None] = (),
) -> list[ResponseText]:
    """The texts of each response, without special tokens and without the end that the model wrote.

    Observations are in `episode` and `turns` alone. `final` is the last message of the model
    without its thoughts and calls; "" if it ends inside a thought. A response of one turn without
    thoughts has one text.

    Args:
        tokenizer: of the actor.
        rollout: B rows.
        tools: those of each row; () if no row has any. Only in an episode with tools a call is read
            as one.
        messages: those of the episode of each row; () without episodes.
    """
    has_turns = rollout.episode_lengths is not None
    rows = zip(
        rollout.prompt_ids[:, -LONGEST_MARK:].tolist(),
        rollout.response_ids.tolist(),
        rollout.response_mask.tolist(),
        rollout.response_lengths.tolist(),
        whole_texts(tokenizer, rollout),
        sections_of(tokenizer, rollout),
        strict=True,
    )
    texts = list[ResponseText]()
    for row, (prompt, ids, mask, length, episode, turns) in enumerate(rows):
        row_tools: list[Any] = []
        if tools and has_turns:
            row_tools = tools[row]
        actions = _actions(tokenizer, prompt, ids[:length], mask[:length], row_tools)
        spoken = "\n".join(action.text for action in actions)
        final = ""
        if actions:
            final = actions[-1].final
        if len(actions) == 1 and not turns:
            # the text decoded after its prompt, which may begin with a space
            if not row_tools and final == spoken:
                final = episode
            spoken = episode
        texts.append(
            ResponseText(
                spoken=spoken,
                final=final,
                thoughts="\n\n".join(action.thoughts for action in actions if action.thoughts),
                episode=episode,
                turns=turns or [{"role": "model", "text": spoken}],
                messages=messages[row] if messages else None,
            )
        )
    return texts


@dataclass(frozen=True)
class _Action:
    """What the model wrote in one turn."""

    text: str  # all of it
    final: str  # without thoughts and calls
    thoughts: str


def _actions(
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    ids: list[int],
    mask: list[bool],
    tools: list[Any],
) -> list[_Action]:
    """The actions of a response, which are the runs of True in its `mask`; the other tokens of
    `ids` are observations. `prompt`: the last tokens of the prompt, which tell whether a thought is
    open. `tools`: those that the row's actions may call."""
    actions = []
    before = prompt
    start = 0
    for is_action, run in groupby(mask):
        end = start + len(list(run))
        tokens = ids[start:end]
        if is_action:
            is_opened = ends_in_thought(tokenizer, before)
            final, thoughts = _final_and_thoughts(tokenizer, tokens, tools, is_opened)
            decoded_text = str(tokenizer.decode(tokens, skip_special_tokens=True))
            text, _ = without_final(tokenizer, decoded_text)
            actions.append(_Action(text, final, thoughts))
        before = tokens
        start = end
    return actions


def _final_and_thoughts(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], tools: list[Any], is_opened: bool
) -> tuple[str, str]:
    """What an action says, without its thoughts and calls, and its thoughts. `is_opened`: whether
    what precedes it ends inside a thought."""
    reply = reply_of_tokens(tokenizer, ids, tools, is_opened)
    final = reply.content
    if reply.malformed:  # a call that cannot be read is a call
        final = without_special(tokenizer, read_reply(reply.said, is_opened).rest)
    return final, reply.thoughts
