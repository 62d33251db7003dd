"""The examples with episodes: their tools, games, demonstrations and commands; the example `gsm8k`
on word problems in the form of GSM8K and a tiny model, and the commands of its README."""

import importlib
import json
import random
import shutil
import subprocess
import sys
from itertools import combinations
from operator import itemgetter
from pathlib import Path

import pytest
import yaml
from launch import ROOT, environment, forked, metrics_of, succeed

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.step_config import flatten
from dschat_ppo.data.templates import render
from dschat_ppo.episodes.environment_forms import environment_form
from dschat_ppo.episodes.tool_calls import parse_action
from dschat_ppo.supervised.training_plan import SupervisedPlan
from dschat_ppo.tools.evaluate import evaluation_request

EXAMPLES = ROOT / "training_scripts/examples"
STUBS = """
top="$PWD" RANKS="${RANKS:-1}" DTYPE=fp32
launch() { command python -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"; }
python() { echo "made $1" >&2; }
is_valid_json() { [ -e asked ] || { touch asked && false; } }
"""


def task_of(name, monkeypatch):
    """The module `task.py` of an example, which imports the one beside it."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    for module in ("task", "calculator", "game"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module("task")


def test_demonstrations_of_the_calculator_call_it_as_episodes_do(monkeypatch, tmp_path):
    task = task_of("calculator", monkeypatch)
    monkeypatch.setattr(task, "COUNTS", {"sft": 300, "prompts": 20, "heldout": 10})
    task.make(tmp_path, 3)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "data/sft.jsonl").read_text().splitlines()]
    form = environment_form(tools=[f"{EXAMPLES}/calculator/calculator.py:calculate"])
    kinds = {"right": 0, "wrong": 0, "none": 0}
    for row in rows:
        question, *turns = row["messages"]
        numbers = [
            int(word)
            for word in question["content"].removeprefix("What is ").rstrip("?").split("+")
        ]
        opening = render(tokenizer, [question], open_answer=True, tools=row["tools"])
        said = render(
            tokenizer, [question, turns[0]], open_answer=False, tools=row["tools"]
        ).removeprefix(opening)
        action = parse_action(tokenizer, said.removesuffix("<|end|>"), row["tools"])
        assert (row["tools"] or [form.tools[0]]) == form.tools
        if "tool_calls" not in action:
            assert turns == [{"role": "assistant", "content": f"The sum is {sum(numbers)}."}]
            kinds["none"] += bool(row["tools"])
            continue
        [seen] = form.make().step(action).messages
        assert seen == turns[1]
        kinds["right" if seen["content"] == str(sum(numbers)) else "wrong"] += 1
        assert turns[2]["content"] == f"The sum is {seen['content']}."
    assert min(kinds.values()) > 0.15 * len(rows)
    assert (
        all(len(tokenizer.encode(digit)) == 1 for digit in "0123456789")
        and len(tokenizer.encode("48")) == 2
    )


def test_the_game_by_hand(monkeypatch):
    task = task_of("twenty_questions", monkeypatch)
    game = task.TwentyQuestions()
    thing = random.Random(5).choice(sorted(task.THINGS))
    assert len(task.THINGS) == 8 and game.reset(seed=5) == ("I think of something.", {})
    yes = {question: thing in things.split() for question, things in task.QUESTIONS.items()}
    for question, is_yes in yes.items():
        assert game.step(question) == ("yes" if is_yes else "no", 0.0, False, False, {})
    assert game.step("Is it red?")[0] == "I do not understand."
    observation, reward, ended, _, numbers = game.step(f"It is the {thing}.")
    assert (observation, ended, numbers) == ("", True, {"right": True, "questions": 6})
    assert reward == pytest.approx(1 - 6 * 0.05)
    assert game.step("It is the thing.")[1:3] == (0.0, True)
    answers = [
        tuple(thing in things.split() for things in task.QUESTIONS.values())
        for thing in task.THINGS
    ]
    assert len({of_thing[:3] for of_thing in answers}) == 8, "three questions tell all things apart"
    assert [sum(of_question[3:]) for of_question in answers].count(1) == 1, (
        "of the others, one names one thing"
    )
    # of the player without a plan: of every choice of questions, the share of things that it tells
    # apart
    found = []
    for count in range(5):
        told = [
            len({itemgetter(*kept)(of_thing) if kept else () for of_thing in answers}) / 8
            for kept in combinations(range(5), count)
        ]
        found.append(sum(told) / len(told) * (1 - 0.05 * count))
    assert sum(found) / 5 == pytest.approx(0.35, abs=0.005), "as the README says"
    for seed in range(20):
        row = task.demonstration(random.Random(seed))["messages"]
        guess = row[-1]["content"].removeprefix("It is the ").rstrip(".")
        assert len({turn["content"] for turn in row[1:-1:2]}) == len(row[1:-1:2]) <= 4
        for asked, said in zip(row[1:-1:2], row[2:-1:2], strict=True):
            assert (guess in task.QUESTIONS[asked["content"]].split()) == (said["content"] == "yes")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["calculator", "twenty_questions"])
def test_the_steps_accept_the_commands(tmp_path, name, ranks):
    shutil.copytree(EXAMPLES, tmp_path / "training_scripts/examples")
    (tmp_path / "training_scripts/ranks.sh").write_text(STUBS)
    script = tmp_path / "training_scripts/examples" / name / "run.sh"
    more = ["--seed", "7"] if name == "twenty_questions" else ["--tools", "--seed", "7"]
    command = ["bash", script, "out", *more]
    env = environment() | {"RANKS": str(ranks)}
    result = succeed(
        subprocess.run(command, env=env, cwd=tmp_path, text=True, capture_output=True, check=False)
    )
    assert f"made {script.parent}/task.py" in result.stderr
    sft, ppo = map(json.loads, result.stdout.splitlines())
    first, second = (parse(step, words[1:]) for step, words in (("sft", sft), ("ppo", ppo)))
    assert flatten(first)["output_dir"] == flatten(second)["actor_model_name_or_path"] == "out/sft"
    assert (
        flatten(second)["seed"] == 7
        and first.fit.per_device_train_batch_size
        == {"calculator": 64, "twenty_questions": 32}[name] // ranks
    )
    assert bool(second.environment.is_used) is (name == "twenty_questions"), (
        "--tools without one turns it off"
    )


FOLDER = ROOT / "training_scripts/examples/gsm8k"
NAMES, THINGS = ("Ann", "Bob", "Cy", "Dee"), ("pens", "hats")
GSM8K_STUBS = """
top="$PWD" RANKS="${RANKS:-1}" DTYPE=bf16
launch() { command python -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"; }
python() { [ "$1" = -c ] && command python "$@" || launch "$@"; }
"""
TINY = ("--max_prompt_seq_len", 80, "--max_answer_seq_len", 24)


def problem(number: int) -> dict[str, str]:
    """One of 40 different problems; its calculation is marked as in GSM8K."""
    name, thing = NAMES[number % 4], THINGS[number % 2]
    left, right = 1 + number // 8, 1 + number % 3
    total = left + right
    return {
        "question": f"{name} has {left} {thing} and buys {right}. How many {thing} now?",
        "answer": f"{left}+{right}=<<{left}+{right}={total}>>{total}\n#### {total}",
    }


def script(
    name: str, *words: object, folder: Path = FOLDER, **variables: object
) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in environment().items() if key not in ("MODEL", "DATA")}
    env |= {"RANKS": "1"} | {key: str(value) for key, value in variables.items()}
    command = ["bash", folder / name, *map(str, words)]
    return subprocess.run(
        command, env=env, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def out(assets, tmp_path_factory) -> Path:
    """The folders of what the three scripts start, one after the other as the README of the example
    does."""
    out = tmp_path_factory.mktemp("gsm8k")
    copy = shutil.copytree(FOLDER, out / FOLDER.relative_to(ROOT))
    (out / "training_scripts/ranks.sh").write_text(GSM8K_STUBS)
    data = out / "train.jsonl"
    data.write_text("".join(json.dumps(problem(number)) + "\n" for number in range(40)))
    shared = ("--dtype", "fp32")
    for name, folder, model, words in (
        (
            "run_sft.sh",
            "sft",
            assets / "lm",
            ("--max_steps", 100, "--learning_rate", 1e-2, *shared),
        ),
        (
            "run_grpo.sh",
            "grpo",
            out / "sft",
            (
                "--max_steps",
                2,
                "--eval_samples",
                2,
                "--per_device_generation_batch_size",
                16,
                *TINY,
                *shared,
            ),
        ),
        (
            "run_evaluate.sh",
            "evaluation",
            "",
            ("--model", out / "sft", out / "grpo/actor", "--max_tokens", 24, *shared),
        ),
    ):
        started = succeed(
            script(name, out / folder, *words, folder=copy, MODEL=model, DATA=data)
        ).stdout
        main, *flags = json.loads(started)
        succeed(
            forked(1, "tests/workers/run_module.py", *flags)
            if main == "-m"
            else forked(1, main, *flags)
        )
    return out


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.release
def test_sft_learns_the_form_of_answers_grpo_reports_both_rules_and_the_evaluation_compares_both(
    out,
):
    first, *_, last = [line["eval_loss"] for line in metrics_of(out / "sft") if "eval_loss" in line]
    assert last < first / 3
    lines = metrics_of(out / "grpo")
    for line in (line for line in lines if "reward/score_mean" in line):
        mean = line["reward/numeric_match_mean"] + 0.2 * line["reward/format_match_mean"]
        assert line["reward/score_mean"] == pytest.approx(mean, abs=1e-6)
    assert {"eval/pass@1", "eval/pass@2", "eval/kl_ref_k1"} <= set(lines[-1])
    found = json.loads((out / "evaluation/evaluation.json").read_text())
    assert str(out / "grpo/actor") in json.dumps(found) and "pass@4" in json.dumps(found)
    trained = yaml.safe_load((out / "grpo/config.yaml").read_text())["data_path"]
    assert trained == [f"{out}/train.jsonl[train[:95%]]"]


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_the_steps_accept_the_commands_of_the_readme(tmp_path, ranks):
    shutil.copytree(FOLDER, tmp_path / FOLDER.relative_to(ROOT))
    (tmp_path / "training_scripts/ranks.sh").write_text(GSM8K_STUBS)
    commands = (
        (FOLDER / "README.md")
        .read_text()
        .split("## Commands")[1]
        .split("```bash")[1]
        .split("```")[0]
    )
    words = ["bash", "-euo", "pipefail", "-c", commands]
    env = environment() | {"RANKS": str(ranks)}
    result = succeed(
        subprocess.run(words, env=env, cwd=tmp_path, text=True, capture_output=True, check=False)
    )
    started = [json.loads(line) for line in result.stdout.splitlines()]
    assert [words[0] for words in started[:2]] == [
        f"{tmp_path}/training/step{n}/main.py" for n in ("1_sft", "3_ppo")
    ]
    sft, grpo = (
        parse(step, words[1:]) for step, words in zip(("sft", "ppo"), started[:2], strict=True)
    )
    first, second, third = (
        flatten(sft),
        flatten(grpo),
        vars(evaluation_request(started[2][2:]).args),
    )
    assert second["actor_model_name_or_path"] == first["output_dir"] == third["model"][0]
    assert f"{second['output_dir']}/actor" == third["model"][1]
    assert (
        first["eval_data_path"]
        == second["eval_data_path"]
        == third["data_path"]
        == ["openai/gsm8k:main[train[95%:]]"]
    )
    assert first["input_template"] == second["input_template"] == third["input_template"]
    assert second["reward_function"] == third["reward_function"]
    assert plan_ppo(grpo.ppo, 7000, ranks).updates_per_rollout == 2
    assert SupervisedPlan(sft.fit, 7000, ranks).global_batch == {1: 32, 3: 24, 64: 512}[ranks]
