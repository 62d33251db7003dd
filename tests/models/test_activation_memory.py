"""MLPs in pieces of the sequence, and activations in host memory."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCABULARY, new_model
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_ppo.models import activation_memory
from dschat_ppo.models.activation_memory import mlps_of, tile_mlps
from dschat_ppo.models.policy_model import PolicyModel

ROWS, COLUMNS = 3, 40  # 120 tokens: three pieces of 32 and one of 24


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made inside."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.size = max([self.size, *sizes])
        return out


def scores_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(2, VOCABULARY, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    scores = torch.stack(model(ids, torch.ones_like(ids).bool(), 0.7, True))
    model.zero_grad()
    (scores * torch.linspace(-1, 1, scores.numel()).view(scores.shape)).sum().backward()
    return scores.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_inside_of_a_tiled_mlp_is_as_small_as_a_piece():
    model = new_model("llama", intermediate_size=4096, num_hidden_layers=1)
    ids = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)

    def largest() -> int:
        with Largest() as watch:
            model.model(ids).last_hidden_state.sum().backward()
        return watch.size

    whole = largest()
    tile_mlps(model.model)
    assert whole == ROWS * COLUMNS * 4096
    assert largest() == 32 * 4096
    with torch.no_grad(), Largest() as watch:
        model.model(ids)
    assert watch.size == 32 * 4096


def test_a_rank_with_fewer_tokens_runs_empty_pieces_where_zero_gathers_weights(monkeypatch):
    plain, tiled = (PolicyModel(new_model("llama")) for _ in range(2))
    tile_mlps(tiled.backbone)
    monkeypatch.setattr(activation_memory.dist, "all_reduce", lambda number, op: number.clamp_min(6))  # another rank's
    sizes = []
    for layer in tiled.lm.model.layers:
        layer.mlp.up_proj.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[1]))
    expected, gradients = scores_and_gradients(plain)
    found, others = scores_and_gradients(tiled)
    assert sizes[:12] == 2 * [32, 32, 32, 24, 0, 0]  # two layers
    assert sorted(sizes[12:]) == sorted(sizes[:12]), "each piece once more in the backward pass"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_a_copy_of_a_tiled_mlp_runs_its_own_layers():
    mlp = new_model("llama").model
    tile_mlps(mlp)
    mlp = mlp.layers[0].mlp
    other = copy.copy(mlp)
    other._modules = {name: copy.deepcopy(module) for name, module in mlp.named_children()}
    torch.nn.init.zeros_(other.down_proj.weight)
    states = torch.randn(1, 80, 32)
    assert mlp(states).abs().max() > 0
    assert not other(states).any()


@pytest.mark.parametrize(
    ("kind", "found", "experts"),
    [("llama", 2, 0), ("opt", 0, 0), ("mixtral", 0, 2), ("gpt-oss", 0, 2), ("mamba", 0, 0)],
)
def test_mixtures_of_experts_and_layers_without_mlp_are_left_out(kind, found, experts):
    mlps, of_experts = mlps_of(new_model(kind).base_model)
    assert (len(mlps), of_experts) == (found, experts)


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
