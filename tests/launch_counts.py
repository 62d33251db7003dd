"""What a model launches on a GPU, from meta tensors: operations and shapes without numbers, and
kernels of `gpu_kernels` that only count."""

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_ppo.models import fast_layers
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout import decode_kernels, fused_layers
from dschat_ppo.rollout.attention import attention_replaced
from dschat_ppo.rollout.continuous_batching import ContinuousBatching
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.kv_cache import KVCache, PrefillMetadata
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.rollout.static_steps import Bucket, StaticMemory
from dschat_ppo.types import PromptBatch

VIEWS = set(
    (
        "view _unsafe_view expand transpose unsqueeze squeeze slice select t permute split alias "
        "detach as_strided unbind lift_fresh _reshape_alias split_with_sizes unfold "
        "empty_like new_empty"
    ).split()
)
ROWS, VOCABULARY = 4, 5000


class Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name not in VIEWS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class CountedDecode:
    """`GPUDecode` for tensors without numbers: the kernel, and the one that merges the tokens of
    rows that it divides."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def supports(self, call):
        return decode_kernels._is_plain(call)

    def __call__(self, batch, call):
        def kernel(query, key, value, cache, token_offsets, scale, window):
            self.counts += Counter(decode_attention=1, merge=1)
            for tensor in (query, key, value):
                tensor.contiguous()
            return query.new_empty(len(query), query.shape[1], query.shape[3])

        return decode_kernels._by_kernel(kernel, batch, call)


def step_counts(
    model: nn.Module, sampling: SamplingParameters, by_kernel: bool, shares: bool = False
) -> Counter:
    """Operations of one static step, with the attention of a GPU or by products."""
    model, vocabulary = model.to("meta"), vocabulary_size(model)
    prompts = PromptBatch(
        torch.ones(ROWS, 8, dtype=torch.int64), torch.ones(ROWS, 8, dtype=torch.bool)
    )
    config = GenerationConfig(sampling, StoppingCriteria(9, (3,), min_new_tokens=2))
    request = RolloutRequest(prompts, torch.arange(ROWS))
    buffers = SequenceBuffers(request, config, vocabulary, 8)
    memory = StaticMemory(buffers, KVCache(1, 64 * ROWS), ROWS, 1000)
    engine = ContinuousBatching(model, buffers, ROWS, memory=memory)
    for holder in (buffers, memory):
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                setattr(holder, name, value.to("meta"))
    decode = CountedDecode()
    engine.attention._kernel = decode if by_kernel else None
    columns = torch.arange(ROWS, device="meta")
    with attention_replaced(model, engine.attention), torch.no_grad(), fused_layers.fused(model):
        engine.attention.metadata = PrefillMetadata(memory.pool, *[columns] * 4)
        engine._forward(
            buffers.token_ids[:ROWS, :7],
            torch.arange(7, device="meta").expand(ROWS, -1),
            engine.cache,
        )
        with Kernels() as kernels:
            engine.decoder._advance(Bucket(ROWS, 64, shares, False))
    assert engine.attention.reads_all_slots is not bool(decode.counts)
    return kernels.counts + decode.counts


def lay_flat(model: nn.Module) -> None:
    """Lay weights and biases one after another, as DeepSpeed's optimizers do."""
    for kind in ("weight", "bias"):
        weights = [weight for name, weight in model.named_parameters() if name.endswith(kind)]
        sizes = [weight.numel() for weight in weights]
        flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device="meta")
        for weight, data in zip(weights, flat.split(sizes), strict=True):
            weight.data = data.view(weight.shape)


class CountedKernels:
    """In place of `gpu_kernels`: what each function gives back, without numbers, and how often each
    ran, of which each is one kernel (the backward of a norm also sums what its programs found)."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def rms_norm(self, states, weight, eps):
        self.counts["rms_norm"] += 1
        return torch.empty_like(states)

    def rms_norm_backward(self, states, weight, gradient, eps):
        self.counts["rms_norm_backward"] += 1
        sums = states.new_empty(8, states.shape[-1], dtype=torch.float32)
        return torch.empty_like(states), sums.sum(dim=0).to(weight.dtype)

    def swiglu(self, gate, up):
        self.counts["swiglu"] += 1
        return gate.new_empty(gate.shape)

    def swiglu_backward(self, gate, up, gradient):
        self.counts["swiglu_backward"] += 1
        return torch.empty_like(gate), torch.empty_like(up)

    def rotated(self, values, cos, sin, back=False):
        lines = values.transpose(1, 2).contiguous()
        cos.contiguous()
        sin.contiguous()
        self.counts["rotated"] += 1
        return torch.empty_like(lines).transpose(1, 2)

    def rotated_heads(self, values, cos, sin, heads, kv_heads):
        self.counts["rotated_heads"] += 1
        width = values.shape[2]
        return tuple(
            values.new_empty(len(values), size, width) for size in (heads, kv_heads, kv_heads)
        )

    def use(self, monkeypatch) -> None:
        """Layers take these kernels for all tensors."""
        for module in (fast_layers, fused_layers):
            monkeypatch.setattr(module, "kernels_for", lambda *_: self)
