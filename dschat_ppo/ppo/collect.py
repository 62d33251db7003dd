"""Experience collection: prompts, answers, rewards and model scores of one PPO step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.checkpoint.resumable import Checkpointer, load_saved
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.common.progress import report_phase
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.on_policy import OldLogprobs
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.sampler import IndexStream, chunk_rows_of
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.errors import RolloutCancelled
from dschat_ppo.ppo.generate import RolloutGenerator
from dschat_ppo.ppo.group_pool import GroupPool
from dschat_ppo.ppo.samples import printed_answers, sample_lines
from dschat_ppo.ppo.score import ModelScorer, RewardScorer, Scores, ScoringSettings
from dschat_ppo.rewards.reward_mixture import NumberMeans
from dschat_ppo.rewards.reward_source import RewardFunctionError, RewardServiceError
from dschat_ppo.types import Rollout, ScoredRollout, to_device


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one round."""

    rows: list[int]  # row numbers in the prompt data set
    first: int  # number of the first one among all prompts of the run; it numbers the groups


class ExperienceCollection:
    """The steps of `make_experience`. Each is timed, and its tokens are counted.

    Args:
        config: the resolved flags.
        plan: the batch sizes.
        engines: actor, critic, reference.
        generator: samples answers.
        reward_scorer: scores answers.
        shaped: raw scores (B,) -> scaled and clipped scores, which dynamic sampling compares.
        clock: times the phases.
        old_logprobs: their source; with "update", scoring computes neither them nor values.
        several_data_sets: whether rows carry the number of their prompt's data set, the column `source`.
    """

    def __init__(
        self, config: PPOConfig, plan: PPOPlan, engines: RLHFEngine, generator: RolloutGenerator,
        reward_scorer: RewardScorer, shaped: Callable[[Tensor], Tensor], clock: PhaseClock, old_logprobs: OldLogprobs,
        several_data_sets: bool = False,
    ):  # fmt: skip
        ppo, algorithm = config.ppo, config.algorithm
        self.plan = plan
        self.engines = engines
        self.generator = generator
        self.reward_scorer = reward_scorer
        self.clock = clock
        self.several_data_sets = several_data_sets
        self.greedy_baseline = algorithm.advantage_estimator == "remax"
        self.max_rounds = algorithm.dynamic_sampling_rounds
        on_host = config.ppo_memory.experience_on_host
        self.pool = GroupPool(plan.rollout_rows, shaped, on_host) if algorithm.dynamic_sampling else None
        self.print_interval = ppo.print_answers_interval if ppo.print_answers else 0
        self.stream = IndexStream(len(generator.prompts), config.run.seed, chunk_rows_of(generator.prompts))
        late_ends = generator.config.stopping.late_ends
        scoring = ScoringSettings(
            ppo.temperature, plan.micro_batch_tokens, old_logprobs, algorithm.kl_estimator, late_ends
        )
        critic = None if old_logprobs == "update" else engines.critic
        self.model_scorer = ModelScorer(engines.actor, engines.reference, critic, scoring)
        self.metrics: dict[str, float] = {}  # of the last collection
        self._round = self._faults = 0
        self._numbers = NumberMeans()
        self._rows: ScoredRollout | None = None  # without dynamic sampling

    @contextmanager
    def cancelled_on_stop(self, checkpointer: Checkpointer) -> Iterator[None]:
        """Collect the rows of one PPO step inside this block; discard them if a stop is requested meanwhile.

        A resumed run samples the same answers again, because their seeds depend only on the step. A stop may end the
        processes or the service of a reward before this rank notices the request. So scores computed meanwhile are
        discarded too, and a failed reward is treated as part of the stop.

        Raises:
            StopRequested: a stop was requested, and the state before the block is saved.
        """
        before = self.state_dict()
        self._round = self._faults = 0
        self._numbers = NumberMeans()
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

    def prompts_wanted(self) -> int:
        """Prompts of the next round on each rank; 0 once the rows of the PPO step are collected.

        Dynamic sampling takes as many prompts as should fill the step, estimated from the share of rows kept so far.
        """
        if self.pool is None:
            return self.plan.prompts_per_rank if self._round == 0 else 0
        if not self.pool.missing or self._round == self.max_rounds:
            return 0
        wanted = self.pool.missing / self.plan.samples / max(self.pool.kept_share, 0.1)
        return min(self.plan.prompts_per_rank, -int(-wanted // dist.world_size()))

    def take_prompts(self, count: int) -> Prompts:
        """The next `count` prompts of this rank. All ranks advance by the same number."""
        first, ranks = self.stream.taken + dist.rank() * count, dist.world_size()
        taken = self.stream.take(count * ranks)
        return Prompts(taken[dist.rank() * count : (dist.rank() + 1) * count], first)

    def generate(self, prompts: Prompts, step: int, checkpointer: Checkpointer) -> Rollout:
        """Sample the answers to each prompt. Collective.

        Raises:
            RolloutCancelled: a stop was requested.
        """
        rollout = self._timed_rollout(prompts, step)
        if checkpointer.stop_requested():
            raise RolloutCancelled
        return rollout

    def reward(self, rollout: Rollout, prompts: Prompts, step: int) -> Scores:
        """Score the answers; with ReMax (Li et al. 2024), the greedy answer to each prompt as well. Collective."""
        scorer, baselines = self.reward_scorer, None
        if self.greedy_baseline:
            greedy = self._timed_rollout(prompts, step, greedy=True)
            with self.clock.phase("reward"):
                greedy_scores = scorer(scorer.request(greedy, prompts.rows, step - 1), greedy).total  # (count,)
                baselines = greedy_scores.repeat_interleave(self.plan.samples)  # (B,)
        with self.clock.phase("reward"):
            report_phase(0, len(rollout.response_ids), "answers")
            scores = scorer(scorer.request(rollout, prompts.rows, step - 1), rollout)
            self._faults += scorer.count_failed_rows()
            self._numbers.add(scores.numbers)
        return Scores(scores.total, scores.by_source, baselines)

    def score(self, rollout: Rollout, scores: Scores, prompts: Prompts) -> ScoredRollout:
        """Add log-probs, KL and values, all models in eval mode; on-policy, the reference's alone. Collective."""
        with self.clock.phase("score"):
            self.engines.eval()
            numbers = torch.arange(prompts.first, prompts.first + len(prompts.rows), device=rollout.prompt_ids.device)
            groups = numbers.repeat_interleave(self.plan.samples)  # (B,)
            scored = self.model_scorer(rollout, scores, groups)
            if self.several_data_sets:
                numbers = torch.tensor(self.generator.prompts[prompts.rows]["source"], device=groups.device)
                scored = replace(scored, data_sources=numbers.repeat_interleave(self.plan.samples))  # (B,)
            self.clock.count_tokens("score", float(rollout.response_mask.sum() + rollout.prompt_mask.sum()))
        return scored

    def add(self, rows: ScoredRollout) -> None:
        """Add the rows of a round, of all ranks."""
        self._round += 1
        if self.pool is None:
            self._rows = rows
        else:
            self.pool.add(rows)

    def take_rows(self, step: int) -> ScoredRollout:
        """The rows of the PPO step, of all ranks. Collective."""
        self.metrics = {"reward/function_faults": float(self._faults)}
        self.metrics |= {f"reward/{name}": mean for name, mean in self._numbers.reduce().items()}
        if self.pool is None:
            assert self._rows is not None
            rows, self._rows = self._rows, None
            self._print_answers(rows, step)
            return rows
        self.metrics["rollout/dynamic_sampling_rounds"] = float(self._round)
        self.metrics["rollout/dynamic_sampling_kept_share"] = self.pool.kept_share
        rows, filled = self.pool.take()
        rows = to_device(rows, dist.device())  # for the advantage computation
        self.metrics["rollout/dynamic_sampling_filled_rows"] = float(filled)
        if filled:
            logger().warning(
                f"dynamic sampling: {self._round} rounds gave too few prompts whose answers differ in score; {filled} "
                "rows of prompts whose answers score alike fill the step (see --dynamic_sampling_rounds)"
            )
        self._print_answers(rows, step)
        return rows

    def _timed_rollout(self, prompts: Prompts, step: int, greedy: bool = False) -> Rollout:
        with self.clock.phase("rollout"):
            rollout = self.generator.generate(prompts.rows, step, 0 if greedy else self._round, greedy)
            self.clock.count_tokens("rollout", float(rollout.response_mask.sum()))
        return rollout

    def _print_answers(self, rows: ScoredRollout, step: int) -> None:
        """Print the answers of all ranks, which rank 0 holds, as one record: no other line comes between."""
        scorer = self.reward_scorer
        if dist.is_main() and self.print_interval and step % self.print_interval == 0:
            lines = sample_lines(to_device(rows, "cpu"), scorer.tokenizer, scorer.mixture.names)
            logger().info(printed_answers(step, lines))

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts and the rows kept for the next step; the same on every rank, between two steps."""
        pool = None if self.pool is None else self.pool.state_dict()
        return {"stream": self.stream.state_dict(), "pool": pool}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()`. A pool that the saved run did not have starts empty."""
        self.stream.load_state_dict(state["stream"])
        if self.pool is not None:
            load_saved("--dynamic_sampling", state["pool"], partial(self.pool.load_state_dict, device=device))
