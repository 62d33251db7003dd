"""Steps 1 and 2: how many rows and optimizer steps a run has."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import batch_text, times
from dschat_ppo.config.supervised_config import FitConfig
from dschat_ppo.config.supervised_flags import SupervisedFlags
from dschat_ppo.data.lazy_rows import TrainingRows, rows_at_hand
from dschat_ppo.data.supervised_batches import PackingPlan, sample_tokens
from dschat_ppo.run.start_and_end import show_plan


@dataclass(frozen=True)
class SupervisedPlan:
    """Batches of steps 1 and 2. The last optimizer step of an epoch may have fewer rows; no row is
    dropped."""

    flags: SupervisedFlags
    rows: int  # training rows; with --packing, packed rows
    world_size: int  # ranks
    # of all samples, prompts and answers; estimated from the rows at hand
    tokens: int | None = None
    packing: PackingPlan | None = None
    shared: int = 1  # ranks that share their rows
    # optimizer steps of the run, in place of --num_train_epochs; 0: by --num_train_epochs
    max_steps: int = 0

    @property
    def global_batch(self) -> int:
        """Rows of one optimizer step over all ranks."""
        flags = self.flags
        batch = flags.per_device_train_batch_size * flags.gradient_accumulation_steps
        return batch * self.world_size // self.shared

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch, rounded up."""
        return -(-self.rows // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, rounded up."""
        return self.max_steps or times(self.steps_per_epoch, self.flags.num_train_epochs)

    def is_evaluated(self, step: int) -> bool:
        """Whether the model is evaluated after `step` optimizer steps: at the end of the run and of
        an epoch, and by `--eval_interval`."""
        if step == self.total_steps or step % self.steps_per_epoch == 0:
            return True
        interval = self.flags.eval_interval
        return interval > 0 and step % interval == 0

    def table(self) -> list[tuple[str, str]]:
        """The lines of the table that a run shows: what is counted, and how."""
        steps = self.steps_per_epoch
        row = "row"
        lines = []
        if self.packing is not None:
            row = "packed row"
            capacity = self.packing.capacity
            text = f"{len(self.packing.tokens)} samples in {self.rows} rows of {capacity} tokens"
            tokens = self.tokens or 0
            fullness = 100 * tokens / (self.rows * capacity)
            lines.append(("packed rows", f"{text}, {fullness:.1f} % full"))
        if self.tokens is not None:
            text = f"{self.tokens} / {steps} = {self.tokens / steps:.1f} on average"
            lines.append(("tokens per optimizer step", text))
        batch = batch_text(self, self.flags.per_device_train_batch_size, row)
        lines.append(("global batch", batch))
        text = f"ceil({self.rows} / {self.global_batch}) = {steps}"
        lines.append(("optimizer steps per epoch", text))
        text = f"{self.total_steps}, {self.total_steps / steps:.3g} epochs"
        lines.append(("optimizer steps in all", text))
        return lines


def plan_batches(
    fit: SupervisedFlags,
    rows: TrainingRows,
    packing: PackingPlan | None,
    max_steps: int,
    shared: int,
) -> SupervisedPlan:
    """The batch plan for the ranks of this launch, of which `shared` share their rows; of packed
    rows with `packing`."""
    ranks = dist.world_size()
    if packing is None:
        row_count = len(rows)
        known = rows_at_hand(rows)
        tokens = int(sample_tokens(known).sum()) * row_count // len(known)
    else:
        row_count = packing.rows
        tokens = int(packing.tokens.sum())
    return SupervisedPlan(fit, row_count, ranks, tokens, packing, shared, max_steps)


def show_supervised_batches(title: str, plan: SupervisedPlan, config: FitConfig) -> None:
    """Log the table of batches and the warm-up of a step."""
    schedule = (config.warmup_steps(plan.total_steps), plan.total_steps)
    show_plan(f"{title}: batches", plan.table(), schedule)
