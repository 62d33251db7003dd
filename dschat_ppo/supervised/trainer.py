"""The loop that steps 1 and 2 share: epochs, optimizer steps, evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.resumable import Checkpointer, RankStates
from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger, progress_bar
from dschat_ppo.common.phases import PhaseClock, announce_step
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import plan_fit
from dschat_ppo.config.safety_flags import SafetyFlags
from dschat_ppo.config.schema import FitFlags, RunFlags
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.data.sampler import epoch_order, optimizer_steps
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import Config, read_overlay, train_config
from dschat_ppo.engine.optimizer_step import learning_rate, optimizer_step
from dschat_ppo.models.finite_weights import require_finite_weights
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.saving import save_model
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import FailureContext

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Objective(Generic[Batch]):
    """What a step trains for.

    `collate(rows, indices)` makes a batch on the device; `count(batch)` is what the loss is a mean over (tokens,
    pairs); `loss(engine, batch, total, sums)` is the batch's part of the loss, divided by `total`, and adds its
    metrics to `sums`; `summary(metrics)` derives further numbers from reduced ones; `headline` are shown each step.
    `prepare(engine, rows)`, if any, gives the rows what the untrained model says of them; `describe(engine, rows)`, if
    any, measures the trained model, for its config and `result.json`. Both are collective.
    """

    collate: Callable[[Dataset, Sequence[int]], Batch]
    count: Callable[[Batch], Tensor]
    loss: Callable[[Any, Batch, Tensor, MetricSums], Tensor]
    summary: Callable[[dict[str, float]], dict[str, float]]
    headline: tuple[str, ...]
    prepare: Callable[[Any, TokenRows], TokenRows] | None = None
    describe: Callable[[Any, TokenRows], dict[str, float]] | None = None


def fit_ds_config(fit: FitFlags, run: RunFlags) -> Config:
    """The DeepSpeed configuration of steps 1 and 2."""
    overlay = read_overlay(run.deepspeed_config)
    return train_config(fit.zero_stage, run.dtype, fit.offload, dist.world_size(), fit.max_grad_norm, overlay)


@torch.no_grad()
def evaluate(engine: Any, rows: Dataset, objective: Objective[Batch], fit: FitFlags) -> dict[str, float]:
    """Metrics over the evaluation rows (at most `--eval_iters` batches per device), exact whatever the ranks."""
    engine.eval()
    batches = optimizer_steps(range(len(rows)), fit.per_device_eval_batch_size, 1, dist.world_size(), dist.rank())
    sums = MetricSums()
    for number, [indices] in enumerate(batches, start=1):
        batch = objective.collate(rows, indices)
        objective.loss(engine, batch, objective.count(batch).clamp_min(1), sums)
        heartbeat()
        if number == fit.eval_iters:
            break
    engine.train()
    return objective.summary(sums.reduce())


@torch.no_grad()
def score_rows(
    engine: Any, rows: Dataset, score: Callable[[Dataset, Sequence[int]], Tensor], batch_size: int, title: str
) -> Tensor:
    """What the model says of every row, each rank doing its part. Collective.

    Args:
        engine: put into eval mode meanwhile (dropout off).
        rows: at least one.
        score: `score(rows, indices)` is (len(indices), k), one line for each index, of any content for fillers.
        batch_size: rows of a batch on one device.
        title: of the progress bar.

    Returns:
        (len(rows), k) on the CPU, in the order of the rows, the same on every rank.
    """
    engine.eval()
    batches = list(optimizer_steps(range(len(rows)), batch_size, 1, dist.world_size(), dist.rank()))
    parts = []
    with progress_bar(title, len(batches)) as bar:
        for [indices] in batches:
            parts.append(dist.gather_cat(score(rows, indices)).cpu())
            heartbeat()
            bar.update()
    engine.train()
    return torch.cat(parts)[: len(rows)]  # fillers stand at the end


class SupervisedTrainer(Generic[Batch]):
    """Trains one model on rows; a `Resumable`, whose state is saved between two optimizer steps.

    Args:
        model: a `PolicyModel` or a `ScalarModel`.
        ds_config: as it was built with.
        rows: for training and evaluation.
        objective: what it trains for.
        fit: flags of the training.
        run: flags of the run.
        guard: what happens to numbers that are not finite; None: the run stops, and nothing is written.
    """

    def __init__(
        self, model: torch.nn.Module, ds_config: Config, rows: TokenRows, objective: Objective[Batch], fit: FitFlags,
        run: RunFlags, guard: NonFinitePolicy | None = None,
    ):  # fmt: skip
        self.guard = guard or NonFinitePolicy(SafetyFlags())
        self.plan = plan_fit(fit, len(rows.train), dist.world_size())
        self.objective = objective
        self.fit = fit
        self.run_flags = run
        self.clock = PhaseClock()
        settings = OptimizerSettings(
            fit.learning_rate,
            fit.weight_decay,
            fit.lr_scheduler_type,
            fit.num_warmup_steps,
            self.plan.total_steps,
            (run.adam_beta1, run.adam_beta2),
            run.adam_epsilon,
        )
        self.steps = 0
        self.before: dict[str, float] | None = None  # of the untrained model; None: not measured yet
        self.after: dict[str, float] = {}
        self.best: tuple[float, int] | None = None  # least `eval_loss` while training, and the steps done then
        self.engine = train_engine(model, ds_config, settings)
        select_kernels(self.engine)
        self.rows = self._prepared(rows)
        seed_this_rank(run.seed)

    def _prepared(self, rows: TokenRows) -> TokenRows:
        if self.objective.prepare is None:
            return rows
        with self.clock.phase("prepare"):
            return self.objective.prepare(self.engine, rows)

    def run(self, writer: MetricsWriter, checkpointer: Checkpointer, title: str) -> None:
        """Evaluate and train, from where the state stands to the end.

        Raises:
            StopRequested: from the boundary.
        """
        if self.before is None:
            self.before = self.evaluate()
            writer.write(0, self.before)
        with progress_bar(title, self.plan.total_steps, self.steps) as bar:
            for step_indices in self._steps_left():
                self._train_and_report(step_indices, writer)
                bar.update()
                checkpointer.save_if_due()

    def _steps_left(self) -> Iterator[list[list[int]]]:
        """This rank's micro-batches of each optimizer step that is left, epoch after epoch."""
        epoch, done = divmod(self.steps, self.plan.steps_per_epoch)
        for number in range(epoch, self.plan.epochs):
            order = epoch_order(len(self.rows.train), self.run_flags.seed, number)
            steps = optimizer_steps(order, self.plan.per_device, self.plan.accumulation, dist.world_size(), dist.rank())
            yield from islice(steps, done, None)
            done = 0

    def _train_and_report(self, step_indices: list[list[int]], writer: MetricsWriter) -> None:
        announce_step(self.steps + 1)
        rate = learning_rate(self.engine)
        with self.clock.phase("train"):
            metrics = self.train_step(step_indices, self.steps + 1)
        self.steps += 1
        step, per_epoch = self.steps, self.plan.steps_per_epoch
        self._show(step, metrics, rate)
        if step % per_epoch == 0 or (self.fit.eval_interval and step % self.fit.eval_interval == 0):
            self.after = self.evaluate()
            metrics |= self.after
            loss, least = self.after.get("eval_loss", math.inf), math.inf if self.best is None else self.best[0]
            if loss < least:
                self.best = (loss, step)
        self._report(writer, step, {**metrics, "lr": rate, "epoch": step / per_epoch})

    def train_step(self, step_indices: list[list[int]], step: int = 0) -> dict[str, float]:
        """One optimizer step, the `step`-th, over this rank's micro-batches of row numbers.

        Raises:
            NonFiniteError: a loss or gradient is not finite, and the run is to stop.
        """
        objective = self.objective
        batches = [objective.collate(self.rows.train, indices) for indices in step_indices]
        total = dist.all_reduce(torch.stack([objective.count(batch) for batch in batches]).sum()).clamp_min(1)
        sums = MetricSums()
        result = optimizer_step(self.engine, batches, lambda batch: objective.loss(self.engine, batch, total, sums))

        def scene() -> FailureContext:
            state = result.fault.random_state if result.fault else []
            constants = {"total": float(total), "rows": step_indices}
            return FailureContext(batches, constants, self.engine, random_state=state)

        self.guard.handle("model", step, result, scene)
        metrics = {**objective.summary(sums.reduce()), "grad_norm": result.grad_norm, "counted": float(total)}
        return metrics | self.guard.metrics("model")

    def evaluate(self) -> dict[str, float]:
        """Evaluation metrics under their names with `eval_` before; {} if there are no evaluation rows."""
        if self.rows.eval is None:
            return {}
        with self.clock.phase("evaluate"):
            found = evaluate(self.engine, self.rows.eval, self.objective, self.fit)
        logger().info("eval: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
        return {f"eval_{name}": value for name, value in found.items()}

    def _show(self, step: int, metrics: dict[str, float], rate: float) -> None:
        shown = ", ".join(f"{name} {metrics[name]:.4f}" for name in (*self.objective.headline, "grad_norm"))
        logger().info(f"step {step}/{self.plan.total_steps}: {shown}, lr {rate:.2e}")

    def _report(self, writer: MetricsWriter, step: int, metrics: dict[str, float]) -> None:
        seconds, _, peak = self.clock.take()
        metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
        metrics |= {f"peak_memory_gib/{name}": value for name, value in peak.items()}
        writer.write(step, metrics)

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Save the model to `folder`; returns what `result.json` is to say of the training.

        Raises:
            NonFiniteError: a weight is not finite.
        """
        require_finite_weights("model", self.engine)
        described = self._describe()
        with self.clock.phase("save"):
            save_model(self.engine, tokenizer, folder, described, ends=answer_ends(tokenizer))
        before = self.before or {}
        result: dict[str, Any] = {f"{name}_before": value for name, value in before.items()} | described
        result |= {f"{name}_after": value for name, value in (self.after or before).items()}
        return result | {"optimizer_steps": self.plan.total_steps, "world_size": dist.world_size()}

    def _describe(self) -> dict[str, float]:
        if self.objective.describe is None:
            return {}
        with self.clock.phase("describe"):
            return self.objective.describe(self.engine, self.rows)

    @property
    def engines_to_save(self) -> dict[str, Any]:
        """The one engine, as `model`."""
        return {"model": self.engine}

    @property
    def position(self) -> tuple[int, int]:
        """Optimizer steps done, and 0: there is nothing smaller."""
        return self.steps, 0

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was made at this position and has the least loss so far."""
        return self.best is not None and self.best[1] == self.steps

    def shared_state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "steps": self.steps,
            "before": self.before,
            "after": self.after,
            "best": self.best,
            "guard": self.guard.state_dict(),
        }

    def rank_state(self) -> dict[str, Any]:
        """Nothing is this rank's alone."""
        return {}

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Go on from `shared_state()`."""
        self.steps, self.before, self.after = shared["steps"], shared["before"], shared["after"]
        self.best = None if shared["best"] is None else tuple(shared["best"])
        self.guard.load_state_dict(shared["guard"])
