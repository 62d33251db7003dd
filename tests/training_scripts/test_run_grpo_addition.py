"""`run_grpo_addition.sh`: what it starts, by stubs."""

import shutil
import subprocess
from pathlib import Path

import pytest
from launch import ROOT, environment, succeed

SCRIPT = Path("training_scripts/toy/run_grpo_addition.sh")
STUBS = """
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" RANKS="${RANKS:-1}" DTYPE=bf16
python() { echo "python $*"; mkdir -p "$2/model"; touch "$2/model/model.safetensors"; }
launch() { echo "launch ${1##*/training/} $*"; }
is_valid_json() { [ -e "$1" ]; }
"""
SFT = 'echo "sft $*"; mkdir -p "$2"; touch "$2/result.json"'


def started(top: Path) -> list[str]:
    """What the copy of the script in `top` starts."""
    command = ["bash", str(top / SCRIPT), str(top / "out"), "--seed", "5"]
    env = environment() | {"RANKS": "1"}
    return succeed(subprocess.run(command, env=env, text=True, capture_output=True, check=False)).stdout.splitlines()


@pytest.fixture
def top(tmp_path) -> Path:
    """The script among stubs."""
    (tmp_path / SCRIPT).parent.mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    (tmp_path / "training_scripts/ranks.sh").write_text(STUBS)
    (tmp_path / "training_scripts/toy/run_sft_addition.sh").write_text(SFT)
    return tmp_path


def test_the_task_and_its_sft_model_are_made_once(top):
    out = top / "out"
    made, sft, grpo = started(top)
    assert made == f"python {top}/training_scripts/toy/addition.py {out}/toy"
    assert sft == f"sft {out}/toy {out}/sft"
    assert grpo.startswith("launch step3_ppo/main.py") and grpo.endswith(f"--output_dir {out}/grpo --seed 5")
    assert started(top) == [grpo]
    (out / "sft/result.json").unlink()
    assert started(top) == [sft, grpo], "an SFT run that was stopped is resumed"
