"""The examples with the toy judge: their verdicts, and their commands."""

import importlib
import json
import random
import shutil
import subprocess

import pytest
from launch import ROOT, environment, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.config.step_config import flatten
from dschat_ppo.features.judges.prompts import Judged, JudgePrompts
from dschat_ppo.features.judges.spec import parse_judge
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.tools.evaluate import evaluation_request
from dschat_ppo.tools.toy import Question, make_questions, make_tokenizer

SCRIPTS = ROOT / "training_scripts"
STUBS = """
top="$PWD" RANKS="${RANKS:-1}" DTYPE=fp32
launch() { command python -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"; }
python() { launch "$@"; }
is_valid_json() { [ -e "$1" ] || { mkdir -p "$(dirname "$1")" && touch "$1" && false; }; }
"""


@pytest.fixture
def judge_task(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS / "examples/judge"))
    return importlib.import_module("judge_task")


def test_the_judge_is_trained_on_what_it_is_asked(judge_task):
    """The text of the rows is that of a run's judge, but for the name of the fence."""
    questions = make_questions(random.Random(1))["sft"]
    rows = judge_task.verdicts(questions, 200, random.Random(2))
    tokenizer = make_tokenizer([row["messages"][0]["content"] for row in rows])
    prompts = JudgePrompts(parse_judge(f"J?template={judge_task.TEMPLATE}"), tokenizer, 512)
    for row in rows:
        prompt = Question(**row["about"]).text
        asked = prompts.question(Judged(prompt, {}, ResponseText.of(row["judged"]), 0))
        text = tokenizer.decode(asked)
        fence = text.split("Answer:\n<")[1].split(">")[0]
        trained = row["messages"][0]["content"]
        trained_fence = trained.split("Answer:\n<")[1].split(">")[0]
        trained_chat = f"<|user|>{trained}<|assistant|>"
        assert text == trained_chat.replace(trained_fence, fence)
        assert asked == tuple(tokenizer.encode(trained_chat.replace(trained_fence, fence)))
    answers = [row["verdict"] for row in rows]
    assert 80 <= answers.count("yes") <= 120 and set(answers) == {"yes", "no"}


def commands_of(tmp_path, name, *words, ranks=1):
    """What an example starts, as lists of words."""
    for folder in ("examples", "toy"):
        shutil.copytree(SCRIPTS / folder, tmp_path / "training_scripts" / folder)
    (tmp_path / "training_scripts/ranks.sh").write_text(STUBS)
    result = subprocess.run(
        ["bash", tmp_path / "training_scripts/examples" / name / "run.sh", "out", *words],
        env=environment() | {"RANKS": str(ranks)},
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
    )
    return [json.loads(line) for line in succeed(result).stdout.splitlines()]


def step_of(command):
    """`parse`d flags of a step, or of an evaluation; None for other programs."""
    script, *flags = command
    for step, ending in (("sft", "step1_sft"), ("reward", "step2_reward"), ("ppo", "step3_ppo")):
        if script.endswith(f"{ending}/main.py"):
            return flatten(parse(step, flags))
    if script.endswith("step2_dpo/main.py"):
        return flatten(parse("reward", ["--objective", "dpo", *flags]))
    if command[:2] == ["-m", "dschat_ppo.tools.evaluate"]:
        return vars(evaluation_request(command[2:]).args)
    return None


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_runs_with_the_judge_and_with_the_learned_reward_differ_in_the_reward_alone(
    tmp_path, ranks
):
    commands = commands_of(tmp_path, "judge", "4", "5", ranks=ranks)
    sft, judge_sft, reward, *runs = [step for step in map(step_of, commands) if step]
    out = f"{tmp_path}/out"
    assert [run["seed"] for run in runs] == [4, 4, 5, 5]
    for with_judge, with_reward in zip(runs[::2], runs[1::2], strict=True):
        assert with_judge["judge"] == [
            f"{judge_sft['output_dir']}?template={tmp_path}/training_scripts/examples/judge/judge.jinja"
        ]
        assert with_reward["reward_model_name_or_path"] == reward["output_dir"]
        differing = {name for name in with_judge if with_judge[name] != with_reward[name]}
        assert differing == {"judge", "use_reward_model", "reward_model_name_or_path", "output_dir"}
        assert with_judge["actor_model_name_or_path"] == sft["output_dir"] == f"{out}/sft"
        assert with_judge["per_device_training_batch_size"] == 64 // ranks
    assert commands[-1][1:] == [out, "4", "5"]


def test_each_round_of_online_dpo_begins_with_the_policy_of_the_last(tmp_path):
    commands = commands_of(tmp_path, "online_dpo", "2", "7")
    steps = [step for step in map(step_of, commands) if step]
    _, _, start, sampled, trained, measured, sampled_again, trained_again, end = steps
    runs = f"{tmp_path}/out/online_dpo_7"
    assert start["model"] == sampled["model"] == [trained["model_name_or_path"]]
    assert sampled["write_pairs"] == trained["data_path"][0]
    assert sampled["judge"] == [
        f"{tmp_path}/out/judge?template={tmp_path}/training_scripts/examples/judge/judge.jinja"
    ]
    policy = trained["output_dir"]
    assert [policy] == measured["model"] == sampled_again["model"]
    assert policy == trained_again["model_name_or_path"] == f"{runs}/round_1"
    assert [trained_again["output_dir"]] == end["model"]
    assert sampled["data_path"] != sampled_again["data_path"]
    assert sampled["seed"] != sampled_again["seed"]
    assert trained["objective"] == "dpo"
