"""Experience collection: prompts, rollouts, rewards and log-probs of one PPO step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.common import dist, stop_requests
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.common.progress import report_phase
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.batches import IndexStream
from dschat_ppo.errors import RolloutCancelled
from dschat_ppo.ppo.generation_settings import greedily
from dschat_ppo.ppo.given_metrics import given_metrics
from dschat_ppo.ppo.own_algorithms import OwnSampler
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.ppo.rounds import Rounds
from dschat_ppo.ppo.samples import contents_of, printed_responses, sample_lines
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests
from dschat_ppo.rewards.reward_source import (
    FailedRows,
    RewardFunctionError,
    RewardServiceError,
    Scores,
    number_means,
)
from dschat_ppo.types import Rollout, ScoredRollout, to_device, with_columns


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one round."""

    rows: list[int]  # row indices in the prompt data set
    # index of the first one among all prompts that the run takes; the index of a prompt there is
    # the group of its responses
    first: int


@dataclass(frozen=True)
class PendingScores:
    """Scores that functions and services compute meanwhile."""

    pending: Callable[[], Scores]  # waits for them, after the learned reward has scored
    greedy: Scores | None = None  # of the greedy responses to the same prompts, (B,), for ReMax

    def wait(self) -> Scores:
        """The scores of B responses. Collective."""
        scores = self.pending()
        if self.greedy is None:
            return scores
        left_group = scores.left_group
        if left_group is not None and self.greedy.left_group is not None:
            # without a baseline, all responses to a prompt leave
            left_group = left_group | self.greedy.left_group
        return replace(scores, baselines=self.greedy.total, left_group=left_group)


@dataclass(eq=False)
class ExperienceCollection:
    """The steps of `make_experience`. Each is timed, and its tokens are counted."""

    config: PPOConfig
    plan: PPOPlan
    sampler: RolloutSampler
    requests: RewardRequests
    passes: ForwardPasses
    rounds: Rounds  # of a PPO step
    clock: PhaseClock
    # rows carry the index of their prompt's data set, the column `source`
    several_data_sets: bool = False

    def __post_init__(self) -> None:
        prompts = self.sampler.prompts
        seed = self.config.run.seed
        self.stream: IndexStream | OwnSampler = IndexStream(prompts, seed)
        if self.config.ppo.sampler is not None:
            data_rows = [json.loads(row) for row in prompts["row"]]
            self.stream = OwnSampler(self.config.ppo.sampler, data_rows, seed)
        self.metrics: dict[str, float] = {}  # of the last collection
        self._begin_rounds()

    def _begin_rounds(self) -> None:
        """Begin the rounds of a PPO step."""
        self._round = 0
        self._failed_rows = FailedRows()
        self._response_count = 0  # of all rounds
        self._left_count = 0  # those of them that left their group, without a score
        self._score_numbers: list[dict[str, Tensor]] = []  # `Scores.numbers` of each round

    @contextmanager
    def cancelled_on_stop(self, checkpointer: CheckpointManager) -> Iterator[None]:
        """Collect the rows of one PPO step inside this block. If a stop is requested meanwhile,
        discard them, save the state before the block, and raise `StopRequested`: seeds depend only
        on the step, so a resumed run samples the same answers. A stop may end the processes or the
        service of a reward before this rank notices the request, so scores computed meanwhile are
        discarded too, and a failed reward is treated as part of the stop."""
        before = self.state_dict()
        self._begin_rounds()
        try:
            yield
            if checkpointer.stop_requested():
                raise RolloutCancelled
        except (RolloutCancelled, RewardServiceError, RewardFunctionError) as problem:
            if not isinstance(problem, RolloutCancelled) and not checkpointer.stop_requested():
                raise
            self.load_state_dict(before, dist.device())
            checkpointer.save_if_due()
            raise

    def next_prompts(self) -> Prompts:
        """This rank's prompts of the next round; all ranks take the same number."""
        count = self.rounds.prompts_per_rank()
        first = dist.rank() * count
        first_group = self.stream.taken + first
        of_all_ranks = self.stream.take(count * dist.world_size())
        return Prompts(of_all_ranks[first : first + count], first_group)

    def sample(self, prompts: Prompts, step: int, checkpointer: CheckpointManager) -> Rollout:
        """Sample the responses to each prompt. Collective.

        Raises:
            RolloutCancelled: a stop was requested.
        """
        with self.clock.phase("rollout"):
            rollout = self.sampler.sample(
                prompts.rows, *self._seed_path(step), cancelled=stop_requests.flag_is_set
            )
            self.clock.count_tokens("rollout", float(rollout.response_mask.sum()))
        if checkpointer.stop_requested():
            raise RolloutCancelled
        return rollout

    def _seed_path(self, step: int) -> tuple[int, ...]:
        """What the seeds of a round's responses are derived from."""
        if self._round == 0:
            return (step,)
        return (step, self._round)

    def reward(self, rollout: Rollout, prompts: Prompts, step: int) -> PendingScores:
        """Let functions and services begin to score the responses. With ReMax (Li et al. 2024), the
        greedy response to each prompt is scored as well. Collective."""
        greedy = None
        if self.config.algorithm.advantage_estimator == "remax":
            greedy = self._greedy_scores(prompts, step)
        with self.clock.phase("reward"):
            request = self.requests.request(rollout, prompts.rows, step - 1)
            pending = self.requests.mixture.begin(request, rollout)
        return PendingScores(pending, greedy)

    def _greedy_scores(self, prompts: Prompts, step: int) -> Scores:
        """Scores of the greedy response to each of this rank's prompts, which is sampled here,
        repeated for each of its rows (B,). `step`: the PPO step. Collective."""
        with self.clock.phase("rollout"):
            rollout = self.sampler.sample(
                prompts.rows,
                *self._seed_path(step),
                purpose="greedy",
                config=replace(greedily(self.sampler.config), samples=1),
            )
            self.clock.count_tokens("rollout", float(rollout.response_mask.sum()))
        with self.clock.phase("reward"):
            request = self.requests.request(rollout, prompts.rows, step - 1)
            scores = self.requests.mixture(request, rollout)
        left_group = scores.left_group
        if left_group is not None:
            left_group = left_group.repeat_interleave(self.plan.samples)
        return Scores(
            scores.total.repeat_interleave(self.plan.samples),
            scores.by_source.repeat_interleave(self.plan.samples, dim=0),
            left_group=left_group,
        )

    def forward_passes(
        self, rollout: Rollout, pending: PendingScores, prompts: Prompts
    ) -> ScoredRollout:
        """Add log-probs, KL and values to the rows of a rollout, on-policy what the reference gives
        alone, while functions and services score; then wait for the scores and add them.
        Collective.

        Args:
            rollout: responses to `prompts`, (B, R).
            pending: what `reward` has begun for them.
            prompts: those of this rank.
        """
        samples = self.plan.samples
        device = rollout.prompt_ids.device
        with self.clock.phase("score"):
            end = prompts.first + len(prompts.rows)
            groups = torch.arange(prompts.first, end, device=device)
            groups = groups.repeat_interleave(samples)  # (B,)
            rows = self.passes(rollout, groups)
            if self.several_data_sets:
                sources = self.sampler.prompts[prompts.rows]["source"]
                data_sources = torch.tensor(sources, device=device).repeat_interleave(samples)
                rows = replace(rows, data_sources=data_sources)  # (B,)
            tokens = rollout.response_mask.sum() + rollout.prompt_mask.sum()
            self.clock.count_tokens("score", float(tokens))
        with self.clock.phase("reward"):
            report_phase(0, len(rollout.response_ids), "answers")
            scores = pending.wait()
            self._failed_rows = self._failed_rows.plus(self.requests.count_failed_rows())
            self._score_numbers.append(scores.numbers)
        if scores.columns:
            rows = with_columns(rows, scores.columns)
        columns = {field.name: getattr(rows, field.name) for field in fields(rows)}
        return ScoredRollout(
            **columns,
            source_scores=scores.by_source,
            scores=scores.total,
            baselines=scores.baselines,
            left_group=scores.left_group,
        )

    def add(self, rows: ScoredRollout, step: int) -> ScoredRollout | None:
        """Add the rows of a round, of all ranks. Returns those of the PPO step once the rounds give
        enough, and prints their answers if asked to; None: another round follows. Collective."""
        self._round += 1
        self._response_count += len(rows.groups)
        self._left_count += int((~rows.has_score).sum())
        if isinstance(self.stream, OwnSampler):
            self.stream.update(rows.groups[rows.has_score], rows.scores[rows.has_score])
        step_rows = self.rounds.rows_of_step(rows, self._round)
        if step_rows is None:
            return None
        self.metrics = {
            "reward/function_faults": float(self._failed_rows.faults),
            "rollout/unscored_share": self._failed_rows.unscored / self._response_count,
            "rollout/left_share": self._left_count / self._response_count,
        }
        for extension in self.sampler.extensions:
            self.metrics |= extension.take_metrics()
        self.metrics |= self.requests.mixture.take_metrics()
        self.metrics |= {
            f"reward/{name}": mean for name, mean in number_means(self._score_numbers).items()
        }
        self.metrics |= self.rounds.metrics
        self.metrics |= given_metrics(self.sampler.given_source, step_rows)
        ppo = self.config.ppo
        if dist.is_main() and ppo.print_answers and step % ppo.print_answers_interval == 0:
            printed_rows = to_device(step_rows, "cpu")
            lines = sample_lines(
                printed_rows,
                self.requests.tokenizer,
                self.requests.mixture.names,
                contents=contents_of(printed_rows, self.sampler.given_source),
            )
            # as one record: no other line comes between
            logger().info(printed_responses(step, lines))
        return step_rows

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts and the rows kept for the next step; the same on every rank,
        between two steps."""
        return {"stream": self.stream.state_dict(), "pool": self.rounds.state_dict()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()`."""
        self.stream.load_state_dict(state["stream"])
        self.rounds.load_state_dict(state["pool"], device)
