"""KTO: baseline, loss, metrics and gradients, compared with one forward pass of plain transformers
per answer."""

import pytest
import torch
from datasets import Dataset
from pairs_of_answers import CPU, config_of, language_model, logprob_alone

from dschat_ppo.config.supervised_flags import PreferenceFlags
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised import policy_objectives
from dschat_ppo.supervised.objective import UsedRows
from dschat_ppo.supervised.policy_objectives import kto_objective, log_balance, with_baseline

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
CONFIG = config_of(
    "--objective",
    "kto",
    "--beta",
    "0.3",
    "--kto_desirable_weight",
    "1.5",
    "--kto_undesirable_weight",
    "0.5",
)
OBJECTIVE = kto_objective(0, CPU, CONFIG)


def referred_to(reference) -> TokenRows:
    """The rows and two held-out ones with the log-probs of the model before training."""
    return OBJECTIVE.prepare(
        PolicyModel(reference), TokenRows(ROWS, ROWS.select([3, 1]), ("a", "b", "c")), UsedRows()
    )


def ratio(policy, reference, row: int, answer_of: int) -> float:
    prompt, answer = ROWS[row]["prompt_ids"], ROWS[answer_of]["answers"][0]
    return logprob_alone(policy, prompt, answer) - logprob_alone(reference, prompt, answer)


def baseline_of(policy, reference, numbers) -> float:
    return max(0.0, sum(ratio(policy, reference, n, OTHERS[n]) for n in numbers) / len(numbers))


def run(policy, rows, micro_batches, num_rows, sources=()):
    model, sums = PolicyModel(policy), MetricSums(sources)
    batches = OBJECTIVE.complete(
        model, [OBJECTIVE.collate(rows, indices) for indices in micro_batches]
    )
    losses = [OBJECTIVE.loss(model, batch, torch.tensor(num_rows), sums) for batch in batches]
    return sum(losses), OBJECTIVE.summary(sums.reduce()), batches


def test_the_reference_log_probs_of_own_and_mismatched_answers():
    policy = language_model(2)
    rows = referred_to(policy)
    assert (rows.train["other_row"], rows.eval["other_row"], rows.sources) == (
        OTHERS,
        [1, 0],
        ("a", "b", "c"),
    )
    for number, row in enumerate(rows.train):
        answers = [ROWS[number]["answers"][0], ROWS[OTHERS[number]]["answers"][0]]
        expected = [logprob_alone(policy, row["prompt_ids"], answer) for answer in answers]
        assert row["ref_logprobs"] == pytest.approx(expected, abs=2e-5)
    other = logprob_alone(policy, ROWS[3]["prompt_ids"], ROWS[1]["answers"][0])
    assert rows.eval["ref_logprobs"][0][1] == pytest.approx(other, abs=2e-5)
    _, metrics, _ = run(policy, rows.train, [[0, 1, 2, 3, 4]], 5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5), "an untrained policy is its own reference"


@pytest.mark.parametrize("seeds", [(1, 2), (2, 1)])
def test_loss_metrics_and_gradients_match_loops_over_single_answers(seeds):
    """The mean of the mismatched log-ratios has another sign with the models swapped, so one
    baseline is clamped."""
    trained, reference = map(language_model, seeds)
    rows, numbers, source_of = referred_to(reference).train, [4, 0, 3, 1], [0, 1, 0, 0, 1]
    baseline = baseline_of(trained, reference, numbers)
    loss, metrics, _ = run(
        trained,
        rows.add_column("source", source_of),
        [[4, PADDING_ROW, 0], [3, 1]],
        8,
        ("a", "b", "c"),
    )
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trained.named_parameters()}
    trained.zero_grad()
    losses, found = {}, {}  # row -> loss; loss, accuracy, reward and log-prob
    for n in numbers:
        prompt, answer = ROWS[n]["prompt_ids"], ROWS[n]["answers"][0]
        table = trained(torch.tensor([prompt + answer])).logits[0].log_softmax(dim=-1)
        logprob = sum(table[len(prompt) + place - 1, token] for place, token in enumerate(answer))
        lead = logprob - logprob_alone(reference, prompt, answer)
        sign, weight = (1, 1.5) if ROWS[n]["label"] else (-1, 0.5)
        losses[n], right = (
            weight * (1 - torch.sigmoid(0.3 * sign * (lead - baseline))),
            sign * (lead - baseline) > 0,
        )
        found[n] = (losses[n].item(), right.item(), 0.3 * lead.item(), logprob.item())

    def mean(place: int, rows) -> float:
        return sum(found[n][place] for n in rows) / len(rows)

    expected = {"loss": mean(0, numbers), "kl": baseline, "accuracy": mean(1, numbers)}
    for side, kept in (("chosen", [0, 4]), ("rejected", [1, 3])):
        expected |= {f"{side}_reward": mean(2, kept), f"{side}_logprob": mean(3, kept)}
    expected["margin"] = expected["chosen_reward"] - expected["rejected_reward"]
    assert sorted(expected) == sorted(CONFIG.reward.eval_metrics)
    for name, kept in (("a", [0, 3]), ("b", [1, 4])):
        expected |= {f"loss/{name}": mean(0, kept), f"accuracy/{name}": mean(1, kept)}
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert (
        loss.item() == pytest.approx(expected["loss"] / 2, rel=1e-4) and loss.dtype == torch.float32
    )
    (sum(losses.values()) / 8).backward()
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_baseline_does_not_depend_on_the_micro_batches():
    policy, rows = language_model(1), referred_to(language_model(2)).train
    splits = [
        [[0, 1, 2, 3, 4]],
        [[3, 0], [1, 4], [2, PADDING_ROW]],
        [[4], [3], [2], [1], [0], [PADDING_ROW]],
    ]
    found = [run(policy, rows, split, 5) for split in splits]
    for loss, metrics, batches in found[1:]:
        assert metrics == pytest.approx(found[0][1], rel=1e-5)
        assert loss.item() == pytest.approx(found[0][0].item(), rel=1e-5)
        assert all(batch.baseline.shape == batch.row_mask.shape for batch in batches)


def test_the_baseline_has_no_gradient_and_no_dropout():
    found = []
    for policy, reference in ((1, 2), (2, 1)):
        rows = referred_to(language_model(reference)).train
        noisy = PolicyModel(language_model(policy, attention_dropout=0.5)).train()
        [batch] = with_baseline(noisy, [OBJECTIVE.collate(rows, [0, 2, 4])])
        assert noisy.training and not batch.baseline.requires_grad
        found.append(baseline_of(language_model(policy), language_model(reference), [0, 2, 4]))
        assert batch.baseline.tolist() == pytest.approx([found[-1]] * 3, abs=1e-4)
    assert max(found) > 0.1


def test_the_baseline_is_a_mean_over_the_rows_of_all_ranks(monkeypatch):
    """The rows of another rank have a log-ratio of 12.5 in all."""
    other_rank = torch.tensor([12.5, 3.0], dtype=torch.float64)
    monkeypatch.setattr(policy_objectives.dist, "all_reduce", lambda total: total + other_rank)
    policy, reference = language_model(1), language_model(2)
    rows = referred_to(reference).train
    [batch] = with_baseline(PolicyModel(policy), [OBJECTIVE.collate(rows, [0, 2])])
    log_ratios = ratio(policy, reference, 0, OTHERS[0]) + ratio(policy, reference, 2, OTHERS[2])
    assert log_ratios + 12.5 > 0.1
    assert batch.baseline.tolist() == pytest.approx([(log_ratios + 12.5) / 5] * 2, abs=1e-4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, 1.5), "3 desirable and 2 undesirable answers; together they weigh 1 : 1"),
        (
            (1.0, 3.0),
            "weigh 0.5 : 1; 1 to 1.33 is recommended: --kto_desirable_weight 2 to 2.67 with",
        ),
    ],
)
def test_the_balance_of_the_answers_is_logged(said, weights, message):
    flags = dict(zip(("kto_desirable_weight", "kto_undesirable_weight"), weights, strict=True))
    log_balance(ROWS, PreferenceFlags(objective="kto", **flags))
    assert len(said) == 1 and message in said[0]
