"""Step 3 with an environment: the numbers do not depend on ranks, ZeRO stages, packing or the way
of generation."""

import numpy as np
import pytest
from launch import forked, metrics_of, succeed
from letter_episodes import words_for
from letter_runs import samples_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LAYOUTS = {
    "one": (
        1,
        "--per_device_generation_batch_size 4 --gradient_accumulation_steps 2 --actor_zero_stage 0",
    ),
    "two": (2, "--per_device_generation_batch_size 2 --actor_zero_stage 3"),
    "turn by turn": (
        2,
        "--per_device_generation_batch_size 2 --actor_zero_stage 3 --unpin_actor_parameters",
    ),
    "padded": (
        1,
        (
            "--per_device_generation_batch_size 4 --gradient_accumulation_steps 2 --rollout_engine"
            " padded"
        ),
    ),
}


def depends_on_the_computation(key):
    return (
        key.split("/")[0] in ("policy", "kl", "reward", "episode", "optim", "rollout")
        and "diff" not in key
    )


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    found = {}
    for name, (ranks, flags) in LAYOUTS.items():
        (folder / "calls").unlink(missing_ok=True)
        words = words_for(assets, folder, name, *flags.split())
        succeed(forked(ranks, "training/step3_ppo/main.py", *words))
        calls = (folder / "calls").read_text().split()
        found[name] = metrics_of(folder / name), samples_of(folder / name), calls
    return found


def test_answers_are_episodes(runs):
    metrics, samples, _ = runs["one"]
    assert metrics[-1]["episode/turns"] > 1.2 and metrics[-1]["episode/failures"] == 0
    assert any("letters." in sample["answer"] for sample in samples)
    assert all("Room " in sample["prompt"] for sample in samples)
    assert all(sample["length"] < sample["tokens"] for sample in samples)
    assert metrics[0]["reward/score_std"] > 0.01
    assert abs(metrics[0]["policy/first_log_ratio_abs_max"]) < 1e-4, (
        "training sees what the rollout saw"
    )


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_the_numbers_do_not_depend_on_the_layout(runs, name):
    (expected, samples, _), (found, others, _) = runs["one"], runs[name]
    assert [each["answer"] for each in samples] == [each["answer"] for each in others]
    for row, other in zip(expected, found, strict=True):
        for key in filter(depends_on_the_computation, row):
            # Adam makes whole steps of the rounding of small gradients
            atol = 1e-3 if key.endswith("_max") else 1e-4
            np.testing.assert_allclose(other[key], row[key], rtol=1e-2, atol=atol, err_msg=key)


def test_a_run_that_is_killed_during_a_turn_resumes_and_asks_no_environment_again(
    runs, assets, tmp_path
):
    """Only the episodes that had not ended are played again, and the numbers are those of the
    uninterrupted run. It is killed in the third step, when the checkpoint after the first one is
    complete: the second step asks nothing."""
    # bit-equal whatever the times of answers
    words = words_for(assets, tmp_path, "out", *LAYOUTS["padded"][1].split(), "--save_steps", 1)
    whole = runs["padded"][2]
    episodes = whole.count("close") // 3  # of each of the three steps
    # the last calls of a run may be lost
    (tmp_path / "most").write_text(str(len(whole) - 3 * episodes // 4))
    killed = forked(1, "training/step3_ppo/main.py", *words)
    assert killed.returncode != 0
    before = (tmp_path / "calls").read_text().split()
    assert before.count("reset") == 3 * episodes and before.count("close") > 2 * episodes
    succeed(forked(1, "training/step3_ppo/main.py", *words))
    after = (tmp_path / "calls").read_text().split()[len(before) :]
    assert 0 < after.count("reset") <= episodes, "those of the third step that had not ended"
    metrics, samples = runs["padded"][:2]
    for row, found in zip(metrics, metrics_of(tmp_path / "out"), strict=True):
        for key in filter(depends_on_the_computation, row):
            assert found[key] == row[key], key
    assert samples == samples_of(tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints").exists()
