"""The quickstart with all three steps: a short trial, and before a release the whole."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from launch import environment, forked, metrics_of, run, succeed

from dschat_ppo.tools import toy
from dschat_ppo.tools.toy import Question, keeps_rule

RUN_MODULE = "tests/workers/run_module.py"
TRIAL_ROWS = 160  # of each file: two PPO steps take 128 prompts
TRIAL_HELD_OUT_ROWS = 12

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
release = pytest.mark.release


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A trial on a part of the rows."""
    folder = tmp_path_factory.mktemp("trial")
    toy.make(folder / "toy", seed=1234)
    for file in (folder / "toy/data").iterdir():
        count = TRIAL_ROWS
        if file.stem in ("sft_eval", "pairs_eval", "heldout"):
            count = TRIAL_HELD_OUT_ROWS
        rows = file.read_text().splitlines(keepends=True)
        file.write_text("".join(rows[:count]))
    result = succeed(
        run(
            ["bash", "training_scripts/quickstart.sh", str(folder), "--max_steps", "2"], timeout=900
        )
    )
    (folder / "log").write_text(result.stdout)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    result = succeed(run(["bash", "training_scripts/quickstart.sh", str(folder)], timeout=900))
    (folder / "log").write_text(result.stdout)
    return folder


@release
def test_quickstart_learns_the_task(out):
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sft_eval_loss_after"] < 0.1 * summary["sft_eval_loss_before"]
    assert summary["reward_eval_accuracy"] >= 0.95
    assert summary["ppo_reward_after"] > summary["ppo_reward_before"] + 1
    assert 0.3 <= summary["true_rule_rate_sft"] <= 0.65
    assert summary["true_rule_rate_ppo"] >= 0.9
    assert 0 < summary["ppo_kl_per_token"] < 0.5
    assert summary["distinct_answer_rate"] >= 0.8
    assert set(summary["seconds_per_step"]) == {"sft", "reward", "ppo"}
    assert summary["versions"]["deepspeed"] == "0.19.8"


@release
def test_the_chat_at_the_end_shows_what_ppo_has_changed_and_a_second_turn_is_answered(out):
    purpose, command = (
        (out / "log").read_text().split("chat with the model after PPO")[1].splitlines()[:2]
    )
    first = purpose.split("type first '")[1].removesuffix("':")
    rows = [json.loads(line) for line in (out / "toy/data/heldout.jsonl").read_text().splitlines()]
    [asked] = [Question(**row["about"]) for row in rows if row["prompt"][0]["content"] == first]
    settings = {"env": environment(), "text": True, "capture_output": True, "check": False}
    said = succeed(
        subprocess.run(shlex.split(command), input=f"{first}\nAnd the green lamp?\n", **settings)
    )
    names = said.stdout.splitlines()
    assert names[::2] == ["actor:", "sft:"] * 2
    after, before, second, _ = names[1::2]
    assert keeps_rule(asked, after) and not keeps_rule(asked, before)
    # one of ten second answers has another name, or none
    assert "he green lamp is in the " in second and second.endswith(toy.KIND_CLOSES)


@release
def test_the_report_of_ppo_shows_the_true_rule(out):
    scores = [line["eval/score"] for line in metrics_of(out / "ppo") if "eval/score" in line]
    assert len(scores) == 4 and scores[0] < 0.7 and scores[-1] > 0.9
    text = (out / "ppo/report.html").read_text()
    assert "dschat_ppo.tools.toy:true_rule" in text and "parameters, 100 % trained, from " in text


@pytest.mark.parametrize("which", ["trial", pytest.param("out", marks=release)])
def test_what_is_printed_exists_and_the_commands_at_the_end_run(which, request, tmp_path):
    log = (request.getfixturevalue(which) / "log").read_text()
    assert log.count("before:") == log.count("after :") == 5 <= log.count("  prompt: ")
    lines = log.split("reports, for a browser:\n")[1].splitlines()
    assert all(Path(report.strip()).stat().st_size > 10_000 for report in lines[:3])
    chatting, evaluating = (shlex.split(line) for line in lines[3:] if line.startswith("  "))
    assert chatting[1:3] == ["-m", "dschat_ppo.tools.chat"]
    assert evaluating[1:3] == ["-m", "dschat_ppo.tools.evaluate"]
    # where the libraries are imported already
    printed = succeed(forked(1, RUN_MODULE, *evaluating[2:], "--max_prompts", "8")).stdout
    assert "  actor, greedy (score " in printed and "prompt 3:" in printed
    question = tmp_path / "question"
    question.write_text("Where is the lamp?\n")
    said = succeed(forked(1, RUN_MODULE, *chatting[2:], stdin=question)).stdout
    assert "actor:\n" in said and "sft:\n" in said
