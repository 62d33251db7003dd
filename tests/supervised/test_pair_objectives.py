"""Steps 1 and 2 on policies: SFT, DPO and its variants, ORPO, SimPO and CPO: losses, metrics and
gradients, compared with one forward pass of plain transformers per answer."""

import math

import numpy as np
import pytest
import torch
from pairs_of_answers import (
    CPU,
    LONG_PROMPTS,
    REAL,
    ROWS,
    config_of,
    language_model,
    logprob_alone,
    run_loss,
    tokens_run,
)
from torch.nn.functional import softplus

from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.objective import UsedRows
from dschat_ppo.supervised.policy_objectives import dpo_objective, reference_free_objective
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
    # half of a step
    loss = objective.loss(PolicyModel(model), batch, torch.tensor(2 * tokens), sums)
    expected = sum(nll for nll, _ in sum_of_row) / tokens
    assert loss.item() == pytest.approx(expected / 2, rel=1e-4)
    assert loss.requires_grad
    metrics = objective.summary(sums.reduce())
    assert metrics == pytest.approx({"loss": expected, "perplexity": math.exp(expected)}, rel=1e-4)


def test_the_perplexity_of_a_huge_loss_is_finite():
    assert with_perplexity({"loss": 1e9, "a": 1.0}) == {
        "loss": 1e9,
        "a": 1.0,
        "perplexity": math.exp(700.0),
    }


BETA = 0.3
WORDS = {  # objective -> its flags
    "dpo": "",
    "dpo_nll": "--nll_coef 0.7",
    "cdpo": "--label_smoothing 0.1",
    "robust_dpo": "--label_smoothing 0.1",
    "ipo": "",
    "hinge": "",
    "orpo": "",
    "simpo": "--nll_coef 0.3 --simpo_gamma 0.6",
    "cpo": "--nll_coef 0.3",
}
NLL_WEIGHT = {"dpo_nll": 0.7, "orpo": 1.0, "simpo": 0.3, "cpo": 0.3}
REFERENCE_FREE = ("orpo", "simpo", "cpo")


@pytest.fixture(scope="module")
def rows():
    """The rows and two held-out ones with the log-probs of the model before training, as `prepare`
    adds them."""
    objective = dpo_objective(
        0, CPU, config_of("--objective", "dpo", "--per_device_eval_batch_size", "2")
    )
    return objective.prepare(
        PolicyModel(language_model(2)), TokenRows(ROWS, ROWS.select([3, 1])), UsedRows()
    )


def test_the_reference_log_probs_match_a_forward_pass_per_answer(rows):
    model = language_model(2)
    expected = np.array(
        [
            [logprob_alone(model, row["prompt_ids"], answer) for answer in row["answers"]]
            for row in ROWS
        ]
    )
    assert np.abs(expected).min() > 1
    np.testing.assert_allclose(rows.train["ref_logprobs"], expected, atol=2e-5)
    np.testing.assert_allclose(rows.eval["ref_logprobs"], expected[[3, 1]], atol=2e-5)


def logprob(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    table = model(torch.tensor([prompt + answer])).logits[0].log_softmax(dim=-1)
    return sum(table[len(prompt) + place - 1, token] for place, token in enumerate(answer))


def pair_by_hand(
    objective: str, sums, tokens: list[int], before: list[float]
) -> dict[str, torch.Tensor]:
    """Loss and metrics of one pair by the formulas of the papers, from the log-probs of its
    answers."""
    means = [total / count for total, count in zip(sums, tokens, strict=True)]
    ratios = [now - then for now, then in zip(sums, before, strict=True)]
    used = {
        "orpo": means,
        "simpo": means,
        "cpo": sums,
        "ipo": [r / n for r, n in zip(ratios, tokens, strict=True)],
    }
    chosen, rejected = used.get(objective, ratios)
    lead, nll = chosen - rejected, -means[0]
    held, flipped = softplus(-BETA * lead), softplus(BETA * lead)
    odds = [mean.exp() / (1 - mean.exp()) for mean in means]
    contrast = {
        "dpo": held,
        "dpo_nll": held,
        "cpo": held,
        "cdpo": 0.9 * held + 0.1 * flipped,
        "robust_dpo": (0.9 * held - 0.1 * flipped) / 0.8,
        "ipo": (lead - 1 / (2 * BETA)) ** 2,
        "hinge": torch.relu(1 - BETA * lead),
        "orpo": BETA * softplus((odds[1] / odds[0]).log()),
        "simpo": softplus(0.6 - BETA * lead),
    }[objective]
    found = {
        "loss": contrast + NLL_WEIGHT.get(objective, 0.0) * nll,
        "accuracy": (lead > 0).float(),
        "margin": BETA * lead,
        "chosen_reward": BETA * chosen,
        "rejected_reward": BETA * rejected,
        "chosen_logprob": sums[0],
        "rejected_logprob": sums[1],
    }
    found |= {"nll": nll} if objective in NLL_WEIGHT else {}
    return found | ({"contrast": contrast} if objective in REFERENCE_FREE else {})


@pytest.mark.parametrize("objective", WORDS)
def test_loss_metrics_and_gradients_match_loops_over_single_answers(rows, objective):
    """Three pairs and a filler, of twelve pairs of the step; two are of data set "c", one of
    "a"."""
    config = config_of("--objective", objective, "--beta", str(BETA), *WORDS[objective].split())
    make = reference_free_objective if objective in REFERENCE_FREE else dpo_objective
    made, trained, sums = make(0, CPU, config), language_model(1), MetricSums(("a", "b", "c"))
    assert (made.prepare is None) == (objective in REFERENCE_FREE)
    given = (ROWS if made.prepare is None else rows.train).add_column("source", [2, 0, 0, 1, 2])
    loss = made.loss(
        PolicyModel(trained), made.collate(given, [4, PADDING_ROW, 0, 2]), torch.tensor(12), sums
    )
    loss.backward()
    assert loss.dtype == torch.float32
    gradients = {name: p.grad.clone() for name, p in trained.named_parameters()}
    trained.zero_grad()

    pairs = {}
    for number in REAL:
        row = ROWS[number]
        logprobs = [logprob(trained, row["prompt_ids"], answer) for answer in row["answers"]]
        before = rows.train[number]["ref_logprobs"]
        pairs[number] = pair_by_hand(
            objective, logprobs, [len(answer) for answer in row["answers"]], before
        )
    expected = {name: sum(pair[name].item() for pair in pairs.values()) / 3 for name in pairs[0]}
    assert 0 < expected["accuracy"] < 1
    assert sorted(expected) == sorted(config.reward.eval_metrics)
    for name in ("loss", "accuracy"):
        expected[f"{name}/a"] = pairs[2][name].item()
        expected[f"{name}/c"] = (pairs[4][name] + pairs[0][name]).item() / 2
    assert made.summary(sums.reduce()) == pytest.approx(expected, rel=1e-4)
    assert loss.item() == pytest.approx(expected["loss"] / 4, rel=1e-4)
    (sum(pair["loss"] for pair in pairs.values()) / 12).backward()
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_prompt_of_a_pair_is_run_once_with_the_same_loss_and_gradients():
    found, reference = [], language_model(2)
    for shares in (False, True):
        trained = PolicyModel(language_model(1), Layout(packed=True, shares=shares))
        objective = dpo_objective(0, CPU, config_of("--objective", "dpo"))
        before = PolicyModel(reference, Layout(shares=shares))
        rows = objective.prepare(before, TokenRows(LONG_PROMPTS, None), UsedRows()).train
        tokens = tokens_run(trained)
        loss, metrics = run_loss(objective, trained, rows, (2, 0, 1))
        loss.backward()
        found.append((metrics, {name: p.grad for name, p in trained.named_parameters()}, tokens))
    (metrics, gradients, separate), (same, shared_gradients, shared) = found
    assert separate == [6 * 29 + 21]
    assert shared == [6 * 29 + 21 - 3 * 30 - 2], "two answers begin with the same two tokens"
    assert same == pytest.approx(metrics, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
