"""Steps 1 and 2: the training loop. `SupervisedTrainer.run` is the whole loop, `train_step` one
optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.manager import CheckpointManager, RankStates
from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, announce_step
from dschat_ppo.common.progress import Progress, report_phase
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import batch_text, times
from dschat_ppo.config.supervised_config import FitConfig
from dschat_ppo.config.supervised_flags import SupervisedFlags
from dschat_ppo.data.batches import chunked_order, optimizer_steps
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.data.streaming import StreamedRows, rows_at_hand
from dschat_ppo.data.supervised_batches import PackingPlan, plan_packing, sample_tokens, samples_of
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.engine.build_engine import optimizer_settings, train_engine
from dschat_ppo.engine.ds_config import Config, check_zero_plus_plus, config_of_run
from dschat_ppo.engine.optimizer_step import (
    StepResult,
    accumulate,
    apply,
    learning_rates,
    loss_scale,
)
from dschat_ppo.engine.router_term import router_settings, with_router_term
from dschat_ppo.errors import UserError
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.saving import (
    SavedForm,
    require_finite_weights,
    save_model,
    saved_dtype,
)
from dschat_ppo.models.wrapped_models import WrappedModel
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.step_line import show_step, supervised_columns
from dschat_ppo.monitor.step_trace import NO_TRACE, StepTrace
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.run.model_card import model_card
from dschat_ppo.run.output_folder import KeptModels, best_is_lost
from dschat_ppo.run.start_and_end import show_plan
from dschat_ppo.supervised.best_evaluation import BestEvaluation
from dschat_ppo.supervised.objective import Batch, Objective, UsedRows, collated
from dschat_ppo.supervised.passes import filled_up, passes_for
from dschat_ppo.types import Engine


@dataclass(frozen=True)
class PackedRows:
    """With `--packing`: what the packed rows hold."""

    samples: int  # training samples in all packed rows together
    capacity: int  # most tokens of a packed row


@dataclass(frozen=True)
class SupervisedPlan:
    """Batches of steps 1 and 2. The last optimizer step of an epoch may have fewer rows; no row is
    dropped."""

    flags: SupervisedFlags
    rows: int  # training rows; with --packing, packed rows
    world_size: int  # ranks
    tokens: int | None = None  # of all samples, prompts and answers; of a stream, as its first rows
    packing: PackedRows | None = None
    shared: int = 1  # ranks that share their rows (--sequence_parallel_size)
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

    def table(self) -> list[tuple[str, str]]:
        steps = self.steps_per_epoch
        row = "row"
        lines = []
        if self.packing is not None:
            row = "packed row"
            room = self.rows * self.packing.capacity
            full = f"{100 * (self.tokens or 0) / room:.1f} % full"
            samples = (
                f"{self.packing.samples} samples in {self.rows} rows of {self.packing.capacity}"
                " tokens"
            )
            lines = [("packed rows", f"{samples}, {full}")]
        if self.tokens is not None:
            average = f"{self.tokens} / {steps} = {self.tokens / steps:.1f} on average"
            lines.append(("tokens per optimizer step", average))
        return [
            *lines,
            ("global batch", batch_text(self, self.flags.per_device_train_batch_size, row)),
            ("optimizer steps per epoch", f"ceil({self.rows} / {self.global_batch}) = {steps}"),
            (
                "optimizer steps in all",
                f"{self.total_steps}, {self.total_steps / steps:.3g} epochs",
            ),
        ]


def plan_batches(
    fit: SupervisedFlags,
    rows: Dataset | StreamedRows,
    packing: PackingPlan | None,
    max_steps: int,
    shared: int,
) -> SupervisedPlan:
    """The batch plan for the ranks of this launch, of which `shared` share their rows; of packed
    rows with `packing`."""
    ranks = dist.world_size()
    if packing is None:
        known = rows_at_hand(rows)
        tokens = int(sample_tokens(known).sum()) * len(rows) // len(known)
        return SupervisedPlan(fit, len(rows), ranks, tokens, shared=shared, max_steps=max_steps)
    held = PackedRows(len(rows), packing.capacity)
    return SupervisedPlan(
        fit, packing.rows, ranks, int(packing.tokens.sum()), held, shared, max_steps
    )


def show_supervised_batches(title: str, plan: SupervisedPlan, config: FitConfig) -> None:
    """Log the table of batches and the warm-up of a step."""
    show_plan(
        f"{title}: batches", plan.table(), (config.warmup_steps(plan.total_steps), plan.total_steps)
    )


class SupervisedTrainer(Generic[Batch]):
    """Trains one model on rows. A `Resumable`: its state can be saved between two optimizer steps.
    `ds_config` is what the model was built with. Without `nonfinite`, NaN and infinity stop the run
    without a repro bundle."""

    def __init__(
        self,
        model: WrappedModel,
        ds_config: Config,
        rows: TokenRows,
        objective: Objective[Batch],
        config: FitConfig,
        nonfinite: NonFinitePolicy | None = None,
    ):
        fit = config.fit
        run = config.run
        self.nonfinite = nonfinite or NonFinitePolicy(config.safety)
        self.packing: PackingPlan | None = None
        if fit.packing:
            self.packing = plan_packing(rows.train, fit.max_seq_len)
        self.plan = plan_batches(
            fit, rows.train, self.packing, config.schedule.max_steps, dist.sequence_ranks()
        )
        self.passes = passes_for(rows.train, fit.max_seq_len)
        self.objective = objective
        self.fit = fit
        self.console = config.console
        self.seed = run.seed
        self.saved_form = SavedForm(
            merge=config.adapters.lora_merge or not config.adapters.only_optimize_lora,
            card=partial(model_card, config, "model"),
            dtype=saved_dtype(model, run.save_dtype),
        )
        self.clock = PhaseClock()
        self.steps = 0  # optimizer steps done
        # evaluation of the untrained model; None: not evaluated yet
        self.before: dict[str, float] | None = None
        self.after: dict[str, float] = {}  # the last evaluation
        self.best = BestEvaluation(config.best.best_metric)
        self.health = HealthWatch(config.health)
        # the last measurements, and their step
        self.described: tuple[dict[str, float | str], int] | None = None
        self.router = router_settings(fit.router_loss_coef, model)
        self.engine: Engine = train_engine(
            model, ds_config, optimizer_settings(config, self.plan.total_steps)
        )
        reason = select_kernels(self.engine, pack_on_gpu=fit.packing)
        if fit.packing and reason is not None:
            name = type(self.engine.module.backbone).__name__
            raise UserError(
                f"--packing: {name} cannot run packed rows, because {reason}; train without"
                " --packing"
            )
        self.rows = rows
        if objective.prepare is not None:
            with self.clock.phase("prepare"):
                self.rows = objective.prepare(self.engine, rows, self._used_rows())
        seed_this_rank(run.seed)

    def run(
        self,
        writer: MetricsWriter,
        checkpointer: CheckpointManager,
        title: str,
        kept: KeptModels | None = None,
        trace: StepTrace = NO_TRACE,
    ) -> None:
        """Train from the current state to the end; evaluate at the end of each epoch and of the
        run, and every `--eval_interval` steps. `kept` also saves the models of some steps, and the
        best one; `trace` records one step. `StopRequested` and `UnhealthyRun` come from the
        checkpointer."""
        if self.before is None:
            self.before = self.evaluate()
            writer.write(0, self.before)
        self.best.require_metric(self.before)
        if (
            kept is not None
            and kept.keeps_best
            and self.best.found
            and best_is_lost(kept.best, self.best.found[1])
        ):
            self.best.found = None
        steps = collated(
            self.objective.collate, self.rows.train, self.steps_left(), self.engine.device
        )
        with Progress(title, self.plan.total_steps, self.steps) as progress, closing(steps):
            for micro_batches, take in trace.around(steps, self.steps + 1):
                step = self.steps + 1
                announce_step(step)
                # before the update, which advances the schedule
                rates = learning_rates(self.engine)
                with self.clock.phase("train"):
                    metrics = self.train_step(micro_batches, take())
                self.steps = step
                progress.advance(metrics["tokens"], f"loss {metrics['loss']:.4f}")
                show_step(
                    supervised_columns(self.objective.headline),
                    metrics | rates,
                    progress,
                    self.console,
                )
                interval = self.fit.eval_interval
                ends = step == self.plan.total_steps
                if (
                    ends
                    or step % self.plan.steps_per_epoch == 0
                    or (interval and step % interval == 0)
                ):
                    self.after = self.evaluate()
                    metrics |= self.after
                    self.best.consider(self.after, step)
                if kept is not None and kept.keeps_best and self.is_best:
                    kept.save_best()
                if kept is not None and kept.is_due(step):
                    kept.save_step(step)
                if ends:
                    self.describe()  # here already, so that the last checkpoint holds it
                metrics |= {**rates, "epoch": step / self.plan.steps_per_epoch}
                seconds, _, peak = self.clock.take()
                metrics |= {f"time/{name}": value for name, value in seconds.items()}
                metrics |= {f"memory/{name}_peak_gib": value for name, value in peak.items()}
                writer.write(step, metrics)
                self.health.check(step, metrics)
                checkpointer.save_if_due()
                self.health.stop_if_due(checkpointer)

    def steps_left(self) -> Iterator[list[list[int]]]:
        """For each optimizer step that is left: the row numbers of this rank's micro-batches, or of
        the passes into which these are divided."""
        per_epoch = self.plan.steps_per_epoch
        total = self.plan.total_steps
        epoch, done = divmod(self.steps, per_epoch)
        for number in range(epoch, -(-total // per_epoch)):
            seed = self.seed
            packed = []
            order: Iterable[int]
            if self.packing is None:
                order = chunked_order(self.rows.train, seed, number)
            else:
                packed = self.packing.epoch(seed, number)
                order = range(len(packed))
            micro = self.fit.per_device_train_batch_size
            accumulation = self.fit.gradient_accumulation_steps
            steps = optimizer_steps(order, micro, accumulation, dist.data_ranks(), dist.data_rank())
            # the last epoch may be cut
            for micro_batches in islice(steps, done, total - number * per_epoch):
                if packed:
                    micro_batches = [samples_of(packed, part) for part in micro_batches]
                if self.passes is not None:
                    micro_batches = self.passes.divide(micro_batches)
                yield micro_batches
            done = 0

    def _used_rows(self) -> UsedRows:
        """The rows that the run uses, for what is computed before training. In the order of
        training, and up to the end of a batch of `score_rows`: so the batches, and with them the
        last bits, do not change if the run is made longer."""
        fit = self.fit
        batch = fit.per_device_eval_batch_size * dist.data_ranks()
        if fit.validate_only:
            steps = 0
        else:
            steps = min(self.plan.total_steps, self.plan.steps_per_epoch)
        taken = steps * self.plan.global_batch
        if self.packing is None:
            order = list(chunked_order(self.rows.train, self.seed, 0))
        else:
            packed_rows = self.packing.epoch(self.seed, 0)
            order = [sample for samples in packed_rows for sample in samples]
            taken = sum(map(len, packed_rows[:taken]))
        evaluated = None
        if self.rows.eval is not None and fit.eval_iters:
            evaluated = range(min(len(self.rows.eval), fit.eval_iters * batch))
        return UsedRows(order[: -(-taken // batch) * batch], evaluated)

    def train_step(
        self, micro_batches: list[list[int]], batches: list[Batch] | None = None
    ) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches, which are row numbers; without their
        `batches` the rows are collated here. Where fp16 gradients overflow, it is repeated with
        the lower loss scale, so that each step of the plan trains the model. `NonFiniteError` if a
        loss or gradient is not finite, and the run stops. Collective."""
        objective = self.objective
        if batches is None:
            batches = [objective.collate(self.rows.train, indices) for indices in micro_batches]
        if self.passes is not None:
            collate = partial(objective.collate, self.rows.train)
            micro_batches, batches = filled_up(micro_batches, batches, collate)
        if objective.complete is not None:
            batches = objective.complete(self.engine, batches)
        counts = torch.stack([objective.counts(batch) for batch in batches]).sum(dim=0)
        counted = dist.all_reduce(counts) // dist.sequence_ranks()  # each row once
        total, samples, tokens = counted.unbind()
        total = total.clamp_min(1)
        constants = {"total": total, "rows": micro_batches}
        result, sums = self._update(batches, constants)
        while result.overflow:  # ends, because an overflow at the smallest scale is a fault
            logger().info(
                f"step {self.steps + 1}: the fp16 gradients overflowed, so the update is made"
                f" again, with a loss scale of {loss_scale(self.engine):g}"
            )
            result, sums = self._update(batches, constants)
        metrics = {
            **objective.summary(sums.reduce()),
            "grad_norm": result.grad_norm,
            "counted": float(total),
        }
        metrics |= {"samples": float(samples), "tokens": float(tokens)}
        return metrics | self.nonfinite.metrics("model")

    def _update(
        self, batches: list[Batch], constants: dict[str, Any]
    ) -> tuple[StepResult, MetricSums]:
        """Forward, backward and update over this rank's micro-batches, with the metrics of the
        passes; `constants` are for `NonFinitePolicy.handle`. Collective."""
        sums = MetricSums(self.rows.sources)

        def loss(batch: Batch, sums: MetricSums) -> Tensor:
            return self.objective.loss(self.engine, batch, constants["total"], sums)

        loss_of: Callable[[Batch], Tensor] = partial(loss, sums=sums)
        if self.router is not None:
            loss_of = with_router_term(
                self.router, "router_loss", batches, loss, self.objective.real_rows, sums
            )
        result = apply(accumulate(self.engine, batches, loss_of))
        self.nonfinite.handle("model", self.steps + 1, result, self.engine, batches, constants)
        return result, sums

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics over the evaluation rows, prefixed with `eval_`; {} without evaluation rows. At
        most `--eval_iters` batches per device. The metrics do not depend on the number of ranks.
        Collective."""
        if self.rows.eval is None:
            return {}
        with self.clock.phase("evaluate"):
            self.engine.eval()
            rows = self.rows.eval
            size = self.fit.per_device_eval_batch_size
            sums = MetricSums(self.rows.eval_sources)
            steps = optimizer_steps(range(len(rows)), size, 1, dist.data_ranks(), dist.data_rank())
            used = list(islice(steps, self.fit.eval_iters or None))  # 0: all
            made = collated(self.objective.collate, rows, iter(used), self.engine.device)
            with closing(made):
                batches: Iterable[Batch] = (batch for _, take in made for batch in take())
                if self.objective.complete is not None:
                    batches = self.objective.complete(self.engine, list(batches))
                for number, batch in enumerate(batches, start=1):
                    self.objective.loss(
                        self.engine, batch, self.objective.units(batch).sum().clamp_min(1), sums
                    )
                    report_phase(number, len(used), "batches")
                    heartbeat()
            self.engine.train()
            found = self.objective.summary(sums.reduce())
        line = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        alike = "  (both answers score alike, as they do at the start of DPO)"
        logger().info(
            "evaluation:"
            f" {line}{alike if found.get('accuracy') == found.get('margin') == 0 else ''}"
        )
        return {f"eval_{name}": value for name, value in found.items()}

    def describe(self) -> dict[str, float | str]:
        """Measurements of the model as it is now, for its config; made once for each step.
        Collective."""
        if self.objective.describe is None:
            return {}
        if self.described is None or self.described[1] != self.steps:
            with self.clock.phase("score_statistics"):
                self.described = (self.objective.describe(self.engine, self.rows), self.steps)
        return self.described[0]

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Save the model to `folder`, or nothing if a weight is not finite (`NonFiniteError`);
        returns the entries of `result.json` about the training. Collective."""
        require_finite_weights("model", self.engine)
        described = self.describe()
        with self.clock.phase("save"):
            form = replace(self.saved_form, ends=answer_ends(tokenizer))
            save_model(self.engine, tokenizer, folder, described, form=form)
        before = self.before or {}
        result: dict[str, Any] = {
            f"{name}_before": value for name, value in before.items()
        } | described
        result |= {
            f"{name}_after": value for name, value in (self.after or before).items()
        } | self.best.result()
        skipped = self.nonfinite.skipped
        if skipped:
            result["skipped_steps"] = skipped
        return result | {
            "optimizer_steps": self.plan.total_steps - skipped,
            "world_size": dist.world_size(),
        }

    @property
    def engines_to_save(self) -> dict[str, Engine]:
        """The engine, as `model`."""
        return {"model": self.engine}

    @property
    def position(self) -> tuple[int, int]:
        """Optimizer steps done, and 0: no smaller unit is saved."""
        return self.steps, 0

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation, at this step, is the best so far."""
        return self.best.found is not None and self.best.found[1] == self.steps

    def shared_state(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {
            "steps": self.steps,
            "before": self.before,
            "after": self.after,
            **self.best.state_dict(),
            "described": (
                self.described[0] if self.described and self.described[1] == self.steps else None
            ),
            "nonfinite": self.nonfinite.state_dict(),
            "health": self.health.state_dict(),
            "data": (
                self.rows.train.state_dict() if isinstance(self.rows.train, StreamedRows) else None
            ),
        }

    def rank_state(self) -> dict[str, Any]:
        """Empty: all state is shared."""
        return {}

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Restore `shared_state()`."""
        self.steps = shared["steps"]
        self.before = shared["before"]
        self.after = shared["after"]
        self.best.load_state_dict(shared)
        if shared.get("described"):
            self.described = (shared["described"], self.steps)
        else:
            self.described = None
        self.nonfinite.load_state_dict(shared["nonfinite"])
        self.health.load_state_dict(shared["health"])
        if isinstance(self.rows.train, StreamedRows):
            self.rows.train.load_state_dict(shared.get("data"))


def fit_ds_config(config: FitConfig) -> Config:
    """The DeepSpeed configuration of steps 1 and 2."""
    ranks = dist.world_size()
    device = dist.device().type
    check_zero_plus_plus(config.memory, False, ranks, device)
    return config_of_run(config, config.fit.zero_stage, ranks, device)
