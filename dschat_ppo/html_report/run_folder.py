"""Read the files of a run, finished or not. Missing files and damaged parts are skipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dschat_ppo.common.paths import CONFIG, HEALTH, METRICS, MODELS, RESULT, SAMPLES, STARTS
from dschat_ppo.errors import UserError, without_credentials

NOT_PLOTTED = ("step", "time", "epoch")  # keys of a line that are not metrics
# of an episode: (role "model", "call" or "environment"; text; reward of a turn)
Part = tuple[str, str, float | None]
Points = list[tuple[int, float | None]]  # (step, value); None: NaN or infinity


@dataclass(frozen=True)
class Answer:
    """One response. `kind`: "held-out" from an evaluation, "training" from `samples.jsonl`.
    `tokens`: its length."""

    kind: str
    step: int
    prompt: str
    text: str
    score: float | None
    scores: dict[str, float | None]  # by reward source; {} without them
    kl: float | None  # to the reference: mean over its tokens
    tokens: int | None
    # "eos", "stop", "length" or ""; of an answer of the data "data", "chosen" or "rejected"
    ended: str
    turns: Sequence[Part] = ()  # of an episode of several turns


@dataclass(frozen=True)
class Run:
    """What the files of a run say."""

    name: str  # unique in the report
    folder: Path
    # name -> points in ascending steps. A step without the metric has no point
    metrics: dict[str, Points]
    times: dict[int, float]  # step -> seconds since the epoch at which the step ended
    config: dict[str, Any]  # flag -> value; {} without `config.yaml`
    models: dict[str, Any]  # name of a model or of its devices -> text; {} without `models.json`
    result: dict[str, Any] | None  # of `result.json`; None while the run is unfinished
    health: list[dict[str, Any]] | None  # lines of `health.jsonl`; None without the file
    starts: list[dict[str, Any]]  # lines of `starts.jsonl`, one for each start of the run
    answers: list[Answer]

    @property
    def steps(self) -> list[int]:
        return list(self.times)

    @property
    def kind(self) -> str:
        """Such as "PPO", "SFT" or "DPO"; "-" without `config.yaml`."""
        if not self.config:
            return "-"
        if "actor_model_name_or_path" in self.config:
            estimator = self.config.get("advantage_estimator", "gae")
            if estimator == "gae":
                return "PPO"
            return f"PPO ({estimator})"
        objective = str(self.config.get("objective", "SFT"))
        return {"reward": "reward model", "process": "process reward model"}.get(
            objective, objective.upper()
        )


def short_names(folders: Sequence[Path]) -> list[str]:
    """For each folder the shortest end of its path that no other folder has, without the end that
    all have in common: "ppo" for one folder, "a" and "b" for a/ppo and b/ppo."""
    parts = [folder.resolve().parts for folder in folders]
    while len(parts) > 1 and len({own[-1] for own in parts}) == 1 and min(map(len, parts)) > 2:
        parts = [own[:-1] for own in parts]
    longest = max(map(len, parts))
    for length in range(1, longest):
        names = ["/".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several runs, none of them twice; see `short_names` for their names."""
    for number, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:number]]:
            raise UserError(f"{folder} is named twice; name each run once")
    return [
        read_run(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)
    ]


def read_run(folder: Path, name: str) -> Run:
    """Read one run, which has a step at least. Files other than `metrics.jsonl` may be missing."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    if not (folder / METRICS).is_file():
        inner = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
        if inner:
            hint = f"name its runs: {', '.join(str(folder / run) for run in inner)}"
        else:
            hint = "name the output folder"
        raise UserError(
            f"{folder}: has no {METRICS}, so it is not the output folder of a run; {hint}"
        )
    lines = {
        line["step"]: line
        for line in _read_lines(folder / METRICS)
        if type(line.get("step")) is int
    }
    if not lines:
        raise UserError(
            f"{folder / METRICS}: has no finished step yet; try again after the first one"
        )
    metrics: dict[str, Points] = {}
    for step, line in sorted(lines.items()):  # of two lines of one step, the later counts
        for key, value in line.items():
            if key not in NOT_PLOTTED and (value is None or type(value) in (int, float)):
                metrics.setdefault(key, []).append((step, number_or_none(value)))
    config = {
        flag: without_credentials(value) for flag, value in _read_mapping(folder / CONFIG).items()
    }
    answers = _answers(folder / SAMPLES, _sampled)
    for path in sorted(folder.glob("eval/step_*.jsonl")):
        if (digits := path.stem.removeprefix("step_")).isdecimal():
            answers += _answers(path, partial(_evaluated, int(digits)))
    return Run(
        name=name,
        folder=folder,
        metrics=metrics,
        times={step: number_or_none(lines[step].get("time")) or 0.0 for step in sorted(lines)},
        config=config,
        models=_read_mapping(folder / MODELS),
        result=_read_mapping(folder / RESULT) or None,
        health=_read_lines(folder / HEALTH) if (folder / HEALTH).is_file() else None,
        starts=_read_lines(folder / STARTS),
        answers=answers,
    )


def number_or_none(value: Any) -> float | None:
    """A finite number as it is; None for anything else, also for an integer beyond the range of
    floats."""
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return value
    return None


def _read_text(path: Path) -> str:
    """The text of a file; "" if there is none. Bytes that are not UTF-8 are replaced."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as problem:
        raise UserError(f"{path}: cannot be read ({problem.strerror})") from problem


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; others are skipped, as an incomplete last one of a run
    in progress."""
    found = []
    for line in _read_text(path).split("\n")[:-1]:
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def _read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; {} if there is none or it is damaged."""
    text = _read_text(path)
    # the last: it is no mapping
    with suppress(ValueError, RecursionError, yaml.YAMLError, AttributeError):
        if path.suffix == ".json" and text:
            found = json.loads(text)
        else:
            found = yaml.safe_load(text)
        return {str(name): value for name, value in found.items()}
    return {}


def _answers(path: Path, of_line: Callable[[dict[str, Any]], list[Answer]]) -> list[Answer]:
    """The answers of a file of JSON lines; lines of another shape are skipped."""
    found = []
    for line in _read_lines(path):
        with suppress(LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            found += of_line(line)
    return found


def _sampled(line: dict[str, Any]) -> list[Answer]:
    scores = {str(name): number_or_none(score) for name, score in line["scores"].items()}
    score = number_or_none(line["score"])
    kl = number_or_none(line["kl"])
    prompt = line["prompt"]
    text = line["answer"]
    ended = str(line["ended"])
    tokens = int(line["length"])
    turns = _turns(line.get("turns", ()))
    return [
        Answer(
            "training",
            int(line["step"]),
            str(prompt),
            str(text),
            score,
            scores,
            kl,
            tokens,
            ended,
            turns,
        )
    ]


def _turns(parts: Sequence[dict[str, Any]]) -> list[Part]:
    return [
        (str(part["role"]), str(part["text"]), number_or_none(part.get("reward"))) for part in parts
    ]


def _evaluated(step: int, line: dict[str, Any]) -> list[Answer]:
    """The answers of one line of `eval/step_N.jsonl`, to one prompt. In steps 1 and 2 nothing, or a
    reward model alone, scores them, so that their lines have fewer keys."""
    texts = line["answers"]
    found = []
    scored = line.get("scores") or [None] * len(texts)
    turns = line.get("turns") or [()] * len(texts)
    columns = zip(texts, scored, line["lengths"], line["ended"], turns, strict=True)
    for number, (text, score, tokens, ended, own_turns) in enumerate(columns):
        scores = {
            str(name): number_or_none(own[number])
            for name, own in line.get("scores_by_source", {}).items()
        }
        if line.get("kl") is not None:
            kl = number_or_none(line["kl"][number])
        else:
            kl = None
        per_token = kl / tokens if kl is not None and tokens > 0 else None
        found.append(
            Answer(
                "held-out",
                step,
                str(line["prompt"]),
                str(text),
                number_or_none(score),
                scores,
                per_token,
                int(tokens),
                str(ended),
                _turns(own_turns),
            )
        )
    return found
