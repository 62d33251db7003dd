"""Scoring a rollout with tiny models, against a computation row by row without padding."""

from dataclasses import fields, replace

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from dschat_ppo.common import dist
from dschat_ppo.experience.maker import ExperienceMaker, RewardShaping, shape_scores
from dschat_ppo.models.policy import PolicyModel
from dschat_ppo.models.scalar_head import ScalarModel
from dschat_ppo.rewards.model import ModelReward
from dschat_ppo.types import FinishReason, Rollout

VOCABULARY = 32
PROMPT_LENGTHS = (2, 5, 1, 4, 3)
LENGTHS = (4, 0, 1, 6, 3)
TEMPERATURE = 0.8
SHAPING = RewardShaping(kl_coef=0.2, reward_clip=0.0, missing_eos_penalty=0.0, gamma=0.9, gae_lambda=0.8)
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, num_labels=1, pad_token_id=None,
)  # fmt: skip
GPT2 = GPT2Config(
    vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, num_labels=1,
    pad_token_id=None,
)  # fmt: skip


def models_of(language_model, classifier, config) -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "actor": PolicyModel(language_model(config)).eval(),
        "reference": PolicyModel(language_model(config)).eval(),
        "critic": ScalarModel(classifier(config)).eval(),
        "reward": ScalarModel(classifier(config)).eval(),
    }


MODELS = {
    "llama": models_of(LlamaForCausalLM, LlamaForSequenceClassification, LLAMA),
    "gpt2": models_of(GPT2LMHeadModel, GPT2ForSequenceClassification, GPT2),
}


@pytest.fixture(params=list(MODELS))
def models(request):
    return MODELS[request.param]


def rollout(padding_seed: int = 0) -> Rollout:
    """Five rows of uneven prompts and responses, one response empty; random ids in padding."""
    generator, padding = torch.Generator().manual_seed(1), torch.Generator().manual_seed(padding_seed)
    prompt_mask = torch.arange(5) >= 5 - torch.tensor(PROMPT_LENGTHS).unsqueeze(1)
    response_mask = torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(1)

    def ids(mask: torch.Tensor) -> torch.Tensor:
        real = torch.randint(0, VOCABULARY, mask.shape, generator=generator)
        return torch.where(mask, real, torch.randint(0, VOCABULARY, mask.shape, generator=padding))

    return Rollout(
        prompt_ids=ids(prompt_mask),
        prompt_mask=prompt_mask,
        response_ids=ids(response_mask),
        response_mask=response_mask,
        rollout_logprobs=torch.where(response_mask, -1.0, 0.0),
        finish_reason=torch.tensor([0, 2, 1, 2, 0], dtype=torch.int8),
    )


def maker_of(models, shaping=SHAPING, budget=20, reward=None, recompute=True) -> ExperienceMaker:
    reward = reward or ModelReward(models["reward"]).scores
    return ExperienceMaker(
        models["actor"], models["reference"], models["critic"], reward, shaping, TEMPERATURE, budget, recompute
    )


def logprobs_alone(model, prompt: torch.Tensor, response: torch.Tensor) -> list[float]:
    logits = model.lm(input_ids=torch.cat([prompt, response]).unsqueeze(0), use_cache=False).logits[0].double()
    table = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return [table[len(prompt) + t - 1, int(token)].item() for t, token in enumerate(response)]


def values_alone(model: ScalarModel, sequence: torch.Tensor) -> list[float]:
    hidden = model.classifier.base_model(input_ids=sequence.unsqueeze(0), use_cache=False).last_hidden_state
    return model.classifier.score(hidden)[0, :, 0].tolist()


@torch.no_grad()
def row_alone(models, rows: Rollout, row: int) -> dict[str, list[float] | float]:
    """All fields of one row from its real tokens alone, in plain Python."""
    prompt, response = rows.prompt_ids[row][rows.prompt_mask[row]], rows.response_ids[row][rows.response_mask[row]]
    sequence, length = torch.cat([prompt, response]), len(response)
    old, ref = (logprobs_alone(models[name], prompt, response) for name in ("actor", "reference"))
    values = values_alone(models["critic"], sequence)[len(prompt) - 1 : len(prompt) - 1 + length]
    score = values_alone(models["reward"], sequence)[-1]
    rewards = [-SHAPING.kl_coef * (a - b) for a, b in zip(old, ref, strict=True)]
    if length:
        rewards[-1] += score
    advantages, following = [0.0] * length, 0.0
    for t in reversed(range(length)):
        next_value = values[t + 1] if t + 1 < length else 0.0
        following = rewards[t] + SHAPING.gamma * next_value - values[t] + SHAPING.gamma * SHAPING.gae_lambda * following
        advantages[t] = following
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return {"old_logprobs": old, "ref_logprobs": ref, "values": values, "scores": score, "rewards": rewards,
            "advantages": advantages, "returns": returns}  # fmt: skip


@pytest.mark.parametrize("budget", [1, 12, 1000])
def test_every_field_matches_the_row_alone(models, budget):
    rows = rollout()
    experience = maker_of(models, budget=budget).make(rows)
    for row in range(5):
        for name, expected in row_alone(models, rows, row).items():
            value = getattr(experience, name)[row]
            real = value.item() if name == "scores" else value[experience.response_mask[row]].tolist()
            assert real == pytest.approx(expected, abs=2e-5), (name, row)


def test_nothing_stands_outside_the_mask(models):
    experience = maker_of(models).make(rollout())
    outside = ~experience.response_mask
    for name in ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        assert getattr(experience, name)[outside].abs().max().item() == 0.0, name
        assert getattr(experience, name).dtype == torch.float32, name


def test_the_rollout_is_carried_over(models):
    rows = rollout()
    experience = maker_of(models).make(rows)
    assert torch.equal(experience.response_mask, rows.response_mask)
    assert torch.equal(experience.response_ids[rows.response_mask], rows.response_ids[rows.response_mask])
    assert torch.equal(experience.prompt_ids[experience.prompt_mask], rows.prompt_ids[rows.prompt_mask])
    assert torch.equal(experience.rollout_logprobs, rows.rollout_logprobs)
    assert torch.equal(experience.finish_reason, rows.finish_reason)


def test_empty_answers_keep_their_row(models):
    rows = rollout()
    cut = torch.full((5,), FinishReason.LENGTH, dtype=torch.int8)
    empty = replace(rows, response_mask=torch.zeros_like(rows.response_mask), finish_reason=cut)
    experience = maker_of(models).make(empty)
    assert experience.scores.shape == (5,)
    assert experience.response_ids.shape[1] >= 1
    assert not experience.response_mask.any()
    assert experience.rewards.abs().max().item() == experience.returns.abs().max().item() == 0.0
    with torch.no_grad():
        expected = [values_alone(models["reward"], rows.prompt_ids[row][rows.prompt_mask[row]])[-1] for row in range(5)]
    assert experience.scores.tolist() == pytest.approx(expected, abs=2e-5)


def test_random_ids_in_padding_change_nothing(models):
    first, second = rollout(padding_seed=0), rollout(padding_seed=1)
    assert not torch.equal(first.response_ids, second.response_ids)
    before, after = maker_of(models).make(first), maker_of(models).make(second)
    for field in fields(before):
        if field.name not in ("prompt_ids", "response_ids"):
            torch.testing.assert_close(
                getattr(before, field.name), getattr(after, field.name), atol=1e-6, rtol=0, msg=field.name
            )


def test_a_policy_equal_to_its_reference_pays_no_kl(models):
    same = {**models, "reference": models["actor"]}
    experience = maker_of(same).make(rollout())
    last = torch.tensor(LENGTHS) - 1
    for row in range(5):
        expected = [0.0] * 6
        if LENGTHS[row]:
            expected[int(last[row])] = experience.scores[row].item()
        assert experience.rewards[row].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("clip", "penalty", "expected"),
    [
        (0.0, 0.0, [7.0, -9.0, 0.5, 3.0]),
        (2.0, 0.0, [2.0, -2.0, 0.5, 2.0]),
        (0.0, 1.5, [7.0, -10.5, 0.5, 1.5]),
        (2.0, 1.5, [2.0, -3.5, 0.5, 0.5]),  # the penalty comes after the clipping
    ],
)
def test_scores_are_clipped_then_penalised_where_eos_is_missing(clip, penalty, expected):
    shaping = replace(SHAPING, reward_clip=clip, missing_eos_penalty=penalty)
    ended = torch.tensor([True, False, True, False])
    assert shape_scores(torch.tensor([7.0, -9.0, 0.5, 3.0]), ended, shaping).tolist() == expected


def test_shaped_scores_go_into_rewards_and_the_models_own_into_scores(models):
    raw = torch.tensor([9.0, 9.0, -9.0, 9.0, 1.0])
    shaping = RewardShaping(kl_coef=0.0, reward_clip=2.0, missing_eos_penalty=0.5, gamma=1.0, gae_lambda=1.0)
    of_length = dict(zip(LENGTHS, raw.tolist(), strict=True))

    def reward(rows):
        return torch.tensor([of_length[n] for n in rows.response_mask.sum(dim=1).tolist()])

    experience = maker_of(models, shaping, budget=20, reward=reward).make(rollout())
    assert torch.equal(experience.scores, raw)
    # Row 1 is empty; rows 1 and 3 lack their EOS.
    assert experience.rewards.sum(dim=1).tolist() == [2.0, 0.0, -2.0, 1.5, 1.0]


@pytest.mark.parametrize(("budget", "sizes"), [(1, [1, 1, 1, 1, 1]), (12, [1, 2, 2]), (20, [2, 3]), (50, [5])])
def test_passes_keep_the_budget_longest_rows_first(models, budget, sizes):
    # tokens of the rows: 6, 5, 2, 10, 6
    seen = []

    def reward(rows):
        seen.append((rows.prompt_mask.sum(1) + rows.response_mask.sum(1)).tolist())
        return torch.zeros(len(rows.ended))

    maker_of(models, budget=budget, reward=reward).make(rollout())
    assert [len(part) for part in seen] == sizes
    assert sum(seen, []) == [10, 6, 6, 5, 2]


def test_a_rank_with_fewer_passes_makes_more_and_keeps_its_rows(models, monkeypatch):
    passes = []

    def reward(rows):
        passes.append(len(rows.ended))
        return torch.zeros(len(rows.ended))

    monkeypatch.setattr(dist, "all_reduce", lambda value, op: value + 3)
    experience = maker_of(models, budget=20, reward=reward).make(rollout())
    assert passes == [2, 3, 3, 3, 3]
    assert torch.equal(experience.response_mask, rollout().response_mask)


def test_recorded_logprobs_replace_the_actors_pass(models):
    rows = rollout()

    def forbidden(*_):
        raise AssertionError("the actor was run")

    experience = maker_of({**models, "actor": forbidden}, recompute=False).make(rows)
    assert torch.equal(experience.old_logprobs, rows.rollout_logprobs)
    expected = maker_of(models).make(rows)
    assert torch.equal(experience.ref_logprobs, expected.ref_logprobs)
    kl_difference = SHAPING.kl_coef * (experience.old_logprobs - expected.old_logprobs)
    torch.testing.assert_close(experience.rewards, expected.rewards - kl_difference, rtol=0, atol=1e-6)


def test_scoring_leaves_no_gradient(models):
    experience = maker_of(models).make(rollout())
    assert not any(getattr(experience, field.name).requires_grad for field in fields(experience))
