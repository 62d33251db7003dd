"""Chats whose responses are episodes: the model calls tools, or plays with an environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from datasets import Dataset

from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.data.examples import MESSAGES, TOOLS
from dschat_ppo.data.model_replies import reply_of_tokens
from dschat_ppo.data.reply_tokens import ends_in_thought
from dschat_ppo.data.templates import Messages
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.environments import Turn
from dschat_ppo.features.environments.episode_rollouts import EpisodeRollouts
from dschat_ppo.features.environments.flags import EnvironmentFlags, refuse_unused
from dschat_ppo.features.environments.observations import ObservationTokens, observed_text
from dschat_ppo.features.environments.turns import WAIT_SECONDS, action_message
from dschat_ppo.rewards.worker_pool import CallError
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.tools.chat_model import ChatModel, CheckedModel, StreamedToken
from dschat_ppo.tools.sampling_settings import SamplingSettings


def loader_of(
    features: HasFeatures, checked: Sequence[CheckedModel], at_end: ExitStack
) -> Callable[[CheckedModel, str], ChatModel] | None:
    """Start the environments of the models, which `at_end` ends; returns what loads a model that
    plays in them. None if no flag names one."""
    refuse_unused(features)
    flags = features.of(EnvironmentFlags)
    if not flags.is_used:
        return None
    rollouts_of = {}
    for model in checked:
        rollouts = EpisodeRollouts(flags, model.tokenizer, sys.maxsize)
        at_end.callback(rollouts.close)
        rollouts_of[id(model)] = rollouts

    def load(model: CheckedModel, dtype: str) -> ChatModel:
        return EpisodeModel(model, dtype, flags, rollouts_of[id(model)])

    return load


@dataclass
class ChatEpisode:
    """An episode that a model plays in response to a message."""

    ids: list[int]  # of the conversation so far
    left: int  # tokens that may follow
    text: str = ""  # that the model wrote
    reward: float = 0.0
    remark: str = ""  # why it ended before its time


class EpisodeModel(ChatModel):
    """A chat model whose responses are episodes. Where there are tools, the person is the user, and
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
        self.message_tokens = ObservationTokens(self.tokenizer, self.tools, sys.maxsize)
        # tokens of conversations, by the contents of their messages
        self.conversation_ids = dict[tuple[str, ...], list[int]]()
        self.is_waiting = False  # an environment waits for an action

    def respond(
        self, messages: Messages, settings: SamplingSettings, response_index: int
    ) -> Iterator[StreamedToken]:
        """As `ChatModel.respond`; calls and what came back are `aside` of tokens without text."""
        contents = tuple(message["content"] for message in messages)
        earlier_ids = None  # of a conversation that goes on
        if self.tools:
            earlier_ids = self.conversation_ids.get(contents[:-1])
        if earlier_ids is None or not self.is_waiting:
            seed = int(row_seeds(response_index, 1, settings.seed))
            ids, opening = self._begin(messages, seed)
            if opening and earlier_ids is None:
                yield StreamedToken("", aside=f"[environment] {opening}")
        # what the model drew is not encoded again; an environment that failed starts again
        if earlier_ids is not None:
            message_ids = self.message_tokens(Turn([messages[-1]]), earlier_ids[-1])
            ids = [*earlier_ids, *message_ids]
        episode = ChatEpisode(ids, settings.max_tokens)
        try:
            yield from self._play(episode, settings, response_index)
        finally:
            self.conversation_ids[(*contents, episode.text)] = ids
        if not self.tools and self.is_waiting:
            last_turn = self._ask("finish")
            if isinstance(last_turn, Turn):
                episode.reward += last_turn.reward
        reward = ""
        if episode.reward or not self.tools:
            reward = f"[reward] {episode.reward:g}"
        yield StreamedToken("", episode.remark, aside=reward)

    def _play(
        self, episode: ChatEpisode, settings: SamplingSettings, response_index: int
    ) -> Iterator[StreamedToken]:
        """Let the model act and the environment answer until one of them, or a limit, ends the
        episode. Yields the tokens of the actions, and the answers as asides."""
        ids = episode.ids
        for turn in range(self.flags.max_turns):
            start = len(ids)
            seed_path = [response_index]
            if turn > 0:
                seed_path.append(turn)
            for token in self.draw_tokens(list(ids), settings, episode.left, *seed_path):
                ids.append(token.token_id)
                episode.text += token.text
                yield token
            episode.remark = token.note
            if episode.remark:  # a limit cut it
                return
            is_opened = ends_in_thought(self.tokenizer, ids[:start])
            reply = reply_of_tokens(self.tokenizer, ids[start:], self.tools, is_opened)
            action, refusal = action_message(reply)
            for call in action.get("tool_calls", ()):
                function = call["function"]
                arguments = json.dumps(function["arguments"])
                yield StreamedToken("", aside=f"[call] {function['name']} {arguments}")
            answer: Turn | CallError
            if refusal is None:
                answer = self._ask("step", action)
            else:
                answer = refusal
            if isinstance(answer, CallError):
                episode.remark = f"the environment {answer}"
                return
            episode.reward += answer.reward
            observation: list[int] = []
            if answer.messages or answer.text:
                observation = self.rollouts.observations(answer, ids[-1])
            if observation:
                text = observed_text(self.tokenizer, observation)
                yield StreamedToken("", aside=f"[environment] {text}")
            episode.left -= len(ids) - start + len(observation)
            if answer.done or not observation:
                return
            is_last = turn + 1 == self.flags.max_turns
            if is_last or self.tokens_that_fit([*ids, *observation], episode.left) < 1:
                episode.remark = (
                    f"ended after {turn + 1} turns: no turn (--max_turns) or token is left"
                )
                return
            ids += observation

    def _begin(self, messages: Messages, seed: int) -> tuple[list[int], str]:
        """Begin an episode: (tokens of its prompt, what the environment says first). With an
        environment, a message that is a JSON object is the data row, and its `prompt` the
        message."""
        *earlier, last = messages
        row: dict[str, Any] = {}
        if self.flags.gives_reward:
            with suppress(ValueError, RecursionError):
                parsed = json.loads(last["content"])
                if isinstance(parsed, dict):
                    row = parsed
        if row:
            row.setdefault("prompt", "")
        else:
            row["prompt"] = last["content"]
        prompt = row["prompt"]
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise UserError("the prompt of the row must be text or chat messages")
        if not self.tools:
            earlier = [message for message in earlier if message["role"] == "system"]
        messages = [*earlier, *prompt]
        ids = self.prompt_ids(messages)
        self.is_waiting = False
        self.rollouts.episodes.end_all()
        if self.has_template:
            row = {**row, MESSAGES: messages, TOOLS: self.tools}
        rows = Dataset.from_dict({"row": [json.dumps(row)], "prompt_ids": [ids]})
        batch, _ = self.rollouts.begin(rows, [0], 1, [seed], never)
        self.is_waiting = True
        begun_ids = batch.prompt_ids[0].tolist()
        # The opening is in the middle, before what the template writes after a message.
        start = len(commonprefix([ids, begun_ids]))
        end = len(begun_ids) - (len(ids) - start)
        opening = self.tokenizer.decode(begun_ids[start:end], skip_special_tokens=True)
        return begun_ids, str(opening).strip()

    def _ask(self, method: str, *arguments: Any) -> Turn | CallError:
        """What the environment answers."""
        episodes = self.rollouts.episodes
        self.is_waiting = False
        getattr(episodes, method)(0, *arguments)
        answers = episodes.poll(WAIT_SECONDS)
        while not answers:
            answers = episodes.poll(WAIT_SECONDS)
        [(_, turn)] = answers
        self.is_waiting = isinstance(turn, Turn)
        return turn
