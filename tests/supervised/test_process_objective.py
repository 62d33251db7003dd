"""Process reward models: the loss at the ends of steps, compared with a forward pass of plain transformers per step."""

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
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import write_result
from dschat_ppo.supervised.reward_objectives import process_objective

ROWS = Dataset.from_list(
    [
        {"prompt_ids": [5, 6, 7], "answers": [[8, 9, 10, 1]], "step_ends": [1, 3], "step_labels": [1.0, 0.0]},
        {"prompt_ids": [11], "answers": [[12, 1]], "step_ends": [1], "step_labels": [0.25]},
        {"prompt_ids": [16, 17], "answers": [[18, 19, 20, 21, 1]], "step_ends": [0, 2, 4],
         "step_labels": [1.0, 1.0, 0.0]},
    ]
)  # fmt: skip
WORDS = ["--objective", "process", "--step_separator", "\\n\\n"]


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(3)
    return LlamaClassifier(tiny_config(num_labels=1)).eval()


def score(classifier, row, end: int) -> torch.Tensor:
    """Plain transformers score the last token of the row cut after the step."""
    return classifier(torch.tensor([row["prompt_ids"] + row["answers"][0][: end + 1]])).logits[0, 0]


def steps_of(classifier, numbers) -> list[tuple[torch.Tensor, float]]:
    rows = [ROWS[number] for number in numbers]
    return [(score(classifier, row, end), label) for row in rows
            for end, label in zip(row["step_ends"], row["step_labels"], strict=True)]  # fmt: skip


def cross_entropy(value: float, label: float) -> float:
    p = 1 / (1 + math.exp(-value))
    return -label * math.log(p) - (1 - label) * math.log(1 - p)


def run(model, indices, num_steps: float, sources=(), rows=ROWS):
    objective, sums = process_objective(0, CPU, config_of(*WORDS)), MetricSums(sources)
    loss = objective.loss(model, objective.collate(rows, indices), torch.tensor(num_steps), sums)
    return loss, sums.reduce()


@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_metrics_match_single_steps(classifier, packed):
    model = ScalarModel(classifier)
    if packed:
        assert select_kernels(model) is None and model.layout.packed
    loss, metrics = run(model, [2, PADDING_ROW, 0, 1], 6)
    with torch.no_grad():
        steps = [(float(value), label) for value, label in steps_of(classifier, [2, 0, 1])]
    right = [(value > 0) == (label >= 0.5) for value, label in steps]
    good = [label >= 0.5 for _, label in steps]
    expected = sum(cross_entropy(*step) for step in steps) / 6
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics == pytest.approx({
        "loss": expected, "accuracy": sum(right) / 6, "good_share": sum(good) / 6,
        "accuracy_good": sum(r for r, g in zip(right, good, strict=True) if g) / sum(good),
        "accuracy_bad": sum(r for r, g in zip(right, good, strict=True) if not g) / (6 - sum(good)),
    }, rel=1e-5)  # fmt: skip
    assert sorted(metrics) == sorted(config_of(*WORDS).reward.eval_metrics)
    part, _ = run(model, [2, PADDING_ROW, 0, 1], 24)
    assert part.item() == pytest.approx(expected / 4, rel=1e-5), "divided by the steps of the whole optimizer step"


def test_gradients_match_plain_transformers(classifier):
    classifier.zero_grad()
    run(ScalarModel(classifier), [0, 1, 2], 6)[0].backward()
    ours = {name: p.grad.clone() for name, p in classifier.named_parameters() if p.grad is not None}
    classifier.zero_grad()
    total = 0.0
    for value, label in steps_of(classifier, [0, 1, 2]):
        p = torch.sigmoid(value)
        total = total - label * torch.log(p) - (1 - label) * torch.log(1 - p)
    (total / 6).backward()
    assert "score.weight" in ours
    for name, grad in ours.items():
        torch.testing.assert_close(grad, classifier.get_parameter(name).grad, rtol=1e-3, atol=1e-5, msg=name)
    classifier.zero_grad()


def test_counts_and_metrics_by_data_set(classifier):
    objective = process_objective(0, CPU, config_of(*WORDS))
    rows = ROWS.add_column("source", [0, 1, 0])
    batch = objective.collate(rows, [1, PADDING_ROW, 0])
    assert objective.count(batch).item() == 3
    assert objective.size(batch).tolist() == [2, 7 + 3]
    _, metrics = run(ScalarModel(classifier), [1, PADDING_ROW, 0], 3, ("a", "b", "c"), rows)
    with torch.no_grad():
        for name, number in (("a", 0), ("b", 1)):
            steps = [(float(value), label) for value, label in steps_of(classifier, [number])]
            losses = [cross_entropy(*step) for step in steps]
            assert metrics[f"loss/{name}"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
            right = [(value > 0) == (label >= 0.5) for value, label in steps]
            assert metrics[f"accuracy/{name}"] == sum(right) / len(right)
    assert "loss/c" not in metrics


def test_the_saved_model_is_a_classifier_that_knows_its_separator(classifier, tmp_path, assets):
    objective, model = process_objective(0, CPU, config_of(*WORDS)), ScalarModel(classifier)
    described = objective.describe(model, TokenRows(ROWS, None))
    with torch.no_grad():
        last = [float(score(classifier, row, len(row["answers"][0]))) for row in ROWS]
    mean = sum(last) / 3
    assert described["reward_mean"] == pytest.approx(mean, abs=1e-5)
    assert described["reward_std"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in last) / 3), abs=1e-5)
    assert described["step_separator"] == "\n\n"
    save_model(SimpleNamespace(module=model), AutoTokenizer.from_pretrained(assets / "lm"), tmp_path, described)
    assert AutoConfig.from_pretrained(tmp_path).step_separator == "\n\n"
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 1
    write_result(tmp_path, described)
    assert json.loads((tmp_path / "result.json").read_text())["step_separator"] == "\n\n"
