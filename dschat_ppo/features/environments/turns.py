"""The turns of the episodes of a rollout: what happens between the token that ends an action and
the next token that the model chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Message
from dschat_ppo.data.model_replies import ModelReply, reply_of_tokens
from dschat_ppo.data.reply_tokens import ends_in_thought
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.environments import Turn
from dschat_ppo.features.environments.episode_processes import Episodes
from dschat_ppo.features.environments.journal import JournalledEpisodes
from dschat_ppo.features.environments.observations import ObservationTokens, require_text
from dschat_ppo.rewards.call_forms import LARGEST
from dschat_ppo.rewards.worker_pool import CallError

WAIT_SECONDS = 1.0
MALFORMED = "error"  # in place of the name of the tool


def action_message(reply: ModelReply) -> tuple[Message, Turn | None]:
    """The message that an environment hears, and what answers it if a call in it cannot be read:
    then none of its calls is carried out."""
    if not reply.malformed:
        return reply.message, None
    answer = {"role": "tool", "name": MALFORMED, "content": f"error: {reply.malformed}"}
    return {"role": "assistant", "content": reply.text}, Turn([answer], failed_calls=1)


@dataclass
class EpisodeRecord:
    """One episode. Response tokens are numbered from 0."""

    messages: list[Message] = field(default_factory=list)  # actions and observations
    ends: list[int] = field(default_factory=list)  # the last token of each action
    rewards: list[float] = field(default_factory=list)  # of each action
    metrics: dict[str, float] = field(default_factory=dict)  # that its environment logs
    failed_calls: int = 0
    problem: str = ""  # why its environment could not go on; "" if it did not fail
    variables: dict[str, Any] | None = None  # of its row, for the chat template
    is_opened: bool = False  # whether the tokens before its next action end inside a thought


class EpisodeTurns:
    """Asks the environments of one rollout, whose episodes have begun; `records` has one entry for
    each sequence.

    A sequence is in the hands of the engine, which generates its action, or of its environment,
    from `end_turn` until `observed` returns it. An episode ends when its environment says so or
    fails, after `most` actions, or when `cut`.
    """

    def __init__(
        self,
        episodes: Episodes[Turn] | JournalledEpisodes,
        observations: ObservationTokens,
        tokenizer: PreTrainedTokenizerBase,
        most: int,
        records: Sequence[EpisodeRecord],
        banned_ids: Sequence[int] = (),  # of what is no text, such as images
    ):
        self.episodes = episodes
        self.observations = observations
        self.tokenizer = tokenizer
        self.most = most
        self.records = records
        self.banned_ids = banned_ids
        self._answers = list[tuple[int, Turn | CallError]]()  # that no environment was asked for
        self._finishing = set[int]()  # sequences whose last turn has not come
        # sequences without a process
        self.gone = {sequence for sequence, record in enumerate(records) if record.problem}
        self._last = dict[int, int]()  # the last token of the last action of a sequence

    def end_turn(self, sequence: int, ids: list[int], end: int) -> None:
        """The model has ended an action of tokens `ids`, the last of which is response token
        `end`."""
        record = self._note_action(sequence, end)
        if sequence in self.gone:
            self._answers.append((sequence, CallError(record.problem)))
            return
        self._last[sequence] = ids[-1]
        reply = reply_of_tokens(self.tokenizer, ids, self.observations.tools, record.is_opened)
        action, answer = action_message(reply)
        record.messages.append(action)
        if answer is None:
            self.episodes.step(sequence, action)
        else:
            self._answers.append((sequence, answer))

    def cut(self, sequence: int, end: int) -> None:
        """A limit has ended the episode in the middle of an action."""
        self._note_action(sequence, end)
        self._finish(sequence)

    def stop(self, sequence: int) -> None:
        """A limit has ended the episode after an observation."""
        self._finish(sequence)

    def _note_action(self, sequence: int, end: int) -> EpisodeRecord:
        """The record of a sequence, with one more action, which ends at response token `end`."""
        record = self.records[sequence]
        record.ends.append(end)
        record.rewards.append(0.0)
        return record

    def _finish(self, sequence: int) -> None:
        if sequence not in self.gone:
            self._finishing.add(sequence)
            self.episodes.finish(sequence)

    def observed(self, wait: bool) -> list[tuple[int, list[int]]]:
        """The sequences whose environments have answered, with the tokens of the observation; [] if
        the episode has ended. With `wait`, for a second until there is one."""
        answers = self._answers
        self._answers = []
        seconds = 0.0
        if wait and not answers:
            seconds = WAIT_SECONDS
        answers += self.episodes.poll(seconds)
        observations = list[tuple[int, list[int]]]()
        for sequence, turn in answers:
            tokens = self._observation_of(sequence, turn)
            if tokens is not None:
                observations.append((sequence, tokens))
        return observations

    def _observation_of(self, sequence: int, turn: Turn | CallError) -> list[int] | None:
        """Note the answer of an environment. Returns the tokens of the observation; [] if the
        episode ends now; None if it had ended, and this was its last answer."""
        record = self.records[sequence]
        is_last = sequence in self._finishing
        self._finishing.discard(sequence)
        if isinstance(turn, CallError):  # its process has ended
            record.problem = str(turn)
            self.gone.add(sequence)
            return None if is_last else []
        self._note_turn(record, turn)
        if is_last:
            self.episodes.end(sequence)
            return None
        if turn.messages:
            record.messages += turn.messages
        elif turn.text:
            record.messages.append({"role": "user", "content": turn.text})
        tokens = list[int]()
        if not turn.done and len(record.ends) < self.most:
            try:
                tokens = self.observations(turn, self._last.get(sequence), record.variables)
                require_text(self.tokenizer, tokens, self.banned_ids)
            except UserError as problem:  # of the template or the tokenizer; other ranks go on
                tokens = []
                record.problem = f"answered what cannot be rendered: {problem}"
        if tokens:
            record.is_opened = ends_in_thought(self.tokenizer, tokens)
        else:
            self._finish(sequence)
        return tokens

    @staticmethod
    def _note_turn(record: EpisodeRecord, turn: Turn) -> None:
        """Add the reward of a turn to that of the last action, and what it logs."""
        if sum(map(abs, record.rewards)) + abs(turn.reward) <= LARGEST:
            record.rewards[-1] += turn.reward
        else:
            record.problem = "its rewards add up to more than fp32 holds"
        record.metrics |= turn.metrics
        record.failed_calls += turn.failed_calls

    def finish(self) -> None:
        """Wait for the last rewards of all episodes, which have ended."""
        while self._finishing:
            for sequence, turn in self.episodes.poll(WAIT_SECONDS):
                self._observation_of(sequence, turn)
