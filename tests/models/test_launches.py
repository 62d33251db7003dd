"""How many kernels a decoder layer launches on a GPU, forward, backward and in a decode step, and a
decode step outside its layers: what the difference of four and two layers is, on meta tensors."""

from collections import Counter

import pytest
import torch
from launch_counts import CountedKernels, Kernels, lay_flat, step_counts
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from dschat_ppo.models import packing, segment_attention
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.micro_batches import Segments
from dschat_ppo.models.packing import ForwardPass
from dschat_ppo.rollout import fused_layers
from dschat_ppo.rollout.sampling import SamplingParameters

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
}


def model_of(name: str, layers: int) -> nn.Module:
    """A small model with fast layers, its weights side by side."""
    config = CONFIGS[name](
        vocab_size=5000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    if name == "gemma3":  # its second and fourth layer differ in the window alone
        config.layer_types = ["full_attention"] * layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lay_flat(model)
    use_fast_layers(model)
    return model


class _CountedFlash(torch.autograd.Function):
    """PyTorch's variable-length FlashAttention as one operation in each direction."""

    @staticmethod
    def forward(ctx, counts, query, key, value):
        ctx.shapes = query, key, value
        ctx.counts = counts
        counts["flash"] += 1
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx, gradient):
        gradient.contiguous()
        ctx.counts["flash"] += 1
        return None, *(torch.empty_like(tensor) for tensor in ctx.shapes)


@pytest.fixture
def counted(monkeypatch) -> CountedKernels:
    kernels = CountedKernels()
    kernels.use(monkeypatch)
    monkeypatch.setattr(fused_layers, "_close", lambda *_: True)
    # tests that build DeepSpeed's ZeRO-3 leave another one behind
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    monkeypatch.setattr(packing, "suits_varlen", lambda *_: True)
    monkeypatch.setattr(packing, "suits_blocks", lambda *_: False)

    def flash(query, key, value, *arguments, **options):
        return _CountedFlash.apply(kernels.counts, query, key, value)

    monkeypatch.setattr(segment_attention, "_VARLEN", flash)
    return kernels


def training_counts(
    counted: CountedKernels, model: nn.Module, shares: bool
) -> tuple[Counter[str], Counter[str]]:
    """Launches of a packed row of two segments, of which the second may see the first's beginning:
    forward and backward."""
    segments = Segments([20, 12])
    if shares:
        segments = Segments([20, 12], [(0, 0), (0, 8)])
    ids = torch.zeros(1, 32, dtype=torch.int64, device="meta")
    columns = torch.arange(32, device="meta").unsqueeze(0)
    backbone = model.base_model
    results = []
    with ForwardPass(model.config, segments).running():
        counted.counts.clear()
        with Kernels() as forward:
            states = backbone(ids, position_ids=columns, use_cache=False).last_hidden_state
        results.append(forward.counts + counted.counts)
        counted.counts.clear()
        with Kernels() as backward:
            states.backward(torch.empty_like(states))
        results.append(backward.counts + counted.counts)
    return results[0], results[1]


def of_a_layer(two: Counter[str], four: Counter[str]) -> Counter[str]:
    """Launches of one layer, of those with two and with four."""
    return Counter({name: (four[name] - two[name]) // 2 for name in four if four[name] > two[name]})


LAUNCHES = {
    # a packed layer's forward and backward; with a shared prompt; a decode step's layer; such a
    # step outside its layers
    "llama": (15, 29, 17, 33, 12, 112),
    "qwen2": (15, 32, 17, 36, 12, 112),
    "qwen3": (17, 35, 19, 39, 18, 112),
    "gemma3": (74, 127, 76, 131, 75, 122),
    "phi3": (26, 46, 28, 50, 25, 112),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_layer_and_outside(name, counted):
    found = []
    for shares in (False, True):
        two = training_counts(counted, model_of(name, 2), shares)
        four = training_counts(counted, model_of(name, 4), shares)
        found += [of_a_layer(*pair).total() for pair in zip(two, four, strict=True)]
    steps = []
    for layers in (2, 4):
        model = model_of(name, layers).eval()
        with fused_layers.fused(model):  # compares the layers, whose kernels do not count
            counted.counts.clear()
        operations = step_counts(model, SamplingParameters(), True)
        # a prefill and a step run each kernel as often
        kernels = Counter({kind: count // 2 for kind, count in counted.counts.items()})
        steps.append(operations + kernels)
    layer = of_a_layer(*steps).total()
    found += [layer, steps[0].total() - 2 * layer]
    assert tuple(found) == LAUNCHES[name]
