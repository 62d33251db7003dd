"""Packed rows, and rows that share their beginning: what is run (`test_forward.py` compares the
numbers), recorded loads of routers, the last MLP, and activations in host memory."""

import itertools
from dataclasses import replace

import pytest
import torch
from rows_alone import model_of, rollout
from tiny_models import VOCABULARY, new_model

from dschat_ppo.models import activation_memory
from dschat_ppo.models.activation_memory import last_mlp
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.micro_batches import common_beginnings, lay_out
from dschat_ppo.models.packing import NAME, reason_not_to_pack
from dschat_ppo.models.pass_rows import PassRows
from dschat_ppo.models.wrapped_models import (
    PolicyModel,
    ScalarModel,
    response_logprobs,
    response_values,
)


@pytest.mark.parametrize(
    ("kind", "layout", "tokens"),
    [
        # The last token of a row predicts nothing; of the row without an answer one token remains.
        (PolicyModel, Layout(packed=True), 16 + 13 + 11 + 1 + 13 + 13 + 16 + 13 + 3),
        (PolicyModel, Layout(shares=True), 11 + 5 + 2 + 0 + 9 + 4 + 4 + 7 + 1 + 10 + 3 + 3),
        (ScalarModel, Layout(packed=True), 17 + 14 + 12 + 9 + 14 + 14 + 17 + 14 + 4),
    ],
)
def test_no_padding_and_each_beginning_once(kind, layout, tokens):
    module, seen = kind(model_of("llama", scalar=kind is ScalarModel), layout), []

    def hook(backbone, args, kwargs):
        seen.append((kwargs["input_ids"].shape, backbone.config._attn_implementation))

    module.backbone.register_forward_pre_hook(hook, with_kwargs=True)
    (response_logprobs if kind is PolicyModel else response_values)(
        module, rollout(), *[1.0] * (kind is PolicyModel)
    )
    assert seen == [(torch.Size([1, tokens]), NAME)]
    assert module.config._attn_implementation == "sdpa"


def test_the_reason_not_to_pack_is_named():
    assert reason_not_to_pack(new_model("llama")) is None
    assert (
        reason_not_to_pack(new_model("bloom"))
        == "transformers does not let its attention be replaced"
    )
    eager = new_model("llama")
    eager.config._attn_implementation = "eager"  # that of packed rows has soft caps and sinks too
    assert reason_not_to_pack(eager, "sdpa") == "its attention is 'eager' and not 'sdpa'"
    assert reason_not_to_pack(eager) is reason_not_to_pack(eager, "eager") is None


# Common beginnings


def beginnings(ids, lengths):
    """Rows group after group, the tokens that each leaves to the first row of its group, and the
    number of that row."""
    order, prompts = common_beginnings(ids, lengths)
    leaders, tokens = prompts.groups.tolist(), prompts.tokens.tolist()
    return (
        order,
        [0 if row == leader else tokens[row] for row, leader in enumerate(leaders)],
        leaders,
    )


def test_a_layout_by_hand():
    ids = torch.arange(10).repeat(3, 1)
    ids[0, 8:] += 50
    ids[1] += 20
    rows = lay_out(ids, torch.tensor([10, 3, 9]), packs=False, shares=True)
    first = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert rows.slots.tolist() == [20 + token for token in first] + [8, 9] + [10, 11, 12]
    assert rows.positions.tolist() == [*first, 8, 9, 0, 1, 2]
    assert rows.segments.lengths == [9, 2, 3]
    assert rows.segments.seen == [(0, 0), (0, 8), (11, 11)]
    assert rows.offsets[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert rows.offsets[1, :3].tolist() == [11, 12, 13]
    assert rows.offsets[2, :9].tolist() == first


def test_the_token_at_the_offset_of_each_column_is_that_of_the_row():
    """Also where a row leaves tokens to another one than the row before it."""
    lengths = torch.tensor([12, 12, 13, 5, 12])
    ids = torch.randint(100, (5, 13), generator=torch.Generator().manual_seed(1))
    ids[[1, 4], :10] = ids[2, :10].clone()
    rows = lay_out(ids, lengths, packs=False, shares=True)
    assert len(rows.slots) == int(lengths.sum()) - 2 * 10
    packed = ids.flatten()[rows.slots]
    for row, length in enumerate(lengths.tolist()):
        assert packed[rows.offsets[row, :length]].tolist() == ids[row, :length].tolist()


class GivenAt:
    """What stands for an image: a number for each token of two rows, in place of their ids."""

    def __init__(self, index):
        self.index = index

    def to(self, device):
        return self

    def keys(self, input_ids):
        return torch.where(self.index < 0, input_ids, -1 - self.index)

    def arguments(self, slots, model):
        return {}


@pytest.mark.parametrize(("image_of_second_row", "tokens"), [(0, 12 + 3), (50, 12 + 12)])
def test_beginnings_with_the_same_ids_and_other_images_stay_apart(image_of_second_row, tokens):
    """Two images of one size have equal ids: nine tokens are one beginning if the image is, too."""
    ids = torch.full((2, 12), 7)
    ids[:, 9:] = torch.tensor([[1, 2, 3], [4, 5, 6]])
    index = torch.full((2, 12), -1)
    index[0, 2:6] = torch.arange(4)
    index[1, 2:6] = torch.arange(4) + image_of_second_row
    lengths = torch.tensor([12, 12])
    layout = Layout(packed=True, shares=True)
    slots = torch.arange(24).view(2, 12)
    rows = PassRows.of(ids, lengths, slots, layout, GivenAt(index))
    if rows.packed is None:  # rows of one length, which share nothing
        assert tokens == 24
    else:
        assert len(rows.packed.slots) == tokens


def most_saved(words: list[list[int]]) -> int:
    """The most tokens that groups of neighbours among sorted rows can leave out, by trying every
    division of them."""
    best = 0
    for cuts in itertools.product((False, True), repeat=len(words) - 1):
        groups = [[words[0]]]
        for cut, word in zip(cuts, words[1:], strict=True):
            groups[-1].append(word) if not cut else groups.append([word])
        common = [
            next(
                (n for n, x in enumerate(zip(*group, strict=False)) if len({*x}) > 1),
                min(map(len, group)),
            )
            for group in groups
        ]
        best = max(
            best,
            sum((len(group) - 1) * n for group, n in zip(groups, common, strict=True) if n >= 8),
        )
    return best


def test_groups_of_random_rows_share_what_they_have_in_common_and_save_the_most():
    generator = torch.Generator().manual_seed(5)
    for _ in range(60):
        rows, width = (int(torch.randint(1, most, (), generator=generator)) for most in (8, 8))
        ids = torch.randint(0, 2, (rows, width), generator=generator).repeat_interleave(5, dim=1)
        lengths = torch.randint(1, 5 * width + 1, (rows,), generator=generator)
        words = [row[:size].tolist() for row, size in zip(ids, lengths.tolist(), strict=True)]
        order, shared, leaders = beginnings(ids, lengths)
        assert sorted(order) == list(range(rows))
        assert all(words[row][:n] == words[leaders[row]][:n] for row, n in enumerate(shared))
        assert sum(shared) == most_saved([words[row] for row in order])


def test_a_group_that_saves_much_is_kept_beside_one_that_a_small_beginning_joins():
    """All rows begin alike with 8 tokens, the first two with 40, the last two with 20."""
    ids = torch.stack([torch.arange(100 * group, 100 * group + 40) for group in (0, 0, 1, 2, 2)])
    ids[:, :8], ids[4, 20:] = torch.arange(8), 300
    _, shared, _ = beginnings(ids, torch.full((5,), 40))
    assert sorted(shared) == [0, 0, 0, 20, 40]


def test_a_beginning_ends_with_the_shorter_row_and_never_holds_padding():
    ids = torch.ones(2, 40, dtype=torch.int64)
    assert beginnings(ids, torch.tensor([40, 12])) == ([1, 0], [12, 0], [1, 1])
    rows = lay_out(ids, torch.tensor([40, 12]), packs=False, shares=True)
    assert len(rows.slots) == 40


@pytest.mark.parametrize("shared", [7, 9])
def test_rows_stay_separate_where_sharing_saves_little(shared):
    ids = torch.stack([torch.arange(100), 200 + torch.arange(100)])
    ids[1, :shared] = ids[0, :shared]
    assert lay_out(ids, torch.tensor([100, 100]), packs=True, shares=True) is None
    assert lay_out(ids, torch.tensor([100, 99]), packs=True, shares=True).segments.seen is None
    ids[1, :10] = ids[0, :10]  # a twentieth of the tokens
    assert lay_out(ids, torch.tensor([100, 100]), packs=True, shares=True).segments.lengths == [
        100,
        90,
    ]


ROWS, COLUMNS = 3, 40


def scores_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(2, VOCABULARY, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    scores = torch.stack(model(ids, torch.ones_like(ids).bool(), 0.7, True))
    model.zero_grad()
    (scores * torch.linspace(-1, 1, scores.numel()).view(scores.shape)).sum().backward()
    return scores.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize(
    ("name", "has_mlp"),
    [
        ("llama", True),
        ("gpt2", True),
        ("gemma2", True),
        ("bloom", True),
        ("gpt-neo", True),
        ("opt", False),
        ("mixtral", False),
        ("gpt-oss", False),
        ("mamba", False),
    ],
)
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
    monkeypatch.setattr(activation_memory, "_copy_to_host", copy)
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
    # two layers and the last norm; DeepSpeed's product, which a ZeRO-3 engine leaves in place,
    # keeps its inputs too
    assert 2 <= len(inputs) <= 5 if checkpointing else len(inputs) >= 5
    assert any(shape[-1] == 48 for shape in hosted) != checkpointing  # inside an MLP
    parameters = {tuple(p.shape) for p in model.parameters()}
    assert parameters.isdisjoint(shape for shape in hosted if len(shape) == 2)
