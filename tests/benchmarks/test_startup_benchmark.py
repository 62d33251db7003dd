"""The benchmark of the start: its flags are accepted, and how it starts a step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dschat_ppo.config.cli import parse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import startup  # noqa: E402


def test_step_3_accepts_the_flags():
    config = parse("ppo", startup.step_flags(Path("toy"), Path("out")))
    assert config.ppo.actor_zero_stage == 3 and config.run.folder == "out"


@pytest.mark.parametrize(("scripts", "way", "printed"), [
    ("launch() { echo launch; }", "script", "launch"),
    ("launch() { echo launch; }", "deepspeed", "deepspeed --num_accelerators 2 --master_port 7 main.py --flag a b"),
    ("", "script", "deepspeed --num_accelerators 2 --master_port 7 main.py --flag a b"),
])  # fmt: skip
def test_a_step_starts_as_the_checkouts_scripts_start_it(tmp_path, scripts, way, printed):
    (tmp_path / "training_scripts").mkdir()
    (tmp_path / "training_scripts/ranks.sh").write_text(f'{scripts}\ndeepspeed() {{ echo "deepspeed $*"; }}\n')
    command = ["bash", "-c", startup.START, "start", way, "main.py", "--flag", "a b"]
    env = os.environ | {"RANKS": "2", "MASTER_PORT": "7"}
    done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == printed
