"""What a decode step launches on a GPU, from meta tensors: operations and shapes without numbers.

Meta tensors refuse operands on the CPU, and questions of the host about their numbers.
"""

from collections import Counter

import pytest
import torch
from launch_counts import CountedKernels, lay_flat, step_counts
from tiny_models import CONTINUOUS, new_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config

from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.rollout import fused_layers
from dschat_ppo.rollout.decode_kernels import _products
from dschat_ppo.rollout.sampling import SamplingParameters

VOCABULARY = 5000


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
    lay_flat(model)
    use_fast_layers(model)
    return model


@pytest.fixture
def kernels_run(monkeypatch) -> Counter[str]:
    """How often each function of `gpu_kernels` ran, of which each is a kernel."""
    kernels = CountedKernels()
    kernels.use(monkeypatch)
    return kernels.counts


@pytest.fixture(autouse=True)
def without_numbers(monkeypatch) -> None:
    """Kernels and layers cannot be compared without numbers."""
    monkeypatch.setattr(fused_layers, "_close", lambda *_: True)


@pytest.mark.parametrize("shares", [False, True])
def test_kernels_of_a_layer(shares, kernels_run):
    """4 products, a rotation, 2 norms, a gated product, 1 for attention, which writes the cache
    too, 1 to merge its parts, 2 sums; with shared prompts too."""
    operations_of, kernels_of = [], []
    for layers in (2, 4):
        model = qwen2(layers)
        with fused_layers.fused(model):  # compares the layers, whose kernels do not count
            kernels_run.clear()
        operations_of.append(step_counts(model, SamplingParameters(), True, shares))
        kernels_of.append(Counter(kernels_run))
    two, four = operations_of
    found = Counter({name: (four[name] - two[name]) // 2 for name in four})
    assert found["addmm"] + found["mm"] == 4 and found["index_copy_"] == 0
    assert found["decode_attention"] == found["merge"] == 1
    assert sum(found.values()) == 8
    passes = 2 * 2  # a prefill and a step, of two layers more
    assert {name: count / passes for name, count in (kernels_of[1] - kernels_of[0]).items()} == {
        "rms_norm": 2,
        "rotated_heads": 1,
        "swiglu": 1,
    }


@pytest.mark.parametrize("by_kernel", [False, True])
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
def test_no_architecture_asks_the_host_or_mixes_devices(name, by_kernel):
    """The routing of Mixtral cannot run without numbers."""
    sampling = SamplingParameters(0.8, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.2)
    found = step_counts(new_model(name).bfloat16(), sampling, by_kernel)
    is_plain = name not in ("gemma2", "gpt-oss")
    assert (found["decode_attention"] > 0) is (by_kernel and is_plain)


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
