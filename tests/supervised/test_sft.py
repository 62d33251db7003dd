"""Step 1: the loss over tokens of answers, compared with plain transformers."""

import math

import pytest
import torch
from pairs_of_answers import CPU, ROWS, language_model

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.sft import SFTTeacher, sft_objective, with_perplexity


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


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_with_a_teacher_the_loss_is_a_mixture_of_its_divergence_and_the_cross_entropy(share):
    model, other, indices, sums = language_model(1), language_model(2), [3, PADDING_ROW, 0], MetricSums()
    teacher = SFTTeacher(PolicyModel(other), Divergence("forward_kl"), share)
    objective = sft_objective(0, False, CPU, teacher)
    batch = objective.collate(ROWS, indices)
    divergence, tokens = torch.zeros(()), 0
    for row in (3, 0):
        prompt, answer = ROWS[row]["prompt_ids"], ROWS[row]["answers"][0]
        log_p, log_q = (
            torch.log_softmax(each(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1], dim=-1)
            for each in (model, other)
        )
        divergence, tokens = divergence + (log_q.exp() * (log_q - log_p)).sum(), tokens + len(answer)
    nll = sum(nll_alone(model, row, False)[0] for row in (3, 0))
    loss = objective.loss(PolicyModel(model), batch, torch.tensor(tokens), sums)
    expected = (share * divergence + (1 - share) * nll) / tokens
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    metrics = objective.summary(sums.reduce())
    assert metrics["divergence"] == pytest.approx(divergence.item() / tokens, rel=1e-4)
    assert metrics["loss"] == pytest.approx(nll / tokens, rel=1e-4) and objective.headline == ("divergence", "loss")


def test_the_perplexity_of_a_huge_loss_is_finite():
    assert with_perplexity({"loss": 1e9, "a": 1.0}) == {"loss": 1e9, "a": 1.0, "perplexity": math.exp(700.0)}
