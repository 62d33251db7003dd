"""Layers with a state in packed rows: their rows, and rows longer than the chunks of a kernel.
`test_forward.py` tests each kind of model."""

import pytest
import torch
from tiny_models import VOCABULARY, new_model

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.micro_batches import lay_out
from dschat_ppo.models.packing import token_states
from dschat_ppo.models.pass_rows import PassRows
from dschat_ppo.models.state_layers import StateRows, state_layers
from dschat_ppo.models.wrapped_models import PolicyModel

IDS = torch.arange(9 * 12).view(9, 12)
IDS[1, :9] = IDS[3, :9] = IDS[4, :9] = IDS[0, :9]
IDS[6, :10] = IDS[7, :10] = IDS[5, :10]
LENGTHS = [12, 11, 5, 10, 9, 12, 11, 12, 1]


def mixed(states, factor, cache_params=None):
    """Of each token (b, T, 1): `factor` times the sum of it and the two before it, and of 0.1 times
    all up to it."""
    x = states.transpose(1, 2)
    whole, before = x, 0
    if cache_params is not None:
        if (start := cache_params.get_recurrent_state(0)) is not None:
            before = start
        whole = cache_params.update_conv_state(x, 0, conv_kernel_size=3)
    near = torch.nn.functional.pad(whole, (2, 0)).unfold(2, 3, 1).sum(dim=3)[..., -x.shape[2] :]
    total = before + x.cumsum(dim=2)
    if cache_params is not None:
        cache_params.update_recurrent_state(total[..., -1:], 0)
    return factor * (near + 0.1 * total).transpose(1, 2)


@pytest.mark.parametrize("shares", [False, True])
def test_each_row_goes_on_after_its_beginning_and_their_gradients_add_up(shares):
    packed = lay_out(IDS, torch.tensor(LENGTHS), packs=True, shares=shares)
    values, weights = torch.randn(
        2, IDS.numel(), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    values, of_token = values.requires_grad_(), IDS.flatten()[packed.slots]
    rows = StateRows.of(packed.segments.lengths, packed.segments.seen, torch.device("cpu"))
    slots = [block.slots.shape for block in (*rows.beginnings, *rows.rows)]
    if shares:  # beginnings of 9 and of 10 tokens; rows of 5, 3, 2, 2, 2, 1, 1 and 1 tokens
        assert slots == [(1, 9), (1, 10), (2, 5), (6, 2)]
    else:
        assert slots == [(7, 12), (1, 5), (1, 2)]
    whole = rows.around(mixed)(values[of_token][None], factor=2, cache_params=None)[0]
    found = torch.cat([whole[packed.offsets[row, :size]] for row, size in enumerate(LENGTHS)])
    ids = [row[:size] for row, size in zip(IDS, LENGTHS, strict=True)]
    expected = torch.cat([mixed(values[row][None], 2)[0] for row in ids])
    torch.testing.assert_close(found, expected)
    of_row = weights[: len(expected)]
    gradients = [
        torch.autograd.grad((of_row * part).sum(), values)[0] for part in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("name", "chunk"), [("qwen3-next", 64), ("qwen3.5", 64), ("falcon-h1", 16), ("lfm2", 3)]
)
@pytest.mark.parametrize("shares", [False, True])
def test_rows_longer_than_a_chunk_have_the_numbers_of_padded_rows(name, chunk, shares):
    """Chunks begin at a row's first token in both layouts, but after a shared beginning they begin
    anew."""
    lm = new_model(name, initializer_range=0.2)
    ids = torch.randint(2, VOCABULARY, (5, 90), generator=torch.Generator().manual_seed(0))
    ids[1:3, :50] = ids[:1, :50]  # the answers begin within a chunk
    wanted = torch.arange(90) < torch.tensor([90, 66, 84, 30, 70]).unsqueeze(1)
    assert chunk < 66
    both = []
    for layout in (Layout(), Layout(packed=True, shares=shares)):
        scores = PolicyModel(lm, layout)(ids, wanted, entropy_grad=True)
        both.append(
            [
                *scores,
                *torch.autograd.grad(sum(part.sum() for part in scores) / 100, [*lm.parameters()]),
            ]
        )
    for padded, packed in zip(*both, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)


def test_hooks_of_a_layer_run_once_around_the_packed_row():
    """ZeRO-3 gathers its weights in such hooks, and those of a convolution that is not called by
    itself."""
    lm, seen = new_model("lfm2"), []
    [layer] = state_layers(lm.model)
    layer.register_forward_pre_hook(
        lambda _, args, named: seen.append(named["hidden_states"].shape), with_kwargs=True
    )
    layer.register_forward_hook(lambda _, args, output: seen.append(output.shape))
    lengths = torch.tensor([9, 3])
    layout = Layout(packed=True)
    rows = PassRows.of(torch.ones(2, 9).long(), lengths, torch.arange(2), layout)
    token_states(lm.model, layout, rows)
    assert seen == [(1, 12, 32), (1, 12, 32)]
    assert "forward" not in vars(layer)
