"""The benchmarks, apart from their runs: what their commands parse, draw, count and compare; trials of some."""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch import ROOT, forked, succeed
from one_rank import one_rank  # noqa: F401
from safetensors.torch import save_file

from dschat_ppo.config.cli import parse
from dschat_ppo.types import Rollout

sys.path.insert(0, str(ROOT / "benchmarks"))
import curves  # noqa: E402
import fault_outcomes  # noqa: E402
import faults  # noqa: E402
import fuzz  # noqa: E402
import memory  # noqa: E402
import plain  # noqa: E402
import ppo_parts  # noqa: E402
import ppo_step  # noqa: E402
import trajectories  # noqa: E402

# curves.py

PICTURE = re.compile(r"!\[[^\]]+\]\((?:docs/)?pictures/([\w-]+)\.png\)")


@pytest.mark.parametrize("run", curves.RUNS)
def test_a_picture_s_run_has_a_script_and_flags_of_step_3(run):
    words = curves.RUNS[run].format(work="w", out="o").split()
    assert (ROOT / words[0]).exists()
    flags = words[next(i for i, word in enumerate(words) if word.startswith("--")) :]
    models = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c", "--n_samples_per_prompt", "8"]
    parse("ppo", [*models, "--data_path", "d", "--eval_data_path", "e", "--output_dir", "o", *flags])


def test_each_picture_has_runs_and_is_shown():
    assert {run for runs, _ in curves.PICTURES.values() for run in runs} == set(curves.RUNS)
    pages = (ROOT / page for page in ("README.md", "docs/reading-curves.md"))
    shown = [name for page in pages for name in PICTURE.findall(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(curves.PICTURES)
    files = {file.stem for file in (ROOT / "docs/pictures").iterdir()}
    assert files == {*curves.PICTURES, "learning"}


# faults.py

FIRST = """checkpoint step_000001: copied in 0.0 s, being written
checkpoint step_000001: saved, 0.9 MiB
checkpoint step_000002_update_0003: saved, 0.9 MiB
checkpoint step_000003: copied in 0.0 s, being written
"""


def test_forty_kills_of_a_seed_meet_every_run_at_every_moment():
    drawn = faults.kills(0, 40)
    names = [fault.name for fault in drawn]
    assert len(names) == 40 and names == [fault.name for fault in faults.kills(0, 40)]
    assert names != [fault.name for fault in faults.kills(1, 40)]
    assert {(fault.run, fault.moment) for fault in drawn} == {(r, m) for r in faults.RUNS for m in faults.MOMENTS}
    assert all(any(victim in name for name in names) for victim in ("rank 0", "rank 1", "launcher", "child of"))


@pytest.mark.parametrize(("resumed", "lost"), [(2, 0), (1, 1), (None, 2)])
def test_saved_steps_that_are_computed_again_are_lost(resumed, lost):
    again = "" if resumed is None else f"resuming from /out/checkpoints/step_{resumed:06d}: so many steps are done\n"
    assert fault_outcomes.lost_steps(FIRST, FIRST + again) == lost


def outputs(folder: Path, loss: float, weight: float) -> Path:
    for role in ("actor", "critic"):
        (folder / role).mkdir(parents=True)
        save_file({"w": torch.tensor([weight])}, folder / role / "model.safetensors")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": torch.rand(1).item(), "loss": loss}) + "\n")
    return folder


def test_outputs_are_equal_in_metrics_and_weights_but_not_in_times(tmp_path):
    one = outputs(tmp_path / "one", 0.5, 1.0)
    assert faults.same_outputs(one, outputs(tmp_path / "same", 0.5, 1.0))
    assert not faults.same_outputs(one, outputs(tmp_path / "loss", 0.6, 1.0))
    assert not faults.same_outputs(one, outputs(tmp_path / "weight", 0.5, 1.0 + 2**-23))


# fuzz.py


@pytest.mark.slow
@pytest.mark.release
def test_fifteen_cases_end_with_a_result_or_one_line(tmp_path):
    found = tmp_path / "found.json"
    words = ["--cases", 15, "--seed", 1, "--jobs", 1, "--work", tmp_path / "work", "--json", found]
    ended = forked(1, "tests/workers/run_module.py", "benchmarks/fuzz.py", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = json.loads(found.read_text())["outcomes"]
    assert sum(outcomes.values()) == 15 and min(outcomes["result"], outcomes["error line"]) >= 2, outcomes


def ends(folder: Path, body, seconds: float = 60.0) -> tuple[str, str]:
    process = fuzz.fork(folder, body)
    process.deadline = time.monotonic() + seconds
    return fuzz.judge(process.wait())


def print_error(text: str, code: int = 2) -> int:
    print(text, file=sys.stderr)
    return code


@pytest.mark.parametrize(("body", "outcome"), [
    (lambda: 0, ("result", "")), (lambda: print_error("error: --x: wrong"), ("error line", "")),
    (lambda: print_error("error: differs:\n  a  1 -> 2", 4), ("error line", "")),
    (lambda: print_error("error: a\nand more"), ("failed", "more than one line")),
    (lambda: print_error("error: a\nerror: b"), ("failed", "2 error lines")), (lambda: 2, ("failed", "0 error lines")),
    (lambda: print_error("error: a", 1), ("failed", "exit code 1")), (lambda: 1 // 0, ("failed", "traceback")),
    (lambda: print_error("Traceback (most recent call last):", 0), ("failed", "traceback")),
    (lambda: os.kill(os.getpid(), signal.SIGTERM), ("failed", "signal SIGTERM")),
])  # fmt: skip
def test_the_end_of_a_case_is_judged(tmp_path, body, outcome):
    assert ends(tmp_path, body) == outcome


# memory.py


@pytest.mark.parametrize("name", memory.ALL)
def test_every_setting_of_memory_parses(name):
    setting = memory.ALL[name]
    parse(setting.step, memory.words_of(setting, Path("models"), Path("data"), Path("out")))


@pytest.mark.parametrize(
    ("step", "stage"), [("ppo", "--actor_zero_stage 2 --critic_zero_stage 2"), ("sft", "--zero_stage 2")]
)
def test_a_planned_peak_counts_device_and_host(step, stage, tmp_path):
    on_device, offloaded = (
        memory.planned_peak(memory.Setting(step, flags, 1, memory.TINY, 1, 8, 4), tmp_path)
        for flags in (stage, f"{stage} --offload_optimizer")
    )
    assert 0 < on_device < 0.1 and on_device / 2 < offloaded < 0.1


# ppo_step.py

RATE = 1e-3


def weights(engine) -> torch.Tensor:
    return torch.cat([weight.detach().float().flatten() for weight in engine.module.parameters()])


@pytest.fixture
def folder(tmp_path) -> Path:
    ppo_parts.save_models(tmp_path, ppo_step.TINY.model)
    return tmp_path


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["varied", "group"])
def test_both_ways_make_the_same_update(name, folder, monkeypatch):
    """Adam's first update moves each weight by the learning rate: only the sign of a gradient near 0 may differ."""
    work = ppo_step.TINY.workload(name, ppo_step.TINY.model.vocab_size)
    flags = ["--dtype", "fp32", "--old_logprobs", "recompute", "--actor_learning_rate", RATE]
    flags += ppo_parts.GRPO if name == "group" else ["--critic_learning_rate", RATE]
    ours, theirs = (ppo_step.TINY.components(folder, ppo_step.TINY.model, work, flags) for _ in range(2))
    before = weights(ours.engines.actor)
    rollouts: list[Rollout] = []
    answer = ours.collection.generator.answer
    ours.collection.generator.answer = lambda *given, **how: rollouts.append(answer(*given, **how)) or rollouts[-1]
    ppo_parts.ppo_step(ours, work)
    rows = rollouts[0]
    ids = torch.cat([rows.prompt_ids, rows.response_ids], dim=1)
    mask = torch.cat([rows.prompt_mask, rows.response_mask], dim=1).long()
    monkeypatch.setattr(plain, "answers", lambda *_: (ids, mask, rows.response_mask))
    plain.step(theirs, work)
    for role in ours.engines.trained:
        one, other = (weights(ppo.engines.trained[role]) for ppo in (ours, theirs))
        assert (one - other).abs().mean() < 0.01 * RATE, role
    assert (weights(ours.engines.actor) - before).abs().mean() > 0.5 * RATE


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_ppo_step(tmp_path):
    words = ["--tiny", "--repeats", "1", "--workloads", "fixed", "--json", str(tmp_path / "found.json")]
    result = succeed(forked(1, "tests/workers/run_module.py", "benchmarks/ppo_step.py", *words))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fixed"]["ratio_wall"] > 0
    assert found["peak_memory_ratio"] >= 0
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("| ")][2:] == ["fixed"]


# trajectories.py

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
def test_the_flags_of_every_trajectory_are_accepted(name):
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
