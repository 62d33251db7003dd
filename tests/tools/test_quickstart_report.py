"""The quickstart with all three steps: a short trial, and before a release the whole, SFT on fewer
rows."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, metrics_of, run, succeed

from dschat_ppo.tools.toy import Question, keeps_rule

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
release = pytest.mark.release


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
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
    succeed(run([sys.executable, "-m", "dschat_ppo.tools.toy", str(folder / "toy")]))
    rows = folder / "toy/data/sft.jsonl"
    # 150 of 250 steps; the loss is flat then
    kept = rows.read_text().splitlines(keepends=True)[:4800]
    rows.write_text("".join(kept))
    result = succeed(run(["bash", "training_scripts/quickstart.sh", str(folder)], timeout=900))
    (folder / "log").write_text(result.stdout)
    return folder


@release
def test_quickstart_learns_the_task(out):
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sft_eval_loss_after"] < 0.1 * summary["sft_eval_loss_before"]
    assert summary["reward_eval_accuracy"] >= 0.95
    assert summary["ppo_reward_after"] > summary["ppo_reward_before"] + 1
    assert 0.2 <= summary["true_rule_rate_sft"] <= 0.6
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
    assert keeps_rule(Question(asked.name, "green", "lamp", 4), second)


@release
def test_the_report_of_ppo_shows_the_true_rule(out):
    scores = [line["eval/score"] for line in metrics_of(out / "ppo") if "eval/score" in line]
    assert len(scores) == 9 and scores[0] < 0.7 and scores[-1] > 0.9
    text = (out / "ppo/report.html").read_text()
    assert "dschat_ppo.tools.toy:true_rule" in text and "parameters, 100 % trained, from " in text


@pytest.mark.parametrize("which", ["trial", pytest.param("out", marks=release)])
def test_what_is_printed_exists_and_the_commands_at_the_end_run(which, request):
    log = (request.getfixturevalue(which) / "log").read_text()
    assert log.count("before:") == log.count("after :") == 5 <= log.count("  prompt: ")
    lines = log.split("reports, for a browser:\n")[1].splitlines()
    assert all(Path(report.strip()).stat().st_size > 10_000 for report in lines[:3])
    chatting, evaluating = (shlex.split(line) for line in lines[3:] if line.startswith("  "))
    settings = {"env": environment(), "text": True, "capture_output": True, "check": False}
    printed = succeed(subprocess.run([*evaluating, "--max_prompts", "8"], **settings)).stdout
    assert "  actor, greedy (score " in printed and "prompt 3:" in printed
    said = succeed(subprocess.run(chatting, input="Where is the lamp?\n", **settings)).stdout
    assert "actor:\n" in said and "sft:\n" in said
