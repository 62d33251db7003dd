"""Batch plan of step 3: global batch sizes and numbers of steps, from the flags and the number of
ranks. (That of steps 1 and 2 is in `supervised/training_plan.py`.)"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, gcd
from typing import Any

from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.schema import require
from dschat_ppo.errors import counted

# Of a micro-batch on one CPU. A larger one leaves the caches, and its activations are above 32 MiB,
# which glibc returns to the system after each use. Several ranks exchange weights and gradients in
# each pass, so theirs are twice as large.
CPU_TOKENS = 1024


def tokens_on_cpu(longest: int, ranks: int) -> int:
    """Most tokens of a micro-batch on a CPU, where the longest row has `longest`."""
    return max(longest, CPU_TOKENS * min(ranks, 2))


def times(count: int, factor: float) -> int:
    """`count` x `factor`, rounded up. `factor` is the decimal that was typed: 0.07 of 100 is 7, not
    above it."""
    return ceil(count * Fraction(str(factor)))


def batch_text(plan: Any, micro_batch: int, row: str) -> str:
    """The global batch of a plan, such as "32 rows x 1 micro-batch x 2 ranks = 64"; `row`: what a
    row is called."""
    rows = counted(micro_batch, row)
    batches = counted(plan.flags.gradient_accumulation_steps, "micro-batch", "micro-batches")
    ranks = counted(plan.world_size, "rank")
    if plan.shared > 1:  # ranks that share their rows are a group
        ranks = counted(plan.world_size // plan.shared, "group")
    return f"{rows} x {batches} x {ranks} = {plan.global_batch}"


@dataclass(frozen=True)
class PPOPlan:
    """Batches of step 3. A PPO step is one collection of experience and all updates made from
    it."""

    flags: PPOFlags
    prompts: int  # prompts in the data
    world_size: int  # ranks
    warmup_rollouts: int = 0  # PPO steps at the start that train only the critic
    shared: int = 1  # ranks that share their rows in updates
    # PPO steps of the run, in place of --num_train_epochs; 0: by --num_train_epochs
    max_steps: int = 0
    on_gpu: bool = True

    @property
    def samples(self) -> int:
        return self.flags.n_samples_per_prompt

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum tokens per micro-batch, padding included."""
        longest = self.flags.max_prompt_seq_len + self.flags.max_answer_seq_len
        tokens = self.flags.per_device_training_batch_size * longest
        if not self.on_gpu:
            tokens = min(tokens, tokens_on_cpu(longest, self.world_size))
        return self.flags.micro_batch_tokens or tokens

    @property
    def prompts_per_rank(self) -> int:
        """Prompts of one rank in one PPO step."""
        return self.flags.per_device_generation_batch_size * self.flags.generation_batches

    @property
    def rows_per_rank(self) -> int:
        """Answers of one rank in one PPO step."""
        return self.prompts_per_rank * self.samples

    @property
    def rollout_prompts(self) -> int:
        """Prompts of one PPO step over all ranks."""
        return self.prompts_per_rank * self.world_size

    @property
    def rollout_rows(self) -> int:
        """Rows of one PPO step over all ranks."""
        return self.rows_per_rank * self.world_size

    @property
    def global_batch(self) -> int:
        """Rows of one optimizer step over all ranks."""
        batch = self.flags.per_device_training_batch_size * self.flags.gradient_accumulation_steps
        return batch * self.world_size // self.shared

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps of one PPO step."""
        return self.rollout_rows // self.global_batch * self.flags.ppo_epochs

    @property
    def ppo_steps(self) -> int:
        """PPO steps of the run, rounded up; at most `--test_stop_step` in test mode."""
        steps = self.max_steps
        if steps == 0:
            prompts = times(self.prompts, self.flags.num_train_epochs)
            steps = -(-prompts // self.rollout_prompts)
        return min(steps, self.flags.test_stop_step or steps)

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.ppo_steps * self.updates_per_rollout

    @property
    def actor_updates(self) -> int:
        """Optimizer steps of the actor, which has none during the warm-up of the critic."""
        return (self.ppo_steps - self.warmup_rollouts) * self.updates_per_rollout

    def table(self) -> list[tuple[str, str]]:
        """(what, its arithmetic) of each line of the plan in the log."""
        flags = self.flags
        ranks = counted(self.world_size, "rank")
        rows = self.rows_per_rank
        passes = counted(flags.ppo_epochs, "epoch")
        device = "device" if self.shared == 1 else "group"
        ppo_steps = str(self.ppo_steps)
        if self.ppo_steps == self.max_steps:
            ppo_steps += " (--max_steps)"
        of_prompts = (
            f"{flags.per_device_generation_batch_size} x {flags.generation_batches} prompts"
        )
        return [
            ("prompts", f"{self.prompts}"),
            ("rows per rank", f"{of_prompts} x {self.samples} answers = {rows}"),
            ("rows per PPO step", f"{rows} x {ranks} = {self.rollout_rows}"),
            (
                f"micro-batch per {device}",
                f"up to {self.micro_batch_tokens} tokens, padding included",
            ),
            ("global batch", batch_text(self, flags.per_device_training_batch_size, "row")),
            (
                "updates per PPO step",
                f"{self.rollout_rows} / {self.global_batch} x {passes} ="
                f" {self.updates_per_rollout}",
            ),
            ("PPO steps", ppo_steps),
            (
                "optimizer steps in all",
                f"{self.ppo_steps} x {self.updates_per_rollout} = {self.total_updates}",
            ),
        ]


def plan_ppo(
    flags: PPOFlags,
    prompts: int,
    world_size: int,
    warmup_rollouts: int = 0,
    shared: int = 1,
    max_steps: int = 0,
    on_gpu: bool = True,
) -> PPOPlan:
    """The batch plan of step 3 for a number of prompts (see `PPOPlan`). A run whose flags limit its
    steps has fewer `warmup_rollouts` if it must, so that its last step trains the actor."""
    plan = PPOPlan(flags, prompts, world_size, warmup_rollouts, shared, max_steps, on_gpu)
    # a trial of a longer run, so its last PPO step trains the actor too
    if max_steps or flags.test_stop_step:
        plan = replace(plan, warmup_rollouts=min(warmup_rollouts, plan.ppo_steps - 1))
    require(
        plan.warmup_rollouts < plan.ppo_steps,
        f"--critic_warmup_rollouts {warmup_rollouts} must be below the {plan.ppo_steps} PPO steps"
        " of this run, or the actor is never trained",
    )
    # per device, or per group of ranks that share rows
    rows = plan.rows_per_rank * shared
    rows_per_update = plan.global_batch * shared // world_size
    sharing = ""
    device = "device"
    if shared > 1:
        sharing = f" x {shared} ranks that share rows"
        device = "group"
    # --generation_batches must be a multiple of this for a whole number of updates
    multiple = rows_per_update // gcd(rows // flags.generation_batches, rows_per_update)
    require(
        rows % rows_per_update == 0,
        "the rows of a PPO step are not a whole number of optimizer steps:"
        f" --per_device_generation_batch_size {flags.per_device_generation_batch_size} x"
        f" --generation_batches {flags.generation_batches} x --n_samples_per_prompt"
        f" {plan.samples}{sharing} = {rows} rows per {device}, but an optimizer step takes"
        f" --per_device_training_batch_size {flags.per_device_training_batch_size} x"
        f" --gradient_accumulation_steps {flags.gradient_accumulation_steps} = {rows_per_update}."
        f" Set --generation_batches {-(-flags.generation_batches // multiple) * multiple}",
    )
    return plan
