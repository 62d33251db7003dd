"""Packed rows and rows that share their beginning: what is run. `test_forward.py` compares the numbers."""

import itertools

import pytest
import torch
from rows_alone import model_of, rollout
from tiny_models import new_model

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.micro_batches import common_beginnings, lay_out
from dschat_ppo.models.packing import NAME, reason_not_to_pack
from dschat_ppo.models.router_recorder import recorded_router
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_logprobs, response_values


@pytest.mark.parametrize(("kind", "layout", "tokens"), [
    # The last token of a row predicts nothing; of the row without an answer one token remains.
    (PolicyModel, Layout(packed=True), 16 + 13 + 11 + 1 + 13 + 13 + 16 + 13 + 3),
    (PolicyModel, Layout(shares=True), 11 + 5 + 2 + 0 + 9 + 4 + 4 + 7 + 1 + 10 + 3 + 3),
    (ScalarModel, Layout(packed=True), 17 + 14 + 12 + 9 + 14 + 14 + 17 + 14 + 4),
])  # fmt: skip
def test_no_padding_and_each_beginning_once(kind, layout, tokens):
    module, seen = kind(model_of("llama", scalar=kind is ScalarModel), layout), []

    def hook(backbone, args, kwargs):
        seen.append((kwargs["input_ids"].shape, backbone.config._attn_implementation))

    module.backbone.register_forward_pre_hook(hook, with_kwargs=True)
    (response_logprobs if kind is PolicyModel else response_values)(module, rollout(), *[1.0] * (kind is PolicyModel))
    assert seen == [(torch.Size([1, tokens]), NAME)]
    assert module.config._attn_implementation == "sdpa"


def test_the_reason_not_to_pack_is_named():
    assert reason_not_to_pack(new_model("llama")) is None
    assert reason_not_to_pack(new_model("bloom")) == "transformers does not let its attention be replaced"
    eager = new_model("llama")
    eager.config._attn_implementation = "eager"  # that of packed rows has soft caps and sinks too
    assert reason_not_to_pack(eager, "sdpa") == "its attention is 'eager' and not 'sdpa'"
    assert reason_not_to_pack(eager) is reason_not_to_pack(eager, "eager") is None


# Common beginnings


def beginnings(ids, lengths):
    """Rows group after group, the tokens that each leaves to the first row of its group, and the number of that row."""
    order, prompts = common_beginnings(ids, lengths)
    leaders, tokens = prompts.groups.tolist(), prompts.tokens.tolist()
    return order, [0 if row == leader else tokens[row] for row, leader in enumerate(leaders)], leaders


def test_a_layout_by_hand():
    ids = torch.arange(10).repeat(3, 1)
    ids[0, 8:] += 50
    ids[1] += 20
    rows = lay_out(ids, torch.tensor([10, 3, 9]), packs=False, shares=True)
    first = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert rows.tokens.tolist() == [20 + token for token in first] + [8, 9] + [10, 11, 12]
    assert rows.positions.tolist() == [*first, 8, 9, 0, 1, 2]
    assert rows.segments.lengths == [9, 2, 3]
    assert rows.segments.seen == [(0, 0), (0, 8), (11, 11)]
    assert rows.places[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert rows.places[1, :3].tolist() == [11, 12, 13]
    assert rows.places[2, :9].tolist() == first


def most_saved(words: list[list[int]]) -> int:
    """The most tokens that groups of neighbours among sorted rows can leave out, by trying every division of them."""
    best = 0
    for cuts in itertools.product((False, True), repeat=len(words) - 1):
        groups = [[words[0]]]
        for cut, word in zip(cuts, words[1:], strict=True):
            groups[-1].append(word) if not cut else groups.append([word])
        common = [next((n for n, x in enumerate(zip(*group, strict=False)) if len({*x}) > 1), min(map(len, group)))
                  for group in groups]  # fmt: skip
        best = max(best, sum((len(group) - 1) * n for group, n in zip(groups, common, strict=True) if n >= 8))
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


def test_a_beginning_ends_with_the_shorter_row_and_never_holds_padding():
    ids = torch.ones(2, 40, dtype=torch.int64)
    assert beginnings(ids, torch.tensor([40, 12])) == ([1, 0], [12, 0], [1, 1])
    rows = lay_out(ids, torch.tensor([40, 12]), packs=False, shares=True)
    assert len(rows.tokens) == 40


@pytest.mark.parametrize("shared", [7, 9])
def test_rows_stay_separate_where_sharing_saves_little(shared):
    ids = torch.stack([torch.arange(100), 200 + torch.arange(100)])
    ids[1, :shared] = ids[0, :shared]
    assert lay_out(ids, torch.tensor([100, 100]), packs=True, shares=True) is None
    assert lay_out(ids, torch.tensor([100, 99]), packs=True, shares=True).segments.seen is None
    ids[1, :10] = ids[0, :10]  # a twentieth of the tokens
    assert lay_out(ids, torch.tensor([100, 100]), packs=True, shares=True).segments.lengths == [100, 90]


def test_a_shared_token_counts_for_each_of_its_rows_in_the_router_loss():
    lm, rows, counted = new_model("mixtral"), rollout(), torch.arange(9) != 2
    loads = []
    for shares in (False, True):
        with recorded_router(counted, 2) as recorded:
            response_logprobs(PolicyModel(lm, Layout(shares=shares)), rows, 1.0)
        [load] = recorded
        gradient = torch.autograd.grad((load.probability * torch.arange(4.0)).sum(), lm.model.layers[0].mlp.gate.weight)
        loads.append((load, gradient[0]))
    (separate, of_separate), (shared, of_shared) = loads
    assert shared.count == separate.count
    torch.testing.assert_close(shared.chosen, separate.chosen)
    torch.testing.assert_close(shared.probability, separate.probability, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_shared, of_separate, rtol=1e-4, atol=1e-5)
