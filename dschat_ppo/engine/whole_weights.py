"""ZeRO-3 for small models: whole weights on each rank, gathered at once after an update instead of layer by layer.

ZeRO-3 gathers the weights of each module before it runs and drops them afterwards, in the forward and in the backward
pass. That is several hooks and a collective for each layer, which cost more than the layer itself if it is small. Here
the weights are gathered in one collective before the first forward pass after an update, and stay until the next
update. Gradients, optimizer states, fp32 weights and checkpoints are partitioned as ever, and no number changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_ppo.common.dist import local_world_size, on_gpu, world_size
from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.engine.ds_config import PERSISTENT_ELEMENTS, Config
from dschat_ppo.types import Engine

# The whole weights of a model stay if the memory of a device would hold them so many times: those of all four models
# of step 3 then take at most a sixteenth of it.
FITS = 64
# Beginnings of the settings of DeepSpeed that say how weights are gathered; this project sets none of them.
OF_GATHERING = ("stage3_max_", "stage3_prefetch_", "stage3_model_", "mics_", "zenflow", "leaf_module")


def fits_whole(size: int, ranks: int, memory: int) -> bool:
    """Whether each of `ranks` keeps the `size` bytes of whole weights in the `memory` bytes of its device. One rank
    always does: its whole weights are views of its partition."""
    return ranks == 1 or FITS * size <= memory


def may_be_whole(model: nn.Module, config: Config) -> bool:
    """Whether an engine of this model keeps its whole weights on each rank: under ZeRO-3, if they fit many times.
    Weights that are offloaded, quantised, or partitioned in groups (hpZ) stay partitioned, and so do those of models
    for which `--deepspeed_config` says how weights are gathered, such as `stage3_param_persistence_threshold`."""
    zero = config["zero_optimization"]
    if zero["stage"] != 3 or zero.get("stage3_param_persistence_threshold") != PERSISTENT_ELEMENTS:
        return False
    if any(name.startswith(OF_GATHERING) for name in zero):
        return False
    if zero.get("offload_param", {}).get("device", "none") != "none" or zero.get("zero_hpz_partition_size", 1) != 1:
        return False
    if any(zero.get(f"zero_quantized_{name}") for name in ("weights", "nontrainable_weights")):
        return False
    size = sum(getattr(weight, "ds_numel", weight.numel()) * weight.element_size() for weight in model.parameters())
    return fits_whole(size, world_size(), _memory_of_device())


def _memory_of_device() -> int:
    """Bytes of this rank's GPU, or its share of the host's memory."""
    if on_gpu():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return host_memory() // local_world_size()


class WholeWeights:
    """Gathers the missing weights of an engine, partitioned by ZeRO-3, before the forward pass of its model. An update,
    a checkpoint and a save of the model drop the whole weights, on all ranks alike."""

    def __init__(self, parameters: Iterable[Any]):
        self._parameters = list(parameters)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Before a forward pass. Collective if weights are missing."""
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the weights that are missing, in one collective for each dtype."""
        missing = [weight for weight in self._parameters if weight.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            missing[0].all_gather_coalesced(missing).wait()


def keep_whole(engine: Engine) -> None:
    """Replace the hooks of ZeRO-3 in an engine by `WholeWeights`, before the first forward pass.

    Its linear layers without a bias call PyTorch's own product again. That of DeepSpeed does not keep the gathered
    weight for the backward pass, and costs a Python function each way; the numbers are the same. With a bias they are
    not: PyTorch rounds the product and the sum together.
    """
    optimizer = engine.optimizer
    offload = getattr(optimizer, "parameter_offload", optimizer)  # an engine that only evaluates has nothing else
    offload._remove_module_hooks()
    if optimizer is not offload:
        optimizer.persistent_parameters = []  # which an update would gather one by one
    model = engine.module
    for weight in model.parameters():
        weight.is_kept_whole = True
    if nn.functional.linear is zero3_linear_wrap:
        nn.functional.linear = linear
    hook = WholeWeights(model.parameters())
    for module in model.modules():
        if module is model or isinstance(module, PreTrainedModel):  # each of them may be called by itself
            module.register_forward_pre_hook(hook)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  the name of PyTorch
    """`nn.functional.linear` under ZeRO-3: DeepSpeed's, but for weights that are kept whole and have no bias."""
    if bias is None and getattr(weight, "is_kept_whole", False):
        return torch._C._nn.linear(input, weight)
    return zero3_linear_wrap(input, weight, bias)


def whole_weights(engine: Engine) -> WholeWeights | None:
    """The `WholeWeights` of an engine, or None if it gathers layer by layer or its weights are not partitioned."""
    hooks = engine.module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, WholeWeights)), None)
