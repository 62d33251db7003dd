"""Step 3 with an environment: the numbers do not depend on ranks, ZeRO stages, packing or the way
of generation."""

import json

import numpy as np
import pytest
from launch import forked, metrics_of, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ENVIRONMENT = '''
import os, signal, pathlib, psutil
FOLDER = pathlib.Path(__file__).parent

def note(word):
    with (FOLDER / "calls").open("a") as file:
        file.write(word + "\\n")
    try:
        most = int((FOLDER / "most").read_text())
    except FileNotFoundError:  # another episode has removed it, or there is none
        return
    if len((FOLDER / "calls").read_text().split()) >= most:
        (FOLDER / "most").unlink(missing_ok=True)
        # this process is a fork of the server of the rank
        rank = psutil.Process(os.getppid()).parent().pid
        os.kill(rank, signal.SIGKILL)

class Letters:
    """Rewards an action by its letters e, and answers with how many there were. Ranks have
    other numbers of turns."""
    def reset(self, seed=None, options=None):
        note("reset")
        self.turns, self.most = 0, 1 + options['number'] % 2 * 4
        return f"Room {options['number'] % 3}."
    def close(self):
        note("close")
    def step(self, text):
        note("step")
        self.turns += 1
        seen = f" {text.count('e')} letters. " * (self.turns % 2 + 1)
        return seen, text.count("e") / 4, self.turns == self.most, False, {}
'''
FLAGS = (
    "--use_reward_model False --advantage_estimator grpo --n_samples_per_prompt 2"
    " --max_answer_seq_len 48 --kl_coef 0.1 --max_steps 3 --actor_learning_rate 0.0001"
    " --num_warmup_steps 0 --dtype fp32 --seed 3 --per_device_training_batch_size 2"
    f" --max_prompt_seq_len 48 --stop_token_ids {' '.join(map(str, range(40, 80)))}"
).split()
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


def words_for(assets, folder, layout, output, *more):
    """The command line for a layout; makes the environment and the rows in `folder`."""
    (folder / "letters.py").write_text(ENVIRONMENT)
    rows = [json.loads(line) for line in (assets / "prompts.jsonl").read_text().splitlines()]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"number": n}) + "\n" for n, row in enumerate(rows))
    )
    words = [
        "--actor_model_name_or_path",
        assets / "lm",
        "--data_path",
        folder / "rows.jsonl",
        *FLAGS,
        *more,
    ]
    words += ["--environment", f"{folder / 'letters.py'}:Letters", "--output_dir", folder / output]
    return [*words, *LAYOUTS[layout][1].split()]


def samples_of(output):
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def depends_on_the_computation(key):
    return (
        key.split("/")[0] in ("policy", "kl", "reward", "episode", "optim", "rollout")
        and "diff" not in key
    )


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    found = {}
    for name, (ranks, _) in LAYOUTS.items():
        (folder / "calls").unlink(missing_ok=True)
        succeed(forked(ranks, "training/step3_ppo/main.py", *words_for(assets, folder, name, name)))
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
    words = words_for(assets, tmp_path, "padded", "out", "--save_steps", 1)
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
