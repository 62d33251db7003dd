"""Reward models of steps: losses, metrics, score statistics, compared with plain transformers, one
forward pass per step."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from datasets import Dataset
from pairs_of_answers import CPU, config_of
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers import LlamaForSequenceClassification as LlamaClassifier

from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.features.process_rewards.objectives import process_objective, step_losses
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import write_result


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("score", "label"), [(0.3, 1.0), (0.3, 0.0), (-2.0, 1.0), (1.5, 0.25), (0.0, 0.5)]
)
def test_binary_cross_entropy_by_hand(score, label):
    expected = -label * math.log(sigmoid(score)) - (1 - label) * math.log(1 - sigmoid(score))
    found = step_losses(
        torch.tensor([score], dtype=torch.float64), torch.tensor([label], dtype=torch.float64)
    )
    assert found.tolist() == pytest.approx([expected], rel=1e-9)


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(3)
    return LlamaClassifier(tiny_config(num_labels=1)).eval()


STEP_ROWS = Dataset.from_list(
    [
        {
            "prompt_ids": [5, 6, 7],
            "answers": [[8, 9, 10, 1]],
            "step_ends": [1, 3],
            "step_labels": [1.0, 0.0],
        },
        {"prompt_ids": [11], "answers": [[12, 1]], "step_ends": [1], "step_labels": [0.25]},
        {
            "prompt_ids": [16, 17],
            "answers": [[18, 19, 20, 21, 1]],
            "step_ends": [0, 2, 4],
            "step_labels": [1.0, 1.0, 0.0],
        },
    ]
)
STEP_CONFIG = config_of("--objective", "process", "--step_separator", "\\n\\n")


def score(classifier, row, end: int) -> torch.Tensor:
    """Plain transformers score the last token of the row cut after the step."""
    return classifier(torch.tensor([row["prompt_ids"] + row["answers"][0][: end + 1]])).logits[0, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_loss_metrics_and_gradients_match_single_steps(classifier, packed):
    """Two rows are of data set "a", one of "b"; the optimizer step has 24 steps of answers."""
    model, objective, sums = (
        ScalarModel(classifier),
        process_objective(0, CPU, STEP_CONFIG),
        MetricSums(("a", "b", "c")),
    )
    if packed:
        assert select_kernels(model) is None and model.layout.packed
    batch = objective.collate(STEP_ROWS.add_column("source", [0, 1, 0]), [2, PADDING_ROW, 0, 1])
    assert objective.counts(batch).tolist() == [6, 3, 7 + 7 + 3]
    classifier.zero_grad()
    loss = objective.loss(model, batch, torch.tensor(24), sums)
    loss.backward()
    gradients = {
        name: p.grad.clone() for name, p in classifier.named_parameters() if p.grad is not None
    }
    classifier.zero_grad()

    losses, right, labels = [], [], []
    for row in STEP_ROWS:
        for end, label in zip(row["step_ends"], row["step_labels"], strict=True):
            value = score(classifier, row, end)
            p = torch.sigmoid(value)
            losses.append(-label * torch.log(p) - (1 - label) * torch.log(1 - p))
            right.append((value.item() > 0) == (label >= 0.5))
            labels.append(label)
    assert labels == [1, 0, 0.25, 1, 1, 0]
    of_a, of_b, good, bad = [0, 1, 3, 4, 5], [2], [0, 3, 4], [1, 2, 5]

    def mean(values, places=range(6)) -> float:
        return sum(float(values[place]) for place in places) / len(places)

    with torch.no_grad():
        expected = {"loss": mean(losses), "accuracy": mean(right), "good_share": 0.5}
        expected |= {"accuracy_good": mean(right, good), "accuracy_bad": mean(right, bad)}
        assert sorted(expected) == sorted(STEP_CONFIG.reward.eval_metrics)
        for name, places in (("a", of_a), ("b", of_b)):
            expected |= {
                f"loss/{name}": mean(losses, places),
                f"accuracy/{name}": mean(right, places),
            }
    assert sums.reduce() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(expected["loss"] / 4, rel=1e-5)
    (sum(losses) / 24).backward()
    assert "score.weight" in gradients
    for name, grad in gradients.items():
        torch.testing.assert_close(
            grad, classifier.get_parameter(name).grad, rtol=1e-3, atol=1e-5, msg=name
        )
    classifier.zero_grad()


def test_the_saved_model_is_a_classifier_that_knows_its_separator(classifier, tmp_path, assets):
    objective, model = process_objective(0, CPU, STEP_CONFIG), ScalarModel(classifier)
    described = objective.describe(model, TokenRows(STEP_ROWS, None))
    with torch.no_grad():
        last = [float(score(classifier, row, len(row["answers"][0]))) for row in STEP_ROWS]
    mean = sum(last) / 3
    assert described["reward_mean"] == pytest.approx(mean, abs=1e-5)
    assert described["reward_std"] == pytest.approx(
        math.sqrt(sum((x - mean) ** 2 for x in last) / 3), abs=1e-5
    )
    assert described["step_separator"] == "\n\n"
    save_model(
        SimpleNamespace(module=model),
        AutoTokenizer.from_pretrained(assets / "lm"),
        tmp_path,
        described,
    )
    assert AutoConfig.from_pretrained(tmp_path).step_separator == "\n\n"
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 1
    write_result(tmp_path, described)
    assert json.loads((tmp_path / "result.json").read_text())["step_separator"] == "\n\n"
