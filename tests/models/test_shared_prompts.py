"""Rows that begin alike, run with their beginning once, against each row alone in plain transformers."""

import itertools
from dataclasses import replace

import pytest
import torch
from test_forward import PACKED, TEMPERATURE, VOCABULARY, both, model_of, rows_alone, scores_alone
from test_packing import seen_by_the_backbone
from tiny_models import new_model as tiny_model

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.models import packing, segment_attention
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.forward import response_logprobs, response_values
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.packing import token_states
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.router_recorder import recorded_router
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.segment_attention import Segments
from dschat_ppo.models.shared_prompts import common_beginnings, lay_out
from dschat_ppo.types import Rollout, full_sequences

PROMPTS = (11, 11, 11, 9, 9, 9, 9, 10)  # lengths of the rows' prompts: three answers to one, four to another, one alone
ANSWERS = (6, 3, 1, 0, 5, 5, 8, 4)
ROWS = (4, 0, 7, 5, 1, 3, 6, 2)  # their order in the rollout
WITH_CLASSIFIER = ["llama", "mistral_window", "qwen2", "gpt2", "opt", "gpt_neox", "phi"]
# Gemma 2's soft cap and the sinks of GPT-OSS have no kernel in PyTorch, so transformers does not use its `sdpa` there
CAPPED = {"gemma2": "gemma2", "gpt-oss": "gpt-oss"}


def rollout(vocabulary: int = VOCABULARY) -> Rollout:
    """Eight rows with three prompts; two answers are the same, one is empty; random ids in padding."""
    generator = torch.Generator().manual_seed(3)
    width, longest = max(PROMPTS), max(ANSWERS)
    drawn = {size: torch.randint(0, vocabulary, (width,), generator=generator) for size in sorted(set(PROMPTS))}
    prompt_ids = torch.stack([drawn[size] for size in PROMPTS])
    prompt_mask = torch.arange(width) >= width - torch.tensor(PROMPTS).unsqueeze(1)
    padding = torch.randint(0, vocabulary, prompt_ids.shape, generator=generator)
    response_ids = torch.randint(0, vocabulary, (len(ANSWERS), longest), generator=generator)
    response_ids[5] = response_ids[4]
    response_mask = torch.arange(longest) < torch.tensor(ANSWERS).unsqueeze(1)
    order, zeros = torch.tensor(ROWS), torch.zeros(response_mask.shape)
    prompt_ids = torch.where(prompt_mask, prompt_ids, padding)
    return Rollout(prompt_ids[order], prompt_mask[order], response_ids[order], response_mask[order], zeros,
                   zeros[:, 0].bool())  # fmt: skip


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attn_pdrop = model.config.attention_dropout = model.config.dropout = 0.0
    return model


def beginnings(ids, lengths):
    """Rows group after group, the tokens that each leaves to the first row of its group, and the number of that row."""
    order, prompts = common_beginnings(ids, lengths)
    leaders, tokens = prompts.groups.tolist(), prompts.tokens.tolist()
    return order, [0 if row == leader else tokens[row] for row, leader in enumerate(leaders)], leaders


# Layout


def test_the_packed_row_holds_each_beginning_once():
    policy = PolicyModel(model_of("llama", 1), Layout(shares=True))
    seen = seen_by_the_backbone(policy)
    response_logprobs(policy, rollout(), 1.0)
    # The last token of a row predicts nothing; of the row without an answer one token remains.
    assert seen == [(torch.Size([1, 11 + 5 + 2 + 0 + 9 + 4 + 4 + 7 + 1 + 10 + 3]), packing.NAME)]


def test_a_layout_by_hand():
    ids = torch.arange(10).repeat(3, 1)
    ids[0, 8:] += 50
    ids[1] += 20
    rows = lay_out(ids, torch.tensor([10, 3, 9]), packs=False, shares=True)
    first = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert rows.tokens.tolist() == [20 + token for token in first] + [8, 9] + [10, 11, 12]
    assert rows.positions.tolist() == [*first, 8, 9, 0, 1, 2]
    assert rows.lengths == [9, 2, 3]
    assert rows.seen == [(0, 0), (0, 8), (11, 11)]
    assert rows.places[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert rows.places[1, :3].tolist() == [11, 12, 13]
    assert rows.places[2, :9].tolist() == first


def test_groups_leave_the_fewest_tokens():
    """All rows begin with the same ten tokens (a template), and each prompt of 30 has two answers."""
    template = torch.arange(10)
    prompts = [torch.cat([template, 100 * (1 + p) + torch.arange(20)]) for p in range(2)]
    ids = torch.stack([torch.cat([prompts[row % 2], 1000 + 10 * row + torch.arange(3)]) for row in range(4)])
    order, shared, leaders = beginnings(ids, torch.full((4,), 33))
    assert sorted(shared) == [0, 0, 30, 30]
    assert all(leader % 2 == row % 2 and (shared[row] == 0) == (leader == row) for row, leader in enumerate(leaders))
    assert {row % 2 for row in order[:2]} != {row % 2 for row in order[2:]}
    alone = ids[:2]  # one answer to each: the template is worth sharing
    assert sorted(beginnings(alone, torch.full((2,), 33))[1]) == [0, 10]


def groups_by_trying_all(common):
    """Groups of sorted rows that share `common` first tokens with the next, by trying every start for every end."""
    saved, begin = [0], [0]
    for end in range(1, len(common) + 2):
        best, start = saved[-1], end - 1
        for first in range(end - 2, -1, -1):
            shared = min(common[first : end - 1])
            total = saved[first] + (end - 1 - first) * shared
            if shared >= 8 and total > best:
                best, start = total, first
        saved.append(best)
        begin.append(start)
    groups, end = [], len(common) + 1
    while end > 0:
        groups.append((begin[end], end))
        end = begin[end]
    return groups


def test_random_rows_are_grouped_as_by_trying_all_groups():
    generator = torch.Generator().manual_seed(5)
    for _ in range(150):
        rows, width = (int(torch.randint(1, most, (), generator=generator)) for most in (24, 8))
        ids = torch.randint(0, 2, (rows, width), generator=generator).repeat_interleave(5, dim=1)
        lengths = torch.randint(1, 5 * width + 1, (rows,), generator=generator)
        words = [row[:size].tolist() for row, size in zip(ids, lengths.tolist(), strict=True)]
        order, shared, leaders = beginnings(ids, lengths)
        common = [
            next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
            for one, two in itertools.pairwise(words[row] for row in order)
        ]
        wanted_shared, wanted_leaders = [0] * rows, list(range(rows))
        for start, end in groups_by_trying_all(common):
            for row in order[start + 1 : end]:
                wanted_shared[row], wanted_leaders[row] = min(common[start : end - 1]), order[start]
        assert (shared, leaders) == (wanted_shared, wanted_leaders)


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
    assert lay_out(ids, torch.tensor([100, 99]), packs=True, shares=True).seen is None
    ids[1, :10] = ids[0, :10]  # a twentieth of the tokens
    assert lay_out(ids, torch.tensor([100, 100]), packs=True, shares=True).lengths == [100, 90]


def test_a_row_without_a_common_beginning_is_laid_out_as_packed_rows():
    ids, lengths = torch.arange(30).view(3, 10), torch.tensor([10, 4, 7])
    shared, packed = (lay_out(ids, lengths, packs=True, shares=shares) for shares in (True, False))
    assert torch.equal(shared.tokens, packed.tokens) and shared.lengths == packed.lengths == [10, 4, 7]


# Numbers


@pytest.mark.parametrize("name", PACKED)
def test_scores_and_gradients_are_those_of_each_row_alone(name):
    lm, rows = model_of(name, 1), rollout()
    weights = torch.linspace(-1, 1, int(rows.response_mask.sum()))
    parameters = dict(lm.named_parameters())

    def gradients(logprobs, entropies):
        return torch.autograd.grad((weights * logprobs + 0.1 * entropies).sum(), parameters.values(), allow_unused=True)

    found = both(response_logprobs(PolicyModel(lm, Layout(shares=True)), rows, TEMPERATURE, entropy_grad=True))
    found, expected = tuple(part[rows.response_mask] for part in found), scores_alone(lm, rows)
    assert expected[0].std() > 0.2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for key, a, b in zip(parameters, gradients(*found), gradients(*expected), strict=True):
        if b is None:
            assert a is None, key
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", WITH_CLASSIFIER)
def test_values_and_last_scores_are_those_of_each_row_alone(name):
    classifier, rows = model_of(name, 2), rollout()
    model = ScalarModel(classifier, Layout(shares=True))
    ids, lengths = full_sequences(rows)
    with torch.no_grad():
        alone = [classifier.score(classifier.base_model(input_ids=row).last_hidden_state)[0, :, 0]
                 for _, row in rows_alone(rows)]  # fmt: skip
        before = torch.cat([v[start - 1 : -1] for v, (start, _) in zip(alone, rows_alone(rows), strict=True)])
        torch.testing.assert_close(response_values(model, rows)[rows.response_mask], before, rtol=0, atol=1e-5)
        ends = torch.stack([v[-1] for v in alone])
        torch.testing.assert_close(model(ids, lengths, last_only=True), ends, rtol=0, atol=1e-5)
        whole = model(ids, lengths).gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(whole, ends, rtol=0, atol=1e-5)
        wanted = (torch.arange(ids.shape[1]) % 3 == 1) & (torch.arange(ids.shape[1]) < lengths.unsqueeze(1))
        expected = torch.cat([v[mask[: len(v)]] for v, mask in zip(alone, wanted, strict=True)])
        torch.testing.assert_close(model(ids, lengths, wanted=wanted), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt2", "opt"])
def test_checkpointed_layers_share_again_in_the_backward_pass(name):
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(without_dropout(model_of(name, 1)), Layout(shares=True)).train()
        if checkpointing:
            policy.gradient_checkpointing_enable()
        response_logprobs(policy, rollout(), 1.0).logprobs.sum().backward()
        gradients.append({key: p.grad for key, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", CAPPED)
def test_soft_caps_and_sinks_see_the_beginning_too(name):
    """Their attention is exact; whether a model of theirs shares is decided by `select_kernels`."""
    model = tiny_model(name).base_model
    ids, lengths = full_sequences(rollout(48))
    places = torch.arange(ids.numel()).view(ids.shape)
    with torch.no_grad():
        states, places = token_states(model, Layout(shares=True), ids, lengths, places)
        assert len(states) < lengths.sum()
        for row, length in enumerate(lengths.tolist()):
            alone = model(input_ids=ids[row : row + 1, :length]).last_hidden_state[0]
            torch.testing.assert_close(states[places[row, :length]], alone, rtol=0, atol=1e-5)


def test_a_shared_token_counts_for_each_of_its_rows_in_the_router_loss():
    policy, rows = PolicyModel(tiny_model("mixtral")), rollout(48)
    counted = torch.arange(8) != 2
    loads = []
    for shares in (False, True):
        policy.layout = replace(policy.layout, shares=shares)
        with recorded_router(counted, 2) as recorder:
            response_logprobs(policy, rows, 1.0)
        [load] = recorder.loads
        gradient = torch.autograd.grad(
            (load.probability * torch.arange(4.0)).sum(), policy.lm.model.layers[0].mlp.gate.weight
        )
        loads.append((load, gradient[0]))
    (separate, of_separate), (shared, of_shared) = loads
    assert shared.count == separate.count
    torch.testing.assert_close(shared.chosen, separate.chosen)
    torch.testing.assert_close(shared.probability, separate.probability, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_shared, of_separate, rtol=1e-4, atol=1e-5)


# Selection


@pytest.mark.parametrize("kind", ["module", "config", "router"])
def test_a_model_with_noise_in_training_does_not_share(kind):
    model = without_dropout(tiny_model("mixtral" if kind == "router" else "llama"))
    if kind == "module":
        model.model.layers[0].mlp.register_module("noise", torch.nn.Dropout(0.1))
    elif kind == "config":
        model.config.attention_dropout = 0.1
    else:
        model.config.router_jitter_noise = 0.1
    policy = PolicyModel(model)
    select_kernels(policy)
    assert policy.layout.packed and not policy.layout.shares
    select_kernels(policy.eval())
    assert policy.layout.shares, "a reference or a reward model runs without noise"


@pytest.mark.parametrize("by_blocks", [True, False])
def test_wrong_numbers_of_shared_rows_are_found(monkeypatch, by_blocks):
    """A kernel that hides what is shared, and one that hides nothing."""
    if not by_blocks:
        monkeypatch.setattr(operations, "kernels", lambda: None)
    policy = PolicyModel(tiny_model("llama").to(torch.bfloat16))
    select_kernels(policy)
    assert policy.layout.shares
    blocks, grouped = segment_attention.blockwise_attention, segment_attention._grouped_attention
    broken = {
        "blockwise_attention": lambda q, k, v, parts, *o: blocks(q, k, v, Segments(parts.lengths), *o),
        "_grouped_attention": lambda q, k, v, band, **o: grouped(q, k, v, None, **o),
    }
    for name, function in broken.items():
        monkeypatch.setattr(segment_attention, name, function)
    policy.layout = replace(policy.layout, shares=False)
    select_kernels(policy)
    assert policy.layout.packed and not policy.layout.shares


def test_a_head_that_needs_whole_logits_is_not_shared():
    lm, rows = model_of("llama", 1), rollout()
    policy = PolicyModel(lm, Layout(fused=False, shares=True))
    scores = response_logprobs(policy, rows, TEMPERATURE, distributions=True)
    torch.testing.assert_close(scores.logprobs[rows.response_mask], scores_alone(lm, rows)[0], rtol=0, atol=1e-5)
    policy.layout = Layout(fused=False)
    select_kernels(policy)
    assert not policy.layout.shares
