"""A model, an optimizer and a schedule -> a DeepSpeed engine; and one optimizer step over several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import deepspeed
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from dschat_ppo.common.dist import all_reduce, world_size
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.common.op_builds import wait_for_build
from dschat_ppo.common.progress import beat
from dschat_ppo.engine.ds_config import Config

MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its learning rate, and the schedule in optimizer steps."""

    learning_rate: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    total_steps: int
    betas: tuple[float, float]
    epsilon: float


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norm weights (one dimension) do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape  # ZeRO-3 empties `shape`
            groups[len(shape) > 1].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": groups[kind], "weight_decay": decays[kind]} for kind in (True, False) if groups[kind]]


def _optimizer(model: nn.Module, settings: OptimizerSettings, config: Config) -> torch.optim.Optimizer:
    groups = _parameter_groups(model, settings.weight_decay)
    offloaded = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        wait_for_build("cpu_adam")
        return DeepSpeedCPUAdam(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def train_engine(model: nn.Module, config: Config, settings: OptimizerSettings) -> Any:
    """A DeepSpeed engine that trains all parameters of `model` with AdamW, in training mode."""
    optimizer = _optimizer(model, settings, config)
    scheduler = get_scheduler(
        settings.schedule,
        optimizer=optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.total_steps,
    )
    with quiet_prints():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    engine.train()  # transformers loads models in eval mode
    return engine


def eval_engine(model: nn.Module, config: Config) -> Any:
    """A DeepSpeed engine that only runs forward, in eval mode."""
    model.requires_grad_(False)
    with quiet_prints():
        engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def optimizer_step(engine: Any, micro_batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]) -> float:
    """Forward and backward over all micro-batches, then one update.

    Args:
        engine: DeepSpeed engine in training.
        micro_batches: this rank's share of the step; the same number on every rank.
        loss_of: a micro-batch's part of the loss, already divided by the count of the *whole* step over all ranks,
            so that parts add up. DeepSpeed averages gradients over ranks, hence the factor of `world_size`.

    Raises:
        FloatingPointError: a loss on any rank is not finite; raised on every rank, before the update.

    Returns:
        Global gradient norm before clipping; inf where an fp16 overflow skipped the update.
    """
    losses = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        loss = loss_of(micro_batch) * world_size()
        losses.append(loss.detach())
        engine.backward(loss, scale_wrt_gas=False)
        beat()
    _require_finite(torch.stack(losses))
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # stage 0 in fp32: DeepSpeed does not report the norm
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        engine.step()
        return float(norm)
    engine.step()
    norm = engine.get_global_grad_norm()
    return float("inf") if norm is None else float(norm)


def _require_finite(losses: Tensor) -> None:
    bad = all_reduce((~losses.isfinite()).any().float(), "max")
    if bad:
        raise FloatingPointError(
            f"the loss is not finite ({losses.tolist()} on this rank); stopped before the update. Lower the learning "
            "rate, look at the last lines of metrics.jsonl, or use --dtype fp32"
        )


def learning_rate(engine: Any) -> float:
    """Learning rate that the next optimizer step will use."""
    return float(engine.get_lr()[0])
