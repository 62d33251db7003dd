"""`run_grpo_addition.sh`: what it starts, by stubs; and two PPO steps by the script itself, after a short SFT."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import ROOT, environment, metrics_of, succeed

from dschat_ppo.tools import addition

SCRIPT = Path("training_scripts/toy/run_grpo_addition.sh")
STEPS = 2
STUBS = """
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" RANKS="${RANKS:-1}"
python() { echo "python $*"; mkdir -p "$3/model"; touch "$3/model/model.safetensors"; }
launch() { echo "launch ${1##*/training/} $*"; }
is_valid_json() { [ -e "$1" ]; }
"""
SFT = 'echo "sft $*"; mkdir -p "$2"; touch "$2/result.json"'


def started(top: Path, ranks: int = 1) -> list[str]:
    """What the copy of the script in `top` starts."""
    command = ["bash", str(top / SCRIPT), str(top / "out"), "--seed", "5"]
    env = environment() | {"RANKS": str(ranks)}
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
    assert made == f"python -m dschat_ppo.tools.addition {out}/toy"
    assert sft == f"sft {out}/toy {out}/sft"
    assert grpo.startswith("launch step3_ppo/main.py") and grpo.endswith(f"--output_dir {out}/grpo --seed 5")
    assert started(top) == [grpo]
    (out / "sft/result.json").unlink()
    assert started(top) == [sft, grpo], "an SFT run that was stopped is resumed"


@pytest.mark.parametrize(("ranks", "prompts", "rows"), [(1, 32, 64), (2, 16, 32), (64, 1, 1)])
def test_all_ranks_together_take_the_same_number_of_rows(top, ranks, prompts, rows):
    grpo = started(top, ranks)[-1]
    assert f"--per_device_generation_batch_size {prompts} --per_device_training_batch_size {rows} " in grpo


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("addition")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(addition.COUNTS, "sft", 6400)
        addition.make(out / "toy", 1234)
    words = ["bash", ROOT / SCRIPT, out, "--max_steps", STEPS, "--eval_interval", 1]
    env = environment() | {"RANKS": "1"}
    succeed(subprocess.run([*map(str, words)], env=env, text=True, capture_output=True, timeout=600, check=False))
    return out


@pytest.mark.ranks
@pytest.mark.slow
def test_answers_score_1_for_the_sum_and_0_for_anything_else(out):
    rows = [json.loads(line) for line in (out / f"grpo/eval/step_{STEPS:06d}.jsonl").read_text().splitlines()]
    assert len(rows) == 256
    for row in rows:
        total = str(sum(map(int, row["prompt"].removesuffix("=").split("+"))))
        assert row["scores"] == [float(answer == total) for answer in row["answers"]]
    assert {score for row in rows for score in row["scores"]} == {0.0, 1.0}


@pytest.mark.ranks
@pytest.mark.slow
def test_the_actor_is_trained_without_a_critic(out):
    lines = [line for line in metrics_of(out / "grpo") if "reward/score_mean" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(0 < line["reward/score_mean"] < 1 for line in lines)
    weights = [(out / folder / "model.safetensors").read_bytes() for folder in ("sft", "grpo/actor")]
    assert weights[0] != weights[1] and not (out / "grpo/critic").exists()
