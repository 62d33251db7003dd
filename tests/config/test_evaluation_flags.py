"""Flags of the evaluation: combinations that are refused."""

import pytest

from dschat_ppo.config.ppo_flags import EvaluationFlags
from dschat_ppo.errors import UserError


@pytest.mark.parametrize("given", [{"eval_batch_size": 8}, {"eval_pass_score": 0.5}, {"save_best": False}])
def test_evaluation_flags_need_eval_data_path(given):
    with pytest.raises(UserError, match=f"--{next(iter(given))}: .*--eval_data_path"):
        EvaluationFlags(**given)
    EvaluationFlags(eval_data_path=["prompts.jsonl"], **given)


def test_validation_needs_held_out_prompts():
    with pytest.raises(UserError, match="^--validate_only needs held-out prompts: give --eval_data_path$"):
        EvaluationFlags(validate_only=True)
    assert EvaluationFlags(eval_data_path=["e"], validate_only=True).validate_only


def test_greedy_evaluation_of_several_samples_is_refused():
    with pytest.raises(UserError, match="--eval_greedy .*omit --eval_samples"):
        EvaluationFlags(eval_data_path=["e"], eval_greedy=True, eval_samples=2)
