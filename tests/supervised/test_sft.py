"""Step 1: the loss over tokens of answers, compared with plain transformers."""

import math

import pytest
import torch
from pairs_of_answers import CPU, ROWS, language_model

from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.sft import sft_objective, with_perplexity


@torch.no_grad()
def nll_alone(model, row: int, train_on_prompt: bool) -> tuple[float, int]:
    """Sum of -log p over the counted tokens of one row, and their number."""
    prompt, answer = ROWS[row]["prompt_ids"], ROWS[row]["answers"][0]
    table = torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0].double(), dim=-1)
    first = 1 if train_on_prompt else len(prompt)
    tokens = list(enumerate(prompt + answer))[first:]
    return -sum(float(table[place - 1, token]) for place, token in tokens), len(tokens)


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_the_loss_is_a_mean_over_tokens_of_the_whole_step(train_on_prompt):
    model, indices, sums = language_model(1), [3, PADDING_ROW, 0], MetricSums()
    objective = sft_objective(0, train_on_prompt, CPU)
    batch = objective.collate(ROWS, indices)
    sum_of_row = [nll_alone(model, row, train_on_prompt) for row in (3, 0)]
    tokens = sum(count for _, count in sum_of_row)
    assert objective.counts(batch).tolist()[:2] == [tokens, 2]
    loss = objective.loss(PolicyModel(model), batch, torch.tensor(2 * tokens), sums)  # half of a step
    expected = sum(nll for nll, _ in sum_of_row) / tokens
    assert loss.item() == pytest.approx(expected / 2, rel=1e-4)
    assert loss.requires_grad
    metrics = objective.summary(sums.reduce())
    assert metrics == pytest.approx({"loss": expected, "perplexity": math.exp(expected)}, rel=1e-4)


def test_the_perplexity_of_a_huge_loss_is_finite():
    assert with_perplexity({"loss": 1e9, "a": 1.0}) == {"loss": 1e9, "a": 1.0, "perplexity": math.exp(700.0)}
