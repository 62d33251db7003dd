"""`--profile` on two ranks: the traces of real steps, the same numbers, and steps that cannot be traced."""

import pytest
from launch import metrics_of, run_steps
from traces import blocks, inside, spans_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

UNTIMED = ("time", "memory/")
PPO_BLOCKS = {"rollout", "reward", "score", "gather rows", "advantages", "train", "train actor", "train critic"}
PPO_BLOCKS |= {"update actor", "update critic"}


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """(folder of the outputs, what each run said)"""
    folder = tmp_path_factory.mktemp("profiled")
    common = ["--dtype", "fp32", "--num_warmup_steps", 0, "--data_split", "0,0,1"]
    ppo = ["--actor_model_name_or_path", assets / "lm", "--critic_model_name_or_path", assets / "reward", *common]
    ppo += ["--data_path", assets / "prompts.jsonl", "--max_answer_seq_len", 8, "--lr_scheduler_type", "constant"]
    ppo += ["--per_device_generation_batch_size", 4, "--per_device_training_batch_size", 2]
    sft = ["--model_name_or_path", assets / "lm", "--data_path", assets / "sft.jsonl", "--dtype", "fp32"]
    sft += ["--max_steps", 2, "--per_device_train_batch_size", 4]
    cases = {
        "plain": ("ppo", [*ppo, "--max_steps", 2, "--output_dir", folder / "plain", "--keep_final_checkpoint"]),
        "profiled": ("ppo", [*ppo, "--max_steps", 2, "--output_dir", folder / "profiled", "--profile", 2]),
        "beyond": ("ppo", [*ppo, "--max_steps", 2, "--output_dir", folder / "beyond", "--profile", 3]),
        "done": ("ppo", [*ppo, "--max_steps", 3, "--output_dir", folder / "plain", "--profile", 2]),
        "sft": ("sft", [*sft, "--output_dir", folder / "sft", "--profile", 1]),
        "sft beyond": ("sft", [*sft, "--output_dir", folder / "beyond", "--profile", 3]),
    }
    return folder, run_steps(cases, folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ppo_step_has_its_phases_around_their_operators(runs, rank):
    file = runs[0] / f"profiled/profile/step_2_rank_{rank}.json.gz"
    assert file.stat().st_size < 5 * 2**20
    events = spans_of(file)
    named = blocks(events)
    assert {block["name"] for block in named} >= PPO_BLOCKS
    order = [block["name"] for block in named if block["name"] in ("rollout", "reward", "score", "advantages", "train")]
    assert order == ["rollout", "reward", "score", "advantages", *["train"] * order.count("train")]
    for block in named:
        if block["name"] in ("rollout", "reward", "score", "advantages", "train actor", "train critic"):
            assert any(name.startswith("aten::") for name in inside(block, events)), block["name"]
    train = next(block for block in named if block["name"] == "train" and "train actor" in inside(block, named))
    assert {"train critic", "update actor", "update critic"} <= set(inside(train, named))
    assert "aten::embedding" in inside(train, events)


def test_each_rank_writes_one_trace_and_the_log_says_how_to_open_it(runs):
    folder, said = runs
    assert sorted(path.name for path in (folder / "profiled/profile").iterdir()) == [
        "step_2_rank_0.json.gz", "step_2_rank_1.json.gz",
    ]  # fmt: skip
    line = next(line for line in said["profiled"]["said"].splitlines() if line.startswith("--profile"))
    assert f"the trace of step 2 is {folder}/profiled/profile/step_2_rank_0.json.gz" in line
    assert "https://ui.perfetto.dev" in line


def test_a_profiled_run_computes_the_same_numbers(runs):
    plain, profiled = (
        [{name: value for name, value in line.items() if not name.startswith(UNTIMED)} for line in metrics_of(folder)]
        for folder in (runs[0] / "plain", runs[0] / "profiled")
    )
    assert plain[:2] == profiled
    assert len(profiled) == 2


@pytest.mark.parametrize("name", ["beyond", "sft beyond"])
def test_a_step_beyond_the_last_one_is_refused_before_anything_is_written(runs, name):
    folder, said = runs
    assert said[name]["error"] == "--profile 3: this run has 2 steps; name one of them"
    assert not (folder / "beyond/config.yaml").exists()


def test_a_step_that_is_done_already_is_reported(runs):
    folder, said = runs
    assert said["done"]["error"] is None
    assert "note: --profile 2 has no effect: the run resumes from" in said["done"]["said"]
    assert not (folder / "plain/profile").exists()


def test_an_optimizer_step_of_step_1(runs):
    events = spans_of(runs[0] / "sft/profile/step_1_rank_1.json.gz")
    [train] = [block for block in blocks(events) if block["name"] == "train"]
    assert "aten::embedding" in inside(train, events)
