"""Which steps the quickstart runs, with stubs in place of the training scripts; and how its output ends."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import quickstart_report

from dschat_ppo.tools import chat, evaluate

STEPS = ("sft", "reward", "ppo")
SAMPLES = [("Where is the red lamp?", "before", "after")]
ASK = ("Where is the blue kite?", 41)
STUB = """#!/usr/bin/env bash
for last; do case "$last" in --*|never) ;; *) folder="$last" ;; esac; done
step="$(basename "$folder")"
mkdir -p "$folder"
rm -f "$folder/result.json"
touch "$folder/config.yaml"
echo "$step ${*##/*}" | xargs >>"$(dirname "$folder")/steps"
[ "${STOP:-}" = "$step" ] || echo {} >"$folder/result.json"
"""


@pytest.fixture
def script(tmp_path) -> Path:
    scripts = tmp_path / "training_scripts"
    (scripts / "toy").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "training_scripts/quickstart.sh", scripts)
    (scripts / "setup_venv.sh").write_text("")
    real = (Path(__file__).parents[2] / "training_scripts/ranks.sh").read_text().splitlines()
    [is_valid_json] = [line for line in real if line.startswith("is_valid_json()")]
    python = 'python() { case "$*" in *json.tool*) command python3 "$@" ;; esac; }'
    (scripts / "ranks.sh").write_text(f"RANKS=1 OMP_NUM_THREADS=1\n{python}\n{is_valid_json}\n")
    for name in ("run_step1_sft", "run_step2_reward", "run_step3_ppo"):
        (scripts / "toy" / f"{name}.sh").write_text(STUB)
    return scripts / "quickstart.sh"


def steps_run(script: Path, stop: str = "") -> tuple[int, list[str]]:
    """(exit code, step and extra arguments of each step that ran)."""
    out = script.parents[1] / "out"
    (out / "steps").unlink(missing_ok=True)
    result = subprocess.run(["bash", script, out], env={**os.environ, "STOP": stop}, check=False, capture_output=True)
    lines = (out / "steps").read_text().splitlines() if (out / "steps").exists() else []
    return result.returncode, lines


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--help"], 0, "usage: quickstart.sh [OUT_DIR"), (["--max_steps", "2"], 2, "error: --max_steps is no folder"),
    (["{out}", "--dry_run"], 2, "error: --dry_run: steps 2 and 3 need the models"),
])  # fmt: skip
def test_words_that_are_no_folder_are_refused_before_anything_is_made(script, tmp_path, words, code, said):
    command = ["bash", script, *(word.format(out=tmp_path / "out") for word in words)]
    result = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert result.returncode == code
    assert said in result.stdout + result.stderr
    assert os.listdir(tmp_path) == ["training_scripts"]


def test_a_stopped_step_ends_the_quickstart_and_is_resumed(script):
    assert steps_run(script, "sft") == (1, ["sft"])
    assert steps_run(script, "reward") == (1, ["sft", "reward"]), "the step is resumed, not started from scratch"
    assert steps_run(script) == (0, ["reward", "ppo"])
    assert steps_run(script) == (0, [])


def test_steps_after_a_repeated_step_start_from_scratch(script):
    steps_run(script)
    shutil.rmtree(script.parents[1] / "out/sft")
    scratch = "--overwrite_output_dir --resume never"
    assert steps_run(script, stop="reward") == (1, ["sft", f"reward {scratch}"])
    shutil.rmtree(script.parents[1] / "out/reward")
    assert steps_run(script) == (0, ["reward", f"ppo {scratch}"])


def test_a_step_with_a_truncated_result_is_not_finished(script):
    steps_run(script)
    for content in ("", '{"loss_after": 1'):
        (script.parents[1] / "out/ppo/result.json").write_text(content)
        assert steps_run(script) == (0, ["ppo"])


def test_the_output_ends_with_the_reports_and_with_commands_that_the_tools_accept(capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    quickstart_report.show(defaultdict(float), SAMPLES, ASK, Path("/out of/quick"))
    lines = capsys.readouterr().out.split("reports, for a browser:\n")[1].splitlines()
    assert lines[:3] == [f"  /out of/quick/{step}/report.html" for step in STEPS]
    chatting, evaluating = (shlex.split(line) for line in lines[3:] if line.startswith("  "))
    assert [words[:3] for words in (chatting, evaluating)] == [
        ["python", "-m", f"dschat_ppo.tools.{tool}"] for tool in ("chat", "evaluate")
    ]
    [words, settings, *_] = chat.read_arguments(chatting[3:])
    assert settings.seed == 41 and any("'Where is the blue kite?'" in line for line in lines)
    assert (words.model, words.compare) == ("/out of/quick/ppo/actor", "/out of/quick/sft")
    wanted = evaluate.read_arguments(evaluating[3:])
    assert wanted.words.model == ["/out of/quick/sft", "/out of/quick/ppo/actor"]
    assert wanted.prompts.data_path == ["/out of/quick/toy/data/heldout.jsonl"]
    assert wanted.rewards.reward_model_name_or_path == "/out of/quick/reward"


def test_ctrl_c_says_how_to_resume_and_returns_130(script):
    waits = "#!/usr/bin/env bash\ntrap 'exit 130' INT\necho ready\nsleep 100\n"
    (script.parent / "toy/run_step2_reward.sh").write_text(waits)
    words = ["bash", script, script.parents[1] / "out"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while "ready" not in run.stdout.readline():
        assert run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    rest = run.communicate(timeout=60)[0]
    assert (run.returncode, rest) == (130, "quickstart: interrupted; run the same command again to resume\n")
