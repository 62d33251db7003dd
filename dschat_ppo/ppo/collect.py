"""The first half of a PPO step: prompts -> answers -> scored rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.checkpoint.resumable import NO_CHECKPOINTS, Checkpointer, load_saved
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, say
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.sampler import IndexStream
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.errors import RolloutCancelled, UserError
from dschat_ppo.ppo.generate import Rollouts
from dschat_ppo.ppo.group_pool import GroupPool
from dschat_ppo.ppo.mini_dataset import gather_rows
from dschat_ppo.ppo.reward_scorer import RewardScorer, texts_of
from dschat_ppo.ppo.score import ModelScorer, Scoring
from dschat_ppo.types import Rollout, ScoredRollout


class ExperienceCollector:
    """Samples answers, has them scored, and hands over the rows of one PPO step.

    Args:
        config: the resolved flags.
        plan: the arithmetic of batches.
        engines: the roles.
        rollouts: where answers come from.
        judge: where scores come from.
        shaped: scores as the baseline sees them, for dynamic sampling.
        clock: of the phases.
    """

    def __init__(
        self, config: PPOConfig, plan: PPOPlan, engines: RLHFEngine, rollouts: Rollouts, judge: RewardScorer,
        shaped: Callable[[Tensor], Tensor], clock: PhaseClock,
    ):  # fmt: skip
        ppo, algorithm = config.ppo, config.algorithm
        self.plan = plan
        self.engines = engines
        self.rollouts = rollouts
        self.judge = judge
        self.clock = clock
        self.greedy_baseline = algorithm.advantage_estimator == "remax"
        self.rounds = algorithm.dynamic_sampling_rounds
        self.pool = GroupPool(plan.rollout_rows, shaped) if algorithm.dynamic_sampling else None
        self.print_every = ppo.print_answers_interval if ppo.print_answers else 0
        self.stream = IndexStream(len(rollouts.prompts), config.run.seed)
        how = Scoring(ppo.temperature, plan.micro_batch_tokens, config.recompute_old_logprobs, algorithm.kl_estimator)
        self.maker = ModelScorer(engines.actor, engines.reference, engines.critic, how)

    def collect(self, step: int, checkpointer: Checkpointer = NO_CHECKPOINTS) -> tuple[ScoredRollout, dict[str, float]]:
        """The rows of one PPO step, of all ranks, and metrics of their collection. Collective.

        Raises:
            RolloutGivenUp: the run is to stop, as the boundary says. Whoever stops a run may have hurt the processes of
                reward functions first, so what was scored meanwhile is not trusted either.
            UserError: a reward cannot be had.
        """
        metrics = dict[str, float]()
        if self.pool is None:
            rows, faults = self._round(self.plan.prompts_per_rank, step, 0, checkpointer)
        else:
            rows, faults, metrics = self._sample_dynamically(self.pool, step, checkpointer)
        _give_up_if_asked(checkpointer)
        return rows, {**metrics, "reward/function_faults": float(faults)}

    def _sample_dynamically(
        self, pool: GroupPool, step: int, checkpointer: Checkpointer
    ) -> tuple[ScoredRollout, int, dict[str, float]]:
        """Rounds until the pool has enough groups whose scores differ, or the rounds are used up."""
        rounds = faults = 0
        while pool.missing and rounds < self.rounds:
            found, failed = self._round(self._prompts_to_try(pool), step, rounds, checkpointer)
            pool.add(found)
            rounds, faults = rounds + 1, faults + failed
        metrics = {"dynamic_sampling/rounds": float(rounds), "dynamic_sampling/kept_share": pool.kept_share}
        rows, filled = pool.take()
        if filled:
            logger().warning(
                f"dynamic sampling: {rounds} rounds gave too few prompts whose answers differ in score; {filled} rows "
                "of prompts whose answers score alike fill the step (see --dynamic_sampling_rounds)"
            )
        return rows, faults, {**metrics, "dynamic_sampling/filled_rows": float(filled)}

    def _prompts_to_try(self, pool: GroupPool) -> int:
        """Prompts of the next round on each rank: as many as should do, from the share that was kept so far."""
        wanted = pool.missing / self.plan.samples / max(pool.kept_share, 0.1)
        return min(self.plan.prompts_per_rank, -int(-wanted // dist.world_size()))

    def _round(self, per_rank: int, step: int, number: int, checkpointer: Checkpointer) -> tuple[ScoredRollout, int]:
        """Rows of all ranks that answer the next prompts, `per_rank` on each, and how many a function failed on."""
        first = self.stream.taken + dist.rank() * per_rank
        taken = self.stream.take(per_rank * dist.world_size())
        indices = taken[dist.rank() * per_rank : (dist.rank() + 1) * per_rank]
        rollout = self.rollout(indices, step, number)
        _give_up_if_asked(checkpointer)
        try:
            scored = self.score(rollout, indices, first, step)
            return gather_rows(scored), self.judge.count_failed_rows()
        except UserError:  # of a reward, on every rank; who stops a run may have stopped its service first
            _give_up_if_asked(checkpointer)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Where the prompts stand and which rows wait, to be taken between two steps; the same on every rank."""
        pool = None if self.pool is None else self.pool.state_dict()
        return {"stream": self.stream.state_dict(), "pool": pool}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from `state_dict()`; a pool that the saved run did not have begins empty."""
        self.stream.load_state_dict(state["stream"])
        if self.pool is not None:
            load = partial(self.pool.load_state_dict, device=device)
            load_saved("--dynamic_sampling", state["pool"], load)

    def rollout(self, indices: list[int], step: int, number: int = 0) -> Rollout:
        """Sample the answers to each prompt; `number` is that of the round in the step."""
        with self.clock.phase("rollout"):
            rollout = self.rollouts.make(indices, step, number)
            self.clock.count_tokens("rollout", float(rollout.response_mask.sum()))
        return rollout

    def score(self, rollout: Rollout, indices: list[int], first_group: int, step: int) -> ScoredRollout:
        """Rewards, log-probs and values, all models in eval mode.

        Args:
            rollout: answers to the prompts at `indices`.
            indices: row numbers.
            first_group: number of the first prompt in the run.
            step: PPO step.
        """
        baselines = self._baselines(indices, step) if self.greedy_baseline else None
        with self.clock.phase("reward"):
            found = self.judge(rollout, indices)
        with self.clock.phase("score"):
            self.engines.eval()
            groups = torch.arange(first_group, first_group + len(indices), device=rollout.prompt_ids.device)
            scored = self.maker.make(
                rollout, found.by_source, found.scores, groups.repeat_interleave(self.plan.samples), baselines
            )
            self.clock.count_tokens("score", float(rollout.response_mask.sum() + rollout.prompt_mask.sum()))
        if self.print_every and step % self.print_every == 0:
            self._print_answers(scored, step)
        return scored

    def _baselines(self, indices: list[int], step: int) -> Tensor:
        """Scores of the greedy answers, (B,) fp32. (Li et al. 2024, ReMax)"""
        with self.clock.phase("rollout"):
            greedy = self.rollouts.make(indices, step, greedy=True)
            self.clock.count_tokens("rollout", float(greedy.response_mask.sum()))
        with self.clock.phase("reward"):
            return self.judge(greedy, indices).scores.repeat_interleave(self.plan.samples)

    def _print_answers(self, rows: ScoredRollout, step: int) -> None:
        """Ranks take turns, so that their lines do not mix."""
        tokenizer = self.judge.tokenizer
        prompts = texts_of(tokenizer, rows.prompt_ids, rows.prompt_mask, skip_special_tokens=False)
        answers = texts_of(tokenizer, rows.response_ids, rows.response_mask, skip_special_tokens=False)
        for turn in range(dist.world_size()):
            if turn == dist.rank():
                for prompt, answer, score in zip(prompts, answers, rows.scores.tolist(), strict=True):
                    say(f"[rank {turn}, step {step}, score {score:.3f}] {prompt!r} -> {answer!r}")
            dist.barrier()


def _give_up_if_asked(checkpointer: Checkpointer) -> None:
    if checkpointer.stop_requested():
        raise RolloutCancelled
