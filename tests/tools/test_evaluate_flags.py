"""The flags of an evaluation: what belongs together, and what has no effect."""

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.tools.evaluate_flags import read_arguments

MODELS = ["--model", "a", "b", "--data_path", "d"]
PAIRS = ["--pairs", "p", "--reward_model_name_or_path", "r"]


def test_flags():
    wanted = read_arguments([*MODELS, *PAIRS, "--top_k", "3", "--samples", "8", "--prompt_column", "q"])
    assert wanted.words.model == ["a", "b"] and wanted.settings.top_k == 3 and wanted.words.samples == 8
    assert (wanted.prompts.data_path, wanted.pairs.data_path, wanted.prompts.prompt_column) == (["d"], ["p"], "q")
    assert wanted.rewards.use_reward_model and wanted.rewards.reward_model_name_or_path == "r"


def test_rows_that_are_too_long_are_handled_as_in_the_steps():
    wanted = read_arguments([*MODELS, *PAIRS])
    assert (wanted.prompts.truncation, wanted.pairs.truncation) == ("drop", "left")
    wanted = read_arguments([*MODELS, *PAIRS, "--truncation", "middle"])
    assert (wanted.prompts.truncation, wanted.pairs.truncation) == ("middle", "middle")


def test_rewards_are_optional():
    assert read_arguments(MODELS).rewards is None
    assert not read_arguments([*MODELS, "--reward_function", "length"]).rewards.use_reward_model
    assert read_arguments(PAIRS).prompts is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to evaluate"),
        (["--model", "a"], "give --model and --data_path together"),
        (["--data_path", "a"], "give --model and --data_path together"),
        (["--pairs", "a"], "--pairs needs the reward model"),
        ([*MODELS, "--data_split", "1,0,0"], "--data_split has no effect here"),
        ([*MODELS, "--streaming", "--streaming_rows", "4"], "--streaming has no effect here"),
        ([*MODELS, "--use_reward_model"], "--use_reward_model has no effect here"),
        ([*MODELS, "--samples", "0"], "--samples must be at least 1, got 0"),
        ([*MODELS, "--samples", "2", "--decoding", "greedy"], "--samples has no effect with --decoding greedy"),
        ([*MODELS, "--process_reward", "min", "--reward_function", "length"], "--process_reward has no effect"),
        (["--model", "a", "a", "--data_path", "d"], "--model names a model twice"),
        ([*MODELS, "--min_p", "2"], "--min_p must be a number from 0 to 1"),
        ([*MODELS, "--actor_learning_rate", "1"], "unrecognized arguments"),
    ],
)
def test_bad_flags(words, message):
    with pytest.raises(UserError, match=message):
        read_arguments(words)
