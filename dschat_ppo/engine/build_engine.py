"""DeepSpeed engines from a model, an optimizer and a schedule; under ZeRO-3 with whole weights of
small models.

ZeRO-3 gathers the weights of each module before it runs and drops them afterwards, in the forward
and in the backward pass. That is several hooks and a collective for each layer, which cost more
than the layer itself if it is small. With `WholeWeights` they are gathered in one collective before
the first forward pass after an update, and stay until the next update. Gradients, optimizer states,
fp32 weights and checkpoints are partitioned as ever, and no number changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from math import cos, pi
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from dschat_ppo.common.dist import local_world_size, on_gpu, world_size
from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.config.feature_needs import FurtherModel
from dschat_ppo.config.step_config import POLYNOMIAL_END, StepConfig
from dschat_ppo.engine.ds_config import PERSISTENT_ELEMENTS, Config, eval_config
from dschat_ppo.engine.optimizers import ADAMW, OptimizerKind, optimizer_of, second_rate
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import further_changes, load_causal_lm
from dschat_ppo.models.state_layers import state_layers
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.types import Engine

# The whole weights of a model stay if the memory of a device would hold them so many times: those
# of all four models of step 3 then take at most a sixteenth of it.
COPIES_THAT_FIT = 64
# Beginnings of the settings of DeepSpeed that say how weights are gathered; this project sets none
# of them.
OF_GATHERING = (
    "stage3_max_",
    "stage3_prefetch_",
    "stage3_model_",
    "mics_",
    "zenflow",
    "leaf_module",
)


def may_be_whole(config: Config, size: int, ranks: int, memory: int) -> bool:
    """Whether an engine keeps its whole weights, of `size` bytes, on each rank: under ZeRO-3, if
    they fit many times into the `memory` of a rank's device; one rank's are views of its partition.
    Weights that are offloaded, quantised, or partitioned in groups (hpZ) stay partitioned, and so
    do those of models for which `--deepspeed_config` says how weights are gathered, such as
    `stage3_param_persistence_threshold`."""
    zero = config["zero_optimization"]
    if zero["stage"] != 3 or zero.get("stage3_param_persistence_threshold") != PERSISTENT_ELEMENTS:
        return False
    if any(name.startswith(OF_GATHERING) for name in zero):
        return False
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        return False
    if zero.get("zero_hpz_partition_size", 1) != 1:
        return False
    if any(zero.get(f"zero_quantized_{name}") for name in ("weights", "nontrainable_weights")):
        return False
    return ranks == 1 or COPIES_THAT_FIT * size <= memory


def _memory_of_device() -> int:
    """Bytes of memory for one rank: of its GPU, or its share of the host's."""
    if on_gpu():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return host_memory() // local_world_size()


class WholeWeights:
    """Gathers the missing weights of an engine, partitioned by ZeRO-3, before the forward pass of
    its model. An update, a checkpoint and a save of the model drop the whole weights, on all ranks
    alike."""

    def __init__(self, parameters: Iterable[Any]):
        self._parameters = list(parameters)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Before a forward pass. Collective if weights are missing."""
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the weights that are missing, in one collective for each dtype."""
        missing = [
            weight
            for weight in self._parameters
            if weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        ]
        if missing:
            missing[0].all_gather_coalesced(missing).wait()


def keep_whole(engine: Engine) -> None:
    """Replace the hooks of ZeRO-3 in an engine by `WholeWeights`, before the first forward pass.
    Its linear layers without a bias call PyTorch's own product again, with the same numbers:
    DeepSpeed's does not keep the gathered weight for the backward pass, and costs a Python function
    each way. With a bias PyTorch rounds otherwise."""
    optimizer = engine.optimizer
    # an engine that only evaluates has nothing else
    offload = getattr(optimizer, "parameter_offload", optimizer)
    offload._remove_module_hooks()
    if optimizer is not offload:
        optimizer.persistent_parameters = []  # an update would gather each of them by itself
    model = engine.module
    for weight in model.parameters():
        weight.is_kept_whole = True
    if nn.functional.linear is zero3_linear_wrap:
        nn.functional.linear = linear
    hook = WholeWeights(model.parameters())
    for module in model.modules():
        # each of them may be called by itself
        if module is model or isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(hook)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  the name of PyTorch
    """`nn.functional.linear` under ZeRO-3: DeepSpeed's, but for weights that are kept whole and
    have no bias."""
    if bias is None and getattr(weight, "is_kept_whole", False):
        return torch._C._nn.linear(input, weight)
    return zero3_linear_wrap(input, weight, bias)


def whole_weights(engine: Engine) -> WholeWeights | None:
    """The `WholeWeights` of an engine, or None if it gathers layer by layer or its weights are not
    partitioned."""
    hooks = engine.module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, WholeWeights)), None)


_NO_COMPILER = "TORCHDYNAMO_DISABLE"
_MUON = "deepspeed.runtime.zero.muon.muon_optimizer"


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, the optimizer of the parameters that AdamW does not train, and the learning rate
    schedule over optimizer steps."""

    learning_rate: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    total_steps: int
    betas: tuple[float, float]
    epsilon: float
    second_learning_rate: float | None = None  # of the parameters that `second_rate` takes
    min_lr_ratio: float = 0.0  # lowest rate after the warm-up, as a share of the peak
    optimizer: OptimizerKind = ADAMW
    taken_learning_rate: float | None = None  # of the parameters that `optimizer` takes


def optimizer_settings(config: StepConfig, updates: int, prefix: str = "") -> OptimizerSettings:
    """As the flags of a step ask for `updates` steps; `prefix`: of the flags of one of its
    models."""
    run = config.run
    flags = vars(config.training)
    optimizer = optimizer_of(config)
    second = second_rate()
    second_learning_rate = None
    if second is not None:
        second_learning_rate = second.learning_rate(config, prefix)
    return OptimizerSettings(
        learning_rate=flags[f"{prefix}learning_rate"],
        weight_decay=flags[f"{prefix}weight_decay"],
        schedule=flags["lr_scheduler_type"],
        warmup_steps=config.warmup_steps(updates),
        total_steps=updates,
        betas=(run.adam_beta1, run.adam_beta2),
        epsilon=run.adam_epsilon,
        second_learning_rate=second_learning_rate,
        min_lr_ratio=config.schedule.min_lr_ratio,
        optimizer=optimizer,
        taken_learning_rate=optimizer.learning_rate(config),
    )


def train_engine(
    model: nn.Module, config: Config, settings: OptimizerSettings, layer_by_layer: bool = False
) -> Engine:
    """A DeepSpeed engine that trains the parameters of `model` that require gradients.
    `layer_by_layer`: ZeRO-3 gathers the weights of one layer at a time, of a small model too (see
    `WholeWeights`)."""
    _import_muon()
    optimizer = build_optimizer(model, settings)
    scheduler = LambdaLR(optimizer, partial(rate_factor, settings))
    engine = _initialise(model, config, layer_by_layer, optimizer=optimizer, lr_scheduler=scheduler)
    if config["zero_optimization"].get("zero_quantized_nontrainable_weights"):
        # no weight was frozen when the model was partitioned
        engine.optimizer.quantize_nontrainable_params()
    if world_size() == 1:
        # Below ZeRO-2 the all-reduce of gradients is then the identity. DeepSpeed copies all
        # gradients three times for it, and in bf16 rounds to bf16 what was accumulated in fp32.
        engine.allreduce_and_copy = lambda *_: None
    engine.train()  # transformers loads models in eval mode
    return engine


@cache
def _import_muon() -> None:
    """Import DeepSpeed's Muon optimizer, as every ZeRO engine does, without torch's compiler.
    `torch.compile` decorates functions there, which imports the compiler: a second for each rank,
    and modules that each garbage collection searches. Muon runs them uncompiled. DeepSpeed without
    the module needs no import."""
    before = os.environ.get(_NO_COMPILER)
    os.environ[_NO_COMPILER] = "1"
    try:
        with suppress(ImportError):
            import_module(_MUON)
    finally:
        if before is None:
            del os.environ[_NO_COMPILER]
        else:
            os.environ[_NO_COMPILER] = before


def eval_engine(model: nn.Module, config: Config) -> Engine:
    """A DeepSpeed engine in eval mode that only runs forward."""
    model.requires_grad_(False)
    engine = _initialise(model, config)
    engine.eval()
    return engine


def _initialise(
    model: nn.Module, config: Config, layer_by_layer: bool = False, **training: Any
) -> Engine:
    """A DeepSpeed engine for `model`, in the configuration of DeepSpeed. At ZeRO-3 the weights of
    all layers stay whole on each rank if they fit, unless `layer_by_layer`. `training`: optimizer
    and schedule."""
    size = 0
    for weight in model.parameters():
        # ZeRO-3 empties the tensor
        size += getattr(weight, "ds_numel", weight.numel()) * weight.element_size()
    keeps_whole = not layer_by_layer and may_be_whole(
        config, size, world_size(), _memory_of_device()
    )
    if config["zero_optimization"]["stage"] == 3:
        # ZeRO-3 gathers all weights of a layer with a state when the layer is called. Module by
        # module, it would gather them as often as a rank's rows need blocks, which differs between
        # ranks.
        for layer in state_layers(model):
            set_z3_leaf_module(layer, True)
            layer.register_forward_pre_hook(_states_by_position, with_kwargs=True, prepend=True)
    with quiet_prints():
        engine, *_ = deepspeed.initialize(model=model, config=config, **training)
    if keeps_whole:
        keep_whole(engine)
    return engine


def _states_by_position(
    _module: nn.Module, values: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Before a forward pass: pass `hidden_states` as the first argument, without its name.
    DeepSpeed finds the end of a backward pass by arguments without names alone."""
    if values or "hidden_states" not in options:
        return values, options
    rest = dict(options)
    hidden_states = rest.pop("hidden_states")
    return (hidden_states,), rest


def share_gathering(model: nn.Module, engine: Engine) -> None:
    """Let the engine that `model` gets know which parameters `engine` gathers at the moment. Call
    it before. Under ZeRO-3 an engine records in its module which parameters are under way, and does
    not gather these. Engines over the same parameters must share that record, or one would not know
    what to wait for."""
    record = getattr(engine.module, "ds_inflight_param_registry", None)
    of_engine = {id(parameter) for parameter in engine.module.parameters()}
    is_shared = any(id(parameter) in of_engine for parameter in model.parameters())
    if record is not None and is_shared:
        model.ds_inflight_param_registry = record


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer of the settings over PyTorch's fused AdamW, which also updates what DeepSpeed
    keeps on the host, as with `--offload`."""
    groups = parameter_groups(model, settings)
    adamw = dict[str, Any](
        lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True
    )
    return settings.optimizer.build(groups, adamw)


def rate_factor(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of an optimizer step (counted from 0), as a factor f of its peak, by the
    formulas of `transformers.get_scheduler`, whose import also loads peft.

    f rises from 0 to 1 over the warm-up. From there the schedule brings it down to 0 at step
    `total_steps`, the one after the last: "linear", "cosine" or "cosine_with_restarts" (one cycle,
    which ends at the lowest factor); with `min_lr_ratio` m, f after the warm-up becomes m + (1 - m)
    f. "polynomial" (of power 1) ends at m times the peak, or with m = 0 at a rate of
    `POLYNOMIAL_END`. f stays 1 with "constant_with_warmup", and with "constant", which has no
    warm-up.
    """
    kind = settings.schedule
    warmup = settings.warmup_steps
    total = settings.total_steps
    lowest = settings.min_lr_ratio
    if kind == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, total - warmup)  # above 1 after the run
    if kind == "constant_with_warmup":
        return 1.0
    if kind == "polynomial":
        peak = settings.learning_rate
        last = POLYNOMIAL_END
        if lowest > 0:
            last = lowest * peak
        return ((peak - last) * max(0.0, 1 - progress) + last) / peak
    if kind == "linear":
        factor = max(0.0, (total - step) / max(1, total - warmup))
    elif kind == "cosine" or progress < 1:
        factor = (1 + cos(pi * progress)) / 2
    else:
        factor = 0.0
    return lowest + (1 - lowest) * factor


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Trainable parameters by learning rate (those of a second rate or another optimizer than AdamW
    last) and weight decay: matrices have it, and vectors do not. Groups without parameters are left
    out."""
    optimizer = settings.optimizer
    second = second_rate()
    if settings.second_learning_rate is None:
        second = None
    options: dict[str, dict[str, Any]] = {
        "": {},
        "second": {"lr": settings.second_learning_rate},
        "taken": {"lr": settings.taken_learning_rate, optimizer.mark: True},
    }
    members: dict[tuple[str, bool], list[nn.Parameter]] = {}  # (kind, is a matrix) -> parameters
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties `shape`
            kind = ""
            if second is not None and second.takes(name):
                kind = "second"
            elif optimizer.takes(name, shape):
                kind = "taken"
            members.setdefault((kind, len(shape) > 1), []).append(parameter)
    groups = []
    for kind in options:
        for is_matrix, weight_decay in ((True, settings.weight_decay), (False, 0.0)):
            if (kind, is_matrix) in members:
                group = {"params": members[kind, is_matrix], "weight_decay": weight_decay}
                groups.append(group | options[kind])
    return groups


def frozen_policy(
    config: StepConfig, model: FurtherModel, folder: str, stage: int
) -> tuple[PolicyModel, Config]:
    """A model that a feature adds, from its `folder`, without its engine, and DeepSpeed's
    configuration for it at a ZeRO `stage`."""
    dtype = config.run.dtype
    ds_config = eval_config(stage, dtype, model.offload, world_size())
    lm = load_causal_lm(folder, dtype, ds_config, further_changes(config, model))
    return PolicyModel(lm), ds_config


def require_whole_distributions(engines: Sequence[Engine]) -> None:
    """Check that divergences between whole distributions of these models can be computed."""
    for engine in engines:
        if not engine.module.compares_distributions:
            raise UserError(
                f"{type(engine.module.lm).__name__}: its output head is more than a matrix product,"
                " so its distributions cannot be compared in blocks; omit the teacher, and in step"
                " 3 use --kl_estimator and --kl_loss_estimator k1, k2 or k3"
            )
