"""Seconds of a step and hours of a run, from measurements of its parts (`--dry_run --measure`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from deepspeed.accelerator import get_accelerator

from dschat_ppo.common import dist
from dschat_ppo.common.progress import duration
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.errors import counted

REPETITIONS = 3  # of a measurement, after one that warms up
LONG = 5.0  # seconds; of a measurement that takes longer, the one that warms up counts
# (rows or micro-batches, seconds) of each measurement
Measured = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class PhaseTime:
    """What one phase takes in each step."""

    name: str  # as the metric `time/NAME` of a run has it
    work: str  # how much of it a step has
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """What a step and a run take."""

    phases: Sequence[PhaseTime]
    step: str  # what a step is called
    steps: int
    assumed: Sequence[str]

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(phase.seconds for phase in self.phases)

    def __str__(self) -> str:
        """A line for each phase, the step and the run, and what is assumed."""
        ranks = counted(dist.world_size(), f"{dist.device().type} rank")
        threads = counted(torch.get_num_threads(), "thread")
        lines = [f"time of one {self.step}, measured on {ranks} with {threads}"]
        for phase in self.phases:
            lines.append(f"  {phase.name:<14}  {phase.work:<38}  {phase.seconds:>9.3f} s")
        run = self.seconds * self.steps
        lines.append(f"  {'in all':<14}  {'':<38}  {self.seconds:>9.3f} s")
        lines.append(
            f"  {counted(self.steps, self.step)} x {self.seconds:.3g} s = {duration(run)}"
            f" ({run / 3600:.2f} hours)"
        )
        lines.append("  assumed:")
        lines += [f"    {assumption}" for assumption in self.assumed]
        return "\n".join(lines)


@dataclass(frozen=True)
class PPOMeasurement:
    """Measured seconds of the parts of a PPO step on one rank."""

    decoded_rows: int  # sequences that are generated at a time
    first_token: float  # of these sequences, with what a generation does before it
    decode_step: float  # one more token of each, in the middle of a response
    scored_rows: int
    reward: float  # the reward sources, for the scored rows
    score: float  # the forward passes of scoring, for these
    # (rows on a rank, role -> seconds) of one or two optimizer steps of unlike size
    updates: Sequence[tuple[int, Mapping[str, float]]]


def ppo_time(measured: PPOMeasurement, plan: PPOPlan, greedy_too: bool) -> StepTime:
    """The time of the PPO steps of a plan, whose responses all have full length. `greedy_too`: each
    prompt also has a greedy response (ReMax)."""
    rows = plan.rows_per_rank
    generated = rows
    if greedy_too:
        generated += plan.prompts_per_rank
    length = plan.flags.max_answer_seq_len
    batches = generated / measured.decoded_rows
    scored = rows / measured.scored_rows
    rows_of_update = plan.global_batch / plan.world_size
    updates = plan.updates_per_rollout
    decoded = f"{generated} responses of {length} tokens"
    phases = [
        PhaseTime("rollout/first", f"{generated} prompts", batches * measured.first_token),
        PhaseTime("rollout/decode", decoded, batches * (length - 1) * measured.decode_step),
        PhaseTime("reward", f"{rows} rows", scored * measured.reward),
        PhaseTime("score", f"{rows} rows", scored * measured.score),
    ]
    for role in measured.updates[0][1]:
        of_role = [(count, seconds[role]) for count, seconds in measured.updates]
        work = f"{counted(updates, 'update')} of {rows_of_update:g} rows"
        seconds = updates * seconds_for(rows_of_update, of_role)
        phases.append(PhaseTime(f"train/{role}", work, seconds))
    assumed = [
        f"every response has {length} tokens (--max_answer_seq_len); an EOS makes it shorter",
        "prompts as long as those of the data; without evaluation and checkpoints",
    ]
    return StepTime(phases, "PPO step", plan.ppo_steps, assumed)


def fit_time(measured: Measured, micro_batches: int, steps: int) -> StepTime:
    """The time of the optimizer steps of steps 1 and 2, each of so many micro-batches on a rank, of
    which `measured` has one or two numbers."""
    work = counted(micro_batches, "micro-batch", "micro-batches")
    phase = PhaseTime("train", work, seconds_for(micro_batches, measured))
    assumed = [
        "rows as long as the first ones of training; without evaluation, checkpoints, and what is",
        "computed once before training",
    ]
    return StepTime([phase], "optimizer step", steps, assumed)


def seconds_for(count: float, measured: Measured) -> float:
    """The seconds for `count` rows: in proportion to those measured, or on the line through two
    measurements, where an optimizer step has a cost of its own and each row costs the same."""
    first_count, first_seconds = measured[0]
    if len(measured) == 1:
        return count * first_seconds / first_count
    second_count, second_seconds = measured[1]
    of_a_row = max(0.0, (second_seconds - first_seconds) / (second_count - first_count))
    of_the_step = max(0.0, first_seconds - of_a_row * first_count)
    return of_the_step + count * of_a_row


def usual_seconds(work: Callable[[], object]) -> float:
    """Seconds that the work takes on the slowest rank: the median of `REPETITIONS`, after one that
    warms up, which alone counts if it is `LONG`. Collective."""
    seconds = _seconds_of(work)
    if seconds > LONG:
        return seconds
    return median(_seconds_of(work) for _ in range(REPETITIONS))


def _seconds_of(work: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    get_accelerator().synchronize()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=dist.device())
    return float(dist.all_reduce(seconds, "max"))
