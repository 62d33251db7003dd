"""Layers with a state in packed rows: their rows, and rows longer than the chunks of a kernel. `test_forward.py` tests
each kind of model."""

import sys

import pytest
import torch
from tiny_models import VOCABULARY, new_model

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.packing import token_states
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.shared_prompts import lay_out
from dschat_ppo.models.state_layers import StateRows, reach_of, state_layers

IDS = torch.arange(4 * 12).view(4, 12)
IDS[1, :9] = IDS[3, :9] = IDS[0, :9]  # two rows begin with 9 tokens of the first
LENGTHS = [12, 11, 5, 10]


@pytest.mark.parametrize(("reach", "blocks"), [
    (99, [[[*range(12)], [*range(9), 21, 22], [*range(9), 45]], [[24, 25, 26, 27, 28]]]),
    (2, [[[*range(12)]], [[24, 25, 26, 27, 28], [7, 8, 21, 22], [7, 8, 45]]]),
])  # fmt: skip
def test_rows_by_hand(reach, blocks):
    packed, seen = lay_out(IDS, torch.tensor(LENGTHS), packs=True, shares=True), []
    tokens = IDS.flatten()[packed.tokens].double()[None, :, None].requires_grad_()  # (1, 12 + 2 + 5 + 1, 1)
    assert tokens.shape[1] == 20

    def of_three(states, factor, mask=None):
        """`factor` times each token and the two before it."""
        seen.append(states[..., 0].tolist())
        return factor * torch.nn.functional.pad(states, (0, 0, 2, 0)).unfold(1, 3, 1).sum(dim=-1)

    found = StateRows.of(packed, reach).around(of_three)(tokens, factor=2, mask=None)
    assert len(seen) == 2
    for block, rows in zip(seen, blocks, strict=True):
        assert len(block[0]) == len(rows[0])
        assert [row[: len(real)] for row, real in zip(block, rows, strict=True)] == rows
    values = dict(zip(packed.tokens.tolist(), found[0, :, 0].tolist(), strict=True))
    assert [values[token] for token in (8, 9, 25)] == [2 * (6 + 7 + 8), 2 * (7 + 8 + 9), 2 * (24 + 25)]
    assert [values[token] for token in (21, 45)] == [2 * (7 + 8 + 21), 2 * (7 + 8 + 45)]
    # the gradient of the sum of all outputs: how many tokens of all rows see each token, twice
    found.sum().backward()
    gradients = dict(zip(packed.tokens.tolist(), tokens.grad[0, :, 0].tolist(), strict=True))
    assert [gradients[token] for token in (0, 6, 7, 8, 9, 10, 11)] == [6, 6, 10, 12, 6, 4, 2]
    assert [gradients[token] for token in (21, 22, 45, 24, 28)] == [4, 2, 2, 6, 2]


@pytest.mark.parametrize(("name", "reach"), [("lfm2", 2), ("granite-hybrid", sys.maxsize), ("qwen3.5", sys.maxsize)])
def test_a_convolution_alone_sees_few_tokens(name, reach):
    [layer] = state_layers(new_model(name))
    assert reach_of(layer) == reach


@pytest.mark.parametrize(("name", "chunk"), [("qwen3-next", 64), ("qwen3.5", 64), ("falcon-h1", 16), ("lfm2", 3)])
@pytest.mark.parametrize("shares", [False, True])
def test_rows_longer_than_a_chunk_have_the_numbers_of_padded_rows(name, chunk, shares):
    """Chunks begin at a row's first token in both layouts, so even kernels that round by chunk find the same."""
    lm = new_model(name, initializer_range=0.2)
    ids = torch.randint(2, VOCABULARY, (5, 90), generator=torch.Generator().manual_seed(0))
    ids[1:3, :50] = ids[:1, :50]  # the answers begin within a chunk
    wanted = torch.arange(90) < torch.tensor([90, 66, 84, 30, 70]).unsqueeze(1)
    assert chunk < 66
    both = []
    for layout in (Layout(), Layout(packed=True, shares=shares)):
        scores = PolicyModel(lm, layout)(ids, wanted, entropy_grad=True)
        both.append([*scores, *torch.autograd.grad(sum(part.sum() for part in scores) / 100, [*lm.parameters()])])
    for padded, packed in zip(*both, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)


def test_hooks_of_a_layer_run_once_around_the_packed_row():
    """ZeRO-3 gathers its weights in such hooks, and those of a convolution that is not called by itself."""
    lm, seen = new_model("lfm2"), []
    [layer] = state_layers(lm.model)
    layer.register_forward_pre_hook(lambda _, args, named: seen.append(named["hidden_states"].shape), with_kwargs=True)
    layer.register_forward_hook(lambda _, args, output: seen.append(output.shape))
    lengths = torch.tensor([9, 3])
    token_states(lm.model, Layout(packed=True), torch.ones(2, 9).long(), lengths, torch.arange(2))
    assert seen == [(1, 12, 32), (1, 12, 32)]
    assert "forward" not in vars(layer)
