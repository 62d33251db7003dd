"""DeepSpeed engines from a model, an optimizer and a schedule."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dschat_ppo.algorithms.learning_rate import rate_factor
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.common.ranks import world_size
from dschat_ppo.config.schedule_flags import POLYNOMIAL_END
from dschat_ppo.engine.ds_config import Config
from dschat_ppo.engine.whole_weights import keep_whole, may_be_whole
from dschat_ppo.models.adapters import is_adapter_parameter
from dschat_ppo.runtime.stop_requests import subprocesses_may_stop
from dschat_ppo.types import Engine

_NO_COMPILER = "TORCHDYNAMO_DISABLE"


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its learning rate schedule over optimizer steps. `lora_learning_rate` None: `learning_rate`."""

    learning_rate: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    total_steps: int
    betas: tuple[float, float]
    epsilon: float
    lora_learning_rate: float | None = None
    min_lr_ratio: float = 0.0  # lowest rate after the warm-up, as a share of the peak


def train_engine(model: nn.Module, config: Config, settings: OptimizerSettings, layer_by_layer: bool = False) -> Engine:
    """A DeepSpeed engine that trains the parameters of `model` that require gradients with AdamW. `layer_by_layer`:
    ZeRO-3 gathers the weights of one layer at a time, of a small model too (see `whole_weights.py`)."""
    whole = not layer_by_layer and may_be_whole(model, config)
    optimizer = build_optimizer(model, settings, config)
    scheduler = build_scheduler(optimizer, settings)
    _import_muon()
    with quiet_prints():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    if config["zero_optimization"].get("zero_quantized_nontrainable_weights"):
        engine.optimizer.quantize_nontrainable_params()  # no weight was frozen when the model was partitioned
    if whole:
        keep_whole(engine)
    if world_size() == 1:
        _leave_gradients(engine)
    engine.train()  # transformers loads models in eval mode
    return engine


def _leave_gradients(engine: Engine) -> None:
    """Leave out the all-reduce of gradients below ZeRO-2, which on one rank is the identity. DeepSpeed copies all
    gradients three times for it, and in bf16 rounds to bf16 what was accumulated in fp32."""
    engine.allreduce_and_copy = lambda *_: None


@cache
def _import_muon() -> None:
    """Import DeepSpeed's Muon optimizer, as every ZeRO engine does, without torch's compiler. `torch.compile` decorates
    functions there, which imports the compiler: a second for each rank, and modules that each garbage collection
    searches. No run calls these functions (`DERIVED`). DeepSpeed without the module needs no import."""
    before = os.environ.get(_NO_COMPILER)
    os.environ[_NO_COMPILER] = "1"
    try:
        with suppress(ImportError):
            import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        if before is None:
            del os.environ[_NO_COMPILER]
        else:
            os.environ[_NO_COMPILER] = before


def eval_engine(model: nn.Module, config: Config) -> Engine:
    """A DeepSpeed engine in eval mode that only runs forward."""
    model.requires_grad_(False)
    whole = may_be_whole(model, config)
    with quiet_prints():
        engine, *_ = deepspeed.initialize(model=model, config=config)
    if whole:
        keep_whole(engine)
    engine.eval()
    return engine


def share_gathering(model: nn.Module, engine: Engine) -> None:
    """Let the engine that `model` gets know which parameters `engine` gathers at the moment. Call it before. Under
    ZeRO-3 an engine records in its module which parameters are under way, and does not gather these. Engines over the
    same parameters must share that record, or one would not know what to wait for."""
    record = getattr(engine.module, "ds_inflight_param_registry", None)
    held = {id(parameter) for parameter in engine.module.parameters()}
    if record is not None and any(id(parameter) in held for parameter in model.parameters()):
        model.ds_inflight_param_registry = record


def build_optimizer(model: nn.Module, settings: OptimizerSettings, config: Config) -> torch.optim.Optimizer:
    """AdamW: fused, or DeepSpeed's on the CPU if the config offloads the optimizer."""
    groups = parameter_groups(model, settings)
    offloaded = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with subprocesses_may_stop("compiled an operator"):
            return DeepSpeedCPUAdam(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> LambdaLR:
    """The rate of each parameter group is its peak times a factor f. With `min_lr_ratio` m, f after the warm-up becomes
    m + (1 - m) f. "polynomial" ends at m times the peak, or with m = 0 at `POLYNOMIAL_END`, as in transformers."""
    peak, warmup, total, least = (
        settings.learning_rate,
        settings.warmup_steps,
        settings.total_steps,
        settings.min_lr_ratio,
    )
    if settings.schedule == "polynomial":
        total = max(total, warmup + 1)  # it divides by the steps after the warm-up
    last = least * peak if least > 0 else POLYNOMIAL_END
    return LambdaLR(
        optimizer,
        partial(rate_factor, kind=settings.schedule, warmup=warmup, total=total, least=least, peak=peak, last=last),
    )


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Trainable parameters by learning rate (LoRA last) and weight decay: of matrices, not of DoRA's magnitudes."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (is_lora, is_matrix): [] for is_lora in (False, True) for is_matrix in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape  # ZeRO-3 empties `shape`
            groups[is_adapter_parameter(name), len(shape) > 1].append(parameter)
    own = settings.learning_rate if settings.lora_learning_rate is None else settings.lora_learning_rate
    return [
        {"params": held, "weight_decay": settings.weight_decay if is_matrix else 0.0} | ({"lr": own} if is_lora else {})
        for (is_lora, is_matrix), held in groups.items()
        if held
    ]
