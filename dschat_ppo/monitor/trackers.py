"""Experiment trackers: what TensorBoard, W&B, MLflow and Trackio receive from a run, and the ids of its runs there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dschat_ppo.common.atomic_files import write_file
from dschat_ppo.errors import StorageError

RUN_IDS = "trackers.json"


@dataclass(frozen=True)
class Histogram:
    """Counts of values in buckets: `counts[i]` values are in `[edges[i], edges[i + 1])`.

    Attributes:
        edges: n + 1 ascending numbers, finite.
        counts: n numbers of values.
    """

    edges: Sequence[float]
    counts: Sequence[float]


@dataclass(frozen=True)
class Answer:
    """A prompt and its answer, as text."""

    prompt: str
    answer: str
    score: float
    tokens: int  # of the answer


@dataclass(frozen=True)
class StepFigures:
    """What a step gives to trackers besides its metrics."""

    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    answers: Sequence[Answer] = ()


class Tracker(Protocol):
    """Writes one run to one library. It exists on rank 0 only.

    Attributes:
        failures: the exceptions by which the library says that it cannot write, such as those of files and networks.
            The run then continues without the tracker. Every other exception is a bug and ends the run.
    """

    failures: tuple[type[Exception], ...]

    def write(self, step: int, metrics: Mapping[str, float], figures: StepFigures) -> None:
        """Write one step. NaN and infinity are written as the library has them."""

    def close(self, succeeded: bool) -> None:
        """Write what is buffered, and mark the run as ended: finished, or failed if it did not succeed."""


@dataclass(frozen=True)
class Tracking:
    """The trackers of a run, and what they receive when they open.

    Attributes:
        libraries: names of the trackers, see `RunFlags.trackers`.
        folder: the output folder.
        tensorboard: folder for TensorBoard's files.
        project: `--project`, or None.
        run_name: `--run_name`, or None.
        flags: all flags of the run, name -> value.
    """

    libraries: Sequence[str]
    folder: Path
    tensorboard: Path
    project: str | None
    run_name: str | None
    flags: Mapping[str, Any]

    @property
    def default_project(self) -> str:
        """The name of the folder that holds the output folder."""
        return self.folder.resolve().parent.name or "dschat_ppo"

    @property
    def default_run_name(self) -> str:
        """The name of the output folder."""
        return self.folder.resolve().name or "run"


@dataclass(frozen=True)
class Start:
    """Where a start of the run begins.

    Attributes:
        first_step: the first step to run, if the run resumes; None from scratch.
        written: the last step that earlier starts wrote to `metrics.jsonl`; -1 if there is none. Steps from
            `first_step` to `written` run again.
    """

    first_step: int | None = None
    written: int = -1


def logged_values(library: Any, metrics: Mapping[str, float], figures: StepFigures) -> dict[str, Any]:
    """What a step logs to a `library` with W&B's interface: numbers, histograms, and a table of answers."""
    data: dict[str, Any] = dict(metrics)
    for name, histogram in figures.histograms.items():
        data[name] = library.Histogram(np_histogram=(list(histogram.counts), list(histogram.edges)))
    if figures.answers:
        rows = [[answer.prompt, answer.answer, answer.score, answer.tokens] for answer in figures.answers]
        data["samples/answers"] = library.Table(columns=["prompt", "answer", "score", "tokens"], data=rows)
    return data


def saved_run_id(folder: Path, library: str) -> str | None:
    """The id of the library's run that an earlier start in this output folder began, or None."""
    return _run_ids(folder).get(library)


def save_run_id(folder: Path, library: str, run_id: str) -> None:
    """Keep the id of the library's run in `trackers.json`, durably.

    Raises:
        StorageError: the file cannot be written.
    """
    place = folder / RUN_IDS
    try:
        write_file(place, (json.dumps(_run_ids(folder) | {library: run_id}, indent=2) + "\n").encode())
    except OSError as problem:
        raise StorageError(f"{place}: cannot be written ({problem.strerror}); free space, then run again") from problem


def _run_ids(folder: Path) -> dict[str, str]:
    try:
        saved = json.loads((folder / RUN_IDS).read_bytes())
    except (OSError, ValueError):  # absent or damaged: the run then begins a new run of the library
        return {}
    return saved if isinstance(saved, dict) else {}
