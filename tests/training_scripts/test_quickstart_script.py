"""Which steps the quickstart runs, with stubs in place of the training scripts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
    result = subprocess.run(
        ["bash", script, out], env={**os.environ, "STOP": stop}, check=False, capture_output=True
    )
    lines = (out / "steps").read_text().splitlines() if (out / "steps").exists() else []
    return result.returncode, lines


def test_a_stopped_step_ends_the_quickstart_and_is_resumed(script):
    assert steps_run(script, "sft") == (1, ["sft"])
    assert steps_run(script, "reward") == (1, ["sft", "reward"]), (
        "the step is resumed, not started from scratch"
    )
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
