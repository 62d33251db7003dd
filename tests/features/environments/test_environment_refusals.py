"""Flags that do not fit episodes, or each other, in step 3 and in an evaluation."""

import pytest

from dschat_ppo.config.cli import parse
from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.errors import UserError
from dschat_ppo.rewards.build_rewards import check_columns, check_sources
from dschat_ppo.tools import chat, evaluate

NEEDED = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d".split()
FUNCTION = "--use_reward_model False --reward_function exact_match"
TWO = "--model a b --data_path d"
REAL = "--model {lm} --data_path {prompts} --max_prompt_seq_len 40"
CASES = [
    (
        f"{FUNCTION} --environment e.py:E --min_answer_seq_len 2",
        "--min_answer_seq_len is not for episodes",
    ),
    (
        "--environment e.py:E --inference_tp_size 2",
        "--inference_tp_size 2 does not go with --environment: each",
    ),
    (
        "--environment e.py:E --agent_func_path a.py",
        "--environment and --agent_func_path: name one of them",
    ),
    (
        "--tools t.py:f --tool_config t.yaml",
        "--tools beside --tool_config: its environment has no other tools",
    ),
    ("--max_turns 3", "--max_turns 3 has no effect: it is for --environment, --tools"),
    ("--use_reward_model False --tools t.py:f", "--use_reward_model False leaves no reward"),
    *[
        (
            (
                f"--advantage_estimator {name} --n_samples_per_prompt 2 --environment e.py:E"
                " --turn_reward to_go"
            ),
            f"--advantage_estimator {name} compares scores of whole episodes",
        )
        for name in ("gdpo", "remax")
    ],
]
WRONG = [  # flags of an evaluation
    (f"{TWO} --turn_reward to_go", "--turn_reward: has no effect here"),
    (f"{TWO} --agent_func_path a.py --tool_config b", "name one of them"),
    (f"{REAL} --agent_func_path none.py", "--agent_func_path none.py: cannot be used"),
]


@pytest.mark.parametrize(("words", "message"), CASES)
def test_flags_of_step_3_that_do_not_go_together_are_refused(words, message):
    with pytest.raises(UserError) as problem:
        parse("ppo", [*NEEDED, "--output_dir", "o", *words.split()])
    assert message in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max_turns 3", "--max_turns 3 has no effect"),
        ("--environment_workers 3", "--environment_workers: has no effect here"),
        ("--apply_chat_template False --tools calculator", "--tools needs the chat template"),
        ("--chat_template chatml --tools none.py:f", "--tools none.py:f: cannot be used"),
    ],
)
def test_a_wrong_chat_is_refused_in_a_line(assets, words, said, capsys):
    assert chat.main(["--model", str(assets / "lm"), *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_a_wrong_evaluation_is_refused_in_a_line(assets, words, said, capsys):
    places = {"lm": assets / "lm", "prompts": assets / "prompts.jsonl"}
    assert evaluate.main(words.format(**places).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error


def test_a_reward_function_that_takes_environments_is_told_where_they_are(tmp_path):
    path = tmp_path / "f.py"
    path.write_text("def f(completions, environments): return [1.0] * len(completions)")
    functions = check_sources(
        RewardSourceFlags(use_reward_model=False, reward_function=[f"{path}:f"])
    )
    with pytest.raises(UserError, match="which live in processes of their own here"):
        check_columns(functions, "--data_path", ['{"prompt": "a"}'])
