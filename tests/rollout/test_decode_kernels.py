"""What a decode step launches on a GPU, from meta tensors: operations and shapes without numbers.

Meta tensors refuse operands on the CPU, and questions of the host about their numbers.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from tiny_models import CONTINUOUS, new_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout import flash_decode, fused_layers
from dschat_ppo.rollout.attention import _products, installed
from dschat_ppo.rollout.continuous_batching import ContinuousBatching
from dschat_ppo.rollout.cuda_graphs import Bucket, StaticMemory
from dschat_ppo.rollout.flash_decode import FlashDecode, varlen_kernel
from dschat_ppo.rollout.kv_cache import KVCache, PrefillMetadata
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import PromptBatch

VIEWS = set(
    "view _unsafe_view expand transpose unsqueeze squeeze slice select t permute split alias detach as_strided unbind "
    "lift_fresh _reshape_alias split_with_sizes unfold".split()
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


def counts_of(model: nn.Module, sampling: SamplingParameters, flash: bool, shares: bool = False) -> Counter:
    """Operations of one static step."""
    model, vocabulary = model.to("meta"), vocabulary_size(model)
    prompts = PromptBatch(torch.ones(ROWS, 8, dtype=torch.int64), torch.ones(ROWS, 8, dtype=torch.bool))
    stopping = StoppingCriteria(9, (3,), min_new_tokens=2)
    buffers = SequenceBuffers(prompts, torch.arange(ROWS), 1, sampling, stopping, vocabulary, 8)
    memory = StaticMemory(KVCache(1, 64 * ROWS), ROWS, 1000, torch.device("cpu"))
    engine = ContinuousBatching(model, buffers, ROWS, sampling, memory=memory)
    for holder in (buffers, memory):
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                setattr(holder, name, value.to("meta"))
    engine.attention._kernel = FlashDecode(varlen_kernel) if flash else None
    columns = torch.arange(ROWS, device="meta")
    with installed(model, engine.attention), torch.no_grad(), fused_layers.fused_rotary(model):
        engine.attention.metadata = PrefillMetadata(memory.pool, *[columns] * 4)
        engine._forward(buffers.token_ids[:ROWS, :7], torch.arange(7, device="meta").expand(ROWS, -1))
        with Kernels() as kernels:
            engine.graphed._advance(Bucket(ROWS, 64, shares, False))
    assert engine.attention.reads_all_slots is not bool(kernels.counts["_flash_attention_forward"])
    return kernels.counts


def qwen2(layers: int) -> nn.Module:
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for layer in model.to("meta").modules():
        if type(layer).__name__ == "Qwen2RMSNorm":
            layer.forward = partial(norm_on_gpu, layer.weight)
    return model


def norm_on_gpu(weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """As the layers of `models/fast_layers.py` on a GPU, for which a meta tensor does not count."""
    return weight * nn.functional.rms_norm(states, weight.shape, None, 1e-6)


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch) -> None:
    """Norms are one kernel on a GPU and many elsewhere; kernels cannot be compared without numbers."""
    monkeypatch.setattr(nn.functional, "rms_norm", lambda states, *_: torch.neg(states))
    monkeypatch.setattr(flash_decode, "_agrees", lambda *_: True)
    monkeypatch.setattr(fused_layers, "_rotation_agrees", lambda *_: True)


@pytest.mark.parametrize(("shares", "kernels"), [(False, 22), (True, 27)])
def test_kernels_of_a_layer(shares, kernels):
    """7 products, 4 for the rotary positions, 2 x 2 for norms, 2 to write the cache, 1 for attention, 4 others. Shared
    prompts: the queries twice, in the same call of the kernel, and the weighted sum of the two results."""
    two, four = (counts_of(qwen2(layers), SamplingParameters(), True, shares) for layers in (2, 4))
    found = Counter({name: (four[name] - two[name]) // 2 for name in four})
    assert found["addmm"] + found["mm"] == 7 and found["index_copy_"] == 2 and found["neg"] == 2
    assert found["_flash_attention_forward"] == found["index_select"] == 1
    assert found["_softmax"] == found["repeat"] == found["sum"] == shares
    assert sum(found.values()) == kernels


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("name", [name for name in CONTINUOUS if name != "mixtral"])
def test_no_architecture_asks_the_host_or_mixes_devices(name, flash):
    """The routing of Mixtral cannot run without numbers."""
    sampling = SamplingParameters(0.8, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.2)
    found = counts_of(new_model(name).bfloat16(), sampling, flash)
    assert (found["_flash_attention_forward"] > 0) is (flash and name != "gemma2")


def test_scores_of_half_precision_are_fp32_on_a_gpu():
    with FakeTensorMode():
        query = torch.empty(4, 2, 8, dtype=torch.bfloat16, device="cuda")
        keys = torch.empty(4, 5, 8, dtype=torch.bfloat16, device="cuda")
        scores = _products(query, keys)
        assert (scores.dtype, scores.shape) == (torch.float32, (4, 2, 5))
        assert _products(query.float(), keys.float()).dtype == torch.float32
    assert _products(torch.ones(1, 2, 8).bfloat16(), torch.ones(1, 3, 8).bfloat16()).dtype == torch.bfloat16
