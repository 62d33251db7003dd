"""Step 2: losses and metrics of pairs, compared with one forward pass of plain transformers per answer."""

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
from transformers import LlamaForCausalLM

from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.policy_objectives import add_references, dpo_objective


def logprobs_alone(model: LlamaForCausalLM) -> np.ndarray:
    """(rows, 2) of every answer."""
    return np.array([[logprob_alone(model, row["prompt_ids"], answer) for answer in row["answers"]] for row in ROWS])


@pytest.fixture(scope="module")
def policy():
    return language_model(1)


@pytest.fixture(scope="module")
def reference():
    return language_model(2)


@pytest.fixture(scope="module")
def rows(reference):
    """The rows with the log-probs of another model."""
    return add_references(PolicyModel(reference), ROWS, 0, CPU, batch_size=2)


def test_reference_logprobs_match_a_forward_pass_per_answer(rows, reference):
    expected = logprobs_alone(reference)
    assert np.abs(expected).min() > 1
    np.testing.assert_allclose(rows["ref_logprobs"], expected, atol=2e-5)


@pytest.mark.parametrize("held_out", [None, ROWS.select([3, 1])])
def test_reference_logprobs_are_added_to_training_and_evaluation_rows(policy, held_out):
    objective = dpo_objective(0, CPU, config_of("--objective", "dpo"))
    prepared = objective.prepare(PolicyModel(policy), TokenRows(ROWS, held_out))
    expected = logprobs_alone(policy)
    np.testing.assert_allclose(prepared.train["ref_logprobs"], expected, atol=2e-5)
    if held_out is None:
        assert prepared.eval is None
        return
    np.testing.assert_allclose(prepared.eval["ref_logprobs"], expected[[3, 1]], atol=2e-5)


def test_an_untrained_policy_has_no_margin_over_its_reference(policy):
    objective = dpo_objective(0, CPU, config_of("--objective", "dpo", "--beta", "1"))
    prepared = objective.prepare(PolicyModel(policy), TokenRows(ROWS, None))
    for indices in ([0], [1, 2], [0, 1, 2, 3, 4]):
        loss, metrics = run_loss(objective, PolicyModel(policy), prepared.train, indices, len(indices))
        assert loss.item() == pytest.approx(math.log(2), abs=1e-5)
        for name in ("margin", "chosen_reward", "rejected_reward"):
            assert abs(metrics[name]) < 1e-5


PAIR = {
    "dpo": lambda d, beta: math.log(1 + math.exp(-beta * d)),
    "dpo_nll": lambda d, beta: math.log(1 + math.exp(-beta * d)),
    "cdpo": lambda d, beta: 0.9 * math.log(1 + math.exp(-beta * d)) + 0.1 * math.log(1 + math.exp(beta * d)),
    "robust_dpo": lambda d, beta: (
        (0.9 * math.log(1 + math.exp(-beta * d)) - 0.1 * math.log(1 + math.exp(beta * d))) / 0.8
    ),
    "ipo": lambda d, beta: (d - 1 / (2 * beta)) ** 2,
    "hinge": lambda d, beta: max(0.0, 1 - beta * d),
}


def expected_of(objective: str, policy, reference, beta: float, nll_coef: float) -> dict[str, float]:
    """Metrics of the real pairs, by loops over single answers."""
    now, before = logprobs_alone(policy), logprobs_alone(reference)
    found = []
    for number in REAL:
        tokens = [len(answer) for answer in ROWS[number]["answers"]]
        ratios = [(now[number, side] - before[number, side]) / (tokens[side] if objective == "ipo" else 1)
                  for side in (0, 1)]  # fmt: skip
        lead, nll = ratios[0] - ratios[1], -now[number, 0] / tokens[0]
        one = {
            "loss": PAIR[objective](lead, beta) + (nll_coef * nll if objective == "dpo_nll" else 0.0),
            "accuracy": float(lead > 0), "margin": beta * lead, "chosen_logprob": now[number, 0],
            "rejected_logprob": now[number, 1], "chosen_reward": beta * ratios[0], "rejected_reward": beta * ratios[1],
        }  # fmt: skip
        found.append(one | ({"nll": nll} if objective == "dpo_nll" else {}))
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


@pytest.mark.parametrize("objective", PAIR)
def test_loss_and_metrics_match_loops_over_single_answers(policy, reference, rows, objective):
    words = ["--objective", objective, "--beta", "0.3"]
    words += ["--label_smoothing", "0.1"] if objective in ("cdpo", "robust_dpo") else []
    words += ["--nll_coef", "0.7"] if objective == "dpo_nll" else []
    expected = expected_of(objective, policy, reference, 0.3, 0.7)
    assert 0 < expected["accuracy"] < 1
    config = config_of(*words)
    loss, metrics = run_loss(dpo_objective(0, CPU, config), PolicyModel(policy), rows)
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert sorted(metrics) == sorted(config.reward.eval_metrics)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-4)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("objective", ["dpo", "dpo_nll"])
def test_loss_and_accuracy_by_data_set_are_those_of_its_pairs_alone(policy, rows, objective):
    made = dpo_objective(0, CPU, config_of("--objective", objective, "--beta", "0.3"))
    sums = MetricSums(("a", "b", "c"))
    batch = made.collate(rows.add_column("source", [2, 0, 0, 1, 2]), [4, PADDING_ROW, 0, 2])
    made.loss(PolicyModel(policy), batch, torch.tensor(9), sums)
    metrics = sums.reduce()
    assert not {"loss/b", "accuracy/b"} & set(metrics), "no pair of the batch"
    for name, numbers in (("a", [2]), ("c", [4, 0])):
        _, alone = run_loss(made, PolicyModel(policy), rows, numbers, len(numbers))
        for metric in ("loss", "accuracy"):
            assert metrics[f"{metric}/{name}"] == pytest.approx(alone[metric], rel=1e-5)


def test_gradients_match_plain_transformers(reference, rows):
    trained = language_model(1)
    loss, _ = run_loss(dpo_objective(0, CPU, config_of("--objective", "dpo_nll")), PolicyModel(trained), rows)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in trained.named_parameters()}
    trained.zero_grad()
    total, before = 0.0, logprobs_alone(reference)
    for number in REAL:
        row, sums = ROWS[number], []
        for answer in row["answers"]:
            table = trained(torch.tensor([row["prompt_ids"] + answer])).logits[0].log_softmax(dim=-1)
            start = len(row["prompt_ids"]) - 1
            sums.append(sum(table[start + i, token] for i, token in enumerate(answer)))
        lead = (sums[0] - before[number, 0]) - (sums[1] - before[number, 1])
        total = total + torch.log1p(torch.exp(-0.1 * lead)) - 0.2 * sums[0] / len(row["answers"][0])
    (total / 3).backward()
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_prompt_of_a_pair_is_run_once_with_the_same_loss_and_gradients(reference):
    found = []
    for shares in (False, True):
        trained = PolicyModel(language_model(1), Layout(packed=True, shares=shares))
        rows = add_references(PolicyModel(reference, Layout(shares=shares)), LONG_PROMPTS, 0, CPU, batch_size=2)
        tokens = tokens_run(trained)
        loss, metrics = run_loss(dpo_objective(0, CPU, config_of("--objective", "dpo")), trained, rows, (2, 0, 1))
        loss.backward()
        found.append((metrics, {name: p.grad for name, p in trained.named_parameters()}, tokens))
    (metrics, gradients, separate), (same, shared_gradients, shared) = found
    assert (separate, shared) == (
        [6 * 29 + 21],
        [6 * 29 + 21 - 3 * 30 - 2],
    )  # two answers begin with the same two tokens
    assert same == pytest.approx(metrics, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
