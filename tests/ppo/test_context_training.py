"""A PPO step over episodes of several contexts, from the forward passes of scoring to the gradients
of actor and critic, against plain Python over each context alone."""

from copy import deepcopy
from dataclasses import fields, replace

import pytest
import torch
from episodes import (
    Context,
    episodes,
    fixed_episodes,
    logprobs_alone,
    rollout_of,
    values_alone,
)
from hypothesis import given
from hypothesis import strategies as st
from ragged import properties
from rows_alone import TEMPERATURE, assert_same_gradients, model_of
from scored_rows import Computation
from tiny_experience import record
from tiny_tokenizers import tokenizer_of

from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, gae, grpo
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.mini_dataset import MiniDataset, prompts_of
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests
from dschat_ppo.ppo.token_losses import ActorLoss, critic_loss
from dschat_ppo.ppo.update import _rows_with_response
from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.rewards.learned_reward import ModelReward
from dschat_ppo.rewards.reward_source import RewardMixture, RewardRequest
from dschat_ppo.types import ScoredRollout, full_sequences

SCORES = [1.0, -0.5, 2.0]
GROUPS = [4, 4, 9]
FLAGS = AlgorithmFlags(
    gamma=0.9, gae_lambda=0.8, kl_coef=0.2, entropy_coef=0.05, clip_eps=0.1, value_clip_eps=0.1
)
LAYOUTS = {
    "padded": Layout(),
    "packed": Layout(packed=True),
    "shared": Layout(packed=True, shares=True, reads_few=True),
}


def moved(model, seed: int):
    """The model after a small step."""
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return other


def gae_by_loop(rewards, values, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of one episode, whose steps are its chosen tokens in order."""
    advantages, carried, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carried = reward + gamma * next_value - value + gamma * lam * carried
        next_value = value
        advantages.insert(0, carried)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def by_episode(tokens, made: list[list[Context]]) -> list[list[float]]:
    """Numbers of all chosen tokens as lists of each episode."""
    numbers, lists = iter(tokens.tolist()), []
    for episode in made:
        lists.append([next(numbers) for context in episode for _ in context.chosen_columns])
    return lists


def expected_losses(made, old, reference, old_critic, actor, critic):
    """Loss of the actor and of the critic, scalars with gradient, and the advantages and returns of
    the chosen tokens (n,)."""
    with torch.no_grad():
        old_logprobs = logprobs_alone(old, made, TEMPERATURE)[0]
        ref_logprobs = logprobs_alone(reference, made, TEMPERATURE)[0]
        old_values = values_alone(old_critic, made)
    advantages, returns = [], []
    penalties = by_episode(-FLAGS.kl_coef * (old_logprobs - ref_logprobs), made)
    for rewards, values, score in zip(penalties, by_episode(old_values, made), SCORES, strict=True):
        rewards[-1] += score
        of_episode = gae_by_loop(rewards, values, FLAGS.gamma, FLAGS.gae_lambda)
        advantages += of_episode[0]
        returns += of_episode[1]
    raw = torch.tensor(advantages, dtype=torch.float64)
    advantages = ((raw - raw.mean()) / raw.var(correction=0).sqrt()).float()
    returns = torch.tensor(returns)

    logprobs, entropies = logprobs_alone(actor, made, TEMPERATURE)
    ratios = (logprobs - old_logprobs).exp()
    clipped = ratios.clamp(1 - FLAGS.clip_eps, 1 + FLAGS.clip_eps)
    policy = -torch.minimum(ratios * advantages, clipped * advantages).mean()
    values = values_alone(critic, made)
    near = torch.clamp(values, old_values - FLAGS.value_clip_eps, old_values + FLAGS.value_clip_eps)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return policy - FLAGS.entropy_coef * entropies.mean(), 0.5 * errors.mean(), advantages, returns


@pytest.mark.parametrize("way", LAYOUTS)
def test_a_ppo_step_is_that_of_plain_python_over_each_context_alone(way):
    """Micro-batches of one and of two rows; ratios and values are clipped here and there."""
    made, layout = fixed_episodes(), LAYOUTS[way]
    old, old_critic = model_of("llama"), model_of("llama", scalar=True)
    reference, actor, critic = moved(old, 1), moved(old, 2), moved(old_critic, 3)
    passes = ForwardPasses(
        PolicyModel(old, layout),
        PolicyModel(reference, layout),
        ScalarModel(old_critic, layout),
        TEMPERATURE,
        micro_batch_tokens=70,
        old_logprobs="recompute",
        kl_estimator="k1",
    )
    forwarded = passes(rollout_of(made), torch.tensor(GROUPS))
    scored = ScoredRollout(
        **{field.name: getattr(forwarded, field.name) for field in fields(forwarded)},
        source_scores=torch.tensor(SCORES).unsqueeze(1),
        scores=torch.tensor(SCORES),
        baselines=None,
    )
    experience = Computation(FLAGS, 100, 0, 0.0)(scored, step=1)
    of_actor, of_critic, advantages, returns = expected_losses(
        made, old, reference, old_critic, actor, critic
    )
    mask = experience.response_mask
    torch.testing.assert_close(experience.returns[mask], returns, rtol=0, atol=1e-5)
    torch.testing.assert_close(experience.advantages[mask], advantages, rtol=0, atol=2e-5)
    assert not experience.advantages[~mask].any()

    dataset = MiniDataset(3, 70, 100, 0, layout.shares, layout.packed)
    [minibatch] = dataset.minibatches(experience, 1, step=1)
    assert len(minibatch.micro_batches) == 2
    policy = PolicyModel(actor, layout)
    loss_of, sums = ActorLoss(policy, FLAGS, TEMPERATURE), MetricSums()
    found = sum(
        loss_of(part, minibatch, FLAGS.entropy_coef, sums) for part in minibatch.micro_batches
    )
    torch.testing.assert_close(found, of_actor, rtol=0, atol=1e-5)
    assert_same_gradients(found, of_actor, dict(actor.named_parameters()), atol=1e-5)
    found = sum(
        critic_loss(ScalarModel(critic, layout), part, minibatch, FLAGS, sums)
        for part in minibatch.micro_batches
    )
    torch.testing.assert_close(found, of_critic, rtol=0, atol=1e-5)
    assert_same_gradients(found, of_critic, dict(critic.named_parameters()), atol=1e-5)
    metrics = sums.reduce()
    assert metrics["policy/clip_fraction"] > 0 and metrics["value/clip_fraction"] > 0


def inputs_of(made: list[list[Context]], seed: int) -> AdvantageInputs:
    rows = rollout_of(made)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, *rows.response_mask.shape, generator=generator)
    return AdvantageInputs(
        rewards=torch.where(rows.response_mask, rewards, 0.0),
        values=torch.where(rows.response_mask, values, 0.0),
        response_mask=rows.response_mask,
        groups=torch.zeros(len(made), dtype=torch.int64),
        baselines=None,
        gamma=0.9,
        lam=0.7,
    )


@properties
@given(made=episodes(), seed=st.integers(0, 99))
def test_advantages_go_on_from_a_context_to_the_next(made, seed):
    inputs = inputs_of(made, seed)
    mask = inputs.response_mask
    advantages, returns = gae(inputs)
    numbers = zip(
        by_episode(inputs.rewards[mask], made),
        by_episode(inputs.values[mask], made),
        by_episode(advantages[mask], made),
        by_episode(returns[mask], made),
        strict=True,
    )
    for rewards, values, *found in numbers:
        for column, expected in zip(found, gae_by_loop(rewards, values, 0.9, 0.7), strict=True):
            assert column == pytest.approx(expected, abs=1e-5)


def test_an_episode_counts_once_in_its_group_however_it_was_split():
    made = fixed_episodes()
    inputs = inputs_of(made, 0)
    whole = [[Context(e[0].prompt, [5] * 9, [True] * 9)] for e in made]  # as rows of one context
    scores = zero_but_last(rollout_of(made).response_mask)
    split, _ = grpo(replace(inputs, rewards=scores))
    alone_inputs = replace(
        inputs_of(whole, 0), rewards=zero_but_last(rollout_of(whole).response_mask)
    )
    unsplit, _ = grpo(alone_inputs)
    for row in range(3):
        [of_split] = set(split[row][inputs.response_mask[row]].tolist())
        [of_unsplit] = set(unsplit[row].tolist())
        assert of_split == of_unsplit != 0


def zero_but_last(mask: torch.Tensor) -> torch.Tensor:
    """Rewards of rows with this mask: their score on their last chosen token."""
    rewards = torch.zeros(mask.shape)
    for row, score in enumerate(SCORES):
        rewards[row, mask[row].nonzero().max()] = score
    return rewards


def test_rows_of_a_group_with_prompts_of_their_own_share_none():
    made = fixed_episodes()  # the first two begin alike
    rows = record(ScoredRollout, rollout_of(made).response_mask, groups=torch.tensor([4, 4, 4]))
    rows = replace(rows, **{f: getattr(rollout_of(made), f) for f in ("prompt_ids", "prompt_mask")})
    assert prompts_of(rows).groups.tolist() == [4, 4, 4]
    prompts = prompts_of(replace(rows, contexts=rollout_of(made).contexts))
    assert prompts.groups[0] == prompts.groups[1] != prompts.groups[2]
    assert prompts.tokens.tolist() == [13, 13, 1]


def test_rows_that_count_are_named_by_sequence():
    """For the load of routers, which is read from sequences."""
    rows = rollout_of(fixed_episodes())
    mask = rows.response_mask & torch.tensor([[True], [False], [True]])
    counted = _rows_with_response(replace(rows, response_mask=mask))
    assert counted.tolist() == [True, True, True, False, True, True]
    assert len(counted) == len(full_sequences(rows)[0])


@torch.no_grad()
def test_reward_sources_see_the_last_context(tmp_path):
    made = fixed_episodes()
    tokenizer = tokenizer_of("bytes")
    seen = {}

    class Source:
        name = "seen"

        def __call__(self, request: RewardRequest, rollout):
            seen["prompts"], seen["responses"] = request.prompts, request.responses
            return torch.zeros(len(request))

    class Prompts:
        def __getitem__(self, index):
            return {"row": "{}"}

    (tmp_path / "ids.py").write_text(
        "def ids(completions, completion_ids, **columns):\n"
        "    return [float(sum(row)) for row in completion_ids]\n"
    )
    of_ids = FunctionReward(parse_function(f"{tmp_path}/ids.py:ids"), 1, 10.0)
    mixture = RewardMixture([(Source(), 1.0), (of_ids, 1.0)])
    requests = RewardRequests(mixture, Prompts(), tokenizer)
    rows = rollout_of(made)
    scores = mixture(requests.request(rows, [0, 1, 2], 0), rows)
    of_ids.close()
    assert scores.total.tolist() == [sum(episode[-1].response) for episode in made]
    for row, episode in enumerate(made):
        last = episode[-1]
        assert seen["prompts"][row] == tokenizer.decode(last.prompt)
        assert seen["responses"][row] == tokenizer.decode(last.response)

    classifier = model_of("llama", scalar=True)
    scores = ModelReward(ScalarModel(classifier))(requests.request(rows, [0, 1, 2], 0), rows)
    for row, episode in enumerate(made):
        states = classifier.base_model(input_ids=torch.tensor([episode[-1].ids])).last_hidden_state
        assert float(scores[row]) == pytest.approx(
            float(classifier.score(states)[0, -1, 0]), abs=1e-5
        )
