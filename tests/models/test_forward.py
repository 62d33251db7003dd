"""Log-probs, entropies, values and gradients in every layout of rows, compared with each row alone;
arguments of forward passes, and the division of rows into micro-batches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rows_alone import (
    ANSWERS,
    FAMILIES,
    PACKED,
    TEMPERATURE,
    assert_same_gradients,
    both,
    model_of,
    rollout,
    scores_alone,
    values_alone,
)
from tiny_models import HYBRIDS as OF_GENERATION
from tiny_models import POSITIONS, VOCABULARY, new_model

from dschat_ppo.algorithms.divergence import Divergence, dense_divergence
from dschat_ppo.models import backbone
from dschat_ppo.models.backbone import Layout, hidden_window
from dschat_ppo.models.micro_batches import RowPrompts, deal, split_by_tokens
from dschat_ppo.models.wrapped_models import (
    PolicyModel,
    ScalarModel,
    Teaching,
    response_logprobs,
    response_values,
)
from dschat_ppo.supervised.policy_objectives import answer_logprobs
from dschat_ppo.types import ForbiddenTokens, Rollout, full_sequences

LAYOUTS = {
    "plain": Layout(fused=False),
    "padded": Layout(),
    "padded few": Layout(reads_few=True),
    "packed": Layout(packed=True),
    "packed few": Layout(packed=True, reads_few=True),
    "shared": Layout(packed=True, shares=True),
    "shared few": Layout(packed=True, shares=True, reads_few=True),
}
HYBRIDS = (*OF_GENERATION, "nemotron-h", "mamba")
# their scan takes no state to start from
UNSHARED = {(name, "shared few") for name in ("jamba", "mamba")}
OF_PACKED, ENDS = ("packed", "shared few"), ForbiddenTokens((3, 40), 2)
# family, layout, what else is switched on: (ends that could not be drawn), a value of
# --attn_implementation, ...
CASES = [(name, "padded few", None) for name in FAMILIES]
CASES += [(name, "plain", None) for name in ("llama", "opt-350m", "bloom", "gemma2")]
CASES += [(name, way, None) for name in PACKED for way in OF_PACKED]
CASES += [
    (name, way, None) for name in ("llama", "gpt2") for way in ("padded", "packed few", "shared")
]
CASES += [("llama", way, "minimum length") for way in ("plain", "padded", "shared")]
CASES += [
    (name, way, "checkpointing") for name in ("mistral-window", "opt-350m") for way in OF_PACKED
]
CASES += [(name, way, None) for name in HYBRIDS for way in OF_PACKED if (name, way) not in UNSHARED]
CASES += [
    (name, way, "checkpointing")
    for name in ("lfm2", "granite-hybrid", "qwen3.5")
    for way in OF_PACKED
]
CASES += [
    ("gpt-oss", way, choice) for way in ("padded", "packed", "shared") for choice in (None, "eager")
]  # sinks
CASES += [("gemma2", "shared", None)]
CASES += [
    (name, way, choice)
    for way in ("padded", *OF_PACKED)
    for name, choice in (("llama", "sdpa"), ("mistral-window", "eager"), ("gemma2", "eager"))
]
# the other layout of packed rows shows the same of these
BEFORE_A_RELEASE = [
    (name, "packed", change) for name in HYBRIDS for change in (None, "checkpointing")
]
BEFORE_A_RELEASE += [
    ("gpt-oss", "packed", None),
    ("gpt-oss", "padded", "eager"),
    ("qwen3.5", "shared few", "checkpointing"),
]


@pytest.mark.parametrize(
    ("name", "way", "change"),
    [
        pytest.param(*case, marks=pytest.mark.release) if case in BEFORE_A_RELEASE else case
        for case in CASES
    ],
)
def test_scores_and_gradients_are_those_of_each_row_alone(name, way, change):
    lm, rows, ends = model_of(name), rollout(), ENDS if change == "minimum length" else None
    if ends is not None:
        rows = replace(
            rows,
            response_ids=torch.where(rows.response_ids == 40, 4, rows.response_ids.clamp_min(4)),
        )
    policy = PolicyModel(lm, LAYOUTS[way])
    assert policy.layout.fused is (way != "plain")
    if change in ("sdpa", "eager"):
        policy.layout = replace(policy.layout, attention=change)
    own = lm.config._attn_implementation
    expected = scores_alone(lm, rows, ends)
    if change == "checkpointing":
        policy.train().gradient_checkpointing_enable()
    found = both(
        response_logprobs(policy, rows, TEMPERATURE, entropy_grad=True, forbidden_tokens=ends)
    )
    assert lm.config._attn_implementation == own
    assert expected[0].std() > 0.2, "all tokens have the same score, so the test shows nothing"
    assert not any(part[~rows.response_mask].any() for part in found)
    found = tuple(part[rows.response_mask] for part in found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, len(expected[0]))
    loss, of_alone = (
        (weights * logprobs + 0.1 * entropy).sum() for logprobs, entropy in (found, expected)
    )
    # after a shared prompt the chunks of a kernel begin elsewhere, so it rounds elsewhere
    atol = 3e-4 if name in HYBRIDS and way == "shared few" else 3e-5
    assert_same_gradients(loss, of_alone, dict(lm.named_parameters()), atol)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(
            (name, way)
            for name in ("llama", "mistral-window", "gpt2", "opt-350m")
            for way in ("padded few", *OF_PACKED)
        ),
        ("bloom", "padded few"),
        ("gemma2", "padded few"),
        *((name, "shared few") for name in ("lfm2", "granite-hybrid", "qwen3-next")),
        *(  # the other layout of packed rows shows the same
            pytest.param(name, "packed", marks=pytest.mark.release)
            for name in ("lfm2", "granite-hybrid", "qwen3-next")
        ),
    ],
)
def test_values_and_last_scores_and_gradients_are_those_of_each_row_alone(name, way):
    classifier, rows = model_of(name, scalar=True), rollout()
    model, alone = ScalarModel(classifier, LAYOUTS[way]), values_alone(classifier, rows)
    prompts = rows.prompt_mask.sum(dim=1).tolist()
    before = torch.cat([v[start - 1 : -1] for v, start in zip(alone, prompts, strict=True)])
    values = response_values(model, rows)[rows.response_mask]
    torch.testing.assert_close(values, before, rtol=0, atol=1e-5)
    # prompts share their last token: its gradients add up
    weights = torch.linspace(-1, 1, len(before))
    assert_same_gradients(
        (weights * values).sum(), (weights * before).sum(), dict(classifier.named_parameters())
    )
    ids, lengths = full_sequences(rows)
    with torch.no_grad():
        ends = torch.stack([v[-1] for v in alone])
        torch.testing.assert_close(model(ids, lengths, last_only=True), ends, rtol=0, atol=1e-5)
        whole = model(ids, lengths).gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(whole, ends, rtol=0, atol=1e-5)
        wanted = (torch.arange(ids.shape[1]) % 3 == 1) & (
            torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        )
        expected = torch.cat([v[mask[: len(v)]] for v, mask in zip(alone, wanted, strict=True)])
        torch.testing.assert_close(
            model(ids, lengths, read_mask=wanted), expected, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("way", ["padded", "packed", "plain"])
def test_ends_that_could_not_be_drawn_have_no_probability_in_fp16(way):
    lm, rows = model_of("llama").half(), rollout()
    rows = replace(rows, response_ids=torch.where(rows.response_ids == 3, 4, rows.response_ids))
    with torch.no_grad():
        lm.lm_head.weight[40] *= 8
    policy = PolicyModel(lm, LAYOUTS[way])
    found = response_logprobs(policy, rows, TEMPERATURE, True, forbidden_tokens=ENDS)
    expected, free = scores_alone(lm.float(), rows, ENDS), scores_alone(lm, rows)
    for a, b in zip(both(found), expected, strict=True):
        torch.testing.assert_close(a[rows.response_mask], b, rtol=0, atol=0.05)
    assert (expected[0] - free[0]).abs().max() > 0.5


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gpt-neo", "gemma2"])
def test_ids_in_padding_change_nothing(name):
    policy, (one, other) = (
        PolicyModel(model_of(name)),
        (rollout(padding_seed=seed) for seed in (0, 7)),
    )
    assert not torch.equal(one.response_ids, other.response_ids)
    with torch.no_grad():
        pairs = zip(
            both(response_logprobs(policy, one, 1.0)),
            both(response_logprobs(policy, other, 1.0)),
            strict=True,
        )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("forbidden_tokens", [None, ENDS], ids=["free", "late"])
@pytest.mark.parametrize(
    ("name", "teacher"), [("llama", "qwen3"), ("gemma2", "llama"), ("gpt2", "gemma2")]
)
def test_divergences_and_their_gradients_are_those_of_each_row_alone(
    name, teacher, forbidden_tokens
):
    lm, other, rows = model_of(name), model_of(teacher), rollout()

    def table(model):
        found = []
        for ids, length in zip(*full_sequences(rows), strict=True):
            found.append(model(input_ids=ids[None, :length], use_cache=False).logits[0])
        starts = (rows.prompt_mask.sum(dim=1) - 1).tolist()
        logits = (
            torch.cat([each[start:-1] for each, start in zip(found, starts, strict=True)])
            / TEMPERATURE
        )
        if forbidden_tokens is not None:
            early = (torch.arange(max(ANSWERS)) < forbidden_tokens.minimum).expand_as(
                rows.response_mask
            )[rows.response_mask]
            for token in forbidden_tokens.ends:
                logits = logits.index_put(
                    (early.nonzero().squeeze(1), torch.tensor(token)), torch.tensor(-1e4)
                )
        return torch.log_softmax(logits, dim=-1)

    with torch.no_grad():
        layer = response_logprobs(
            PolicyModel(other),
            rows,
            TEMPERATURE,
            forbidden_tokens=forbidden_tokens,
            keeps_layer=True,
        ).layer
    teachings = [Teaching(layer, Divergence(kind)) for kind in ("reverse_kl", "jsd")]
    found = response_logprobs(
        PolicyModel(lm), rows, TEMPERATURE, forbidden_tokens=forbidden_tokens, teachings=teachings
    ).divergences
    log_p, log_q = table(lm), table(other).detach()
    weights = 0.01 * torch.randn(2, len(log_p), generator=torch.Generator().manual_seed(1))
    loss = of_alone = torch.zeros(())
    for divergences, kind, weight in zip(found, ("reverse_kl", "jsd"), weights, strict=True):
        expected = dense_divergence(log_p, log_q, kind)
        torch.testing.assert_close(divergences[rows.response_mask], expected, rtol=1e-4, atol=2e-5)
        assert not divergences[~rows.response_mask].any()
        loss = loss + (weight * divergences[rows.response_mask]).sum()
        of_alone = of_alone + (weight * expected).sum()
    assert_same_gradients(loss, of_alone, dict(lm.named_parameters()))


def test_rows_without_a_response_give_zero_gradients():
    rows = rollout()
    rows = replace(rows, response_mask=torch.zeros_like(rows.response_mask))
    policy = PolicyModel(model_of("llama"))
    logprobs, entropy = both(response_logprobs(policy, rows, 1.0, entropy_grad=True))
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_hooks_of_the_head_run_around_the_fused_function():
    """ZeRO-3 gathers the head's weight in such hooks. The head gets the states of the response
    tokens only."""
    lm, rows, seen = model_of("llama"), rollout(), []
    lm.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    lm.lm_head.register_forward_hook(
        lambda module, inputs, output: seen.append([o.shape for o in output])
    )
    response_logprobs(PolicyModel(lm), rows, 1.0)
    count = sum(ANSWERS)
    assert seen == [(count, 32), [(count,), (count,)]]
    assert "forward" not in vars(lm.lm_head)


def config(**facts) -> SimpleNamespace:
    text = SimpleNamespace(**facts)
    return SimpleNamespace(get_text_config=lambda: text)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("facts", "received", "hidden"),
    [
        ({}, {0: None, 1: None}, False),
        ({"sliding_window": 8}, {0: 8, 1: 8}, False),
        ({"sliding_window": 8}, {0: None, 1: None}, True),
        ({"sliding_window": 8, "layer_types": [SLIDING, FULL]}, {0: 8, 1: None}, False),
        ({"sliding_window": 8, "layer_types": [SLIDING, FULL]}, {0: None, 1: None}, True),
        ({"sliding_window": 8, "layer_types": [FULL, FULL]}, {0: 8, 1: None}, True),
        ({"layer_types": [FULL, "chunked_attention"]}, {0: None, 1: None}, True),
        ({"layer_types": ["linear_attention", "mlp", "hybrid"]}, {2: None}, False),
        ({"attention_chunk_size": 16}, {0: None}, True),
    ],
)
def test_hidden_windows_by_hand(facts, received, hidden):
    assert hidden_window(config(**facts), received) is hidden


def rollout_of(prompt: int, response: int, rows: int = 3) -> Rollout:
    """Rows with a prompt of `prompt` tokens and responses of up to `response`."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(response, response - rows, -1)
    return Rollout(
        torch.randint(2, VOCABULARY, (rows, prompt), generator=generator),
        torch.ones(rows, prompt, dtype=torch.bool),
        torch.randint(2, VOCABULARY, (rows, response), generator=generator),
        torch.arange(response) < lengths.unsqueeze(1),
        torch.zeros(rows, response),
        torch.zeros(rows, dtype=torch.int8),
    )


def numbers_of(policy: PolicyModel, critic: ScalarModel, rows: Rollout) -> list[torch.Tensor]:
    """Scores of every kind, and the gradients of their sums."""
    ids = torch.cat([rows.prompt_ids, rows.response_ids], dim=1)
    lengths = rows.prompt_ids.shape[1] + rows.response_mask.sum(dim=1)
    answers = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    answers[:, :3] = False
    scores = response_logprobs(policy, rows, 1.0, entropy_grad=True)
    found = [scores.logprobs, scores.entropy, answer_logprobs(policy, ids, answers)]
    values = response_values(critic, rows)
    found += [values, critic(ids, lengths, last_only=True)]
    found.append(critic(ids, lengths).gather(1, (lengths - 1).unsqueeze(1)).squeeze(1))
    leaves = [*policy.parameters(), *critic.parameters()]
    grads = torch.autograd.grad(
        sum(part.double().sum() for part in found), leaves, allow_unused=True
    )
    return found + [gradient for gradient in grads if gradient is not None]


@pytest.mark.parametrize(
    ("name", "prompt", "response", "width"),
    [
        ("llama", 20, 9, 64),
        ("gpt2", 60, 4, 64),
        ("llama", 60, 10, POSITIONS),
        ("gpt2", 80, 16, POSITIONS),
    ],
)
def test_on_a_gpu_rows_have_few_widths_within_the_models_positions_and_the_same_numbers(
    name, prompt, response, width, monkeypatch
):
    """GPT-2 has a table of positions, in which a longer row would find nothing."""
    policy = PolicyModel(new_model(name))
    critic = ScalarModel(new_model(name))
    critic.classifier.score = torch.nn.Linear(32, 1)
    rows = rollout_of(prompt, response)
    expected, widths, sdpa = (
        numbers_of(policy, critic, rows),
        set(),
        torch.nn.functional.scaled_dot_product_attention,
    )

    def spy(query, key, *rest, **options):
        widths.update((query.shape[2], key.shape[2]))
        return sdpa(query, key, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(backbone, "COLUMNS", {"cpu": 64})
    found = numbers_of(policy, critic, rows)
    assert widths == {width}
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_a_split_by_hand():
    lengths = torch.tensor([3, 9, 4, 1, 5, 2])
    assert [part.tolist() for part in split_by_tokens(lengths, 10)] == [[1], [4, 2], [0, 5, 3]]
    assert [part.tolist() for part in split_by_tokens(lengths, 8)] == [[1], [4], [2, 0], [5, 3]]


def test_dealing_by_hand():
    lengths = torch.tensor([1, 8, 3, 6, 5, 2])
    assert [share.tolist() for share in deal(lengths, 2)] == [[1, 2, 5], [3, 4, 0]]
    assert [share.tolist() for share in deal(lengths, 1)] == [[1, 3, 4, 2, 5, 0]]


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_shares_have_equal_rows_and_nearly_equal_tokens(ranks):
    lengths = torch.randint(1, 500, (ranks * 12,), generator=torch.Generator().manual_seed(ranks))
    shares = deal(lengths, ranks)
    assert sorted(torch.cat(shares).tolist()) == list(range(len(lengths)))
    assert {len(share) for share in shares} == {12}
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= int(lengths.max())


def prompts_of(*groups: tuple[int, list[int]]) -> tuple[torch.Tensor, RowPrompts]:
    """Lengths and prompts of rows, from (tokens of the prompt, tokens of each answer) of each
    group."""
    rows = [
        (number, prompt, answer)
        for number, (prompt, answers) in enumerate(groups)
        for answer in answers
    ]
    numbers, prompt, answer = torch.tensor(rows).unbind(dim=1)
    return prompt + answer, RowPrompts(numbers, prompt)


def tokens_run(part: torch.Tensor, lengths: torch.Tensor, prompts: RowPrompts) -> int:
    """Tokens that a model runs which holds each prompt once."""
    here = prompts.at(part)
    each = dict(zip(here.groups.tolist(), here.tokens.tolist(), strict=True))
    return sum(each.values()) + int((lengths[part] - here.tokens).sum())


def test_answers_to_one_prompt_stay_together_and_their_prompt_counts_once():
    # Prompts of 40 with answers of 10; each answer but the first adds 10 tokens and the copy of a
    # prompt, 40 / 8 = 5.
    lengths, prompts = prompts_of((40, [10, 10, 10]), (40, [10]), (40, [10, 10, 10, 10]))
    found = [part.tolist() for part in split_by_tokens(lengths, 95, prompts)]
    # 40 + 40 + 15, 40 + 30 + 10 (50 + 80 > 95), and one row alone
    assert found == [[4, 5, 6, 7], [0, 1, 2], [3]]
    assert [part.tolist() for part in split_by_tokens(lengths, 65, prompts)] == [
        [4, 5],
        [6, 7],
        [0, 1],
        [2],
        [3],
    ]
    assert [part.tolist() for part in split_by_tokens(lengths, 175, prompts)] == [
        [4, 5, 6, 7, 0, 1, 2],
        [3],
    ]


def test_rows_that_share_little_are_divided_as_if_they_shared_nothing():
    generator = torch.Generator().manual_seed(1)
    answers = torch.randint(50, 500, (12,), generator=generator).tolist()
    lengths, prompts = prompts_of(
        (7, answers[:4]), (12, answers[4:8]), *((90, [x]) for x in answers[8:])
    )
    for budget in (1, 600, 3000):
        expected = [part.tolist() for part in split_by_tokens(lengths, budget)]
        assert [part.tolist() for part in split_by_tokens(lengths, budget, prompts)] == expected
    for ranks in (1, 2, 4):
        assert [part.tolist() for part in deal(lengths, ranks, prompts)] == [
            p.tolist() for p in deal(lengths, ranks)
        ]


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_groups_contain_each_row_once_within_the_budget(seed):
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    groups = [(drawn(1, 120)[0], drawn(0, 60, drawn(1, 9)[0])) for _ in range(1 + seed)]
    lengths, prompts = prompts_of(*groups)
    for budget in (1, 100, 300, 10_000):
        parts, alone = split_by_tokens(lengths, budget, prompts), split_by_tokens(lengths, budget)
        for found in (parts, alone):
            assert sorted(torch.cat(found).tolist()) == list(range(len(lengths)))
        for part in parts:
            assert (
                len(part) == 1
                or min(tokens_run(part, lengths, prompts), len(part) * lengths[part].max())
                <= budget
            )
        assert all(
            len(part) == 1 or len(part) * int(lengths[part].max()) <= budget for part in alone
        )
    for ranks in (1, 2, 3):
        if len(lengths) % ranks == 0:
            shares = deal(lengths, ranks, prompts)
            assert len(shares) == ranks
            assert sorted(torch.cat(shares).tolist()) == list(range(len(lengths)))


def test_ranks_divide_groups_where_that_evens_their_tokens():
    lengths, prompts = prompts_of(*((384, [64] * 8) for _ in range(3)))
    shares = deal(lengths, 2, prompts)
    # the second group is divided
    assert [part.tolist() for part in shares] == [list(range(12)), list(range(12, 24))]
    lengths, prompts = prompts_of(*((384, [64] * 8) for _ in range(16)))
    assert [len(part) for part in deal(lengths, 2, prompts)] == [64, 64]
    lengths, prompts = prompts_of((384, [64] * 4))
    assert [len(part) for part in deal(lengths, 4, prompts)] == [1, 1, 1, 1]
    # none above the 530 tokens of the longest row
    lengths, prompts = prompts_of((30, [0, 0, 500, 0]))
    assert [part.tolist() for part in deal(lengths, 4, prompts)] == [[0, 1], [2], [3], []]
