"""One score of a response from those of its steps."""

import math

import pytest
import torch
from conftest import tiny_config
from scored_rollouts import alone, request, rollout_of
from transformers import AutoTokenizer, LlamaForSequenceClassification

from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards.flags import ProcessRewardFlags
from dschat_ppo.features.process_rewards.scoring import (
    aggregate_steps,
    saved_separator,
    scoring_of,
)
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.rewards.learned_reward import ModelReward, saved_entries


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def flags_of(how: str | None) -> FeatureFlags:
    return FeatureFlags((ProcessRewardFlags(how),))


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(3)
    return ScalarModel(LlamaForSequenceClassification(tiny_config(num_labels=1)).eval())


@pytest.fixture
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "reward")


@pytest.mark.parametrize(("how", "of"), [("min", min), ("product", math.prod)])
def test_step_scores_are_aggregated(engine, tokenizer, how, of):
    end = tokenizer.eos_token
    # the second one is cut
    steps = [["a lamp\n", "in the\n", f"hall{end}"], ["red\n", "blue"], [f"yes\n{end}"], [""]]
    ids = [
        tokenizer.encode("".join(parts), add_special_tokens=False) if parts[0] else []
        for parts in steps
    ]
    prompts = [[5, 6, 7][: 2 + row % 2] for row in range(len(ids))]
    rollout = rollout_of(prompts, ids)
    expected = []
    for prompt, answer, parts in zip(prompts, ids, steps, strict=True):
        text, cuts = "", []
        for part in parts[:-1]:
            text += part
            cuts.append(
                next(
                    n
                    for n in range(1, len(answer))
                    if tokenizer.decode(answer[:n]).startswith(text)
                )
            )
        scores = alone(engine, [prompt + answer[:cut] for cut in [*cuts, len(answer)]])
        expected.append(of([1 / (1 + math.exp(-score)) for score in scores]))
    scoring = scoring_of(flags_of(how), tiny_config(step_separator="\n"), "", tokenizer)
    reward = ModelReward(engine, 40, scoring)
    found = reward(request(*[("", "", {})] * 4), rollout)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert ModelReward(engine)(request(*[("", "", {})] * 4), rollout).tolist() == pytest.approx(
        alone(engine, [prompt + answer for prompt, answer in zip(prompts, ids, strict=True)]),
        abs=1e-5,
    )


def test_what_step_2_saved_with_the_model(tokenizer):
    assert saved_separator(tiny_config(step_separator="|"), "prm") == "|"
    with pytest.raises(
        UserError, match="--process_reward: prm/config.json has no step_separator; train"
    ):
        scoring_of(flags_of("min"), tiny_config(), "prm", tokenizer)
    assert scoring_of(flags_of(None), tiny_config(), "prm", tokenizer) is None
    assert saved_entries() == ("reward_mean", "reward_std", "step_separator")


# In the last row the columns of the steps, 1 and 2, add up to that of no step, 3.
SCORES = torch.tensor([[0.5, -1.0, 2.0, 9.0], [-3.0, 7.0, 7.0, -40.0], [8.0, 1.0, -0.5, 8.0]])
MASK = torch.tensor(
    [[True, False, True, False], [True, False, False, True], [False, True, True, False]]
)
STEPS = [[0.5, 2.0], [-3.0, -40.0], [1.0, -0.5]]


@pytest.mark.parametrize(
    ("how", "of"),
    [
        ("min", min),
        ("mean", lambda p: sum(p) / len(p)),
        ("last", lambda p: p[-1]),
        ("product", math.prod),
    ],
)
def test_aggregates_by_hand(how, of):
    expected = [of([sigmoid(score) for score in row]) for row in STEPS]
    found = aggregate_steps(SCORES, MASK, how)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("how", ["min", "mean", "last", "product"])
def test_values_outside_the_mask_are_ignored(how):
    scores = SCORES.masked_fill(~MASK, math.nan)
    assert (
        aggregate_steps(scores, MASK, how).tolist() == aggregate_steps(SCORES, MASK, how).tolist()
    )
