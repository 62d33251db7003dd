"""Switch the actor between training and generation. Generation is the only time that ZeRO-3 weights
are whole.

In tensor-parallel generation each rank of a group holds a part of every decoder layer (Shoeybi et
al. 2019). transformers names the division of each layer in `base_model_tp_plan` of a config. Here
it is applied to the weights of a training engine for the duration of a rollout: a column-wise layer
computes a part of its outputs, a row-wise layer a part of each sum, which the group then adds up.
Embeddings, norms and the head stay whole on every rank.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.common.dist import device, on_gpu
from dschat_ppo.common.logging import logger
from dschat_ppo.config.schema import require
from dschat_ppo.engine.build_engine import whole_weights
from dschat_ppo.errors import UserError, attempt
from dschat_ppo.models.backbone import forward_replaced, of_any_rank, unfit
from dschat_ppo.models.wrapped_models import PolicyModel, vocabulary_size
from dschat_ppo.types import Engine

# outputs are divided; in the second style, gathered again
COLUMNS = "colwise", "colwise_gather_output"
# inputs are divided; in the second style, by this layer itself
ROWS = "rowwise", "rowwise_split_input"
WHOLE = ("replicated_with_grad_allreduce",)  # norms of single heads


@dataclass(frozen=True)
class TensorParallel:
    """Rank `rank` of `size` in a `group` that generates together; `layers`: those gathered at a
    time, to divide."""

    group: dist.Group
    rank: int
    size: int
    layers: int


def tensor_parallel(size: int, layers: int) -> TensorParallel | None:
    """Divide all ranks into groups of `size` consecutive ones; None for groups of one.
    Collective."""
    if size == 1:
        return None
    return TensorParallel(dist.group_of(size), dist.rank() % size, size, layers)


def reason_not_to_divide(config: PretrainedConfig, lora_dim: int) -> str | None:
    """Why `--inference_tp_size` gathers the layers of a model one at a time; None if it divides
    them."""
    if lora_dim > 0:
        return "layers with LoRA are not divided"
    plan, kind = plan_of(config), config.get_text_config().model_type
    if not plan:
        return f"transformers has no tensor-parallel plan for {kind} models"
    unknown = sorted(set(plan.values()) - {*COLUMNS, *ROWS, *WHOLE})
    return (
        f"the plan of {kind} models has {', '.join(unknown)}, which is not supported"
        if unknown
        else None
    )


def check_tensor_parallel(
    config: PretrainedConfig, size: int, ranks: int, lora_dim: int = 0
) -> None:
    """Check that the size suits the ranks and, if its layers are divided, the model, before it is
    loaded."""
    if size == 1:
        return
    flag, text = f"--inference_tp_size {size}", config.get_text_config()
    instead = "use --unpin_actor_parameters, which gathers one layer at a time"
    require(
        ranks % size == 0, f"{flag} must divide the number of ranks, {ranks}: set it to a divisor"
    )
    if reason_not_to_divide(config, lora_dim):
        return
    heads = text.num_attention_heads
    for name, count in (
        ("attention heads", heads),
        ("key-value heads", getattr(text, "num_key_value_heads", None) or heads),
        ("MLP columns", text.intermediate_size),
    ):
        require(
            count % size == 0,
            f"{flag} must divide the model's {count} {name}: lower it, or {instead}",
        )


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """Names of layers inside the base model, with `*` for their number -> style; {} if transformers
    has no plan."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


@contextmanager
def divided(model: PreTrainedModel, parallel: TensorParallel) -> Iterator[None]:
    """Hold this rank's part of the decoder layers of `model`, all linear, for the duration of the
    block. Its forward passes are then collective over the group. Entering is collective over all
    ranks, and leaves ZeRO-3 partitions as they are; without ZeRO-3 the parts are views of the whole
    weights."""
    blocks = _linear_layers(model)
    with ExitStack() as stack:
        for start in range(0, len(blocks), parallel.layers):
            layers = list(chain.from_iterable(blocks[start : start + parallel.layers]))
            weights = [entry for layer, style in layers for entry in _divided_weights(layer, style)]
            missing = [weight for weight, _ in weights if is_missing(weight)]
            gathered = {id(weight) for weight in missing}
            with deepspeed.zero.GatheredParameters(missing):
                parts = [
                    _part(weight, along, parallel, id(weight) in gathered)
                    for weight, along in weights
                ]
            for (weight, _), part in zip(weights, parts, strict=True):
                stack.callback(setattr, weight, "data", weight.data)
                weight.data = part
            for layer, style in layers:
                stack.enter_context(
                    forward_replaced(layer, partial(_forward, layer, style, parallel))
                )
        yield


def is_missing(weight: Any) -> bool:
    """Whether a ZeRO-3 parameter has to be gathered; small ones are whole on every rank."""
    return dist.is_partitioned(weight) and weight.ds_status == ZeroParamStatus.NOT_AVAILABLE


def _linear_layers(model: PreTrainedModel) -> list[list[tuple[nn.Linear, str]]]:
    """The layers of each block of the decoder that are divided, and their styles."""
    plan, found = plan_of(model.config), dict[int, list[tuple[nn.Linear, str]]]()
    prefix = f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+", ".*", name.removeprefix(prefix)), WHOLE[0])
        if style in WHOLE:
            continue
        if type(module) is not nn.Linear:
            raise UserError(
                f"--inference_tp_size: {name} is a {type(module).__name__}, not a linear layer"
            )
        found.setdefault(int(re.findall(r"\.(\d+)", name)[0]), []).append((module, style))
    return [found[number] for number in sorted(found)]


def _divided_weights(layer: nn.Linear, style: str) -> list[tuple[Any, int]]:
    """The parameters of a layer that are divided, and along which dimension; a row-wise bias stays
    whole."""
    if style in ROWS:
        return [(layer.weight, 1)]
    return [(layer.weight, 0), *([(layer.bias, 0)] if layer.bias is not None else [])]


def _part(weight: Tensor, along: int, parallel: TensorParallel, copied: bool) -> Tensor:
    """This rank's part of a weight: a view, or a copy if the whole weight will be freed."""
    length = weight.shape[along]
    if length % parallel.size:
        raise UserError(
            f"--inference_tp_size {parallel.size} does not divide a layer of {length} columns"
        )
    part = weight.data.chunk(parallel.size, dim=along)[parallel.rank]
    return part.clone(memory_format=torch.contiguous_format) if copied else part


def _forward(layer: nn.Linear, style: str, parallel: TensorParallel, inputs: Tensor) -> Tensor:
    """(..., in) -> (..., out), where `in` or `out` may be this rank's part."""
    if style in ROWS:
        if style == "rowwise_split_input":
            inputs = inputs.chunk(parallel.size, dim=-1)[parallel.rank]
        # in fp32: the sum of rounded parts is then rounded only once more
        total = dist.all_reduce(
            nn.functional.linear(inputs, layer.weight).float(), group=parallel.group
        )
        total = total.to(inputs.dtype)
        return total if layer.bias is None else total + layer.bias
    outputs = nn.functional.linear(inputs, layer.weight, layer.bias)
    if style == "colwise":
        return outputs
    # (size, ..., out / size)
    gathered = dist.gather_cat(outputs.unsqueeze(0), group=parallel.group)
    return torch.cat(list(gathered), dim=-1)


Merge = Callable[[PreTrainedModel, Collection[nn.Parameter]], AbstractContextManager[Any]]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HybridEngine:
    """Makes the model of the actor's training engine available for inference, in `generating()`.

    In that context the model is an ordinary `PreTrainedModel` in eval mode (thus without activation
    checkpointing): whole weights on every rank, no DeepSpeed hooks, no gradients. Generation needs
    no collective, so ranks may finish at different times. The exit restores training exactly: the
    same hook objects, the same partitions (the gathered copies are dropped, not written back,
    except those of a small model, which stay until the next update), the same mode.

    Args: pinned: gather ZeRO-3 weights once for the whole context. If False, DeepSpeed's hooks
    gather each layer when it runs: less memory, one collective per layer. All ranks must then run
    the same number of forward passes (see `max_over_ranks`). merge: merges adapters into the whole
    weights, and restores these on exit. It gets the model, and those weights that are dropped after
    the exit and need not be restored. Requires `pinned`. sleeping: engines whose training states,
    and weights that the actor does not use, move to host memory. parallel: divide the layers over
    the ranks of a group, which then generate together; forward passes are collective over the
    group. Requires `pinned`.
    """

    def __init__(
        self,
        engine: Engine,
        pinned: bool = True,
        merge: Merge | None = None,
        sleeping: Sequence[Engine] = (),
        parallel: TensorParallel | None = None,
    ):
        self.engine = engine
        self._merge = merge
        self.sleeping = sleeping
        self._has_slept = False
        self._host: HostMemory = {}
        self.parallel = parallel
        self._whole = whole_weights(engine)
        partitioned = self._whole is None and any(map(dist.is_partitioned, self.model.parameters()))
        self._collective = not pinned and partitioned
        if (self._collective or parallel) and merge is not None:
            raise ValueError(
                "adapters cannot be merged into weights that are divided or gathered layer by layer"
            )

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model inside the engine."""
        module = self.engine.module
        return module.lm if isinstance(module, PolicyModel) else module

    @property
    def max_over_ranks(self) -> Callable[[int], int] | None:
        """If forward passes are collective, a collective over the same ranks that returns the
        maximum of a number."""
        group = self.parallel.group if self.parallel else None
        if not self._collective and group is None:
            return None
        return lambda number: int(
            dist.all_reduce(torch.tensor([number], device=dist.device()), "max", group)
        )

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """The engines of `sleeping` in host memory. The first time, the log says how much that
        moves."""
        tensors = [
            tensor
            for engine in self.sleeping
            for tensor in chain(training_states(engine), weights_of(engine))
        ]
        scratch = chain.from_iterable(gradient_buffers(engine) for engine in self.sleeping)
        with asleep(
            tensors, awake=weights_of(self.engine), scratch=scratch, host=self._host
        ) as moved:
            if not self._has_slept:
                logger().info(
                    f"--sleep_in_rollout: rollouts move {moved / 2**30:.2f} GiB of this rank to"
                    " host memory"
                )
                self._has_slept = True
            yield

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The model, ready for inference. Entry and exit are collective, and so is each forward
        pass if not pinned."""
        model = self.model
        was_training = model.training
        with ExitStack() as stack:
            if self.sleeping:
                stack.enter_context(self._asleep())
            missing: list[Any] = []
            if self._whole is not None:
                self._whole.gather()
            if self.parallel:
                stack.enter_context(divided(model, self.parallel))
            if not self._collective:
                missing = [
                    weight
                    for weight in model.parameters()
                    if is_missing(weight) and not weight.numel()
                ]
                stack.enter_context(deepspeed.zero.GatheredParameters(missing))
                stack.enter_context(_without_hooks(self.engine.module))
            if self._merge is not None:
                stack.enter_context(self._merge(model, missing))
            stack.enter_context(torch.no_grad())
            model.eval()
            try:
                yield model
            finally:
                model.train(was_training)

    def check_division(self) -> None:
        """Require divided layers to give the log-probs of whole ones, up to rounding. Collective;
        once, at first."""
        if self.parallel is None:
            return
        model = self.model
        ids = torch.randint(
            0, vocabulary_size(model), (2, 12), generator=torch.Generator().manual_seed(0)
        )
        ids, was_training = ids.to(dist.device()), model.training
        self.engine.eval()
        with torch.no_grad():
            whole = model(ids, use_cache=False).logits.float().log_softmax(dim=-1)
        self.engine.train(was_training)
        parts = torch.full_like(whole, torch.inf)
        with attempt() as tried, self.generating() as lent:
            parts = lent(ids, use_cache=False).logits.float().log_softmax(dim=-1)
        error = of_any_rank(unfit(tried), ids.device)
        likeliest = whole.argmax(dim=-1, keepdim=True)
        difference = (parts.gather(2, likeliest) - whole.gather(2, likeliest)).abs().mean()
        difference = float(dist.all_reduce(difference, "max"))  # so that all ranks decide alike
        tolerance = 1e-3 if model.dtype == torch.float32 else 0.3
        name, size = type(model).__name__, self.parallel.size
        if error or not difference <= tolerance:
            found = error or f"log-probs differ from those of whole layers by {difference:.2g}"
            flag = f"--inference_tp_size {size}"
            raise UserError(
                f"{flag}: with divided layers of {name} {found}; use --unpin_actor_parameters"
            )
        logger().info(
            f"rollout: {name} divided over {size} ranks agrees with the whole layers"
            f" ({difference:.1e})"
        )


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Remove the hooks of every module; the exit restores the same dictionaries."""
    kept = [
        (module, {name: getattr(module, name) for name in _HOOKS}) for module in model.modules()
    ]
    for module, _ in kept:
        for name in _HOOKS:
            setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, hooks in kept:
            for name, value in hooks.items():
                setattr(module, name, value)


# fp32 weights of DeepSpeed's optimizers: ZeRO 3, ZeRO 1 and 2, ZeRO 1 in bf16
_MASTERS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)
_GRADIENTS = ("grad_partitions_flat_buffer", "fp32_groups_gradients_flat")  # ZeRO 3, ZeRO 1 in bf16
SMALLEST_LOCKED = 2**20  # bytes: registering less takes longer than its copy


def weights_of(engine: Engine) -> Iterator[Tensor]:
    """The parameters of an engine, and this rank's partitions of them."""
    for parameter in engine.module.parameters():
        yield parameter.data
        # the latter with hpZ
        parts = (getattr(parameter, name, None) for name in ("ds_tensor", "ds_secondary_tensor"))
        yield from (part for part in parts if part is not None)


def training_states(engine: Engine) -> Iterator[Tensor]:
    """The optimizer states and fp32 weights of an engine that trains; empty for one that does
    not."""
    if engine.basic_optimizer is None:
        return
    for state in engine.basic_optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    yield from _flat(engine, _MASTERS)


def gradient_buffers(engine: Engine) -> Iterator[Tensor]:
    """The buffers of gradients, whose contents mean nothing between an update and the next backward
    pass."""
    for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
        # ZeRO 1 and 2 have a list, which is empty between backward passes
        if isinstance(bucket.buffer, Tensor):
            yield bucket.buffer
    yield from _flat(engine, _GRADIENTS)


def _flat(engine: Engine, names: Sequence[str]) -> Iterator[Tensor]:
    for name in names:
        held = getattr(engine.optimizer, name, None)
        yield from [held] if isinstance(held, Tensor) else held or []


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is in device memory; never on a CPU."""
    return tensor.device.type != "cpu"


# for the tensors that sleep, by number; kept for the next rollout
HostMemory = dict[int, torch.UntypedStorage]


def kept_memory(host: HostMemory, number: int, size: int) -> torch.UntypedStorage:
    """`size` bytes of the host for the tensor of this number: those of the last time, if they were
    as many."""
    if number in host and host[number].nbytes() != size:
        del host[number]  # freed before other memory is taken
    if number not in host:
        host[number] = host_memory(size)
    return host[number]


def host_memory(size: int) -> torch.UntypedStorage:
    """Host memory of `size` bytes, with a GPU page-locked, so that copies are several times faster.
    It is registered with CUDA instead of taken from torch's allocator, which rounds sizes up to a
    power of two."""
    memory = torch.UntypedStorage(size)
    if not on_gpu() or size < SMALLEST_LOCKED:
        return memory
    runtime, place = torch.cuda.cudart(), memory.data_ptr()
    if error := int(runtime.cudaHostRegister(place, size, 0)):
        # torch leaves the error behind, and the next kernel would be blamed for it
        with suppress(RuntimeError):
            torch.ones(1, device=device())
        logger().warning(
            f"--sleep_in_rollout: {size / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA"
            f" error {error}), so rollouts begin and end more slowly; raise the limit of locked"
            " memory (ulimit -l)"
        )
        return memory
    # Before it is freed: CUDA would take other memory at this address for locked. The end of the
    # process needs no call.
    weakref.finalize(memory, runtime.cudaHostUnregister, place).atexit = False
    return memory


@contextmanager
def asleep(
    tensors: Iterable[Tensor],
    awake: Iterable[Tensor] = (),
    scratch: Iterable[Tensor] = (),
    host: HostMemory | None = None,
) -> Iterator[int]:
    """Move the memory of `tensors`, which the block does not use, to the host; yields the bytes
    that leave the device. The memory is emptied and filled again, and no tensor is replaced,
    because DeepSpeed holds views of its flat buffers (such as `_hp_mapping`). What tensors share
    with those `awake` is not moved; that of `scratch` tensors is freed without a copy, and zero
    afterwards. `host` is for the same tensors in the same order each time."""
    host = {} if host is None else host
    used = {tensor.untyped_storage().data_ptr() for tensor in awake}
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if on_device(tensor)
    }
    get_accelerator().synchronize()  # a stream other than the current one may still use the memory
    moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
    for place, storage in memory.items():
        if storage.nbytes() and storage.resizable() and place not in used:
            copy = kept_memory(host, len(moved), storage.nbytes())
            copy.copy_(storage, non_blocking=True)
            moved.append((storage, copy))
    emptied = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in scratch
        if on_device(tensor)
    }
    freed = [(storage, storage.nbytes()) for storage in emptied.values()]
    get_accelerator().synchronize()  # the copies are complete
    try:
        for storage, _ in (*freed, *moved):
            storage.resize_(0)
        yield sum(copy.nbytes() for _, copy in moved) + sum(size for _, size in freed)
    finally:
        for storage, size in freed:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]
        for storage, copy in moved:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=True)
        get_accelerator().synchronize()  # the next rollout writes to the host memory
