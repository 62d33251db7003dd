"""Output folders of runs for the tests of the report, written by hand."""

import json
from pathlib import Path

SAMPLE = {
    "step": 1,
    "prompt": "p",
    "answer": "a",
    "score": 1.0,
    "scores": {},
    "kl": None,
    "length": 1,
    "ended": "eos",
}


def write_run(
    folder: Path, lines: list[dict], config: dict | None = None, result: dict | None = None, **files
) -> Path:
    """A run with these metrics; `files` are lists of objects for NAME.jsonl, or for eval/NAME.jsonl
    if it is a step."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", lines)
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    for name, rows in files.items():
        write_lines(folder / ("eval" if name.startswith("step_") else "") / f"{name}.jsonl", rows)
    return folder


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def ppo_lines(steps: int) -> list[dict]:
    """Metrics of a PPO run: the score is step / 10, KL step / 100; rollout takes 1 s and training 3
    s."""
    return [
        {
            "step": step,
            "time": 1000.0 + 5 * step,
            "reward/score_mean": step / 10,
            "reward/total_mean": step / 20,
            "kl/ref_k1": step / 100,
            "policy/entropy": 1.0,
            "policy/clip_fraction": 0.1,
            "rollout/length_mean": 20.0,
            "value/explained_variance": None if step == 2 else 0.5,
            "time/rollout": 1.0,
            "time/train": 3.0,
            "memory/train_peak_gib": 2.0,
        }
        for step in range(1, steps + 1)
    ]
