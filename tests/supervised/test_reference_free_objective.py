"""ORPO, SimPO and CPO: losses and metrics, compared with one forward pass of plain transformers per answer."""

import math

import pytest
import torch
from pairs_of_answers import CPU, REAL, ROWS, config_of, language_model, run_loss

from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.policy_objectives import reference_free_objective


@pytest.fixture(scope="module")
def policy():
    return language_model(1)


def logprob(model, row, side) -> torch.Tensor:
    answer, prompt = row["answers"][side], row["prompt_ids"]
    table = model(torch.tensor([prompt + answer])).logits[0].log_softmax(dim=-1)
    return sum(table[len(prompt) + i - 1, token] for i, token in enumerate(answer))


def odds(mean: float) -> float:
    return math.exp(mean) / (1 - math.exp(mean))


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def pair_by_hand(objective: str, sums: list[float], tokens: list[int], beta: float) -> dict[str, float]:
    """One pair by the formulas of the papers, with gamma 0.6 and an NLL weight of 0.3 for SimPO and CPO."""
    means = [total / count for total, count in zip(sums, tokens, strict=True)]
    used = sums if objective == "cpo" else means
    lead, nll = used[0] - used[1], -means[0]
    contrast = {
        "orpo": beta * softplus(-math.log(odds(means[0]) / odds(means[1]))),
        "simpo": softplus(-(beta * lead - 0.6)),
        "cpo": softplus(-beta * lead),
    }[objective]
    return {
        "loss": contrast + (1.0 if objective == "orpo" else 0.3) * nll, "contrast": contrast, "nll": nll,
        "accuracy": float(lead > 0), "margin": beta * lead, "chosen_reward": beta * used[0],
        "rejected_reward": beta * used[1], "chosen_logprob": sums[0], "rejected_logprob": sums[1],
    }  # fmt: skip


def words_of(objective: str) -> list[str]:
    words = ["--objective", objective, "--beta", "0.3"]
    words += [] if objective == "orpo" else ["--nll_coef", "0.3"]
    return words + (["--simpo_gamma", "0.6"] if objective == "simpo" else [])


@torch.no_grad()
def expected_of(objective: str, policy, numbers=REAL) -> dict[str, float]:
    found = []
    for row in (ROWS[number] for number in numbers):
        sums = [float(logprob(policy, row, side)) for side in (0, 1)]
        found.append(pair_by_hand(objective, sums, [len(answer) for answer in row["answers"]], 0.3))
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


@pytest.mark.parametrize("objective", ["orpo", "simpo", "cpo"])
def test_loss_and_metrics_match_loops_over_single_answers(policy, objective):
    config = config_of(*words_of(objective))
    made = reference_free_objective(0, CPU, config)
    assert made.prepare is None, "no reference"
    loss, metrics = run_loss(made, PolicyModel(policy), ROWS)
    expected = expected_of(objective, policy)
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert sorted(metrics) == sorted(config.reward.eval_metrics)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-4)
    assert loss.dtype == torch.float32
    part, _ = run_loss(made, PolicyModel(policy), ROWS, num_pairs=12)
    assert part.item() == pytest.approx(loss.item() / 4), "divided by the pairs of the whole step"


@pytest.mark.parametrize("objective", ["orpo", "simpo", "cpo"])
def test_loss_and_accuracy_by_data_set(policy, objective):
    made = reference_free_objective(0, CPU, config_of(*words_of(objective)))
    sums = MetricSums(("a", "b", "c"))
    batch = made.collate(ROWS.add_column("source", [2, 0, 0, 1, 2]), [4, PADDING_ROW, 0, 2])
    made.loss(PolicyModel(policy), batch, torch.tensor(9), sums)
    metrics = sums.reduce()
    assert not {"loss/b", "accuracy/b"} & set(metrics), "no pair of the batch"
    for name, numbers in (("a", [2]), ("c", [4, 0])):
        alone = expected_of(objective, policy, numbers)
        for metric in ("loss", "accuracy"):
            assert metrics[f"{metric}/{name}"] == pytest.approx(alone[metric], rel=1e-4)


@pytest.mark.parametrize("objective", ["orpo", "simpo", "cpo"])
def test_gradients_match_plain_transformers(objective):
    trained = language_model(1)
    made = reference_free_objective(0, CPU, config_of(*words_of(objective)))
    run_loss(made, PolicyModel(trained), ROWS)[0].backward()
    ours = {name: p.grad.clone() for name, p in trained.named_parameters()}
    trained.zero_grad()
    total = 0.0
    for row in (ROWS[number] for number in REAL):
        sums = [logprob(trained, row, side) for side in (0, 1)]
        means = [value / len(answer) for value, answer in zip(sums, row["answers"], strict=True)]
        if objective == "orpo":
            ratio = [torch.log(mean.exp() / (1 - mean.exp())) for mean in means]
            total = total + 0.3 * torch.log1p(torch.exp(ratio[1] - ratio[0])) - means[0]
        else:
            lead = 0.3 * (sums[0] - sums[1]) if objective == "cpo" else 0.3 * (means[0] - means[1]) - 0.6
            total = total + torch.log1p(torch.exp(-lead)) - 0.3 * means[0]
    (total / 3).backward()
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
