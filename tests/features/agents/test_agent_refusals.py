"""Flags that do not fit agents, in step 3 and in an evaluation."""

import json

import pytest

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.ppo.begin_ppo import begin_ppo
from dschat_ppo.tools import chat, evaluate

NEEDED = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
CASES = [
    ("--agent a.py:f --environment e.py:E", "--agent and --environment: name one of them"),
    ("--agent a.py:f --tools t.py:f", "--agent and --tools: name one of them"),
    ("--agent a.py:f --agent_command b", "--agent and --agent_command: name one of them"),
    ("--agent_command no-such-program", "--agent_command no-such-program: there is no such"),
    ("--max_contexts 3", "--max_contexts 3 has no effect: it is for --agent"),
    ("--max_context_len 30", "--max_context_len 30 has no effect"),
    ("--agent a.py:f --max_context_len 1", "--max_context_len 1: a conversation has at least 2"),
    ("--agent a.py:f --min_answer_seq_len 2", "--min_answer_seq_len is not for episodes"),
    ("--agent a.py:f --repetition_penalty 2", "--repetition_penalty 2.0 is not for --agent"),
    ("--agent a.py:f --max_observation_tokens 9", "--max_observation_tokens 9 has no effect"),
    (
        "--agent a.py:f --inference_tp_size 2",
        "--inference_tp_size 2 does not go with --agent: each rank of a group",
    ),
    ("--agent a.py:f --process_reward min", "--process_reward scores the steps of one answer"),
    (
        "--agent a.py:f --advantage_estimator remax --turn_reward to_go",
        "--advantage_estimator remax compares scores of whole episodes",
    ),
    (
        "--agent a.py:f --advantage_estimator none --teacher_model_name_or_path t"
        " --distill_on data",
        "--distill_on data: answers of the data are no samples of the policy",
    ),
]


@pytest.mark.parametrize(("words", "message"), CASES)
def test_flags_of_step_3_that_do_not_go_together_are_refused(words, message):
    with pytest.raises(UserError) as problem:
        parse("ppo", f"{NEEDED} {words}".split())
    assert message in str(problem.value) and "\n" not in str(problem.value)


def test_flags_of_environments_that_agents_have_too():
    config = parse(
        "ppo",
        f"{NEEDED} --agent a.py:f --max_turns 3 --environment_workers 2 --environment_timeout 5"
        " --turn_reward to_go --environment_reward_weight 2".split(),
    )
    assert config.value("agent") == "a.py:f" and config.has_rewards


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--agent a.py:f --environment e.py:E", "--agent and --environment: name one of them"),
        ("--agent a.py:f --write_best o", "--write_best"),
        ("--max_contexts 2", "--max_contexts 2 has no effect"),
        (
            "--chat_template chatml --max_prompt_seq_len 40 --agent none.py:f",
            "--agent none.py:f: cannot be used",
        ),
        (
            "--chat_template chatml --max_prompt_seq_len 40 --agent mine.py",
            "expected FILE.py:FUNCTION, not 'mine.py'",
        ),
    ],
)
def test_a_wrong_evaluation_is_refused_in_a_line(assets, words, said, capsys):
    model = ["--model", str(assets / "lm"), "--data_path", str(assets / "prompts.jsonl")]
    assert evaluate.main([*model, *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error


def test_a_chat_has_no_agents(assets, capsys):
    assert chat.main(["--model", str(assets / "lm"), "--agent", "a.py:f"]) == 2
    assert "--agent" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--data_path", "--eval_data_path"])
def test_a_parameter_that_is_no_column_is_refused_before_models_are_loaded(assets, tmp_path, flag):
    """It says so for the rows of training, and for those of evaluation alone."""
    (tmp_path / "own.py").write_text("def play(base_url, seed, row, task, more=1): ...\n")
    for name in ("--data_path", "--eval_data_path"):
        row = {"prompt": "Where?", "word": "a", "task": "b"}
        if name == flag:
            row.pop("task")
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    words = words_of_ppo(assets, tmp_path)
    with pytest.raises(UserError) as problem:
        begin_ppo(parse("ppo", words))
    assert str(problem.value) == (
        f"--agent {tmp_path / 'own.py'}:play: its parameter 'task' is no column of the data"
        " (columns: prompt, word, data_source) and none of client, base_url, api_key, model, seed,"
        " row"
    )


def words_of_ppo(assets, folder):
    words = f"--actor_model_name_or_path {assets / 'lm'} --use_reward_model False"
    words += " --advantage_estimator grpo --n_samples_per_prompt 2 --chat_template chatml --dry_run"
    words += f" --output_dir {folder / 'out'} --agent {folder / 'own.py'}:play --dtype fp32"
    for name in ("--data_path", "--eval_data_path"):
        words += f" {name} {folder / name}.jsonl"
    return words.split()
