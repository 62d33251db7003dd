"""Steps 1 and 2: the training loop. `SupervisedTrainer.run` is the whole loop, `train_step` one
optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
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
from dschat_ppo.config.supervised_config import FitConfig
from dschat_ppo.data.batches import chunked_order, optimizer_steps
from dschat_ppo.data.lazy_rows import position_in_data, read_on
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.data.supervised_batches import PackingPlan, plan_packing, samples_of
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
from dschat_ppo.engine.step_loss import StepLoss, step_terms, with_terms
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.given_embeddings import GivenSource, usage_metrics
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.saving import (
    SavedForm,
    parts_beside,
    require_finite_weights,
    save_model,
    saved_dtype,
    saves_whole_model,
)
from dschat_ppo.models.wrapped_models import WrappedModel
from dschat_ppo.monitor.early_stop import EarlyStop
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.step_line import show_step, supervised_columns
from dschat_ppo.monitor.step_trace import NO_TRACE, StepTrace
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.run.model_card import model_card
from dschat_ppo.run.output_folder import KeptModels, best_is_lost
from dschat_ppo.supervised.best_evaluation import BestEvaluation
from dschat_ppo.supervised.objective import Batch, MicroBatches, Objective, UsedRows, collated
from dschat_ppo.supervised.passes import filled_up, passes_for
from dschat_ppo.supervised.training_plan import plan_batches
from dschat_ppo.types import Engine

MEASURED_STEPS = 4  # of the data, whose lengths differ (`--measure`)


class SupervisedTrainer(Generic[Batch]):
    """Trains one model on rows. A `Resumable`: its state can be saved between two optimizer steps.
    `ds_config` is what the model was built with. Without `nonfinite`, NaN and infinity stop the run
    and are not recorded."""

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
        self.fit = fit
        self.seed = config.run.seed
        self.console = config.console
        self.is_measured = config.run.measure
        self.nonfinite = nonfinite or NonFinitePolicy(config.safety)
        self.packing: PackingPlan | None = None
        if fit.packing:
            self.packing = plan_packing(rows.train, fit.max_seq_len)
        self.plan = plan_batches(
            fit, rows.train, self.packing, config.schedule.max_steps, dist.ranks_of_row()
        )
        self.passes = passes_for(rows.train, fit.max_seq_len)
        self.objective = objective
        self.saved_form = saved_form(model, config)
        self.clock = PhaseClock()
        self.steps = 0  # optimizer steps done
        # evaluation of the untrained model; None: not evaluated yet
        self.before: dict[str, float] | None = None
        self.after: dict[str, float] = {}  # the last evaluation
        self.best = BestEvaluation(config.best.best_metric)
        self.early_stop = EarlyStop(
            config.schedule.early_stop_patience,
            config.schedule.early_stop_min_delta,
            config.best.best_metric,
        )
        self.health = HealthWatch(config.health)
        # the last measurements of the model, and the step after which they were made
        self.described: dict[str, float | str] = {}
        self.described_step: int | None = None
        self.engine = self._build_engine(model, ds_config, config)
        # of the loss, beside that of the objective
        self.terms = step_terms(config, self.engine, further_batches={})
        self.rows = rows
        if objective.prepare is not None:
            with self.clock.phase("prepare"):
                self.rows = objective.prepare(self.engine, rows, self._used_rows())
        seed_this_rank(self.seed)

    def _build_engine(self, model: WrappedModel, ds_config: Config, config: FitConfig) -> Engine:
        """The engine that trains the model, with kernels; `UserError` if these cannot run packed
        rows that `--packing` asks for."""
        settings = optimizer_settings(config, self.plan.total_steps)
        engine: Engine = train_engine(model, ds_config, settings)
        reason = select_kernels(engine, pack_on_gpu=self.fit.packing)
        if self.fit.packing and reason is not None:
            name = type(engine.module.backbone).__name__
            raise UserError(
                f"--packing: {name} cannot run packed rows, because {reason}; train without"
                " --packing"
            )
        return engine

    def run(
        self,
        writer: MetricsWriter,
        checkpointer: CheckpointManager,
        title: str,
        kept_models: KeptModels | None = None,
        trace: StepTrace = NO_TRACE,
    ) -> None:
        """Train from the current state to the end, or to an early one (`--early_stop_patience`);
        evaluate at the end of each epoch and of the run, and every `--eval_interval` steps.
        `kept_models` also saves the models of some steps,
        and the best one; `trace` records one step. `StopRequested` and `UnhealthyRun` come from the
        checkpointer."""
        if self.before is None:
            self.before = self.evaluate()
            writer.write(0, self.before)
        self.best.require_metric(self.before)
        if kept_models is not None:
            self._forget_lost_best(kept_models)
        total = self.plan.total_steps
        steps = collated(
            self.objective.collate, self.rows.train, self.steps_left(), self.engine.device
        )
        with Progress(title, total, self.steps) as progress, closing(steps):
            steps_to_run = self.early_stop.until_due(steps)
            for micro_batches, wait_for_batches in trace.around(steps_to_run, self.steps + 1):
                announce_step(self.steps + 1)
                # before the update, which advances the schedule
                rates = learning_rates(self.engine)
                with self.clock.phase("train"):
                    metrics = self.train_step(micro_batches, wait_for_batches())
                self.steps += 1
                progress.advance(metrics["tokens"], f"loss {metrics['loss']:.4f}")
                columns = supervised_columns(self.objective.headline)
                show_step(columns, metrics | rates, progress, self.console)
                if self.plan.is_evaluated(self.steps):
                    self.after = self.evaluate()
                    metrics |= self.after
                    self.best.consider(self.after, self.steps)
                    self.early_stop.consider(self.after, self.steps)
                if kept_models is not None:
                    self._keep_models(kept_models)
                if self.steps == total or self.early_stop.is_due:
                    self.describe()  # here already, so that the last checkpoint holds it
                metrics |= {**rates, "epoch": self.steps / self.plan.steps_per_epoch}
                metrics |= self._phase_metrics()
                writer.write(self.steps, metrics)
                self.health.check(self.steps, metrics)
                checkpointer.save_if_due()
                self.health.stop_if_due(checkpointer)

    def _forget_lost_best(self, kept_models: KeptModels) -> None:
        """Look for the best model again if a resumed run does not find that of its best evaluation.
        Collective."""
        best = self.best.value_and_step
        if kept_models.keeps_best and best is not None and best_is_lost(kept_models.best, best[1]):
            self.best.value_and_step = None

    def _keep_models(self, kept_models: KeptModels) -> None:
        """Save the model as the best one and as that of this step, where they are asked for.
        Collective."""
        if kept_models.keeps_best and self.is_best:
            kept_models.save_best()
        if kept_models.is_due(self.steps):
            kept_models.save_step(self.steps)

    def _phase_metrics(self) -> dict[str, float]:
        """Seconds and peak memory of the phases since the last call. Collective."""
        seconds, _, peak = self.clock.take()
        metrics = {f"time/{name}": value for name, value in seconds.items()}
        source: GivenSource | None = getattr(unwrap(self.engine), "given_source", None)
        if source is not None:
            metrics |= usage_metrics(source.name, dist.gather_objects(source.take_usage()))
        return metrics | {f"memory/{name}_peak_gib": value for name, value in peak.items()}

    def steps_left(self) -> Iterator[MicroBatches]:
        """For each optimizer step that is left: the row numbers of this rank's micro-batches, or of
        the passes into which these are divided."""
        per_epoch = self.plan.steps_per_epoch
        total = self.plan.total_steps
        first_epoch, done = divmod(self.steps, per_epoch)
        for epoch in range(first_epoch, -(-total // per_epoch)):
            # the last epoch may be cut
            yield from self._steps_of_epoch(epoch, done, total - epoch * per_epoch)
            done = 0

    def _steps_of_epoch(self, epoch: int, first: int, end: int) -> Iterator[MicroBatches]:
        """`steps_left` for an epoch, from its step `first` to the one before `end`."""
        packed: list[list[int]] = []  # samples of each packed row
        order: Iterable[int]
        if self.packing is None:
            order = chunked_order(self.rows.train, self.seed, epoch)
        else:
            packed = self.packing.epoch(self.seed, epoch)
            order = range(len(packed))
        steps = optimizer_steps(
            order,
            self.fit.per_device_train_batch_size,
            self.fit.gradient_accumulation_steps,
            dist.data_ranks(),
            dist.data_rank(),
        )
        for micro_batches in islice(steps, first, end):
            if packed:
                micro_batches = [samples_of(packed, indices) for indices in micro_batches]
            if self.passes is not None:
                micro_batches = self.passes.divide(micro_batches)
            yield micro_batches

    def _used_rows(self) -> UsedRows:
        """The rows that the run uses, for what is computed before training. In the order of
        training, and up to the end of a batch of `score_rows`: so the batches, and with them the
        last bits, do not change if the run is made longer."""
        fit = self.fit
        batch = fit.per_device_eval_batch_size * dist.data_ranks()
        steps = 0
        if not fit.validate_only:
            steps = min(self.plan.total_steps, self.plan.steps_per_epoch)
        eval_batches = fit.eval_iters
        if self.is_measured:
            steps = min(steps, MEASURED_STEPS)
            eval_batches = 1
        count = steps * self.plan.global_batch
        if self.packing is None:
            order = list(chunked_order(self.rows.train, self.seed, 0))
        else:
            packed_rows = self.packing.epoch(self.seed, 0)
            order = [sample for samples in packed_rows for sample in samples]
            count = sum(map(len, packed_rows[:count]))
        evaluated = None
        if self.rows.eval is not None and eval_batches:
            evaluated = range(min(len(self.rows.eval), eval_batches * batch))
        return UsedRows(order[: -(-count // batch) * batch], evaluated)

    def train_step(
        self, micro_batches: MicroBatches, batches: list[Batch] | None = None
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
        # of all ranks, each row once
        units, samples, tokens = (dist.all_reduce(counts) // dist.ranks_of_row()).unbind()
        units = units.clamp_min(1)
        constants = {"total": units, "rows": micro_batches}
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
            "counted": float(units),
            "samples": float(samples),
            "tokens": float(tokens),
        }
        return metrics | self.nonfinite.metrics("model")

    def _update(
        self, batches: list[Batch], constants: dict[str, Any]
    ) -> tuple[StepResult, MetricSums]:
        """Forward, backward and update over this rank's micro-batches, with the metrics of the
        passes; `constants` are for `NonFinitePolicy.handle`. Collective."""
        sums = MetricSums(self.rows.sources)

        def loss(batch: Batch, sums: MetricSums) -> Tensor:
            return self.objective.loss(self.engine, batch, constants["total"], sums)

        step_loss = StepLoss(batches, loss, self.objective.real_rows, sums)
        step_loss = with_terms(step_loss, self.terms)
        result = apply(accumulate(self.engine, step_loss.all_batches, step_loss))
        self.nonfinite.handle(
            "model",
            self.steps + 1,
            result,
            self.engine,
            step_loss.all_batches,
            {**constants, **step_loss.constants},
        )
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
            sums = self._evaluation_sums(self.rows.eval)
            self.engine.train()
            metrics = self.objective.summary(sums.reduce())
        line = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if metrics.get("accuracy") == metrics.get("margin") == 0:
            line += "  (both answers score alike, as they do at the start of DPO)"
        logger().info(f"evaluation: {line}")
        return {f"eval_{name}": value for name, value in metrics.items()}

    def _evaluation_sums(self, rows: Dataset) -> MetricSums:
        """The sums of this rank's batches of evaluation rows."""
        objective = self.objective
        sums = MetricSums(self.rows.eval_sources)
        size = self.fit.per_device_eval_batch_size
        steps = optimizer_steps(range(len(rows)), size, 1, dist.data_ranks(), dist.data_rank())
        used_steps = list(islice(steps, self.fit.eval_iters or None))  # 0: all
        collated_steps = collated(objective.collate, rows, iter(used_steps), self.engine.device)
        with closing(collated_steps):
            batches: Iterable[Batch] = (
                batch for _, wait_for_batches in collated_steps for batch in wait_for_batches()
            )
            if objective.complete is not None:
                batches = objective.complete(self.engine, list(batches))
            for done, batch in enumerate(batches, start=1):
                units = objective.units(batch).sum().clamp_min(1)
                objective.loss(self.engine, batch, units, sums)
                report_phase(done, len(used_steps), "batches")
                heartbeat()
        return sums

    def describe(self) -> dict[str, float | str]:
        """Measurements of the model as it is now, for its config; made once for each step.
        Collective."""
        if self.objective.describe is None:
            return {}
        if self.described_step != self.steps:
            with self.clock.phase("score_statistics"):
                self.described = self.objective.describe(self.engine, self.rows)
            self.described_step = self.steps
        return self.described

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Save the model to `folder`, or nothing if a weight is not finite (`NonFiniteError`);
        returns the entries of `result.json` about the training. Collective."""
        require_finite_weights("model", self.engine)
        described = self.describe()
        with self.clock.phase("save"):
            form = replace(self.saved_form, ends=answer_ends(tokenizer))
            save_model(self.engine, tokenizer, folder, described, form=form)
        before = self.before or {}
        result: dict[str, Any] = {f"{name}_before": value for name, value in before.items()}
        result |= described
        result |= {f"{name}_after": value for name, value in (self.after or before).items()}
        result |= self.best.result()
        if self.early_stop.is_due and self.steps < self.plan.total_steps:
            result["early_stop"] = self.early_stop.reason
        skipped = self.nonfinite.skipped
        if skipped:
            result["skipped_steps"] = skipped
        return result | {
            "optimizer_steps": self.steps - skipped,
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
        best = self.best.value_and_step
        return best is not None and best[1] == self.steps

    def shared_state(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        described = None
        if self.described_step == self.steps:
            described = self.described
        return {
            "steps": self.steps,
            "before": self.before,
            "after": self.after,
            **self.best.state_dict(),
            "early_stop": self.early_stop.state_dict(),
            "described": described,
            "nonfinite": self.nonfinite.state_dict(),
            "health": self.health.state_dict(),
            "data": position_in_data(self.rows.train),
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
        self.early_stop.load_state_dict(shared["early_stop"])
        self.described_step = None
        if shared.get("described"):
            self.described = shared["described"]
            self.described_step = self.steps
        self.nonfinite.load_state_dict(shared["nonfinite"])
        self.health.load_state_dict(shared["health"])
        read_on(self.rows.train, shared.get("data"))


def saved_form(model: WrappedModel, config: FitConfig) -> SavedForm:
    """How the trained model is written, but for the ends of its answers."""
    return SavedForm(
        merge=saves_whole_model(config, ""),
        card=partial(model_card, config, "model"),
        dtype=saved_dtype(model, config.run.save_dtype),
        beside=parts_beside(config),
    )


def fit_ds_config(config: FitConfig) -> Config:
    """The DeepSpeed configuration of steps 1 and 2."""
    ranks = dist.world_size()
    device = dist.device().type
    check_zero_plus_plus(config.memory, ranks)
    return config_of_run(config, config.fit.zero_stage, ranks, device)
