"""The comparison of trajectories, apart from its runs: what is compared, what is named."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launch import forked, succeed

from dschat_ppo.config.cli import parse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import trajectories  # noqa: E402

RECORDED = {"metrics": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}], "weights": {"a": "1", "best/a": "2"}}


def changed(**parts):
    return json.loads(json.dumps(RECORDED | parts))


@pytest.mark.parametrize(("found", "named"), [
    (changed(), []),
    (
        changed(metrics=[{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.2500000000000001, "new": 1}]),
        ["run, step 2, loss: 0.25 in the recording, 0.2500000000000001 now"],
    ),
    (
        changed(metrics=[{"step": 1, "loss": 0.5, "new": 1}]),
        ["run, step 2: only in the recording"],
    ),
    (
        changed(weights={"a": "3"}),
        ["run, a: 1 in the recording, 3 now", "run, best/a: 2 in the recording, missing now"],
    ),
])  # fmt: skip
def test_differences_are_named(found, named):
    assert list(trajectories.differences("run", found, RECORDED)) == named


@pytest.mark.parametrize("name", trajectories.RUNS)
def test_the_flags_of_every_run_are_accepted(name):
    run = trajectories.RUNS[name]
    step = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_ppo": "ppo"}[run.script]
    parse(step, [*run.flags.format(made="made").split(), "--output_dir", "out"])


def main(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["trajectories.py", "--only", "sft", *map(str, words)])
    return trajectories.main()


@pytest.mark.release
@pytest.mark.ranks
@pytest.mark.slow
def test_recorded_compared_and_resumed_runs_are_equal_and_a_changed_one_is_not(tmp_path, monkeypatch, capsys):
    """The commands of docs/benchmarks.md with one run of two steps on one rank."""
    succeed(forked(1, "tests/workers/run_module.py", "dschat_ppo.tools.toy", tmp_path / "toy"))  # not in a thread

    def call(tree: trajectories.Tree, words: list[str], log: Path) -> str:
        """As `Tree.call`, without the launcher and the imports; the task is made once."""
        if words[1] == "-c":
            return trajectories.__file__  # of the tree
        if words[2] == "dschat_ppo.tools.toy":
            return shutil.copytree(tmp_path / "toy", words[3])
        assert words[2] == "deepspeed.launcher.runner"
        return succeed(forked(1, *words[7:], folder=tree.work)).stdout

    small = "--data_path {made}/plain.jsonl --eval_data_path {made}/plain.jsonl --eval_iters 1 --dtype fp32"
    small += " --per_device_train_batch_size 4 --max_steps 2 --save_steps 1 --keep_final_checkpoint"
    run = trajectories.Run("step1_sft", f"{trajectories.SFT} {small}", ranks=1, resumed=("step_000001",))
    monkeypatch.setitem(trajectories.RUNS, "sft", run)
    before, kept = tmp_path / "before.json", tmp_path / "before"
    monkeypatch.setattr(trajectories.Tree, "call", call)
    assert main(monkeypatch, "--json", before, "--checkpoints", kept) == 0
    assert main(monkeypatch, "--against", before, "--resume_from", kept) == 0
    assert "no difference" in capsys.readouterr().out
    monkeypatch.setitem(trajectories.RUNS, "sft", replace(run, flags=f"{run.flags} --seed 5"))
    assert main(monkeypatch, "--against", before) == 1
    assert "differences, the first: sft, step 1" in capsys.readouterr().out
