"""Experience collection: prompts, answers, rewards and model scores of one PPO step; dynamic sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.group_statistics import groups_that_differ
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
from dschat_ppo.ppo.samples import printed_answers, sample_lines
from dschat_ppo.ppo.score import ModelScorer, RewardScorer, ScoringSettings
from dschat_ppo.rewards.reward_mixture import NumberMeans, Scores
from dschat_ppo.rewards.reward_source import RewardFunctionError, RewardServiceError
from dschat_ppo.types import Rollout, ScoredRollout, concat_rows, record_of, select_rows, tensors_of, to_device


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one round."""

    rows: list[int]  # row numbers in the prompt data set
    first: int  # number of the first one among all prompts of the run; it numbers the groups


class ExperienceCollection:
    """The steps of `make_experience`. Each is timed, and its tokens are counted.

    Args:
        shaped: raw scores (B,) -> scaled and clipped scores, which dynamic sampling compares.
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
        """Collect the rows of one PPO step inside this block. If a stop is requested meanwhile, discard them, save the
        state before the block, and raise `StopRequested`.

        A resumed run samples the same answers again, because their seeds depend only on the step. A stop may end the
        processes or the service of a reward before this rank notices the request. So scores computed meanwhile are
        discarded too, and a failed reward is treated as part of the stop.
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
        """Prompts of the next round on each rank; 0 once the rows of the PPO step are collected. Dynamic sampling takes
        as many prompts as should fill the step, estimated from the share of rows kept so far."""
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
        """Sample the answers to each prompt; `RolloutCancelled` if a stop was requested. Collective."""
        with self.clock.phase("rollout"):
            rollout = self.generator.generate(prompts.rows, step, self._round)
            self.clock.count_tokens("rollout", float(rollout.response_mask.sum()))
        if checkpointer.stop_requested():
            raise RolloutCancelled
        return rollout

    def reward(self, rollout: Rollout, prompts: Prompts, step: int) -> Scores:
        """Score the answers; with ReMax (Li et al. 2024), the greedy answer to each prompt as well. Collective."""
        scorer, baselines = self.reward_scorer, None
        if self.greedy_baseline:
            with self.clock.phase("rollout"):
                greedy = self.generator.generate(prompts.rows, step, greedy=True)
                self.clock.count_tokens("rollout", float(greedy.response_mask.sum()))
            with self.clock.phase("reward"):
                request = scorer.request(greedy, prompts.rows, step - 1)
                greedy_scores = scorer.mixture(request, greedy).total  # (count,)
                baselines = greedy_scores.repeat_interleave(self.plan.samples)  # (B,)
        with self.clock.phase("reward"):
            report_phase(0, len(rollout.response_ids), "answers")
            scores = scorer.mixture(scorer.request(rollout, prompts.rows, step - 1), rollout)
            self._faults += scorer.count_failed_rows()
            self._numbers.add(scores.numbers)
        return replace(scores, baselines=baselines)

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
        """The rows of the PPO step, of all ranks; prints their answers if asked to. Collective."""
        self.metrics = {"reward/function_faults": float(self._faults)}
        self.metrics |= {f"reward/{name}": mean for name, mean in self._numbers.reduce().items()}
        if self.pool is None:
            assert self._rows is not None
            rows, self._rows = self._rows, None
        else:
            self.metrics["rollout/dynamic_sampling_rounds"] = float(self._round)
            self.metrics["rollout/dynamic_sampling_kept_share"] = self.pool.kept_share
            rows, filled = self.pool.take()
            rows = to_device(rows, dist.device())  # for the advantage computation
            self.metrics["rollout/dynamic_sampling_filled_rows"] = float(filled)
            if filled:
                logger().warning(
                    f"dynamic sampling: {self._round} rounds gave too few prompts whose answers differ in score; "
                    f"{filled} rows of prompts whose answers score alike fill the step (see --dynamic_sampling_rounds)"
                )
        if dist.is_main() and self.print_interval and step % self.print_interval == 0:
            lines = sample_lines(to_device(rows, "cpu"), self.reward_scorer.tokenizer, self.reward_scorer.mixture.names)
            logger().info(printed_answers(step, lines))  # as one record: no other line comes between
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts and the rows kept for the next step; the same on every rank, between two steps."""
        pool = None if self.pool is None else self.pool.state_dict()
        return {"stream": self.stream.state_dict(), "pool": pool}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()`. A pool that the saved run did not have starts empty."""
        self.stream.load_state_dict(state["stream"])
        if self.pool is not None:
            load_saved("--dynamic_sampling", state["pool"], partial(self.pool.load_state_dict, device=device))


class GroupPool:
    """Collects the rows of a PPO step from several rounds of sampling: dynamic sampling (Yu et al. 2025, DAPO).

    It replaces prompts whose answers all have the same score, so advantage 0. Every rank holds the rows of all ranks,
    so every rank makes the same decision. Accepted rows beyond what the step needs are kept for the next one.

    Args:
        rows_needed: rows of a PPO step over all ranks, whole groups.
        shaped: raw scores (N,) -> scaled and clipped scores: a group whose clipped scores are equal is dropped too.
        host: hold the rows in host memory (`--experience_on_host`).
    """

    def __init__(self, rows_needed: int, shaped: Callable[[Tensor], Tensor], host: bool = False):
        self.rows_needed = rows_needed
        self.shaped = shaped
        self.host = host
        self.accepted: ScoredRollout | None = None
        self.dropped: ScoredRollout | None = None
        self.sampled = 0  # rows of this step's rounds
        self.kept = 0  # those of them that were accepted

    @property
    def missing(self) -> int:
        """Rows that the step still needs."""
        return max(0, self.rows_needed - (0 if self.accepted is None else len(self.accepted.groups)))

    @property
    def kept_share(self) -> float:
        """Share of the rows of this step's rounds that were accepted; 1 before the first round."""
        return self.kept / self.sampled if self.sampled else 1.0

    def add(self, rows: ScoredRollout) -> None:
        """Sort the rows of a round (whole groups) into accepted and dropped ones."""
        rows = to_device(rows, "cpu") if self.host else rows
        differ = groups_that_differ(self.shaped(rows.scores), rows.groups)  # (N,) bool
        self.sampled += len(differ)
        self.kept += int(differ.sum())
        self.accepted = _appended(self.accepted, rows, differ.nonzero().squeeze(1))
        self.dropped = _appended(self.dropped, rows, (~differ).nonzero().squeeze(1))

    def take(self) -> tuple[ScoredRollout, int]:
        """The rows of the step, and how many of them are dropped ones that fill it up. The next step begins."""
        filled, rows = self.missing, self.accepted
        if filled:
            assert self.dropped is not None
            rows = _appended(rows, self.dropped, torch.arange(filled, device=self.dropped.groups.device))
        assert rows is not None
        places = torch.arange(len(rows.groups), device=rows.groups.device)
        self.accepted = _appended(None, rows, places[self.rows_needed :])
        self.dropped, self.sampled, self.kept = None, 0, 0
        return select_rows(rows, places[: self.rows_needed]), filled

    def state_dict(self) -> dict[str, Any]:
        """The accepted rows kept for the next step; call it between two steps."""
        return {"accepted": None if self.accepted is None else tensors_of(self.accepted)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()` at the beginning of a step, on `device` unless the rows are in host memory."""
        device = torch.device("cpu") if self.host else device
        kept = state["accepted"]
        self.accepted = None if kept is None else to_device(record_of(ScoredRollout, kept), device)
        self.dropped, self.sampled, self.kept = None, 0, 0


def _appended(before: ScoredRollout | None, rows: ScoredRollout, chosen: Tensor) -> ScoredRollout | None:
    """`before`, followed by the rows at `chosen` (n,) int64; None if both are empty."""
    if not len(chosen):
        return before
    new = select_rows(rows, chosen)
    return new if before is None else concat_rows([before, new])
