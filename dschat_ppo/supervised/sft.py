"""Step 1: supervised fine-tuning on answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.config.distillation_flags import TeacherFlags
from dschat_ppo.config.supervised_config import SFTConfig
from dschat_ppo.data.batches import SFTBatch, collate_sft
from dschat_ppo.engine.build_engine import eval_engine, frozen_policy, require_whole_distributions
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.kernel_selection import apply_memory_flags, select_kernels
from dschat_ppo.models.loading import ModelChanges, load_causal_lm
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import PolicyModel, Teaching
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.run.start_and_end import tool_command
from dschat_ppo.supervised.objective import Objective, collator_on_device
from dschat_ppo.supervised.supervised_run import SupervisedRun, begin_supervised_run, train_and_save
from dschat_ppo.supervised.trainer import SupervisedTrainer
from dschat_ppo.types import Engine, Model


@dataclass(frozen=True)
class SFTTeacher:
    """A model whose distributions the one that trains learns at the tokens of the loss."""

    engine: Engine
    divergence: Divergence
    coef: float  # share of the divergence in the loss; the rest is that of the cross entropy

    @classmethod
    def of(cls, engine: Engine, flags: TeacherFlags) -> SFTTeacher:
        """By the flags; without `--distill_coef` the loss is the divergence alone."""
        coef = 1.0
        if flags.distill_coef is not None:
            coef = flags.distill_coef
        return cls(engine, Divergence(flags.kind, flags.distill_beta, flags.distill_topk), coef)

    @torch.no_grad()
    def teaching(self, batch: SFTBatch) -> Teaching:
        """What it says of the tokens in the batch's `loss_mask`."""
        policy: Any = unwrap(self.engine)
        with observed(None):  # observers read the passes of the model that trains
            _, _, hidden = self.engine(batch.input_ids, batch.loss_mask, states=True)
        return Teaching(policy.output_layer(hidden), self.divergence)


def sft_loss(
    model: Model,
    batch: SFTBatch,
    num_tokens: Tensor,
    sums: MetricSums,
    teacher: SFTTeacher | None = None,
) -> Tensor:
    """Sum of `-log p(token)` over the batch's `loss_mask`, divided by `num_tokens` of the whole
    optimizer step. With a `teacher`, the weighted sum of that and of the divergence from it."""
    teachings = []
    if teacher is not None:
        teachings.append(teacher.teaching(batch))
    # (N,) tokens of the mask
    logprobs, _, *divergences = model(batch.input_ids, batch.loss_mask, teachings=teachings)
    sums.add_mean("loss", -logprobs.detach())
    if len(sums.sources) > 1:
        assert batch.data_sources is not None
        of_tokens = batch.data_sources.repeat_interleave(batch.loss_mask.sum(dim=1))  # (N,)
        sums.add_by_source("loss", -logprobs, of_tokens)
    if teacher is None:
        return -logprobs.sum() / num_tokens
    sums.add_mean("divergence", divergences[0].detach())
    return (teacher.coef * divergences[0].sum() - (1 - teacher.coef) * logprobs.sum()) / num_tokens


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Add `perplexity = exp(loss)`."""
    return {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}


def sft_objective(
    pad_id: int, train_on_prompt: bool, device: torch.device, teacher: SFTTeacher | None = None
) -> Objective[SFTBatch]:
    """Mean cross entropy over the tokens of the answers, or divergence from a teacher."""
    headline: tuple[str, ...] = ("loss",)
    if teacher is not None:
        headline = ("divergence", "loss")
    return Objective(
        collator_on_device(collate_sft, device, pad_id, train_on_prompt),
        lambda batch: batch.loss_mask,
        partial(sft_loss, teacher=teacher),
        headline,
        summary=with_perplexity,
    )


def sft_teacher(config: SFTConfig, run: SupervisedRun) -> SFTTeacher | None:
    """The teacher of the run, in its engine; None without one."""
    flags = config.teacher
    if run.teacher is None:
        return None
    teacher, ds_config = frozen_policy(
        run.teacher,
        config.run.dtype,
        config.fit.zero_stage,
        flags.offload_teacher_model,
        config.run.resize_vocabulary,
    )
    apply_memory_flags(teacher, config.memory)
    engine = eval_engine(teacher, ds_config)
    select_kernels(engine)
    require_whole_distributions([engine])
    return SFTTeacher.of(engine, flags)


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Run step 1; returns the contents of `result.json`."""
    fit = config.fit
    run_flags = config.run
    run = begin_supervised_run(config, "SFT", "step 1: supervised fine-tuning")
    changes = ModelChanges(fit.dropout, run_flags.resize_vocabulary, run.adapter)
    model = PolicyModel(load_causal_lm(run.model_folder, run_flags.dtype, run.ds_config, changes))
    apply_memory_flags(model, config.memory, fit.gradient_checkpointing)
    teacher = sft_teacher(config, run)
    objective = sft_objective(
        filler_id(run.tokenizer), config.sft.train_on_prompt, run.device, teacher
    )
    trainer = SupervisedTrainer(model, run.ds_config, run.rows, objective, config, run.nonfinite)
    teacher_engine = None
    if teacher is not None:
        teacher_engine = teacher.engine
        require_whole_distributions([trainer.engine])
    next_command = tool_command("chat", ["--model", str(run.output)])
    return train_and_save(trainer, run, next_command, teacher_engine)
