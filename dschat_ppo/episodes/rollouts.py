"""The episodes of rollouts: they begin with data rows, give their prompts, and end with rewards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.config.environment_flags import EnvironmentFlags
from dschat_ppo.data.batches import left_padded
from dschat_ppo.data.encode import encode_after, encode_prompt
from dschat_ppo.data.examples import MESSAGES, TOOLS, Row
from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.episode_processes import Episodes
from dschat_ppo.episodes.observations import ObservationTokens
from dschat_ppo.episodes.turns import WAIT_SECONDS, EpisodeTurns, Record
from dschat_ppo.errors import UserError
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.rewards.worker_pool import CallError
from dschat_ppo.types import PromptBatch, Rollout

MOST_WARNINGS = 3


class EpisodeRollouts:
    """The environments of this rank. `tools`: JSON schemas for the chat template."""

    def __init__(self, flags: EnvironmentFlags, tokenizer: PreTrainedTokenizerBase):
        self.flags, self.tokenizer = flags, tokenizer
        given = " ".join(f"--{name} {value}" for name, value in flags.given.items())
        try:
            self.episodes = Episodes(flags.names, flags.environment_timeout, flags.environment_workers)
        except CallError as problem:
            raise UserError(f"{given}: cannot be used: {problem}") from None
        self.tools = self.episodes.tools
        if self.tools and tokenizer.chat_template is None:
            self.close()
            raise UserError(f"{given}: a chat template describes tools to the model; give one with --chat_template")
        self.observations = ObservationTokens(
            tokenizer, self.tools, flags.max_observation_tokens, flags.observation_truncation
        )
        self._sums: Counter[str] = Counter()

    def begin(self, rows: Dataset, indices: Sequence[int], seeds: Tensor) -> tuple[PromptBatch, EpisodeTurns]:
        """Begin the episodes of the token rows at `indices`, of each as many as there are `seeds` (B,) int64; the
        environments of one row get the same seed. The prompts: one for each row, or for each episode if some of a row
        begin in different ways."""
        samples, data = len(seeds) // len(indices), rows[list(indices)]
        of_rows: list[Row] = [json.loads(text) for text in data["row"]]
        for number in range(len(seeds)):
            row = {key: value for key, value in of_rows[number // samples].items() if not key.startswith("_")}
            self.episodes.start(number, row, int(seeds[number - number % samples]) & 0x7FFFFFFF)
        openings = dict[int, Turn | CallError]()
        while len(openings) < len(seeds):
            openings |= dict(self.episodes.poll(WAIT_SECONDS))
        problem = next((str(turn) for turn in openings.values() if isinstance(turn, CallError)), None)
        if (first := dist.first_problem(problem)) is not None:
            raise UserError(f"{' '.join(f'--{name}' for name in self.flags.given)}: no episode begins: {first}")
        prompts = [
            self._prompt(data["prompt_ids"][number // samples], of_rows[number // samples], openings[number])
            for number in range(len(seeds))
        ]
        leaders = prompts[::samples]
        alike = all(prompt == leaders[number // samples] for number, prompt in enumerate(prompts))
        turns = EpisodeTurns(
            self.episodes, self.observations, self.tokenizer, self.flags.max_turns, [Record() for _ in prompts]
        )
        return left_padded(leaders if alike else prompts, filler_id(self.tokenizer)), turns

    def _prompt(self, ids: list[int], row: Row, opening: Any) -> list[int]:
        """The tokens of a row's prompt, with what its environment says first: in the last message, as TRL has it, or
        after a text."""
        messages: Any = row.get(MESSAGES)
        said = "".join(str(message.get("content") or "") for message in opening.messages)
        if opening.text or (said and messages is None):
            return [*ids, *encode_after(self.tokenizer, str(row.get("prompt")), opening.text or said)]
        if not said:
            return ids
        last = {**messages[-1], "content": "\n\n".join(filter(None, [messages[-1].get("content"), said]))}
        return encode_prompt(self.tokenizer, [*messages[:-1], last], [*(row.get(TOOLS) or ()), *self.tools] or None)

    def end(self, rollout: Rollout, turns: EpisodeTurns, cancelled: bool) -> Rollout:
        """The rollout with the rewards of its turns, each on the last token of its action."""
        if not cancelled:
            turns.finish()
        self.episodes.end_all()
        rewards = torch.zeros_like(rollout.rollout_logprobs)
        for row, record in enumerate(turns.records if not cancelled else ()):
            for end, reward in zip(record.ends, record.rewards, strict=True):
                rewards[row, end] = reward
            self._sums.update({
                "episodes": 1, "turns": len(record.ends), "failed_calls": record.failed_calls,
                "failures": int(bool(record.problem)),
            })  # fmt: skip
        problems = [(row, record.problem) for row, record in enumerate(turns.records) if record.problem]
        for row, problem in problems[:MOST_WARNINGS]:
            print_line(f"warning: rank {dist.rank()}: the environment of row {row} {problem}; its episode ended there")
        if len(problems) > MOST_WARNINGS:
            more = len(problems) - MOST_WARNINGS
            print_line(f"warning: rank {dist.rank()}: {more} more environments failed")
        return replace(rollout, episode_lengths=rollout.response_lengths, turn_rewards=rewards)

    def take_metrics(self) -> dict[str, float]:
        """Means over the episodes of all ranks since the last call. Collective."""
        sums: Counter[str] = Counter()
        for of_rank in dist.gather_objects(self._sums):
            sums.update(of_rank)
        self._sums.clear()
        count = max(1, sums.pop("episodes", 0))
        return {f"episode/{name}": sums[name] / count for name in ("turns", "failed_calls", "failures")}

    def close(self) -> None:
        """End the processes."""
        self.episodes.close()
