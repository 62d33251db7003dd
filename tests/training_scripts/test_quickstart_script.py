"""Which steps the quickstart does, told by steps that only leave their marks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

STEPS = ("sft", "reward", "ppo")
STUB = """#!/usr/bin/env bash
for last; do case "$last" in --*|never) ;; *) folder="$last" ;; esac; done
step="$(basename "$folder")"
mkdir -p "$folder"
rm -f "$folder/result.json"
touch "$folder/config.yaml"
echo "$step ${*##/*}" | xargs >>"$(dirname "$folder")/did"
[ "${STOP:-}" = "$step" ] || echo {} >"$folder/result.json"
"""


@pytest.fixture
def script(tmp_path) -> Path:
    scripts = tmp_path / "training_scripts"
    (scripts / "toy").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "training_scripts/quickstart.sh", scripts)
    (scripts / "setup_venv.sh").write_text("")
    real = (Path(__file__).parents[2] / "training_scripts/ranks.sh").read_text().splitlines()
    [is_whole] = [line for line in real if line.startswith("is_whole()")]
    python = 'python() { case "$*" in *json.tool*) command python3 "$@" ;; esac; }'
    (scripts / "ranks.sh").write_text(f"RANKS=1 OMP_NUM_THREADS=1\n{python}\n{is_whole}\n")
    for name in ("run_step1_sft", "run_step2_reward", "run_step3_ppo"):
        (scripts / "toy" / f"{name}.sh").write_text(STUB)
    return scripts / "quickstart.sh"


def did(script: Path, stop: str = "") -> tuple[int, list[str]]:
    """(exit code, what each step that was run was told)."""
    out = script.parents[1] / "out"
    (out / "did").unlink(missing_ok=True)
    result = subprocess.run(["bash", script, out], env={**os.environ, "STOP": stop}, check=False, capture_output=True)
    lines = (out / "did").read_text().splitlines() if (out / "did").exists() else []
    return result.returncode, lines


def test_what_is_done_is_not_done_again(script):
    assert did(script) == (0, list(STEPS))
    assert did(script) == (0, [])


@pytest.mark.parametrize("stop", STEPS)
def test_a_step_that_stops_ends_the_quickstart_and_goes_on(script, stop):
    at = STEPS.index(stop)
    assert did(script, stop) == (1, list(STEPS[: at + 1]))
    assert did(script) == (0, list(STEPS[at:])), "it goes on, and is not told to begin anew"


def test_what_follows_a_step_that_is_done_again_begins_anew(script):
    did(script)
    shutil.rmtree(script.parents[1] / "out/sft")
    anew = "--overwrite_output_dir --resume never"
    assert did(script, stop="reward") == (1, ["sft", f"reward {anew}"])
    shutil.rmtree(script.parents[1] / "out/reward")
    assert did(script) == (0, ["reward", f"ppo {anew}"])


def test_a_run_between_two_steps_that_is_killed_leaves_nothing_old_as_done(script):
    did(script)
    (script.parents[1] / "out/sft/result.json").unlink()
    assert did(script, stop="sft") == (1, ["sft"])
    assert [line.split()[0] for line in did(script)[1]] == list(STEPS)


@pytest.mark.parametrize("content", ["", '{"loss_after": 1', "\0\0\0"])
def test_a_step_whose_result_is_not_whole_is_not_done(script, content):
    did(script)
    (script.parents[1] / "out/ppo/result.json").write_text(content)
    assert did(script) == (0, ["ppo"])
