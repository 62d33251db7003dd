"""The episodes of rollouts: they begin with data rows, give their prompts, and end with rewards."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.config.environment_flags import EnvironmentFlags
from dschat_ppo.data.batches import collate_prompts
from dschat_ppo.data.encode import encode_after
from dschat_ppo.data.examples import MESSAGES, TOOLS, VARIABLES, Message, Row
from dschat_ppo.data.rendered import known_variables
from dschat_ppo.data.templates import Variables
from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.episode_processes import Episodes
from dschat_ppo.episodes.journal import Journal, JournalledEpisodes
from dschat_ppo.episodes.observations import ObservationTokens
from dschat_ppo.episodes.tool_calls import check_calls_read_back
from dschat_ppo.episodes.turns import MALFORMED, WAIT_SECONDS, EpisodeTurns, Record, ends_in_thought
from dschat_ppo.errors import UserError, printable_line
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.rewards.worker_pool import CallError
from dschat_ppo.types import PromptBatch, Rollout

MOST_WARNINGS = 3


class EnvironmentReward:
    """The sum of the rewards of an episode's turns."""

    name = "environment"

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32. The sum is in fp64, so that the order of equal rewards does not show."""
        assert rollout.turn_rewards is not None
        return rollout.turn_rewards.double().sum(dim=1).float()


def described_tools(
    flags: EnvironmentFlags, tokenizer: PreTrainedTokenizerBase, longest: int
) -> Sequence[dict[str, Any]]:
    """JSON schemas of what the environment offers to the model; () without one. `UserError` if it
    cannot be used; see `EpisodeRollouts` for the arguments."""
    if not flags.is_used:
        return ()
    with closing(EpisodeRollouts(flags, tokenizer, longest)) as episodes:
        return episodes.tools


class EpisodeRollouts:
    """The environments of this rank. `tools`: JSON schemas for the chat template. `output`: the
    folder of the run, for its journal; None: without one."""

    def __init__(
        self,
        flags: EnvironmentFlags,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        output: Path | None = None,
    ):
        self.flags, self.tokenizer, self.longest = flags, tokenizer, longest  # tokens of a prompt
        given = " ".join(
            f"--{name} {value if isinstance(value, str) else ' '.join(value)}"
            for name, value in flags.given.items()
        )
        try:
            processes = Episodes(flags.names, flags.environment_timeout, flags.environment_workers)
        except CallError as problem:
            raise UserError(f"{given}: cannot be used: {problem}") from None
        self.tools, self.journalled = processes.tools, None
        if output is not None:
            self.journalled = JournalledEpisodes(
                processes, Journal(output), flags.gives_reward, [path for _, path in flags.files]
            )
        self.episodes = self.journalled or processes
        if self.tools and tokenizer.chat_template is None:
            self.close()
            raise UserError(
                f"{given}: a chat template describes tools to the model; give one with"
                " --chat_template"
            )
        try:
            if self.tools:
                check_calls_read_back(tokenizer, self.tools)
            self.observations = ObservationTokens(
                tokenizer, self.tools, flags.max_observation_tokens, flags.observation_truncation
            )
        except UserError as problem:
            self.close()
            raise UserError(
                f"{given}, with the chat template (--chat_template): {problem}"
            ) from None
        # (source, weight) of its rewards; tools alone score nothing
        weight = flags.environment_reward_weight
        self.reward_sources = [(EnvironmentReward(), weight)] if flags.gives_reward else []
        self._numbers = list[dict[str, float]]()
        # number of an episode -> its messages, of the last two rollouts: ReMax scores two together
        self.messages = dict[int, list[Message]]()
        self._last_messages = dict[int, list[Message]]()
        self._count = 0  # episodes so far
        self._flags = given
        self._has_told = self._has_counted = False

    def begin(
        self,
        rows: Dataset,
        indices: Sequence[int],
        samples: int,
        seeds: Sequence[int],
        cancelled: Callable[[], bool],
        step: int = 0,
        rollout: str = "",
        first: int = 0,
    ) -> tuple[PromptBatch, EpisodeTurns]:
        """Begin `samples` episodes of each of the token rows at `indices`; those of one row get its
        seed. The journal knows them by the PPO step, the name of the rollout and their numbers,
        which start at `first`. The prompts: one for each row, or for each episode if some of a row
        begin in different ways. An episode that does not begin has its plain prompt and no turns;
        if none of any rank begins, that is a `UserError`. Collective."""
        data = rows[list(indices)]
        of_rows: list[Row] = [json.loads(text) for text in data["row"]]
        count = len(indices) * samples
        if self.journalled is not None:
            self.journalled.begin(step, rollout, first)
        for number in range(count):
            place = number // samples
            row = {key: value for key, value in of_rows[place].items() if not key.startswith("_")}
            messages = of_rows[place].get(MESSAGES)
            text = str(
                self.tokenizer.decode(
                    data["prompt_ids"][place], skip_special_tokens=messages is None
                )
            )
            self.episodes.start(number, row, seeds[place] & 0x7FFFFFFF, text, messages)
        openings = dict[int, Turn | CallError]()
        while len(openings) < count and not cancelled():
            openings |= dict(self.episodes.poll(WAIT_SECONDS))
        prompts, records = list[list[int]](), list[Record]()
        for number in range(count):
            ids, row = data["prompt_ids"][number // samples], of_rows[number // samples]
            variables = known_variables(self.tokenizer, row.get(VARIABLES), row.get(TOOLS))
            record = Record(variables=variables)
            try:
                opening = openings.get(number, CallError("did not begin"))
                ids = self._prompt(ids, row, opening, variables)
            except (CallError, UserError) as problem:
                record.problem = str(problem)
            record.is_opened = ends_in_thought(self.tokenizer, ids)
            prompts.append(ids)
            records.append(record)
        problems = sum(dist.gather_objects([record.problem for record in records]), list[str]())
        if all(problems) and not any(dist.gather_objects(cancelled())):
            self._forget()
            raise UserError(f"{self._flags}: no episode begins: {problems[0]}")
        leaders = prompts[::samples]
        alike = all(prompt == leaders[number // samples] for number, prompt in enumerate(prompts))
        begun = leaders if alike else prompts
        turns = EpisodeTurns(
            self.episodes, self.observations, self.tokenizer, self.flags.max_turns, records
        )
        batch = collate_prompts(
            Dataset.from_dict({"prompt_ids": begun}), range(len(begun)), filler_id(self.tokenizer)
        )
        return batch, turns

    def _prompt(
        self,
        ids: list[int],
        row: Row,
        opening: Turn | CallError,
        variables: Variables | None = None,
    ) -> list[int]:
        """The tokens of a row's prompt, with what its environment says first: in the last message,
        as TRL has it, or after a text."""
        if isinstance(opening, CallError):
            raise opening
        said = "".join(str(message.get("content") or "") for message in opening.messages)
        messages: Any = row.get(MESSAGES)
        if opening.text:
            ids = [*ids, *encode_after(self.tokenizer, str(row.get("prompt")), opening.text)]
        elif said and messages is None:
            ids = [*ids, *self.observations.plain(said)]
        elif said:
            # with those of the environment
            tools = row.get(TOOLS) or ()
            ids = self.observations.opening(messages, said, tools, variables)
        if len(ids) > self.longest:
            raise CallError(
                f"begins with a prompt of {len(ids)} tokens (--max_prompt_seq_len {self.longest})"
            )
        return ids

    def end(self, rollout: Rollout, turns: EpisodeTurns, cancelled: bool, counts: bool) -> Rollout:
        """The rollout with the rewards of its turns, each on the last token of its action, and the
        rows whose environment failed. Its episodes enter the metrics if it `counts`. `UserError` if
        all environments of the first rollout failed, on any rank. Collective."""
        if not cancelled:
            turns.finish()
        self.episodes.end_all()
        rewards = torch.zeros_like(rollout.rollout_logprobs)
        for row, record in enumerate(turns.records if not cancelled else ()):
            for end, reward in zip(record.ends, record.rewards, strict=True):
                rewards[row, end] = reward
            if counts:
                chosen = rollout.response_ids[row][rollout.response_mask[row]].tolist()
                self._numbers.append(
                    {
                        **record.numbers,
                        "invented_observations": self.observations.invented(chosen),
                        "turns": len(record.ends),
                        "failed_calls": record.failed_calls,
                        "failures": bool(record.problem),
                    }
                )
        self._tell(turns.records)
        if not self._has_counted and not any(dist.gather_objects(cancelled)):
            self._has_counted = True
            problems = sum(
                dist.gather_objects([record.problem for record in turns.records]), list[str]()
            )
            if all(problems):
                self._forget()
                raise UserError(
                    f"{self._flags}: all environments of the first rollout failed: {problems[0]}"
                )
        failed = [bool(record.problem) for record in turns.records]
        numbers = range(self._count, self._count + len(turns.records))
        self._count = numbers.stop
        said = {
            number: [{key: message[key] for key in message if key != "text"} for message in episode]
            for number, episode in zip(
                numbers, (record.messages for record in turns.records), strict=True
            )
        }
        self.messages = self._last_messages | said
        self._last_messages = said
        return replace(
            rollout,
            episode_lengths=rollout.response_lengths,
            turn_rewards=rewards,
            failed=torch.tensor(failed, device=rewards.device),
            episodes=torch.tensor(list(numbers), device=rewards.device),
        )

    def _forget(self) -> None:
        """Let the next start ask again what failed."""
        if self.journalled is not None:
            self.journalled.journal.forget()

    def _tell(self, records: Sequence[Record]) -> None:
        """Print why environments failed, and, once in a run, how a tool did."""
        causes: defaultdict[str, list[int]] = defaultdict(list)
        for row, record in enumerate(records):
            if record.problem:
                causes[record.problem].append(row)
        for cause, rows in list(causes.items())[:MOST_WARNINGS]:
            print_line(
                f"warning: rank {dist.rank()}: {len(rows)} of {len(records)} environments"
                f" ({self._flags}) failed, which ended their episodes (row {rows[0]} first):"
                f" {cause}"
            )
        if len(causes) > MOST_WARNINGS:
            more = sum(map(len, list(causes.values())[MOST_WARNINGS:]))
            print_line(
                f"warning: rank {dist.rank()}: {more} more environments failed for other reasons"
            )
        errors = [
            message["content"]
            for record in records
            if record.failed_calls
            for message in record.messages
            if message["role"] == "tool"
            and message.get("name") != MALFORMED
            and message["content"].startswith("error: ")
        ]
        if errors and not self._has_told:
            self._has_told = True
            said = printable_line(errors[0])[:200]
            print_line(
                f"note: a tool call failed; the model reads: {said} (said once; see"
                " episode/failed_calls)"
            )

    def take_metrics(self) -> dict[str, float]:
        """Means over the episodes of all ranks since the last call, of what they have.
        Collective."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for numbers in (
            numbers for of_rank in dist.gather_objects(self._numbers) for numbers in of_rank
        ):
            for name, number in numbers.items():
                found[name].append(float(number))
        self._numbers.clear()
        return {
            f"episode/{name}": math.fsum(values) / len(values)
            for name, values in sorted(found.items())
        }

    def close(self) -> None:
        """End the processes."""
        self.episodes.close()
