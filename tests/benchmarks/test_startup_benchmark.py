"""The benchmark of the start, apart from its runs: phases from marks, its table, and that its flags are accepted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dschat_ppo.config.cli import parse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import startup  # noqa: E402


def test_phases_are_the_differences_of_marks():
    marks = [("launcher", 104.0, 3.5), ("imports", 110.0, 5.0), ("data", 110.5, 5.25)]
    found = startup.phases_of(marks, began=100.0)
    assert found == {"launcher": (3.5, 4.0), "imports": (5.0, 6.0), "data": (0.25, 0.5)}


def test_table_by_hand():
    before = {startup.IMPORTS: (4.0, 5.0), startup.TOTAL: (14.0, 15.25)}
    text = startup.table({"before": before, "here": {startup.IMPORTS: (4.0, 5.0), startup.TOTAL: (7.0, 8.0)}})
    last = text.splitlines()[-1]
    assert last == "| **command to first token** | 14.00 | 15.25 | 3.50 | 7.00 | 8.00 | 1.75 |"


def test_step_3_accepts_the_flags():
    config = parse("ppo", startup.step_flags(Path("toy"), Path("out")))
    assert config.ppo.actor_zero_stage == 3 and config.run.folder == "out"


def test_a_command_that_fails_ends_the_benchmark_with_its_output(tmp_path):
    with pytest.raises(SystemExit) as problem:
        startup.run([sys.executable, "-c", "print('reason'); raise SystemExit(3)"], tmp_path)
    assert "reason" in str(problem.value)


def test_a_command_is_measured(tmp_path):
    cpu, wall = startup.run([sys.executable, "-c", "import time; time.sleep(0.3)"], tmp_path)
    assert wall >= 0.3 and 0 < cpu < wall


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
