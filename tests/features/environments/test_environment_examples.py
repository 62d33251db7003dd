"""The examples with episodes: their tools, games, demonstrations and commands."""

import importlib
import json
import random
import shutil
import subprocess
import sys
from itertools import combinations
from operator import itemgetter

import pytest
from launch import ROOT, environment, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.config.step_config import flatten
from dschat_ppo.data.model_replies import reply_of_text
from dschat_ppo.data.templates import render
from dschat_ppo.features.environments.environment_forms import environment_form
from dschat_ppo.features.environments.flags import EnvironmentFlags

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
        action = reply_of_text(tokenizer, said.removesuffix("<|end|>"), row["tools"]).message
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
    assert bool(second.of(EnvironmentFlags).is_used) is (name == "twenty_questions"), (
        "--tools without one turns it off"
    )
