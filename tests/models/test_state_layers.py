"""Layers with a state in packed rows: their rows, and rows longer than the chunks of a kernel. `test_forward.py` tests
each kind of model."""

import pytest
import torch
from tiny_models import VOCABULARY, new_model

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.packing import token_states
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.shared_prompts import lay_out
from dschat_ppo.models.state_layers import StateRows, state_layers


def test_rows_by_hand():
    """Rows of 12, 11, 5 and 10 tokens of which the second and the last begin with 9 tokens of the first."""
    ids = torch.arange(4 * 12).view(4, 12)
    ids[1, :9] = ids[3, :9] = ids[0, :9]
    lengths = [12, 11, 5, 10]
    packed = lay_out(ids, torch.tensor(lengths), packs=True, shares=True)
    tokens = ids.flatten()[packed.tokens].double()[None, :, None].requires_grad_()  # (1, 12 + 2 + 5 + 1, 1)
    assert tokens.shape[1] == 20
    rows, seen = StateRows.of(packed, lengths), []
    assert rows.blocks == [(3, 12), (1, 5)]

    def add_up(states, factor, mask=None):
        seen.append(states)
        return factor * states.cumsum(dim=1)

    found = rows.around(add_up)(tokens, factor=2, mask=None)
    assert [part[..., 0].tolist() for part in seen][1] == [ids[2, :5].tolist()]
    assert [row[:size] for row, size in zip(seen[0][..., 0].tolist(), (12, 11, 10), strict=True)] == [
        ids[row, : lengths[row]].tolist() for row in (0, 1, 3)
    ]
    expected = 2 * ids.cumsum(dim=1).flatten()[packed.tokens]
    assert found[0, :, 0].tolist() == expected.tolist()
    # the gradient of the sum of all outputs: twice as many as the tokens of its segments from it on
    found.sum().backward()
    last = {12: 12, 11: 2, 10: 1}
    by_hand = [2 * (12 - column + last[11] + last[10] if column < 9 else 12 - column) for column in range(12)]
    place = {int(token): float(grad) for token, grad in zip(packed.tokens, tokens.grad[0, :, 0], strict=True)}
    assert [place[column] for column in range(12)] == by_hand
    assert [place[12 + 9], place[12 + 10], place[3 * 12 + 9]] == [4, 2, 2]
    assert [place[24 + column] for column in range(5)] == [10, 8, 6, 4, 2]


@pytest.mark.parametrize(("name", "chunk"), [("qwen3-next", 64), ("qwen3.5", 64), ("falcon-h1", 16)])
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
