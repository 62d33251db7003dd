"""Seconds of a step from measurements, by hand; what `--dry_run --measure` prints and leaves."""

import re

import pytest
from launch import forked, succeed

from dschat_ppo.commands import run_training
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.planner.step_time import PPOMeasurement, fit_time, ppo_time, seconds_for


def test_seconds_for_rows_by_hand():
    assert seconds_for(64, [(32, 1.5)]) == 3.0
    # 0.5 s for an update and 0.1 s for each row
    assert seconds_for(40, [(10, 1.5), (20, 2.5)]) == pytest.approx(4.5)
    assert seconds_for(5, [(10, 1.5), (20, 2.5)]) == pytest.approx(1.0)
    assert seconds_for(40, [(10, 2.0), (20, 1.0)]) == 2.0  # noise: no row is faster than nothing


@pytest.mark.parametrize(("greedy_too", "generated"), [(False, 32), (True, 40)])
def test_a_ppo_step_by_hand(greedy_too, generated):
    """2 ranks; on each 8 prompts x 4 responses of 11 tokens; 16 rows in each of 2 x 3 updates."""
    flags = PPOFlags(
        "actor",
        max_answer_seq_len=11,
        n_samples_per_prompt=4,
        per_device_generation_batch_size=8,
        per_device_training_batch_size=8,
        gradient_accumulation_steps=2,
        ppo_epochs=3,
    )
    plan = plan_ppo(flags, prompts=160, world_size=2)
    measured = PPOMeasurement(
        decoded_rows=16,
        first_token=0.3,
        decode_step=0.02,
        scored_rows=8,
        reward=0.1,
        score=0.25,
        updates=[(4, {"actor": 0.6, "critic": 0.4}), (8, {"actor": 1.0, "critic": 0.6})],
    )
    step = ppo_time(measured, plan, greedy_too)
    seconds = {phase.name: phase.seconds for phase in step.phases}
    assert seconds == pytest.approx(
        {
            "rollout/first": generated / 16 * 0.3,
            "rollout/decode": generated / 16 * 10 * 0.02,
            "reward": 0.4,
            "score": 1.0,
            "train/actor": 6 * (0.2 + 16 * 0.1),
            "train/critic": 6 * (0.2 + 16 * 0.05),
        }
    )
    assert step.steps == 10


def test_the_hours_of_a_run():
    text = str(fit_time([(1, 0.5), (4, 2.0)], micro_batches=8, steps=3600))
    assert "3600 optimizer steps x 4 s = 4:00:00 (4.00 hours)" in text


STEPS = {
    "sft": "--model_name_or_path {a}/lm --data_path {a}/sft.jsonl --max_seq_len 64",
    "dpo": "--model_name_or_path {a}/lm --data_path {a}/pairs.jsonl --max_seq_len 64",
    "ppo": "--actor_model_name_or_path {a}/lm --critic_model_name_or_path {a}/reward"
    " --data_path {a}/prompts.jsonl --max_prompt_seq_len 32 --max_answer_seq_len 8",
}


@pytest.mark.parametrize(
    ("step", "phases"),
    [
        ("sft", ["train"]),
        ("dpo", ["train"]),
        (
            "ppo",
            ["rollout/first", "rollout/decode", "reward", "score", "train/actor", "train/critic"],
        ),
    ],
)
def test_a_measured_dry_run(assets, tmp_path, step, phases):
    """It prints a time of each phase and their sum, and writes nothing."""
    words = STEPS[step].format(a=assets).split()
    words += ["--dtype", "fp32", "--output_dir", str(tmp_path / "out"), "--dry_run", "--measure"]
    result = forked(1, "tests/workers/run_module.py", "dschat_ppo", step, *words)
    succeed(result)
    lines = re.findall(r"^  (\S+(?: all)?) .* ([\d.]+) s$", result.stdout, re.MULTILINE)
    assert [name for name, _ in lines] == [*phases, "in all"]
    assert all(float(seconds) > 0 for name, seconds in lines if name != "rollout/decode")
    total = sum(float(seconds) for _, seconds in lines[:-1])
    assert float(lines[-1][1]) == pytest.approx(total, abs=0.01)
    assert "nothing was written" in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--measure", "--measure needs --dry_run"),
        ("--dry_run --measure --dry_run_ranks 4", "omit --dry_run_ranks"),
    ],
)
def test_flags_that_measure_nothing(capsys, words, message):
    start = "--model_name_or_path m --data_path d --output_dir o"
    assert run_training("sft", [*start.split(), *words.split()]) == 2
    assert message in capsys.readouterr().err
