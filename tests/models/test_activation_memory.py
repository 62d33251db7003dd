"""The last MLP, and activations in host memory."""

from dataclasses import replace

import pytest
import torch
from tiny_models import VOCABULARY, new_model

from dschat_ppo.models import activation_memory
from dschat_ppo.models.activation_memory import last_mlp
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import PolicyModel

ROWS, COLUMNS = 3, 40


def scores_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(2, VOCABULARY, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    scores = torch.stack(model(ids, torch.ones_like(ids).bool(), 0.7, True))
    model.zero_grad()
    (scores * torch.linspace(-1, 1, scores.numel()).view(scores.shape)).sum().backward()
    return scores.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "has_mlp"), [
    ("llama", True), ("gpt2", True), ("gemma2", True), ("bloom", True), ("gpt-neo", True), ("opt", False),
    ("mixtral", False), ("gpt-oss", False), ("mamba", False),
])  # fmt: skip
def test_models_without_an_mlp_or_with_experts_in_the_last_layer_run_all_tokens(name, has_mlp):
    policy = PolicyModel(new_model(name)).eval()
    assert (last_mlp(policy.backbone) is not None) is has_mlp
    select_kernels(policy)
    assert policy.layout.reads_few is has_mlp


@pytest.fixture
def hosted(monkeypatch):
    """Treats tensors of the CPU as those of a GPU, and lists the shapes that went to the host."""
    shapes = []

    def copy(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    monkeypatch.setattr(activation_memory, "HOST", "another device")
    monkeypatch.setattr(activation_memory, "SMALLEST_ON_HOST", 0)
    monkeypatch.setattr(activation_memory, "_host_copy", copy)
    return shapes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_on_the_host_change_no_number(hosted, checkpointing):
    model = PolicyModel(new_model("llama")).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected, gradients = scores_and_gradients(model)
    assert not hosted
    model.layout = replace(model.layout, offload_activations=True)
    found, others = scores_and_gradients(model)
    assert torch.equal(found, expected)
    assert all(torch.equal(others[name], gradients[name]) for name in gradients)
    inputs = [shape for shape in hosted if shape == (ROWS, COLUMNS, 32)]
    assert 2 <= len(inputs) <= 5 if checkpointing else len(inputs) > 10  # two layers, and the last norm
    assert any(shape[-1] == 48 for shape in hosted) != checkpointing  # inside an MLP
    parameters = {tuple(p.shape) for p in model.parameters()}
    assert parameters.isdisjoint(shape for shape in hosted if len(shape) == 2)
