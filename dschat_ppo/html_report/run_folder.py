"""Read the files of a run, finished or not. Missing files and damaged parts are skipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dschat_ppo.common.paths import CONFIG, HEALTH, METRICS, MODELS, RESULT, SAMPLES, STARTS
from dschat_ppo.config.objective_kinds import objective_kinds
from dschat_ppo.errors import UserError, without_credentials

NOT_PLOTTED = ("step", "time", "epoch")  # keys of a line that are not metrics
# of an episode: (role "model", "call", "environment" or "context"; text; reward)
Turn = tuple[str, str, float | None]
# errors of a line that is no response, or whose values are of another type
OF_ANOTHER_SHAPE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
Points = list[tuple[int, float | None]]  # (step, value); None: NaN or infinity


@dataclass(frozen=True)
class ReportedResponse:
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
    turns: Sequence[Turn] = ()  # of an episode of several turns
    fold_outs: Sequence[str] = ()  # HTML of features
    # what the prompt holds besides text, and HTML that shows it
    content: Mapping[str, Any] = field(default_factory=dict)
    content_part: str = ""


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
    responses: list[ReportedResponse]

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
        if trains_reward_model(objective):
            return objective_kinds()[objective].title
        return objective.upper()


def trains_reward_model(objective: str) -> bool:
    """Whether an objective of step 2 trains a reward model; False for one that is not known."""
    kinds = objective_kinds()
    return objective in kinds and kinds[objective].trains_classifier


def short_names(folders: Sequence[Path]) -> list[str]:
    """For each folder the shortest end of its path that no other folder has, without the end that
    all have in common: "ppo" for one folder, "a" and "b" for a/ppo and b/ppo."""
    paths = [folder.resolve().parts for folder in folders]
    while len(paths) > 1 and len({path[-1] for path in paths}) == 1 and min(map(len, paths)) > 2:
        paths = [path[:-1] for path in paths]
    longest = max(map(len, paths))
    for length in range(1, longest):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several runs, none of them twice; see `short_names` for their names."""
    resolved: set[Path] = set()
    for folder in folders:
        if folder.resolve() in resolved:
            raise UserError(f"{folder} is named twice; name each run once")
        resolved.add(folder.resolve())
    return [
        read_run(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)
    ]


def require_run(folder: Path) -> None:
    """Refuse a folder that is not the output folder of a run (`UserError`)."""
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


def files_of(folder: Path) -> list[Path]:
    """The files that `read_run` reads; some may be missing."""
    names = (METRICS, CONFIG, HEALTH, MODELS, RESULT, SAMPLES, STARTS)
    return [*(folder / name for name in names), *evaluation_files(folder)]


def evaluation_files(folder: Path) -> list[Path]:
    """The files of the evaluations of a run, by step."""
    return sorted(folder.glob("eval/step_*.jsonl"))


def read_run(folder: Path, name: str) -> Run:
    """Read one run, which has a step at least. Files other than `metrics.jsonl` may be missing."""
    require_run(folder)
    lines: dict[int, dict[str, Any]] = {}
    for line in _read_lines(folder / METRICS):
        if type(line.get("step")) is int:
            lines[line["step"]] = line  # of two lines of one step, the later counts
    if not lines:
        raise UserError(
            f"{folder / METRICS}: has no finished step yet; try again after the first one"
        )
    metrics: dict[str, Points] = {}
    times: dict[int, float] = {}
    for step, line in sorted(lines.items()):
        times[step] = number_or_none(line.get("time")) or 0.0
        for metric, value in line.items():
            if metric not in NOT_PLOTTED and (value is None or type(value) in (int, float)):
                metrics.setdefault(metric, []).append((step, number_or_none(value)))
    config = flags_of_run(folder)
    health = None
    if (folder / HEALTH).is_file():
        health = _read_lines(folder / HEALTH)
    return Run(
        name=name,
        folder=folder,
        metrics=metrics,
        times=times,
        config={flag: without_credentials(value) for flag, value in config.items()},
        models=_read_mapping(folder / MODELS),
        result=_read_mapping(folder / RESULT) or None,
        health=health,
        starts=starts_of_run(folder),
        responses=_read_responses(folder),
    )


def flags_of_run(folder: Path) -> dict[str, Any]:
    """The flags of a run, flag -> value; {} without `config.yaml`."""
    return _read_mapping(folder / CONFIG)


def starts_of_run(folder: Path) -> list[dict[str, Any]]:
    """The lines of `starts.jsonl`, one for each start of the run; [] without the file."""
    return _read_lines(folder / STARTS)


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
    objects = []
    for line in _read_text(path).split("\n")[:-1]:
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                objects.append(value)
    return objects


def _read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; {} if there is none or it is damaged."""
    text = _read_text(path)
    # AttributeError: it is no mapping
    with suppress(ValueError, RecursionError, yaml.YAMLError, AttributeError):
        if path.suffix == ".json" and text:
            mapping = json.loads(text)
        else:
            mapping = yaml.safe_load(text)
        return {str(name): value for name, value in mapping.items()}
    return {}


def _read_responses(folder: Path) -> list[ReportedResponse]:
    """The samples of training, then the responses of each evaluation; lines of another shape are
    skipped."""
    responses: list[ReportedResponse] = []
    for line in _read_lines(folder / SAMPLES):
        with suppress(*OF_ANOTHER_SHAPE):
            responses.append(_sampled(line))
    for path in evaluation_files(folder):
        digits = path.stem.removeprefix("step_")
        if not digits.isdecimal():
            continue
        for line in _read_lines(path):
            with suppress(*OF_ANOTHER_SHAPE):
                responses += _evaluated(int(digits), line)
    return responses


def _sampled(line: dict[str, Any]) -> ReportedResponse:
    """The response of one line of `samples.jsonl`."""
    return ReportedResponse(
        kind="training",
        step=int(line["step"]),
        prompt=str(line["prompt"]),
        text=str(line["answer"]),
        score=number_or_none(line["score"]),
        scores={str(name): number_or_none(score) for name, score in line["scores"].items()},
        kl=number_or_none(line["kl"]),
        tokens=int(line["length"]),
        ended=str(line["ended"]),
        turns=_turns(line.get("turns", ())),
        content=dict(line.get("content") or {}),
    )


def _turns(turns: Sequence[dict[str, Any]]) -> list[Turn]:
    return [
        (str(turn["role"]), str(turn["text"]), number_or_none(turn.get("reward"))) for turn in turns
    ]


def _evaluated(step: int, line: dict[str, Any]) -> list[ReportedResponse]:
    """The responses of one line of `eval/step_N.jsonl`, to one prompt. In steps 1 and 2 nothing, or
    a reward model alone, scores them, so that their lines have fewer keys."""
    count = len(line["answers"])
    responses = []
    columns = zip(
        line["answers"],
        line.get("scores") or [None] * count,
        line["lengths"],
        line["ended"],
        line.get("turns") or [()] * count,
        strict=True,
    )
    for index, (text, score, tokens, ended, turns) in enumerate(columns):
        scores = {}
        for source, scores_of_source in line.get("scores_by_source", {}).items():
            scores[str(source)] = number_or_none(scores_of_source[index])
        kl_per_token = None
        if line.get("kl") is not None:
            kl = number_or_none(line["kl"][index])
            if kl is not None and tokens > 0:
                kl_per_token = kl / tokens
        responses.append(
            ReportedResponse(
                kind="held-out",
                step=step,
                prompt=str(line["prompt"]),
                text=str(text),
                score=number_or_none(score),
                scores=scores,
                kl=kl_per_token,
                tokens=int(tokens),
                ended=str(ended),
                turns=_turns(turns),
                content=dict(line.get("content") or {}),
            )
        )
    return responses
