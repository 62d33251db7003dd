"""What a decode step launches on a GPU, from meta tensors: operations and shapes without numbers.

Meta tensors refuse operands on the CPU, and questions of the host about their numbers.
"""

from collections import Counter

import pytest
import torch
from tiny_models import CONTINUOUS, new_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from dschat_ppo.models import fast_layers
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout import decode_kernels, fused_layers
from dschat_ppo.rollout.attention import attention_replaced
from dschat_ppo.rollout.continuous_batching import ContinuousBatching
from dschat_ppo.rollout.decode_kernels import FlashDecode, _products, flash_segments
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


def counts_of(
    model: nn.Module, sampling: SamplingParameters, flash: bool, shares: bool = False
) -> Counter:
    """Operations of one static step."""
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
    engine.attention._kernel = FlashDecode(flash_segments) if flash else None
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
    assert engine.attention.reads_all_slots is not bool(kernels.counts["_flash_attention_forward"])
    return kernels.counts


def qwen2(layers: int) -> nn.Module:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to("meta")
    for kind in ("weight", "bias"):  # as DeepSpeed's optimizers lay them
        parts = [part for name, part in model.named_parameters() if name.endswith(kind)]
        flat = torch.empty(sum(part.numel() for part in parts), dtype=torch.bfloat16, device="meta")
        for part, place in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.data = place.view(part.shape)
    use_fast_layers(model)
    return model


@pytest.fixture
def kernels_run(monkeypatch) -> Counter[str]:
    """How often each function of `gpu_kernels` ran, of which each is a kernel."""
    counts: Counter[str] = Counter()

    class OnGPU:
        @staticmethod
        def rms_norm(states, weight, eps):
            counts["rms_norm"] += 1
            return torch.empty_like(states)

        @staticmethod
        def swiglu(gate, up):
            counts["swiglu"] += 1
            return gate.new_empty(gate.shape)

        @staticmethod
        def rotated_heads(values, cos, sin, heads, kv_heads):
            counts["rotated_heads"] += 1
            return tuple(
                values.new_empty(len(values), size, values.shape[2])
                for size in (heads, kv_heads, kv_heads)
            )

    for module in (fast_layers, fused_layers):
        monkeypatch.setattr(module, "kernels_for", lambda *_: OnGPU)
    return counts


@pytest.fixture(autouse=True)
def without_numbers(monkeypatch) -> None:
    """Kernels and layers cannot be compared without numbers."""
    monkeypatch.setattr(decode_kernels, "_agrees", lambda *_: True)
    monkeypatch.setattr(fused_layers, "_close", lambda *_: True)


@pytest.mark.parametrize(("shares", "others"), [(False, 5), (True, 10)])
def test_kernels_of_a_layer(shares, others, kernels_run):
    """4 products, a rotation, 2 norms, a gated product, 2 to write the cache, 1 for attention, 2
    sums. Shared prompts: the queries twice, in the same call of the kernel, and the weighted sum of
    the two results."""
    operations_of, kernels_of = [], []
    for layers in (2, 4):
        model = qwen2(layers)
        with fused_layers.fused(model):  # compares the layers, whose kernels do not count
            kernels_run.clear()
        operations_of.append(counts_of(model, SamplingParameters(), True, shares))
        kernels_of.append(Counter(kernels_run))
    two, four = operations_of
    found = Counter({name: (four[name] - two[name]) // 2 for name in four})
    assert found["addmm"] + found["mm"] == 4 and found["index_copy_"] == 2
    assert found["_flash_attention_forward"] == 1
    assert found["_softmax"] == found["repeat"] == found["sum"] == shares
    assert sum(found.values()) == 4 + others
    passes = 2 * 2  # a prefill and a step, of two layers more
    assert {name: count / passes for name, count in (kernels_of[1] - kernels_of[0]).items()} == {
        "rms_norm": 2,
        "rotated_heads": 1,
        "swiglu": 1,
    }


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        (
            name
            if name in ("llama", "gpt2", "gemma2", "mistral-window", "gpt-oss")
            else pytest.param(name, marks=pytest.mark.release)
        )
        for name in CONTINUOUS
        if name != "mixtral"
    ],
)
def test_no_architecture_asks_the_host_or_mixes_devices(name, flash):
    """The routing of Mixtral cannot run without numbers."""
    sampling = SamplingParameters(0.8, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.2)
    found = counts_of(new_model(name).bfloat16(), sampling, flash)
    assert (found["_flash_attention_forward"] > 0) is (flash and name not in ("gemma2", "gpt-oss"))


def test_scores_of_half_precision_are_fp32_on_a_gpu():
    with FakeTensorMode():
        query = torch.empty(4, 2, 8, dtype=torch.bfloat16, device="cuda")
        keys = torch.empty(4, 5, 8, dtype=torch.bfloat16, device="cuda")
        scores = _products(query, keys)
        assert (scores.dtype, scores.shape) == (torch.float32, (4, 2, 5))
        assert _products(query.float(), keys.float()).dtype == torch.float32
    assert (
        _products(torch.ones(1, 2, 8).bfloat16(), torch.ones(1, 3, 8).bfloat16()).dtype
        == torch.bfloat16
    )
