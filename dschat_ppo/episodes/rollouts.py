"""The episodes of rollouts: they begin with data rows, give their prompts, and end with rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dist import rank
from dschat_ppo.common.logging import print_line
from dschat_ppo.config.environment_flags import EnvironmentFlags
from dschat_ppo.data.encode import encode_after, encode_prompt
from dschat_ppo.data.examples import MESSAGES, Row
from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.observations import ObservationTokens
from dschat_ppo.episodes.processes import Episodes
from dschat_ppo.episodes.turns import WAIT_SECONDS, EpisodeTurns, Record
from dschat_ppo.errors import UserError
from dschat_ppo.rewards.worker_pool import CallError
from dschat_ppo.types import Rollout

MOST_WARNINGS = 3


class EpisodeRollouts:
    """The environments of this rank."""

    def __init__(self, flags: EnvironmentFlags, tokenizer: PreTrainedTokenizerBase):
        self.flags, self.tokenizer = flags, tokenizer
        try:
            self.episodes = Episodes(flags.names, flags.environment_timeout, flags.environment_workers)
        except CallError as problem:
            given = " ".join(f"--{name} {value}" for name, value in flags.names.items() if value)
            raise UserError(f"{given}: cannot be used: {problem}") from None
        self.observations = ObservationTokens(
            tokenizer, self.episodes.tools, flags.max_observation_tokens, flags.observation_truncation
        )

    def begin(self, rows: Sequence[Row], seeds: Sequence[int], longest: int) -> tuple[list[list[int]], EpisodeTurns]:
        """Begin an episode for each data row; the prompts, of at most `longest` tokens, and the turns of a rollout."""
        records = [Record() for _ in rows]
        for number, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
            self.episodes.start(number, {key: value for key, value in row.items() if not key.startswith("_")}, seed)
        openings = dict[int, Turn | CallError]()
        while len(openings) < len(rows):
            openings |= dict(self.episodes.poll(WAIT_SECONDS))
        if (first := next((turn for turn in openings.values() if isinstance(turn, CallError)), None)) is not None:
            raise UserError(f"the environment cannot begin an episode: {first}")
        prompts = [self._prompt(row, openings[number]) for number, row in enumerate(rows)]
        if (most := max(map(len, prompts))) > longest:
            raise UserError(
                f"an environment begins with a prompt of {most} tokens; raise --max_prompt_seq_len {longest}"
            )
        turns = EpisodeTurns(self.episodes, self.observations, self.tokenizer, self.flags.max_turns, records)
        return prompts, turns

    def _prompt(self, row: Row, opening: Any) -> list[int]:
        """The tokens of a row's prompt with what its environment says first: in its last message of the user, as TRL
        has it, or after a text."""
        messages, text = row.get(MESSAGES), row.get("prompt")
        said = "".join(str(message.get("content") or "") for message in opening.messages)
        if messages is None:
            ids = encode_prompt(self.tokenizer, str(text))
            after = opening.text or said
            return [*ids, *encode_after(self.tokenizer, str(text), after)] if after else ids
        if opening.text:
            ids = encode_prompt(self.tokenizer, messages, self.episodes.tools or None)
            return [*ids, *encode_after(self.tokenizer, "", opening.text)]
        if said:
            last = {**messages[-1], "content": "\n\n".join(filter(None, [messages[-1].get("content"), said]))}
            messages = [*messages[:-1], last]
        return encode_prompt(self.tokenizer, messages, self.episodes.tools or None)

    def end(self, rollout: Rollout, turns: EpisodeTurns) -> Rollout:
        """The rollout with the rewards of its turns, each on the last token of its action."""
        turns.finish()
        rewards = torch.zeros_like(rollout.rollout_logprobs)
        for row, record in enumerate(turns.records):
            for end, reward in zip(record.ends, record.rewards, strict=True):
                rewards[row, end] = reward
        problems = [(row, record.problem) for row, record in enumerate(turns.records) if record.problem]
        for row, problem in problems[:MOST_WARNINGS]:
            print_line(f"warning: rank {rank()}: environment of row {row}: {problem}; its episode ended there")
        if len(problems) > MOST_WARNINGS:
            print_line(f"warning: rank {rank()}: {len(problems) - MOST_WARNINGS} more environments failed")
        return replace(rollout, turn_rewards=rewards)

    def close(self) -> None:
        """End the processes."""
        self.episodes.close()
