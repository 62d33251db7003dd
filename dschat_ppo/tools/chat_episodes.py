"""Chats whose answers are episodes: the model calls tools, or plays with an environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from datasets import Dataset

from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.environment_flags import EnvironmentFlags
from dschat_ppo.data.examples import MESSAGES, TOOLS
from dschat_ppo.data.templates import Messages
from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.observations import ObservationTokens, observed_text
from dschat_ppo.episodes.rollouts import EpisodeRollouts
from dschat_ppo.episodes.turns import WAIT_SECONDS, ends_in_thought, read_action
from dschat_ppo.errors import UserError
from dschat_ppo.rewards.worker_pool import CallError
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.tools.chat_model import ChatModel, CheckedModel, Token
from dschat_ppo.tools.sampling_settings import SamplingSettings


class EpisodeModel(ChatModel):
    """A chat model whose answers are episodes. Where there are tools, the person is the user, and
    the environment lasts as long as the conversation. Without tools the environment is the user:
    each message begins an episode."""

    def __init__(
        self, checked: CheckedModel, dtype: str, flags: EnvironmentFlags, rollouts: EpisodeRollouts
    ):
        super().__init__(checked, dtype)
        self.flags = flags
        self.rollouts = rollouts
        self.tools = rollouts.tools
        if self.tools and not self.has_template:
            raise UserError("tools need the chat template: omit --apply_chat_template False")
        # tokens of the person's messages
        self.messages = ObservationTokens(self.tokenizer, self.tools, sys.maxsize)
        # tokens of conversations, by the contents of their messages
        self.drawn = dict[tuple[str, ...], list[int]]()
        self.is_waiting = False  # an environment waits for an action

    def answer(
        self, messages: Messages, settings: SamplingSettings, number: int
    ) -> Iterator[Token]:
        """As `ChatModel.answer`; calls and what came back are `aside` of tokens without text."""
        contents = tuple(message["content"] for message in messages)
        before = self.drawn.get(contents[:-1]) if self.tools else None
        if before is None or not self.is_waiting:
            ids, opening = self._begin(messages, int(row_seeds(number, 1, settings.seed)))
            if opening and before is None:
                yield Token("", "", aside=f"[environment] {opening}")
        # what the model drew is not encoded again; an environment that failed starts again
        if before is not None:
            ids = [*before, *self.messages(Turn([messages[-1]]), before[-1])]
        left = settings.max_tokens
        text = ""
        remark = ""
        reward = 0.0
        try:
            for turn in range(self.flags.max_turns):
                start = len(ids)
                for token in self.continued(
                    list(ids), settings, left, number, *[turn] * (turn > 0)
                ):
                    ids.append(token.number)
                    text += token.text
                    yield token
                if remark := token.note:  # a limit cut it
                    break
                action, answer = read_action(
                    self.tokenizer,
                    ids[start:],
                    self.tools,
                    ends_in_thought(self.tokenizer, ids[:start]),
                )
                for call in (part["function"] for part in action.get("tool_calls", ())):
                    yield Token(
                        "", "", aside=f"[call] {call['name']} {json.dumps(call['arguments'])}"
                    )
                seen = self._ask("step", action) if answer is None else answer
                if isinstance(seen, CallError):
                    remark = f"the environment {seen}"
                    break
                reward += seen.reward
                if seen.messages or seen.text:
                    tokens = self.rollouts.observations(seen, ids[-1])
                else:
                    tokens = []
                if tokens:
                    yield Token(
                        "", "", aside=f"[environment] {observed_text(self.tokenizer, tokens)}"
                    )
                left -= len(ids) - start + len(tokens)
                if seen.done or not tokens:
                    break
                if turn + 1 == self.flags.max_turns or self.room([*ids, *tokens], left) < 1:
                    remark = f"ended after {turn + 1} turns: no turn (--max_turns) or token is left"
                    break
                ids += tokens
        finally:
            self.drawn[(*contents, text)] = ids
        if not self.tools and self.is_waiting:
            last = self._ask("finish")
            reward += last.reward if isinstance(last, Turn) else 0.0
        yield Token("", remark, aside=f"[reward] {reward:g}" if reward or not self.tools else "")

    def _begin(self, messages: Messages, seed: int) -> tuple[list[int], str]:
        """Begin an episode: (tokens of its prompt, what the environment says first). With an
        environment, a message that is a JSON object is the data row, and its `prompt` the
        message."""
        row, [*earlier, last] = dict[str, Any](), messages
        if self.flags.gives_reward:
            with suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(last["content"]), dict):
                    row = found
                else:
                    row = {}
        row = {**row, "prompt": row.get("prompt", "") if row else last["content"]}
        if isinstance(row["prompt"], list):
            asked = row["prompt"]
        else:
            asked = [{"role": "user", "content": row["prompt"]}]
        if not all(
            isinstance(message, dict) and isinstance(message.get("content"), str)
            for message in asked
        ):
            raise UserError("the prompt of the row must be text or chat messages")
        if self.tools:
            earlier = earlier
        else:
            earlier = [message for message in earlier if message["role"] == "system"]
        messages = [*earlier, *asked]
        ids = self.prompt_ids(messages)
        self.is_waiting = False
        self.rollouts.episodes.end_all()
        told = json.dumps(
            {**row, MESSAGES: messages, TOOLS: self.tools} if self.has_template else row
        )
        rows = Dataset.from_dict({"row": [told], "prompt_ids": [ids]})
        batch, _ = self.rollouts.begin(rows, [0], 1, [seed], never)
        self.is_waiting = True
        begun = batch.prompt_ids[0].tolist()
        first = len(commonprefix([ids, begun]))
        added = begun[first : len(begun) - (len(ids) - first)]
        return begun, str(self.tokenizer.decode(added, skip_special_tokens=True)).strip()

    def _ask(self, method: str, *arguments: Any) -> Turn | CallError:
        """What the environment answers."""
        episodes = self.rollouts.episodes
        self.is_waiting = False
        getattr(episodes, method)(0, *arguments)
        while not (found := episodes.poll(WAIT_SECONDS)):
            pass
        [(_, turn)] = found
        self.is_waiting = isinstance(turn, Turn)
        return turn
