"""What step 2 computes from a model and pairs, against one forward pass of plain transformers for each answer alone."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_config
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM
from transformers import LlamaForSequenceClassification as LlamaClassifier

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.data.sampler import PADDING_ROW
from dschat_ppo.models.forward import answer_logprobs
from dschat_ppo.models.policy import PolicyModel
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.scalar_head import ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.dpo_objective import add_reference, dpo_objective
from dschat_ppo.supervised.reward_objective import reward_objective
from dschat_ppo.supervised.train_preference import load_trained_model
from dschat_ppo.supervised.trainer import score_rows

CPU = torch.device("cpu")
ROWS = Dataset.from_list(
    [
        {"prompt_ids": [5, 6, 7], "answers": [[8, 9, 1], [10, 1]], "margin": 0.5},
        {"prompt_ids": [11], "answers": [[1], [12, 13, 14, 15, 1]], "margin": 0.0},
        {"prompt_ids": [16, 17], "answers": [[18, 19, 1], [18, 20, 21, 1]], "margin": 2.0},
        {"prompt_ids": [22, 23, 24, 25], "answers": [[26, 27], [28]], "margin": 0.0},
        {"prompt_ids": [29], "answers": [[30, 1], [1]], "margin": 1.0},
    ]
)
REAL = [4, 0, 2]  # the pairs of the batch below, beside a filler


def config_of(*words: str):
    return parse("reward", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o", *words])


def language_model(seed: int, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


@torch.no_grad()
def logprob_alone(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> float:
    logits = model(torch.tensor([prompt + answer])).logits[0].double()
    table = torch.log_softmax(logits, dim=-1)
    return sum(float(table[len(prompt) + i - 1, token]) for i, token in enumerate(answer))


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
    """The rows with what another model says of them."""
    return add_reference(PolicyModel(reference), ROWS, 0, CPU, batch_size=2)


def run_loss(objective, engine, rows, indices=(4, PADDING_ROW, 0, 2), num_pairs: float = 3):
    sums = MetricSums()
    loss = objective.loss(engine, objective.collate(rows, indices), torch.tensor(num_pairs), sums)
    return loss, objective.summary(sums.reduce())


def test_rows_are_scored_in_their_order_and_without_fillers():
    seen = []

    def score(rows, indices):
        seen.append(list(indices))
        return torch.tensor([[float(i), len(rows[max(i, 0)]["prompt_ids"])] for i in indices])

    engine = torch.nn.Linear(1, 1)
    found = score_rows(engine, ROWS, score, 2, "title")
    assert found.tolist() == [[0, 3], [1, 1], [2, 2], [3, 4], [4, 1]]
    assert [len(indices) for indices in seen] == [2, 2, 1]
    assert engine.training


def test_logprobs_of_long_answers_are_summed_in_fp64():
    token_logprobs = torch.linspace(-9.0, -1e-3, 5000)

    def engine(_ids, _mask):
        return token_logprobs, None

    mask = torch.arange(3001) > torch.tensor([[500], [500], [5000]])
    found = answer_logprobs(engine, torch.zeros(mask.shape, dtype=torch.int64), mask)
    assert mask.sum(dim=1).tolist() == [2500, 2500, 0]
    for row in (0, 1):
        expected = math.fsum(token_logprobs[row * 2500 : (row + 1) * 2500].tolist())
        assert found[row].item() == pytest.approx(expected, rel=1e-13)
    assert found[2].item() == 0.0


def test_reference_logprobs_are_those_of_each_whole_answer_alone(rows, reference):
    expected = logprobs_alone(reference)
    assert np.abs(expected).min() > 1
    np.testing.assert_allclose(rows["chosen_ref_logprob"], expected[:, 0], atol=2e-5)
    np.testing.assert_allclose(rows["rejected_ref_logprob"], expected[:, 1], atol=2e-5)


def test_reference_is_measured_without_dropout_and_training_goes_on_with_it():
    noisy = PolicyModel(language_model(2, attention_dropout=0.5)).train()
    found = add_reference(noisy, ROWS, 0, CPU, batch_size=3)
    assert noisy.training
    np.testing.assert_allclose(found["chosen_ref_logprob"], logprobs_alone(language_model(2))[:, 0], atol=2e-5)


@pytest.mark.parametrize("held_out", [None, ROWS.select([3, 1])])
def test_the_objective_puts_the_reference_beside_training_and_evaluation_rows(policy, held_out):
    objective = dpo_objective(0, CPU, config_of("--objective", "dpo"))
    prepared = objective.prepare(PolicyModel(policy), TokenRows(ROWS, held_out))
    expected = logprobs_alone(policy)
    np.testing.assert_allclose(prepared.train["rejected_ref_logprob"], expected[:, 1], atol=2e-5)
    if held_out is None:
        assert prepared.eval is None
        return
    np.testing.assert_allclose(prepared.eval["chosen_ref_logprob"], expected[[3, 1], 0], atol=2e-5)


def test_an_untrained_policy_leads_by_nothing(policy):
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
def test_loss_and_metrics_are_those_of_loops_over_single_answers(policy, reference, rows, objective):
    words = ["--objective", objective, "--beta", "0.3"]
    words += ["--label_smoothing", "0.1"] if objective in ("cdpo", "robust_dpo") else []
    words += ["--nll_coef", "0.7"] if objective == "dpo_nll" else []
    expected = expected_of(objective, policy, reference, 0.3, 0.7)
    assert 0 < expected["accuracy"] < 1
    loss, metrics = run_loss(dpo_objective(0, CPU, config_of(*words)), PolicyModel(policy), rows)
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-4)
    assert loss.dtype == torch.float32


def test_loss_counts_pairs_of_the_whole_step(policy, rows):
    objective = dpo_objective(0, CPU, config_of("--objective", "dpo_nll"))
    assert objective.count(objective.collate(rows, [4, PADDING_ROW, 0])).item() == 2
    whole, metrics = run_loss(objective, PolicyModel(policy), rows, num_pairs=3)
    part, same = run_loss(objective, PolicyModel(policy), rows, num_pairs=12)
    assert part.item() == pytest.approx(whole.item() / 4)
    assert same["loss"] == pytest.approx(metrics["loss"])
    assert same["nll"] == pytest.approx(metrics["nll"])


def test_gradient_is_that_of_plain_transformers(reference, rows):
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


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(3)
    return LlamaClassifier(tiny_config(num_labels=1)).eval()


@torch.no_grad()
def scores_alone(classifier: LlamaClassifier, numbers) -> np.ndarray:
    """(len(numbers), 2) of the chosen and rejected answers."""
    return np.array(
        [
            [float(classifier(torch.tensor([ROWS[n]["prompt_ids"] + answer])).logits) for answer in ROWS[n]["answers"]]
            for n in numbers
        ]
    )


@pytest.mark.parametrize(
    ("words", "coefficient", "with_margin"),
    [([], 0.0, True), (["--no_use_margin"], 0.0, False), (["--center_rewards_coef", "0.5"], 0.5, True)],
)
def test_reward_loss_with_margin_and_centering(classifier, words, coefficient, with_margin):
    expected, centering = 0.0, 0.0
    for number, (chosen, rejected) in zip(REAL, scores_alone(classifier, REAL), strict=True):
        lead = chosen - rejected - (ROWS[number]["margin"] if with_margin else 0.0)
        centering += (chosen + rejected) ** 2 / 3
        expected += math.log(1 + math.exp(-lead)) / 3
    objective = reward_objective(0, CPU, config_of(*words))
    loss, metrics = run_loss(objective, ScalarModel(classifier), ROWS)
    assert loss.item() == pytest.approx(expected + coefficient * centering, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item())
    assert metrics.get("centering_loss") == (pytest.approx(centering, rel=1e-5) if coefficient else None)


@pytest.mark.parametrize(("held_out", "numbers"), [(None, range(5)), ([1, 3, 4], [1, 3, 4])])
def test_score_statistics_are_of_evaluation_rows_or_of_training_rows_without_them(
    classifier, held_out, numbers, tmp_path, assets
):
    rows = TokenRows(ROWS, None if held_out is None else ROWS.select(held_out))
    objective = reward_objective(0, CPU, config_of("--per_device_eval_batch_size", "2", "--eval_iters", "1"))
    model = ScalarModel(classifier)
    described = objective.describe(model, rows)
    scores = scores_alone(classifier, numbers).reshape(-1)
    mean = scores.sum() / len(scores)
    assert described["reward_mean"] == pytest.approx(mean, abs=1e-5)
    assert described["reward_std"] == pytest.approx(math.sqrt(((scores - mean) ** 2).sum() / len(scores)), abs=1e-5)
    save_model(SimpleNamespace(module=model), AutoTokenizer.from_pretrained(assets / "lm"), tmp_path, described)
    config = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in described} == described
    AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_policy_has_no_dropout_unless_asked_for(tmp_path):
    language_model(1, attention_dropout=0.3).save_pretrained(tmp_path)

    def dropout(*words: str) -> float:
        return load_trained_model(str(tmp_path), config_of("--dtype", "fp32", *words), None).config.attention_dropout

    assert dropout("--objective", "dpo") == 0.0
    assert dropout("--objective", "ipo", "--dropout", "0.2") == 0.2
    assert dropout() == 0.3
    assert dropout("--dropout", "0.1") == 0.1


def test_the_objective_says_what_is_trained(assets):
    kinds = {
        objective: type(load_trained_model(str(assets / "lm"), config_of("--objective", objective), None))
        for objective in ("reward", "dpo", "hinge")
    }
    assert kinds == {"reward": ScalarModel, "dpo": PolicyModel, "hinge": PolicyModel}


def test_gradient_checkpointing_reaches_the_policy(assets):
    words = ["--objective", "dpo", "--gradient_checkpointing"]
    assert load_trained_model(str(assets / "lm"), config_of(*words), None).lm.is_gradient_checkpointing
