"""The benchmark of learning, apart from its runs: what counts as learned, and what is run again."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import learning  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """Commands, in place of running them; each writes what a finished step 3 would."""
    made = []

    def call(command, log, processes=2):
        words = [str(word) for word in command]
        made.append(words)
        output = Path(words[words.index("--output_dir") + 1])
        output.mkdir(parents=True)
        (output / "result.json").write_text("{}")
        return 1.0

    monkeypatch.setattr(learning, "call", call)
    return made


def test_an_estimator_must_beat_its_start_by_the_margin():
    margin = learning.MARGIN["addition"]
    results = {
        "addition": {
            "grpo": {"start": 0.25, "end": 0.25 + margin},
            "rloo": {"start": 0.25, "end": 0.2499 + margin},
            "gae": {"start": 0.25, "end": float("nan")},
        }
    }
    missed = learning.failures(results)
    assert [line.split()[1] for line in missed] == ["rloo", "gae"]
    assert learning.failures({"addition": {"grpo": {"start": 0.0, "end": 1.0}}}) == []


def test_table_by_hand():
    found = {"start": 0.3333, "end": 0.9}
    text = learning.table({"addition": {"rloo": found}, "preference": {"rloo": {"start": 0.5, "end": 0.25}}})
    assert text.splitlines()[-1] == "| `rloo` | `reinforce` | 0.33 -> 0.90 | 0.50 -> 0.25 |"


def test_curve_reads_evaluations_alone(tmp_path):
    lines = [{"step": 0, "eval/score": 0.25}, {"step": 1, "reward/score_mean": 9.0}, {"step": 4, "eval/score": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert learning.curve(tmp_path) == [(0, 0.25), (4, 0.5)]
    assert learning.start_and_end("addition", tmp_path, tmp_path, 1) == (0.25, 0.5)


def test_a_finished_run_is_kept_and_others_are_made_anew(tmp_path, calls, monkeypatch):
    def learn(seed=1):
        return learning.learn("addition", "rloo", seed, tmp_path, tmp_path / "made", 2, 1)

    output = learn()
    assert output == learn() and len(calls) == 1
    assert learn(seed=2) != output and len(calls) == 2
    (output / "result.json").unlink()  # interrupted
    (output / "leftover").touch()
    learn()
    assert len(calls) == 3 and not (output / "leftover").exists()
    monkeypatch.setitem(learning.ESTIMATORS, "rloo", ["--policy_loss", "ppo"])  # other flags than before
    (output.parent / "rule_rate.json").touch()
    learn()
    assert len(calls) == 4 and calls[-1][-4:-2] == ["--policy_loss", "ppo"]
    assert not (output.parent / "rule_rate.json").exists()


def test_models_are_made_once_each_from_the_one_before(tmp_path, monkeypatch):
    made = tmp_path / "preference/made"
    seen = []

    def call(command, log, processes=2):
        seen.append((log.name, [str(word).removeprefix(f"{made}/") for word in command][2:]))
        return 1.0

    monkeypatch.setattr(learning, "call", call)
    assert learning.prepare("preference", tmp_path) == made
    assert [(name, words[-2:] if name == "toy.log" else words[:-1]) for name, words in seen] == [
        ("toy.log", ["dschat_ppo.tools.toy", "toy"]),
        ("sft.log", ["toy", "sft"]),
        ("reward.log", ["toy", "sft", "reward"]),
    ]
    for done in ("toy/model/model.safetensors", "sft/result.json"):
        (made / done).parent.mkdir(parents=True)
        (made / done).touch()
    seen.clear()
    learning.prepare("preference", tmp_path)
    assert [name for name, _ in seen] == ["reward.log"]
    seen.clear()
    learning.prepare("addition", tmp_path)
    assert [name for name, _ in seen] == ["toy.log", "sft.log"]


@pytest.mark.parametrize("task", ["addition", "preference"])
def test_ranks_divide_the_batches_of_a_step(task, tmp_path):
    totals = set()
    for ranks in (1, 2, 4):
        words = learning.flags_of(task, "grpo", 1, tmp_path, ranks)
        flags = dict(zip(words[::2], words[1::2], strict=True))
        names = ("--per_device_generation_batch_size", "--per_device_training_batch_size")
        totals.add(tuple(int(flags[name]) * ranks for name in names))
    assert len(totals) == 1


def test_runs_at_the_same_time_are_put_to_their_estimators(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(learning, "prepare", lambda task, work: work / "made")
    monkeypatch.setattr(learning, "start_and_end", lambda task, output, made, seed: (0.0, seed / 10))
    results, outputs = learning.run_all(["addition"], ["rloo", "grpo"], [1, 3], tmp_path, ranks=1, jobs=2)
    assert results["addition"]["grpo"] == pytest.approx({"start": 0.0, "end": 0.2})
    for name in ("rloo", "grpo"):
        folders = [path.relative_to(tmp_path / "addition").parts[:2] for path in outputs["addition"][name]]
        assert folders == [(name, "seed_1"), (name, "seed_3")]
    assert len(calls) == 4


def test_budgets_are_alike_and_only_critics_cost_more(tmp_path):
    for task in ("addition", "preference"):
        budgets = set()
        for estimator in learning.ESTIMATORS:
            words = learning.flags_of(task, estimator, 3, tmp_path, 2)
            flags = dict(zip(words[::2], words[1::2], strict=True))
            assert flags["--advantage_estimator"] == estimator and flags["--seed"] == "3"
            assert ("--critic_learning_rate" in flags) == (estimator == "gae")
            assert ("--critic_model_name_or_path" in flags) == (estimator == "gae" or task == "preference")
            budgets.add(tuple(sorted((k, v) for k, v in flags.items() if "batch" in k or "sampl" in k or "step" in k)))
        assert len(budgets) == 1


def test_a_command_that_fails_stops_the_benchmark_with_its_output(tmp_path):
    with pytest.raises(SystemExit, match="(?s)broken.*exit code 3") as stopped:
        learning.call(["bash", "-c", "echo it is broken; exit 3"], tmp_path / "log" / "file")
    assert "log/file" in str(stopped.value)


def test_a_command_sees_ranks_threads_and_this_repository(tmp_path):
    learning.call(["bash", "-c", 'echo "$RANKS $PYTHONPATH"; which python'], tmp_path / "log")
    shown = (tmp_path / "log").read_text()
    assert shown.startswith(f"2 {learning.ROOT}")
    assert str(Path(sys.executable).parent) in shown
