"""The benchmarks, apart from their runs: what their commands parse and compare; trials of some."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch import ROOT, forked, succeed
from one_rank import one_rank  # noqa: F401
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_ppo.config.cli import parse
from dschat_ppo.types import PromptBatch

sys.path.insert(0, str(ROOT / "benchmarks"))
import agent_faults  # noqa: E402
import curves  # noqa: E402
import fault_outcomes  # noqa: E402
import faults  # noqa: E402
import memory  # noqa: E402
import products  # noqa: E402
import trajectories  # noqa: E402
from models import Workload  # noqa: E402

# agents.py


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_agents_beside_tools(tmp_path):
    pytest.importorskip("openai")
    words = ["--tiny", "--repeats", "1", "--latencies", "0", "--work", tmp_path]
    result = succeed(forked(1, "tests/workers/run_module.py", "benchmarks/agents.py", *words))
    line = result.stdout.splitlines()[-1]
    assert "'calls': 1.0" in line and "'ratio': " in line


# curves.py


@pytest.mark.parametrize("run", curves.RUNS)
def test_a_picture_s_run_has_a_script_and_flags_of_step_3(run):
    words = curves.RUNS[run].format(work="w", out="o").split()
    assert (ROOT / words[0]).exists()
    first_flag = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    flags = words[first_flag:]
    models = [
        "--actor_model_name_or_path",
        "a",
        "--critic_model_name_or_path",
        "c",
        "--n_samples_per_prompt",
        "8",
    ]
    parse(
        "ppo", [*models, "--data_path", "d", "--eval_data_path", "e", "--output_dir", "o", *flags]
    )


# faults.py


def outputs(folder: Path, loss: float, weight: float) -> Path:
    for role in ("actor", "critic"):
        (folder / role).mkdir(parents=True)
        save_file({"w": torch.tensor([weight])}, folder / role / "model.safetensors")
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "time": torch.rand(1).item(), "loss": loss}) + "\n"
    )
    return folder


def test_outputs_are_equal_in_metrics_and_weights_but_not_in_times(tmp_path):
    one = outputs(tmp_path / "one", 0.5, 1.0)
    assert faults.same_outputs(one, outputs(tmp_path / "same", 0.5, 1.0))
    assert not faults.same_outputs(one, outputs(tmp_path / "loss", 0.6, 1.0))
    assert not faults.same_outputs(one, outputs(tmp_path / "weight", 0.5, 1.0 + 2**-23))


def test_agents_that_had_ended_are_counted_in_whole_lines_of_steps_that_were_not_saved(tmp_path):
    folder = tmp_path / "checkpoints/agents"
    folder.mkdir(parents=True)
    names = ["a/0:x/context/d:0", "a/0:x/reply/d:0:s", "a/0:x", "a/1:y", "a/2:z"]
    text = "".join(json.dumps({name: {}}) + "\n" for name in names)
    for step in (1, 2, 3):
        (folder / f"step_{step:06d}_rank_0.jsonl").write_text(text)
    assert agent_faults.ended_agents(tmp_path, resumed=1) == 6
    agent_faults.cut_last_lines(tmp_path)
    assert agent_faults.ended_agents(tmp_path, resumed=1) == 4
    assert agent_faults.ended_agents(tmp_path, resumed=0) == 6


def test_a_kill_is_not_survived_if_an_agent_plays_again():
    whole = fault_outcomes.Outcome("a", True, 1, left=0, steps_lost=0, equal=True)
    assert whole.survived
    assert not replace(whole, played_again=1).survived and not replace(whole, left=1).survived


# fuzz.py


@pytest.mark.slow
@pytest.mark.release
def test_fifteen_cases_end_with_a_result_or_one_line(tmp_path):
    found = tmp_path / "found.json"
    words = ["--cases", 15, "--seed", 1, "--work", tmp_path / "work", "--json", found]
    ended = forked(1, "tests/workers/run_module.py", "benchmarks/fuzz.py", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = json.loads(found.read_text())["outcomes"]
    assert sum(outcomes.values()) == 15 and min(outcomes["result"], outcomes["error line"]) >= 2, (
        outcomes
    )


# memory.py


@pytest.mark.parametrize("name", memory.ALL)
def test_every_setting_of_memory_parses(name):
    setting = memory.ALL[name]
    parse(setting.step, memory.words_of(setting, Path("models"), Path("data"), Path("out")))


# ppo_step.py


def test_operations_by_hand():
    """One layer: four matrices of 8 x 8, three of 8 x 16, two norms and the last one; a vocabulary
    of 10; one prompt of 2 tokens with answers of 3 and 1."""
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=None,
    )
    weights = 4 * 64 + 3 * 128 + 3 * 8
    prompts = PromptBatch(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.bool))
    work = Workload(prompts, 2, torch.tensor([3, 1]))
    model = LlamaForCausalLM(config)
    alone = products.operations_of(model, work, shares=False)
    pairs = 2 * 2 + (3 * 2 + 4.5) + (1 * 2 + 0.5)  # of two prompts, and of both answers
    assert alone.layers == 2 * weights * (2 * 2 + 4) + 4 * 8 * pairs
    assert alone.head == 2 * 80 * 4
    shared = products.operations_of(model, work, shares=True)
    assert shared.layers == 2 * weights * (2 + 4) + 4 * 8 * (pairs - 2)
    found = products.shares_of({"rollout": 4.0}, {"rollout": 10.0}, rate=5.0)
    assert found == {"rollout": {"seconds": 4.0, "products": 2.0, "share": 0.5}}


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_ppo_step(tmp_path):
    words = [
        "--tiny",
        "--repeats",
        "1",
        "--workloads",
        "fixed",
        "--json",
        str(tmp_path / "found.json"),
    ]
    result = succeed(forked(1, "tests/workers/run_module.py", "benchmarks/ppo_step.py", *words))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fixed"]["ratio_wall"] > 0
    assert found["peak_memory_ratio"] >= 0
    first_cells = [line.split()[1] for line in result.stdout.splitlines() if line[:2] == "| "]
    phases = ["rollout", "train", "score", "reward"]
    assert first_cells == ["workload", "---", "fixed", "workload", "---", *len(phases) * ["fixed"]]
    assert list(found["fixed"]["phases"]) == phases
    assert all(0 < phase["share"] < 1 for phase in found["fixed"]["phases"].values())


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_the_price_of_exact_rollouts():
    words = ["--tiny", "--repeats", "1", "--workloads", "fixed"]
    script = "benchmarks/exact_rollout.py"
    result = succeed(forked(1, "tests/workers/run_module.py", script, *words))
    assert "fixed, step: exact / default = " in result.stdout


# trajectories.py


@pytest.mark.parametrize("name", trajectories.RUNS)
def test_the_flags_of_every_trajectory_are_accepted(name):
    run = trajectories.RUNS[name]
    step = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_ppo": "ppo"}[
        run.script
    ]
    parse(step, [*run.flags.format(made="made").split(), "--output_dir", "out"])


def main(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["trajectories.py", "--only", "sft", *map(str, words)])
    return trajectories.main()


@pytest.mark.release
@pytest.mark.ranks
@pytest.mark.slow
def test_recorded_compared_and_resumed_runs_are_equal_and_a_changed_one_is_not(
    tmp_path, monkeypatch, capsys
):
    """The commands of docs/benchmarks.md with one run of two steps on one rank."""
    # not in a thread
    succeed(forked(1, "tests/workers/run_module.py", "dschat_ppo.tools.toy", tmp_path / "toy"))

    def call(tree: trajectories.Tree, words: list[str], log: Path) -> str:
        """As `Tree.call`, without the launcher and the imports; the task is made once."""
        if words[1] == "-c":
            return trajectories.__file__  # of the tree
        if words[2] == "dschat_ppo.tools.toy":
            return shutil.copytree(tmp_path / "toy", words[3])
        assert words[2] == "deepspeed.launcher.runner"
        return succeed(forked(1, *words[7:], folder=tree.work)).stdout

    small = (
        "--data_path {made}/plain.jsonl --eval_data_path {made}/plain.jsonl --eval_iters 1 --dtype"
        " fp32"
    )
    small += " --per_device_train_batch_size 4 --max_steps 2 --save_steps 1 --keep_final_checkpoint"
    run = trajectories.Run(
        "step1_sft", f"{trajectories.SFT} {small}", ranks=1, resumed=("step_000001",)
    )
    monkeypatch.setitem(trajectories.RUNS, "sft", run)
    before, kept = tmp_path / "before.json", tmp_path / "before"
    monkeypatch.setattr(trajectories.Tree, "call", call)
    assert main(monkeypatch, "--json", before, "--checkpoints", kept) == 0
    assert main(monkeypatch, "--against", before, "--resume_from", kept) == 0
    assert "no difference" in capsys.readouterr().out
    monkeypatch.setitem(trajectories.RUNS, "sft", replace(run, flags=f"{run.flags} --seed 5"))
    assert main(monkeypatch, "--against", before) == 1
    assert "differences, the first: sft, step 1" in capsys.readouterr().out
