"""Step 3 with exact rollouts and an environment: what a run computes does not depend on when its
environment answers, nor on a kill in the middle of a turn."""

from pathlib import Path

import pytest
from launch import forked, metrics_of, succeed
from letter_episodes import words_for
from letter_runs import samples_of
from safetensors.torch import load_file

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FLAGS = (
    "--exact_rollout --save_steps 1 --per_device_generation_batch_size 4"
    " --gradient_accumulation_steps 2 --actor_zero_stage 0"
).split()
# what a run computes; the others are times, and counts of what was done before a kill
COMPUTED = ("policy", "kl", "reward", "episode", "optim", "rollout")


def computed(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step that a run computes."""
    return [
        {key: value for key, value in row.items() if key.split("/")[0] in COMPUTED}
        for row in metrics_of(folder)
    ]


def test_a_kill_in_a_turn_changes_no_bit_whatever_the_times_of_answers(assets, tmp_path):
    """The killed run generates by continuous batching, where each answer that comes earlier or
    later gives the steps other rows, as in the uninterrupted run."""
    script = "training/step3_ppo/main.py"
    (tmp_path / "slow").touch()
    succeed(forked(1, script, *words_for(assets, tmp_path, "whole", *FLAGS)))
    calls = (tmp_path / "calls").read_text().split()
    episodes = calls.count("reset") // 3  # of each of the three steps

    (tmp_path / "calls").unlink()
    # in the third step; the checkpoint after the first one is complete
    (tmp_path / "most").write_text(str(len(calls) - 3 * episodes // 4))
    words = words_for(assets, tmp_path, "killed", *FLAGS)
    assert forked(1, script, *words).returncode != 0
    assert not (tmp_path / "most").exists(), "an environment has killed its rank"
    assert not (tmp_path / "killed" / "result.json").exists()
    succeed(forked(1, script, *words))

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert all(row["rollout/logprob_diff_max"] == 0.0 for row in metrics_of(whole))
    assert computed(killed) == computed(whole)
    assert samples_of(killed) == samples_of(whole)
    weights = {path.name: load_file(path) for path in whole.rglob("actor/*.safetensors")}
    assert weights
    for name, tensors in weights.items():
        resumed = load_file(next(killed.rglob(f"actor/{name}")))
        for tensor_name, tensor in tensors.items():
            assert tensor.equal(resumed[tensor_name]), tensor_name
