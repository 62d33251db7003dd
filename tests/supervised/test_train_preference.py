"""Step 2: the model that each objective trains."""

from pairs_of_answers import config_of, language_model

from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.supervised.train_preference import load_trained_model


def test_a_policy_has_no_dropout_unless_the_flag_is_given(tmp_path):
    language_model(1, attention_dropout=0.3).save_pretrained(tmp_path)

    def dropout(*words: str) -> float:
        return load_trained_model(str(tmp_path), config_of("--dtype", "fp32", *words), None).config.attention_dropout

    assert dropout("--objective", "dpo") == 0.0
    assert dropout("--objective", "ipo", "--dropout", "0.2") == 0.2
    assert dropout() == 0.3
    assert dropout("--dropout", "0.1") == 0.1


def test_the_objective_selects_the_kind_of_model(assets):
    kinds = {
        objective: type(load_trained_model(str(assets / "lm"), config_of("--objective", objective), None))
        for objective in ("reward", "dpo", "hinge")
    }
    assert kinds == {"reward": ScalarModel, "dpo": PolicyModel, "hinge": PolicyModel}


def test_gradient_checkpointing_reaches_the_policy(assets):
    words = ["--objective", "dpo", "--gradient_checkpointing"]
    assert load_trained_model(str(assets / "lm"), config_of(*words), None).lm.is_gradient_checkpointing
