"""KTO: baseline, loss and metrics, compared with one forward pass of plain transformers per answer."""

import math

import pytest
import torch
from datasets import Dataset
from pairs_of_answers import CPU, config_of, language_model, logprob_alone

from dschat_ppo.config.supervised_flags import PreferenceFlags
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.policy_objectives import add_kto_references, kto_objective, log_balance, with_baseline

ROWS = Dataset.from_list(
    [
        {"prompt_ids": [5, 6, 7], "answers": [[8, 9, 1]], "label": 1.0},
        {"prompt_ids": [11], "answers": [[12, 13, 14, 15, 1]], "label": 0.0},
        {"prompt_ids": [16, 17], "answers": [[18, 19, 1]], "label": 1.0},
        {"prompt_ids": [16, 17], "answers": [[20, 1]], "label": 0.0},
        {"prompt_ids": [29], "answers": [[30, 1]], "label": 1.0},
    ]
)
OTHERS = [3, 4, 0, 1, 2]  # two rows before, since two rows have the same prompt
WORDS = ["--objective", "kto", "--beta", "0.3", "--kto_desirable_weight", "1.5", "--kto_undesirable_weight", "0.5"]


@pytest.fixture(scope="module")
def policy():
    return language_model(1)


@pytest.fixture(scope="module")
def reference():
    return language_model(2)


@pytest.fixture(scope="module")
def rows(reference):
    return add_kto_references(PolicyModel(reference), ROWS, 0, CPU, 2, 64)


def ratio(policy, reference, row: int, answer_of: int) -> float:
    prompt, answer = ROWS[row]["prompt_ids"], ROWS[answer_of]["answers"][0]
    return logprob_alone(policy, prompt, answer) - logprob_alone(reference, prompt, answer)


def baseline_of(policy, reference, numbers) -> float:
    return max(0.0, sum(ratio(policy, reference, n, OTHERS[n]) for n in numbers) / len(numbers))


def run(objective, policy, rows, micro_batches, num_rows, sources=()):
    model, sums = PolicyModel(policy), MetricSums(sources)
    batches = objective.complete(model, [objective.collate(rows, indices) for indices in micro_batches])
    losses = [objective.loss(model, batch, torch.tensor(num_rows), sums) for batch in batches]
    return sum(losses), objective.summary(sums.reduce()), batches


def test_reference_log_probs_of_own_and_mismatched_answers(rows, reference):
    assert rows["other_row"] == OTHERS
    for number, row in enumerate(rows):
        own = logprob_alone(reference, row["prompt_ids"], row["answers"][0])
        other = logprob_alone(reference, row["prompt_ids"], ROWS[OTHERS[number]]["answers"][0])
        assert row["ref_logprobs"] == pytest.approx([own, other], abs=2e-5)


def metrics_by_hand(policy, reference, numbers, baseline) -> dict[str, float]:
    ratios = {n: ratio(policy, reference, n, n) for n in numbers}
    losses, right = {}, {}
    for n, r in ratios.items():
        good = ROWS[n]["label"] == 1.0
        gain = r - baseline if good else baseline - r
        weight = 1.5 if good else 0.5
        losses[n], right[n] = weight - weight / (1 + math.exp(-0.3 * gain)), float(gain > 0)
    sides = [[n for n in numbers if ROWS[n]["label"] == label] for label in (1.0, 0.0)]
    rewards = [0.3 * sum(ratios[n] for n in side) / len(side) for side in sides]
    logprobs = [
        sum(logprob_alone(policy, ROWS[n]["prompt_ids"], ROWS[n]["answers"][0]) for n in side) / len(side)
        for side in sides
    ]
    return {
        "loss": sum(losses.values()) / len(numbers), "kl": baseline, "accuracy": sum(right.values()) / len(numbers),
        "chosen_reward": rewards[0], "rejected_reward": rewards[1], "chosen_logprob": logprobs[0],
        "rejected_logprob": logprobs[1], "margin": rewards[0] - rewards[1],
    }  # fmt: skip


@pytest.mark.parametrize("swap", [False, True])
def test_loss_and_metrics_match_loops_over_single_answers(policy, reference, swap):
    """With both models swapped the mean of the mismatched log-ratios has the other sign, so one of them is clamped."""
    policy, reference = (reference, policy) if swap else (policy, reference)
    rows = add_kto_references(PolicyModel(reference), ROWS, 0, CPU, 3, 64)
    numbers = [4, 0, 3, 1]
    objective = kto_objective(0, CPU, config_of(*WORDS))
    baseline = baseline_of(policy, reference, numbers)
    loss, metrics, _ = run(objective, policy, rows, [[4, PADDING_ROW, 0, 3, 1]], 4)
    expected = metrics_by_hand(policy, reference, numbers, baseline)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert sorted(metrics) == sorted(config_of(*WORDS).reward.eval_metrics)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-4) and loss.dtype == torch.float32


def test_the_baseline_does_not_depend_on_the_micro_batches(policy, rows):
    objective = kto_objective(0, CPU, config_of(*WORDS))
    splits = [[[0, 1, 2, 3, 4]], [[3, 0], [1, 4], [2, PADDING_ROW]], [[4], [3], [2], [1], [0], [PADDING_ROW]]]
    found = [run(objective, policy, rows, split, 5) for split in splits]
    for loss, metrics, batches in found[1:]:
        assert metrics == pytest.approx(found[0][1], rel=1e-5)
        assert loss.item() == pytest.approx(found[0][0].item(), rel=1e-5)
        assert all(batch.baseline.shape == batch.row_mask.shape for batch in batches)


def test_the_baseline_has_no_gradient_and_no_dropout():
    objective, found = kto_objective(0, CPU, config_of(*WORDS)), []
    for policy, reference in ((1, 2), (2, 1)):
        rows = add_kto_references(PolicyModel(language_model(reference)), ROWS, 0, CPU, 5, 64)
        noisy = PolicyModel(language_model(policy, attention_dropout=0.5)).train()
        [batch] = with_baseline(noisy, [objective.collate(rows, [0, 2, 4])])
        assert noisy.training and not batch.baseline.requires_grad
        found.append(baseline_of(language_model(policy), language_model(reference), [0, 2, 4]))
        assert batch.baseline.tolist() == pytest.approx([found[-1]] * 3, abs=1e-4)
    assert max(found) > 0.1


def test_loss_and_accuracy_by_data_set(policy, reference, rows):
    objective = kto_objective(0, CPU, config_of(*WORDS))
    with_sources = rows.add_column("source", [0, 1, 0, 0, 1])
    _, metrics, _ = run(objective, policy, with_sources, [[4, 0], [3, PADDING_ROW]], 3, ("a", "b", "c"))
    baseline = baseline_of(policy, reference, [4, 0, 3])
    assert "loss/c" not in metrics
    for name, numbers in (("a", [0, 3]), ("b", [4, 4])):
        weights = {n: 1.5 if ROWS[n]["label"] else 0.5 for n in numbers}
        gains = [(ratio(policy, reference, n, n) - baseline) * (1 if ROWS[n]["label"] else -1) for n in numbers]
        losses = [weights[n] / (1 + math.exp(0.3 * gain)) for n, gain in zip(numbers, gains, strict=True)]
        assert metrics[f"loss/{name}"] == pytest.approx(sum(losses) / 2, rel=1e-4)
        assert metrics[f"accuracy/{name}"] == sum(gain > 0 for gain in gains) / 2


def test_gradients_match_plain_transformers(reference, rows):
    trained = language_model(1)
    objective, numbers = kto_objective(0, CPU, config_of(*WORDS)), [0, 1, 3]
    baseline = baseline_of(trained, reference, numbers)
    run(objective, trained, rows, [numbers], 3)[0].backward()
    ours = {name: p.grad.clone() for name, p in trained.named_parameters()}
    trained.zero_grad()
    total = 0.0
    for n in numbers:
        prompt, answer = ROWS[n]["prompt_ids"], ROWS[n]["answers"][0]
        table = trained(torch.tensor([prompt + answer])).logits[0].log_softmax(dim=-1)
        value = sum(table[len(prompt) + i - 1, token] for i, token in enumerate(answer)) - logprob_alone(
            reference, prompt, answer
        )
        good = ROWS[n]["label"] == 1.0
        total = total + (1.5 if good else 0.5) * (1 - torch.sigmoid(0.3 * (value - baseline) * (1 if good else -1)))
    (total / 3).backward()
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_reference_is_added_to_training_and_evaluation_rows(policy):
    objective = kto_objective(0, CPU, config_of(*WORDS))
    prepared = objective.prepare(PolicyModel(policy), TokenRows(ROWS, ROWS.select([3, 1]), ("a",)))
    assert prepared.sources == ("a",)
    assert prepared.eval["other_row"] == [1, 0]
    assert prepared.eval["ref_logprobs"][0][1] == pytest.approx(
        logprob_alone(policy, ROWS[3]["prompt_ids"], ROWS[1]["answers"][0]), abs=2e-5
    )
    _, metrics, _ = run(objective, policy, prepared.train, [[0, 1, 2, 3, 4]], 5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5), "an untrained policy is its own reference"
    assert metrics["loss"] == pytest.approx((3 * 1.5 + 2 * 0.5) / 2 / 5, rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, 1.5), "3 desirable and 2 undesirable answers; together they weigh 1 : 1"),
        ((1.0, 1.0), "weigh 1.5 : 1; 1 to 1.33 is recommended: --kto_desirable_weight 0.667 to 0.889 with"),
        ((1.0, 3.0), "weigh 0.5 : 1; 1 to 1.33 is recommended: --kto_desirable_weight 2 to 2.67 with"),
    ],
)
def test_the_balance_of_the_answers_is_logged(said, weights, message):
    flags = dict(zip(("kto_desirable_weight", "kto_undesirable_weight"), weights, strict=True))
    log_balance(ROWS, PreferenceFlags(objective="kto", **flags))
    assert len(said) == 1 and message in said[0]
