"""Reward models of answers: losses, metrics, score statistics, compared with plain transformers,
one forward pass per answer."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_config
from pairs_of_answers import CPU, LONG_PROMPTS, REAL, ROWS, config_of, run_loss, tokens_run
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers import LlamaForSequenceClassification as LlamaClassifier

from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.supervised_run import write_answers


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(3)
    return LlamaClassifier(tiny_config(num_labels=1)).eval()


@torch.no_grad()
def scores_alone(classifier: LlamaClassifier, numbers) -> np.ndarray:
    """(len(numbers), 2) of the chosen and rejected answers."""
    return np.array(
        [
            [
                float(classifier(torch.tensor([ROWS[n]["prompt_ids"] + answer])).logits)
                for answer in ROWS[n]["answers"]
            ]
            for n in numbers
        ]
    )


@pytest.mark.parametrize(
    ("words", "coefficient", "with_margin"),
    [
        ([], 0.0, True),
        (["--no_use_margin"], 0.0, False),
        (["--center_rewards_coef", "0.5"], 0.5, True),
    ],
)
def test_loss_and_metrics_match_scores_of_single_answers(
    classifier, words, coefficient, with_margin
):
    """Pairs 4 and 0 are of data set "c", pair 2 of "a"; the step has nine pairs."""
    config, sums = config_of(*words), MetricSums(("a", "b", "c"))
    objective = reward_objective(0, CPU, config)
    batch = objective.collate(ROWS.add_column("source", [2, 0, 0, 1, 2]), [4, PADDING_ROW, 0, 2])
    tokens = sum(
        len(ROWS[n]["prompt_ids"]) + len(answer) for n in REAL for answer in ROWS[n]["answers"]
    )
    assert objective.counts(batch).tolist() == [3, 3, tokens]
    loss = objective.loss(ScalarModel(classifier), batch, torch.tensor(9), sums)
    chosen, rejected = scores_alone(classifier, REAL).T
    margin, centering = np.array([ROWS[n]["margin"] for n in REAL]), (chosen + rejected) ** 2
    losses = np.log1p(np.exp(-(chosen - rejected - with_margin * margin))) + coefficient * centering
    right = chosen > rejected
    expected = {
        "loss": losses.mean(),
        "accuracy": right.mean(),
        "margin": (chosen - rejected).mean(),
        "chosen_score": chosen.mean(),
        "rejected_score": rejected.mean(),
    }
    expected |= {"centering_loss": centering.mean()} if coefficient else {}
    assert sorted(expected) == sorted(config.reward.eval_metrics)
    for name, places in (("a", [2]), ("c", [0, 1])):
        expected |= {
            f"loss/{name}": losses[places].mean(),
            f"accuracy/{name}": right[places].mean(),
        }
    assert sums.reduce() == pytest.approx(expected, rel=1e-4)
    assert loss.item() == pytest.approx(losses.sum() / 9, rel=1e-5)


@pytest.mark.parametrize(("held_out", "numbers"), [(None, range(5)), ([1, 3, 4], [1, 3, 4])])
def test_score_statistics_use_evaluation_rows_if_there_are_any(
    classifier, held_out, numbers, tmp_path, assets
):
    rows = TokenRows(ROWS, None if held_out is None else ROWS.select(held_out))
    objective = reward_objective(
        0, CPU, config_of("--per_device_eval_batch_size", "2", "--eval_iters", "1")
    )
    model = ScalarModel(classifier)
    described = objective.describe(model, rows)
    scores = scores_alone(classifier, numbers).reshape(-1)
    mean = scores.sum() / len(scores)
    assert described["reward_mean"] == pytest.approx(mean, abs=1e-5)
    assert described["reward_std"] == pytest.approx(
        math.sqrt(((scores - mean) ** 2).sum() / len(scores)), abs=1e-5
    )
    save_model(
        SimpleNamespace(module=model),
        AutoTokenizer.from_pretrained(assets / "lm"),
        tmp_path,
        described,
    )
    config = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in described} == described
    AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_the_prompt_of_a_pair_is_run_once_with_the_same_loss_and_gradients():
    found = []
    for shares in (False, True):
        torch.manual_seed(3)
        model = ScalarModel(
            LlamaClassifier(tiny_config(num_labels=1)).eval(), Layout(packed=True, shares=shares)
        )
        tokens = tokens_run(model)
        loss, metrics = run_loss(
            reward_objective(0, CPU, config_of()), model, LONG_PROMPTS, (2, 0, 1)
        )
        loss.backward()
        found.append((metrics, {name: p.grad for name, p in model.named_parameters()}, tokens))
    (metrics, gradients, separate), (same, shared_gradients, shared) = found
    # two answers begin with the same two tokens
    assert (separate, shared) == ([6 * 30 + 21], [3 * 30 + 21 - 2])
    assert same == pytest.approx(metrics, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("scored", [True, False])
def test_the_answers_of_evaluation_rows_are_written_with_their_scores(
    classifier, scored, tmp_path, assets
):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    objective = reward_objective(0, CPU, config_of())
    objective = objective if scored else replace(objective, score=None)
    model, held_out = ScalarModel(classifier), [3, 1]
    trainer = SimpleNamespace(
        rows=TokenRows(ROWS, ROWS.select(held_out)), objective=objective, engine=model, steps=7
    )
    write_answers(trainer, tokenizer, tmp_path)
    lines = [
        json.loads(line) for line in (tmp_path / "eval/step_000007.jsonl").read_text().splitlines()
    ]
    for line, number, scores in zip(
        lines, held_out, scores_alone(classifier, held_out), strict=True
    ):
        row = ROWS[number]
        assert line["lengths"] == [len(answer) for answer in row["answers"]]
        assert line["ended"] == ["chosen", "rejected"]
        for text, answer in zip(line["answers"], row["answers"], strict=True):
            assert tokenizer.decode(row["prompt_ids"] + answer).endswith(text) and text
        assert line.get("scores") == (pytest.approx(list(scores), abs=1e-5) if scored else None)
    (tmp_path / "eval/step_000007.jsonl").unlink()
    trainer.rows = TokenRows(ROWS, None)
    write_answers(trainer, tokenizer, tmp_path)
    assert not list((tmp_path / "eval").iterdir())
