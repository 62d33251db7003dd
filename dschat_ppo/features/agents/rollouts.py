"""Agents in the rollouts of a run: responses are episodes, which programs play with the model."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.common.logging import print_line
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.data.batches import collate_prompts
from dschat_ppo.data.examples import Row
from dschat_ppo.errors import UserError, printable_line
from dschat_ppo.features.agents.checkpoint_folders import JOURNAL
from dschat_ppo.features.agents.flags import AgentFlags, agent_files
from dschat_ppo.features.agents.front_link import Front
from dschat_ppo.features.agents.parameters import agent_parameters, check_parameters, start_agents
from dschat_ppo.features.agents.played import PlayedEpisode, rows_of_played
from dschat_ppo.features.agents.record import EpisodeLimits
from dschat_ppo.features.agents.recorded import RecordedEpisode, records_of
from dschat_ppo.features.agents.turns import AgentTurns
from dschat_ppo.features.environments.episode_processes import ENDED
from dschat_ppo.features.environments.episode_texts import episode_texts
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.ppo.rollouts import Generate, RolloutExtension, RolloutTask, SampleRollout
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.rollout.partners import ReservedSequences
from dschat_ppo.types import PromptBatch, Rollout, to_device

MOST_WARNINGS = 3


class AgentReward:
    """The reward of an episode that its agent returned."""

    name = "agent"

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32; NaN where the agent returned none."""
        return rollout.extra["agent_scores"]


def tools_of(
    features: HasFeatures, tokenizer: PreTrainedTokenizerBase, longest: int
) -> Sequence[dict[str, Any]]:
    """No tools: agents describe their own. `UserError` if the agent of the flags cannot be used."""
    flags = features.of(AgentFlags)
    if flags.is_used:
        agent_parameters(flags)
    return ()


def start_extension(
    features: HasFeatures, tokenizer: PreTrainedTokenizerBase, longest: int, output: Path | None
) -> RolloutExtension | None:
    """Start what runs the agents of the flags; arguments as `start_extensions`."""
    flags = features.of(AgentFlags)
    if not flags.is_used:
        return None
    agents = AgentRollouts(flags, features.of(EnvironmentFlags), tokenizer, longest, output)
    weight = features.of(EnvironmentFlags).environment_reward_weight

    def wrap(sample: SampleRollout, generate: Generate) -> SampleRollout:
        return partial(agents.play, generate)

    return RolloutExtension(
        wrap=wrap,
        observes=True,
        reward_sources=[(AgentReward(), weight)],
        texts=agents.texts,
        take_metrics=agents.take_metrics,
        close=agents.close,
    )


class AgentRollouts:
    """The agents of this rank. `longest`: tokens of a first prompt. `output`: the folder of the
    run, for its journal; None: without one."""

    def __init__(
        self,
        flags: AgentFlags,
        settings: EnvironmentFlags,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        output: Path | None = None,
    ):
        self.flags = flags
        self.settings = settings
        self.tokenizer = tokenizer
        self.longest = longest
        self.agents = start_agents(
            flags, settings.environment_timeout, settings.environment_workers
        )
        self.journal: Journal | None = None
        if output is not None:
            self.journal = Journal(output, JOURNAL, "agents")
        self.front = Front()
        self.agents.watch(self.front.socket)
        self._metrics = list[dict[str, float]]()  # of each episode since the last `take_metrics`
        # of rollouts since then: those in which the engine had no call, and all
        self._idle_seconds = 0.0
        self._seconds = 0.0
        # id of an episode -> the tools of its last call, of the last two rollouts
        self._tools = dict[int, list[Any]]()
        self._last_tools = dict[int, list[Any]]()
        self._count = 0  # episodes so far
        self._told = set[str]()  # what was said once
        self._has_counted = False  # the failures of the first rollout

    def play(self, generate: Generate, task: RolloutTask) -> Rollout:
        """The episodes of a task; those that the journal has are not played again. Collective."""
        token_rows = task.prompts[list(task.indices)]
        rows: list[Row] = []
        for text in token_rows["row"]:
            rows += [json.loads(text)] * task.config.samples
        check_parameters(self.flags, agent_parameters(self.flags), token_rows["row"])
        limits = self._limits(task)
        questions = self._questions(task, rows, limits)
        known = self._known(task, questions)
        missing = [index for index, episode in enumerate(known) if episode is None]

        def keep(index: int, episode: PlayedEpisode) -> None:
            """Note an episode that is over; not that its process ended, which also happens when
            the whole job is killed."""
            known[missing[index]] = episode
            if self.journal is not None and ENDED not in episode.problem:
                self.journal.add(questions[missing[index]], episode.json)
                self.journal.write()

        began = time.monotonic()
        records = records_of(self.journal, [questions[index] for index in missing])
        turns = self._answer_calls(generate, task, limits, rows, missing, keep, records)
        seconds = time.monotonic() - began
        for episode in turns.episodes:
            if not episode.is_over:  # the rollout was cancelled
                self.front.dismiss(episode.key, turns.first + episode.index)
                known[missing[episode.index]] = episode.played()
        if self.journal is not None:
            self.journal.sync()
            self.journal.raise_problem()
        episodes = [episode for episode in known if episode is not None]
        self._tell_failures(episodes)
        if dist.is_main():
            self._tell_once(turns)
        self._end_if_all_failed(episodes, task.cancelled())
        if task.purpose == "sampled" and not task.cancelled():
            self._metrics += [_episode_metrics(episode) for episode in episodes]
            self._idle_seconds += turns.idle_seconds
            self._seconds += seconds
        return self._rows(task, episodes)

    def _answer_calls(
        self,
        generate: Generate,
        task: RolloutTask,
        limits: EpisodeLimits,
        rows: Sequence[Row],
        missing: Sequence[int],
        keep: Callable[[int, PlayedEpisode], None],
        records: Sequence[RecordedEpisode],
    ) -> AgentTurns:
        """Play the episodes `missing` of a task, each of which `keep` gets at its end; `records`:
        what the journal has of them. Collective."""
        turns = AgentTurns(
            self.agents, self.front, self.tokenizer, limits, vars(task.config.sampling)
        )
        seeds = task.seeds.tolist()
        agent_seeds = (task.prompt_seeds & 0x7FFFFFFF).repeat_interleave(task.config.samples)
        turns.start(
            [rows[index] for index in missing],
            [seeds[index] for index in missing],
            [int(agent_seeds[index]) for index in missing],
            keep,
            records,
        )
        reserved = ReservedSequences(
            count=max(1, len(missing)) * turns.sequences_of_episode,
            prompt_width=limits.context_length - 1,
            context_length=limits.context_length,
        )
        generate.answer_calls(reserved, task.config, task.cancelled, turns)
        self.agents.end_all()
        return turns

    def _questions(
        self, task: RolloutTask, rows: Sequence[Row], limits: EpisodeLimits
    ) -> list[str]:
        """What the journal knows each episode by: a run that goes on with another agent, with
        another temperature or with other limits plays it again."""
        name = "/".join(str(word) for word in (task.purpose, *task.path))
        agent = [self.flags.as_written]
        agent += [checksum(Path(file)) for _, file in agent_files(self.flags)]
        stopping = task.config.stopping
        sampling = [vars(task.config.sampling), stopping.ids, stopping.stop_strings]
        questions = list[str]()
        for index, (row, seed) in enumerate(zip(rows, task.seeds.tolist(), strict=True)):
            told = json.dumps([agent, sampling, vars(limits), row, seed], sort_keys=True)
            digest = hashlib.sha256(told.encode()).hexdigest()[:24]
            questions.append(f"{name}/{task.first + index}:{digest}")
        return questions

    def _known(self, task: RolloutTask, questions: Sequence[str]) -> list[PlayedEpisode | None]:
        """The episodes that the journal has; None for others. Collective."""
        if self.journal is None:
            return [None] * len(questions)
        self.journal.begin(task.step)
        self.journal.raise_problem()
        known = list[PlayedEpisode | None]()
        for question in questions:
            entry = self.journal.known.get(question)
            known.append(None)
            if entry is not None:
                known[-1] = PlayedEpisode.of_json(entry)
        return known

    def _limits(self, task: RolloutTask) -> EpisodeLimits:
        """The limits of an episode."""
        response_length = task.config.stopping.max_new_tokens
        context_length = self.longest + response_length
        if self.flags.max_context_len is not None:
            context_length = self.flags.max_context_len
        return EpisodeLimits(
            calls=self.settings.max_turns,
            contexts=self.flags.max_contexts,
            context_length=context_length,
            prompt_length=self.longest,
            response_length=response_length,
        )

    def _rows(self, task: RolloutTask, episodes: Sequence[PlayedEpisode]) -> Rollout:
        """The rows of the episodes, with their rewards."""
        prompts = collate_prompts(task.prompts, task.indices, filler_id(self.tokenizer))
        samples = task.config.samples
        prompts = PromptBatch(
            prompts.prompt_ids.repeat_interleave(samples, dim=0),
            prompts.prompt_mask.repeat_interleave(samples, dim=0),
        )
        rollout = rows_of_played(episodes, to_device(prompts, dist.device()))
        turn_rewards = torch.zeros_like(rollout.rollout_logprobs)  # (B, R)
        for row, episode in enumerate(episodes):
            episode.place_rewards(turn_rewards[row])
        episode_ids = list(range(self._count, self._count + len(episodes)))
        self._count += len(episodes)
        tools = {}
        for episode_id, episode in zip(episode_ids, episodes, strict=True):
            tools[episode_id] = episode.tools
        self._tools = self._last_tools | tools
        self._last_tools = tools
        device = turn_rewards.device
        failed = [bool(episode.problem) for episode in episodes]
        scores = [episode.score for episode in episodes]
        return replace(
            rollout,
            extra={
                **rollout.extra,
                "turn_rewards": turn_rewards,
                "agent_scores": torch.tensor(scores, device=device),
                "failed": torch.tensor(failed, device=device),
                "episode_ids": torch.tensor(episode_ids, device=device),
            },
        )

    def texts(self, rollout: Rollout, rows: Sequence[Row]) -> list[ResponseText]:
        """What reward sources read of the episodes."""
        ids = rollout.extra["episode_ids"].tolist()
        tools = [self._tools.get(episode_id, []) for episode_id in ids]
        return episode_texts(self.tokenizer, rollout, tools)

    def _tell_failures(self, episodes: Sequence[PlayedEpisode]) -> None:
        """Print why agents failed."""
        causes: defaultdict[str, list[int]] = defaultdict(list)
        for row, episode in enumerate(episodes):
            if episode.problem:
                causes[episode.problem].append(row)
        for cause, rows in list(causes.items())[:MOST_WARNINGS]:
            print_line(
                f"warning: rank {dist.rank()}: {len(rows)} of {len(episodes)} agents"
                f" ({self.flags.as_written}) failed (row {rows[0]} first): {cause}"
            )

    def _tell_once(self, turns: AgentTurns) -> None:
        """Print, once in a run, which settings of requests were replaced, and that the template
        renders earlier turns differently."""
        notes = dict[str, str]()
        for name, (asked, used) in turns.replaced.items():
            notes[name] = (
                f"an agent asked for {name} {printable_line(str(asked))[:80]}, but gets {used}"
                " (said once; see agent/replaced_settings)"
            )
        if any(episode.tree.rerendered for episode in turns.episodes):
            notes["--chat_template"] = (
                "the chat template renders earlier turns of agents differently once another message"
                " follows (as one that drops thoughts), so such calls begin new conversations (see"
                " agent/contexts); a template that keeps earlier turns saves tokens"
                " (--chat_template)"
            )
        for name, note in notes.items():
            if name not in self._told:
                self._told.add(name)
                print_line(f"note: {note}")

    def _end_if_all_failed(self, episodes: Sequence[PlayedEpisode], cancelled: bool) -> None:
        """`UserError` with the first cause if no agent of the first rollout succeeds, which the
        next start asks again. Collective."""
        if self._has_counted or any(dist.gather_objects(cancelled)):
            return
        self._has_counted = True
        problems = list[str]()
        for of_rank in dist.gather_objects([episode.problem for episode in episodes]):
            problems += of_rank
        if all(problems):
            if self.journal is not None:
                self.journal.forget()
            raise UserError(
                f"{self.flags.as_written}: all agents of the first rollout failed: {problems[0]}"
            )

    def take_metrics(self) -> dict[str, float]:
        """Means over the episodes of all ranks since the last call, of what they have; and the
        share of the time of these rollouts in which engines had no call. Collective."""
        columns: defaultdict[str, list[float]] = defaultdict(list)
        for metrics_of_rank in dist.gather_objects(self._metrics):
            for metrics in metrics_of_rank:
                for name, value in metrics.items():
                    columns[name].append(float(value))
        times = dist.gather_objects((self._idle_seconds, self._seconds))
        seconds = math.fsum(of_rank for _, of_rank in times)
        if seconds > 0:
            columns["idle_share"].append(math.fsum(idle for idle, _ in times) / seconds)
        self._metrics.clear()
        self._idle_seconds = 0.0
        self._seconds = 0.0
        return {
            f"agent/{name}": math.fsum(values) / len(values)
            for name, values in sorted(columns.items())
        }

    def close(self) -> None:
        """End the processes."""
        self.agents.close()
        self.front.close()


def _episode_metrics(episode: PlayedEpisode) -> dict[str, float]:
    """The metrics of an episode: of its agent, and what was counted."""
    metrics = dict[str, float]()
    if episode.result is not None:
        metrics |= episode.result.metrics
    return metrics | episode.counts
