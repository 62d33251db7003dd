"""The example `gsm8k` on word problems in the form of GSM8K and a tiny model, and the commands of
its README."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from launch import ROOT, environment, forked, metrics_of, succeed

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.step_config import flatten
from dschat_ppo.supervised.training_plan import SupervisedPlan
from dschat_ppo.tools.evaluate import evaluation_request

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
