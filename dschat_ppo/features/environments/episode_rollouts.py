"""The episodes of rollouts: they begin with data rows, give their prompts, and end with rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.data.batches import collate_prompts
from dschat_ppo.data.examples import TOOLS, VARIABLES, Message
from dschat_ppo.data.rendered import known_variables
from dschat_ppo.data.reply_tokens import ends_in_thought
from dschat_ppo.errors import UserError, printable_line
from dschat_ppo.features.environments.checkpoint_folders import JOURNAL
from dschat_ppo.features.environments.environments import Turn
from dschat_ppo.features.environments.episode_processes import Episodes
from dschat_ppo.features.environments.episode_prompts import EpisodePrompt
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.features.environments.journal import (
    FIRST_ROLLOUT,
    JournalledEpisodes,
    RolloutKey,
)
from dschat_ppo.features.environments.observations import ObservationTokens
from dschat_ppo.features.environments.tool_calls import check_calls_read_back
from dschat_ppo.features.environments.turns import (
    MALFORMED,
    WAIT_SECONDS,
    EpisodeRecord,
    EpisodeTurns,
)
from dschat_ppo.models.given_embeddings import GivenSource
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
        return rollout.extra["turn_rewards"].double().sum(dim=1).float()


class EpisodeRollouts:
    """The environments of this rank. `longest`: tokens of a prompt. `output`: the folder of the
    run, for its journal; None: without one. `tools`: JSON schemas for the chat template."""

    def __init__(
        self,
        flags: EnvironmentFlags,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        output: Path | None = None,
    ):
        self.flags = flags
        self.tokenizer = tokenizer
        self.longest = longest
        self._flag_text = _as_written(flags)
        try:
            processes: Episodes[Turn] = Episodes(
                flags.names, flags.environment_timeout, flags.environment_workers
            )
        except CallError as problem:
            raise UserError(f"{self._flag_text}: cannot be used: {problem}") from None
        self.tools = processes.tools
        self.journalled = None
        if output is not None:
            journal = Journal(output, JOURNAL, "environments")
            files = [path for _, path in flags.files]
            self.journalled = JournalledEpisodes(processes, journal, flags.gives_reward, files)
        self.episodes = self.journalled or processes
        if self.tools and tokenizer.chat_template is None:
            self.close()
            raise UserError(
                f"{self._flag_text}: a chat template describes tools to the model; give one with"
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
                f"{self._flag_text}, with the chat template (--chat_template): {problem}"
            ) from None
        # (source, weight) of its rewards; tools alone score nothing
        self.reward_sources = list[tuple[EnvironmentReward, float]]()
        if flags.gives_reward:
            self.reward_sources.append((EnvironmentReward(), flags.environment_reward_weight))
        self._metrics = list[dict[str, float]]()  # of each episode since the last `take_metrics`
        # id of an episode -> its messages, of the last two rollouts: ReMax scores two together
        self.messages = dict[int, list[Message]]()
        self._last_messages = dict[int, list[Message]]()
        self._count = 0  # episodes so far
        self._has_told = False  # of a failed tool call
        self._has_counted = False  # the failures of the first rollout

    def begin(
        self,
        rows: Dataset,
        indices: Sequence[int],
        samples: int,
        seeds: Sequence[int],
        cancelled: Callable[[], bool],
        key: RolloutKey = FIRST_ROLLOUT,
        source: GivenSource | None = None,
    ) -> tuple[PromptBatch, EpisodeTurns]:
        """Begin the episodes of a rollout; `UserError` if none of any rank begins. Collective.

        Args:
            rows: token rows of prompts with their data rows as JSON; those at `indices` are played.
            samples: episodes of each row; they get the row's seed, one of `seeds`.
            cancelled: once it returns True, this rank stops waiting for environments.
            key: what the journal knows the episodes by.
            source: of what the model gets in place of the embeddings of some ids; None: of none.

        Returns:
            The prompts, one for each row, or for each episode if some of a row begin differently;
            and the turns of the episodes. One that does not begin has its prompt and no turns.
        """
        row_prompts = [EpisodePrompt.of(rows[index]) for index in indices]
        if self.journalled is not None:
            self.journalled.begin(key)
        banned_ids: Sequence[int] = ()
        if source is not None:
            banned_ids = source.banned_ids
        openings = self._openings(row_prompts, samples, seeds, cancelled)
        prompts = list[list[int]]()
        records = list[EpisodeRecord]()
        for episode in range(len(indices) * samples):
            opening = openings.get(episode, CallError("did not begin"))
            prompt_ids, record = self._begun(row_prompts[episode // samples], opening, banned_ids)
            prompts.append(prompt_ids)
            records.append(record)
        problems = _problems_of_all_ranks(records)
        if all(problems) and not any(dist.gather_objects(cancelled())):
            self._forget()
            raise UserError(f"{self._flag_text}: no episode begins: {problems[0]}")
        turns = EpisodeTurns(
            self.episodes,
            self.observations,
            self.tokenizer,
            self.flags.max_turns,
            records,
            banned_ids,
        )
        return self._batch_of(prompts, rows, indices, source), turns

    def _batch_of(
        self,
        prompts: Sequence[list[int]],
        rows: Dataset,
        indices: Sequence[int],
        source: GivenSource | None,
    ) -> PromptBatch:
        """The prompts of episodes, several of each row, as one for each row if they are equal."""
        samples = len(prompts) // len(indices)
        prompts_of_rows = prompts[::samples]
        if all(prompt == prompts_of_rows[i // samples] for i, prompt in enumerate(prompts)):
            prompts = prompts_of_rows
            row_indices = list(indices)
        else:
            row_indices = [index for index in indices for _ in range(samples)]
        extra = None
        if source is not None:
            extra = source.prompt_columns(rows, row_indices)
        dataset = Dataset.from_dict({"prompt_ids": prompts})
        return collate_prompts(dataset, range(len(prompts)), filler_id(self.tokenizer), extra)

    def _openings(
        self,
        row_prompts: Sequence[EpisodePrompt],
        samples: int,
        seeds: Sequence[int],
        cancelled: Callable[[], bool],
    ) -> dict[int, Turn | CallError]:
        """Start `samples` episodes of each row and wait for what their environments say first. They
        get the row without the columns that data preparation adds, and its prompt as text."""
        count = len(row_prompts) * samples
        for episode in range(count):
            index = episode // samples
            prompt = row_prompts[index]
            row = {name: value for name, value in prompt.row.items() if not name.startswith("_")}
            seed = seeds[index] & 0x7FFFFFFF  # of 31 bits, which every generator takes
            text = prompt.text(self.tokenizer)
            self.episodes.start(episode, row, seed, text, prompt.messages)
        openings = dict[int, Turn | CallError]()
        while len(openings) < count and not cancelled():
            openings |= dict(self.episodes.poll(WAIT_SECONDS))
        return openings

    def _begun(
        self, prompt: EpisodePrompt, opening: Turn | CallError, banned_ids: Sequence[int]
    ) -> tuple[list[int], EpisodeRecord]:
        """The prompt of an episode that has begun, and its record. One that could not begin has
        the plain prompt and a record with the problem."""
        variables = known_variables(
            self.tokenizer, prompt.row.get(VARIABLES), prompt.row.get(TOOLS)
        )
        record = EpisodeRecord(variables=variables)
        prompt_ids = prompt.ids
        try:
            if isinstance(opening, CallError):
                raise opening
            opened_ids = prompt.opened(self.observations, opening, variables, banned_ids)
            if len(opened_ids) > self.longest:
                raise CallError(
                    f"begins with a prompt of {len(opened_ids)} tokens (--max_prompt_seq_len"
                    f" {self.longest})"
                )
            prompt_ids = opened_ids
        except (CallError, UserError) as problem:
            record.problem = str(problem)
        record.is_opened = ends_in_thought(self.tokenizer, prompt_ids)
        return prompt_ids, record

    def end(self, rollout: Rollout, turns: EpisodeTurns, cancelled: bool, counts: bool) -> Rollout:
        """The rollout with the rewards of its turns, each on the last token of its action, and the
        rows whose environment failed. Its episodes enter the metrics if it `counts`. `UserError` if
        all environments of the first rollout failed, on any rank; `StorageError` if a journal could
        not be written. Collective."""
        if not cancelled:
            turns.finish()
        self.episodes.end_all()
        if self.journalled is not None:
            self.journalled.journal.raise_problem()
        turn_rewards = torch.zeros_like(rollout.rollout_logprobs)  # (B, R)
        if not cancelled:
            for row, record in enumerate(turns.records):
                for end, reward in zip(record.ends, record.rewards, strict=True):
                    turn_rewards[row, end] = reward
                if counts:
                    chosen_ids = rollout.response_ids[row][rollout.response_mask[row]].tolist()
                    self._metrics.append(self._metrics_of(record, chosen_ids))
        self._tell(turns.records)
        if not self._has_counted and not any(dist.gather_objects(cancelled)):
            self._has_counted = True
            problems = _problems_of_all_ranks(turns.records)
            if all(problems):
                self._forget()
                raise UserError(
                    f"{self._flag_text}: all environments of the first rollout failed:"
                    f" {problems[0]}"
                )
        failed = [bool(record.problem) for record in turns.records]
        episode_ids = range(self._count, self._count + len(turns.records))
        self._count = episode_ids.stop
        messages = {
            episode_id: _without_full_texts(record.messages)
            for episode_id, record in zip(episode_ids, turns.records, strict=True)
        }
        self.messages = self._last_messages | messages
        self._last_messages = messages
        return replace(
            rollout,
            episode_lengths=rollout.response_lengths,
            extra={
                **rollout.extra,
                "turn_rewards": turn_rewards,
                "failed": torch.tensor(failed, device=turn_rewards.device),
                "episode_ids": torch.tensor(list(episode_ids), device=turn_rewards.device),
            },
        )

    def _metrics_of(self, record: EpisodeRecord, chosen_ids: list[int]) -> dict[str, float]:
        """The metrics of an episode: of its environment, and of the tokens that the model chose."""
        return {
            **record.metrics,
            "invented_observations": self.observations.invented(chosen_ids),
            "turns": len(record.ends),
            "failed_calls": record.failed_calls,
            "failures": bool(record.problem),
        }

    def _forget(self) -> None:
        """Let the next start ask again what failed."""
        if self.journalled is not None:
            self.journalled.journal.forget()

    def _tell(self, records: Sequence[EpisodeRecord]) -> None:
        """Print why environments failed, and, once in a run, how a tool did."""
        causes: defaultdict[str, list[int]] = defaultdict(list)
        for row, record in enumerate(records):
            if record.problem:
                causes[record.problem].append(row)
        for cause, rows in list(causes.items())[:MOST_WARNINGS]:
            print_line(
                f"warning: rank {dist.rank()}: {len(rows)} of {len(records)} environments"
                f" ({self._flag_text}) failed, which ended their episodes (row {rows[0]} first):"
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
        columns: defaultdict[str, list[float]] = defaultdict(list)
        for metrics_of_rank in dist.gather_objects(self._metrics):
            for metrics in metrics_of_rank:
                for name, value in metrics.items():
                    columns[name].append(float(value))
        self._metrics.clear()
        return {
            f"episode/{name}": math.fsum(values) / len(values)
            for name, values in sorted(columns.items())
        }

    def close(self) -> None:
        """End the processes."""
        self.episodes.close()


def _as_written(flags: EnvironmentFlags) -> str:
    """The flags of environments as in a command line, for messages."""
    texts = list[str]()
    for name, value in flags.given.items():
        if isinstance(value, str):
            texts.append(f"--{name} {value}")
        else:
            texts.append(f"--{name} {' '.join(value)}")
    return " ".join(texts)


def _problems_of_all_ranks(records: Sequence[EpisodeRecord]) -> list[str]:
    """Why each episode failed, "" for those that did not. Collective."""
    problems = list[str]()
    for problems_of_rank in dist.gather_objects([record.problem for record in records]):
        problems += problems_of_rank
    return problems


def _without_full_texts(messages: Sequence[Message]) -> list[Message]:
    """Copies of messages without `text`, which repeats the thoughts for environments."""
    copies = list[Message]()
    for message in messages:
        copy = dict(message)
        copy.pop("text", None)
        copies.append(copy)
    return copies
