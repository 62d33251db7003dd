"""Steps 1 and 2 around their training: the models that train, warnings about the rate, the best
evaluation."""

import math
import sys

import pytest
from launch import ROOT, run, succeed
from pairs_of_answers import config_of, language_model

from dschat_ppo.config.cli import parse
from dschat_ppo.config.supervised_flags import BestMetric
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.run.output_folder import best_is_lost
from dschat_ppo.supervised import supervised_run
from dschat_ppo.supervised.best_evaluation import BestEvaluation
from dschat_ppo.supervised.supervised_run import report_learning_rate
from dschat_ppo.supervised.train_preference import load_trained_model


def test_a_policy_has_no_dropout_unless_the_flag_is_given(tmp_path):
    language_model(1, attention_dropout=0.3).save_pretrained(tmp_path)

    def dropout(*words: str) -> float:
        return load_trained_model(
            str(tmp_path), config_of("--dtype", "fp32", *words), None
        ).config.attention_dropout

    assert dropout("--objective", "dpo") == 0.0
    assert dropout("--objective", "ipo", "--dropout", "0.2") == 0.2
    assert dropout() == 0.3
    assert dropout("--dropout", "0.1") == 0.1


def test_the_objective_selects_the_kind_of_model(assets):
    kinds = {
        objective: type(
            load_trained_model(str(assets / "lm"), config_of("--objective", objective), None)
        )
        for objective in ("reward", "dpo", "hinge")
    }
    assert kinds == {"reward": ScalarModel, "dpo": PolicyModel, "hinge": PolicyModel}


def test_gradient_checkpointing_reaches_the_policy(assets):
    words = ["--objective", "dpo", "--gradient_checkpointing"]
    assert load_trained_model(
        str(assets / "lm"), config_of(*words), None
    ).lm.is_gradient_checkpointing


WORDS = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]


@pytest.mark.parametrize(
    ("step", "rate", "words", "parameters", "warned"),
    [
        ("sft", "1.1e-4", "", 10**8, True),
        ("sft", "1e-4", "", 10**8, False),
        ("dpo", "1.1e-4", "", 10**9, True),
        ("sft", "1.9e-4", "", 5 * 10**7, False),
        ("sft", "2.1e-4", "", 5 * 10**7, True),
        ("sft", "0.9", "", 0, False),
        ("reward", "1e-3", "--lora_dim 8", 10**8, True),
        ("sft", "1e-3", "--lora_dim 8 --only_optimize_lora", 10**8, False),
        ("sft", "1e-3", "--validate_only", 10**8, False),
    ],
)
def test_a_rate_too_high_for_the_weights_that_train_gives_a_warning(
    step, rate, words, parameters, warned, said, monkeypatch
):
    shapes = {"embedding": (parameters // 2,), "layers": (1, parameters // 2)}
    monkeypatch.setattr(supervised_run, "checkpoint_shapes", lambda folder: shapes)
    config = parse(step, [*WORDS, "--learning_rate", rate, *words.split()])
    report_learning_rate(config, "m")
    assert len(said) == warned
    assert all(
        line.startswith(f"--learning_rate {float(rate):g} trains whole weights") for line in said
    )


def test_the_dpo_program_has_the_flags_of_step_2_and_dpo_as_its_objective():
    for program, objective in (("step2_dpo", "dpo"), ("step2_reward", "reward")):
        text = succeed(
            run([sys.executable, str(ROOT / f"training/{program}/main.py"), "--help", "objective"])
        ).stdout
        assert f"(default: {objective})" in " ".join(text.split())


ACCURACY = BestMetric("eval_accuracy", higher=True)


def test_the_first_of_equal_values_is_the_best_and_nan_never_is():
    best, found = BestEvaluation(ACCURACY), []
    for step, value in enumerate([math.nan, 0.5, 0.25, 0.5, math.inf, 0.75, math.nan], start=1):
        best.consider({"eval_accuracy": value, "eval_loss": 1.0}, step)
        found.append(best.value_and_step)
    assert found == [None, *[(0.5, 2)] * 4, *[(0.75, 6)] * 2]
    assert best.result() == {"best_eval_accuracy": 0.75, "best_step": 6}
    assert BestEvaluation().result() == {}


def test_a_resumed_run_keeps_the_best_unless_the_metric_changed(said):
    best = BestEvaluation(ACCURACY)
    best.consider({"eval_accuracy": 0.5}, 3)
    others = BestEvaluation(), BestEvaluation(BestMetric("eval_accuracy", higher=False))
    for resumed, found in (
        (BestEvaluation(ACCURACY), (0.5, 3)),
        (others[0], None),
        (others[1], None),
    ):
        resumed.load_state_dict(best.state_dict())
        assert resumed.value_and_step == found
    assert [line.split("best ")[1] for line in said] == [
        "eval_loss from here on",
        "eval_accuracy from here on",
    ]
    old = BestEvaluation()  # a checkpoint of a version without the flag
    old.load_state_dict({"best": [0.25, 2]})
    assert old.value_and_step == (0.25, 2)


def test_the_best_is_lost_where_its_models_are_not(said, tmp_path):
    (tmp_path / "best").mkdir()
    assert not best_is_lost(tmp_path / "best", 3) and said == []
    assert best_is_lost(tmp_path / "none", 3)
    assert "does not hold the models of step 3, the best so far" in said[0]
