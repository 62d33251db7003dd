"""Experiment trackers: what TensorBoard, W&B and Trackio receive from a run, and the ids of its
runs there.

A tracker exists on rank 0 only. Its `failures` are the exceptions by which the library says that it
cannot write: the run then continues without the tracker. Every other exception is a bug and ends
the run.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_ppo.common.atomic_files import storage_errors, write_file
from dschat_ppo.common.extras import require_extra
from dschat_ppo.errors import UserError, in_one_line

RUN_IDS = "trackers.json"


@dataclass(frozen=True)
class Answer:
    """A prompt and its answer, as text."""

    prompt: str
    answer: str
    score: float
    tokens: int  # of the answer


@dataclass(frozen=True)
class Tracking:
    """The trackers of a run, and what they receive when they open; `flags` are all flags of the
    run, name -> value."""

    libraries: Sequence[str]
    folder: Path
    tensorboard: Path
    project: str | None
    run_name: str | None
    flags: Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """Where a start of the run begins. Steps from `first_step` to `written` run again."""

    first_step: int | None = None  # if the run resumes; None from scratch
    written: int = (
        -1
    )  # the last step that earlier starts wrote to `metrics.jsonl`; -1 if there is none


def check_trackers(libraries: Sequence[str]) -> None:
    """Check, before a model is loaded, that these libraries can be used. Call it on rank 0, which
    alone uses them."""
    for library in libraries:
        require_extra(library, f"--report_to {library}")
        if library == "wandb":
            check_wandb()


def check_wandb() -> None:
    """Check that a run of W&B can begin: it is offline, or there is an API key that the server
    accepts."""
    import wandb

    try:
        ready = wandb.setup().settings.mode != "online" or wandb.login(prompt=False)
    except wandb.errors.Error as problem:
        raise UserError(
            f"--report_to wandb: {in_one_line(problem)}; or set WANDB_MODE=offline"
        ) from problem
    if not ready:
        raise UserError(
            "--report_to wandb: there is no API key; run `wandb login`, set WANDB_API_KEY, or set"
            " WANDB_MODE=offline"
        )


class WandbTracker:
    """Writes to one run of W&B, or of Trackio, which has the same interface; resumed starts
    continue it.

    No step is sent twice: W&B takes steps in ascending order only, and Trackio keeps all points of
    a step. `written` is the last one of earlier starts; W&B knows the last one that its server has,
    and offline writes a separate file for each start. Trackio finds the run to resume by its name,
    which several runs may have, so that the name ends with six random digits.
    """

    def __init__(self, library: str, tracking: Tracking, start: Start):
        self.name = library
        given = os.environ
        self._library: Any = importlib.import_module(library)
        self.failures: tuple[type[Exception], ...] = (
            OSError,
        )  # Trackio turns the others into warnings itself
        ids = _run_ids(tracking.folder)
        folder = tracking.folder.resolve()
        saved = ids.get(library) if start.first_step is not None else None
        project = (
            tracking.project
            or given.get(f"{library.upper()}_PROJECT")
            or folder.parent.name
            or "dschat_ppo"
        )
        named: dict[str, Any] = {"project": project, "config": dict(tracking.flags)}
        if library == "wandb":
            from wandb.sdk import mailbox

            ended = (
                mailbox.MailboxClosedError,
                mailbox.HandleAbandonedError,
            )  # the process that sends to the server
            self.failures += (self._library.errors.Error, *ended)
            run_id = saved or given.get("WANDB_RUN_ID") or secrets.token_hex(4)
            named |= {
                "id": run_id,
                "resume": given.get("WANDB_RESUME", "allow"),
                "allow_val_change": True,
            }
            named["name"] = tracking.run_name or given.get("WANDB_NAME") or folder.name or "run"
            named["dir"] = given.get("WANDB_DIR", str(tracking.folder))
        else:
            run_id = saved or f"{tracking.run_name or folder.name or 'run'}-{secrets.token_hex(3)}"
            named |= {"name": run_id, "resume": "allow", "embed": False}
        content = json.dumps(ids | {library: run_id}, indent=2) + "\n"
        with storage_errors(
            tracking.folder / RUN_IDS
        ):  # before: a run that crashes in `init` exists already
            write_file(tracking.folder / RUN_IDS, content.encode())
        try:
            self._run: Any = self._library.init(**named)
        except self.failures as problem:
            raise UserError(f"--report_to {library}: {problem}") from problem
        if saved:
            self._next = max(start.written + 1, self._run.step if library == "wandb" else 0)
        else:
            self._next = 0

    def write(self, step: int, metrics: Mapping[str, float], answers: Sequence[Answer]) -> None:
        if step < self._next:
            return
        data: dict[str, Any] = dict(metrics)
        if answers:
            rows = [
                [answer.prompt, answer.answer, answer.score, answer.tokens] for answer in answers
            ]
            data["samples/answers"] = self._library.Table(
                columns=["prompt", "answer", "score", "tokens"], data=rows
            )
        # W&B otherwise keeps a step back until the next one begins, and a killed run loses it
        self._run.log(data, step=step, **({"commit": True} if self.name == "wandb" else {}))

    def close(self, succeeded: bool) -> None:
        """Write what is buffered, and mark the run as finished or failed, for which Trackio has no
        mark."""
        self._run.finish(**({"exit_code": 0 if succeeded else 1} if self.name == "wandb" else {}))


class TensorBoardTracker:
    """Writes event files with scalars and texts, of which one has the flags. A resumed run writes
    another one; TensorBoard drops the points of earlier files from `first_step` on
    (`purge_step`)."""

    name = "tensorboard"
    failures: tuple[type[Exception], ...] = (
        OSError,
    )  # also those of the thread that writes the file

    def __init__(self, tracking: Tracking, start: Start):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(tracking.tensorboard), purge_step=start.first_step)
        self._writer.add_text(
            "flags", "\n".join(f"    {name}: {value}" for name, value in tracking.flags.items())
        )
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float], answers: Sequence[Answer]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if answers:
            self._writer.add_text("samples/answers", "\n\n".join(map(_markdown, answers)), step)

    def close(self, succeeded: bool) -> None:
        """Write what is buffered. TensorBoard has no mark for the end of a run."""
        self._writer.close()


Tracker = TensorBoardTracker | WandbTracker


def open_trackers(tracking: Tracking, start: Start) -> list[Tracker]:
    """Begin the run in each library, or continue it. Call it on rank 0. `UserError` if one does not
    begin it."""
    return [
        (
            TensorBoardTracker(tracking, start)
            if library == "tensorboard"
            else WandbTracker(library, tracking, start)
        )
        for library in tracking.libraries
    ]


def _markdown(answer: Answer) -> str:
    """Indented lines are shown as they are."""
    shown = [f"**score {answer.score:.4g}**, {answer.tokens} tokens"]
    for title, text in (("prompt", answer.prompt), ("answer", answer.answer)):
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        shown.append(f"{title}:\n\n{lines}")
    return "\n\n".join(shown)


def _run_ids(folder: Path) -> dict[str, str]:
    """Library -> the id of its run that an earlier start in this output folder began."""
    try:
        saved = json.loads((folder / RUN_IDS).read_bytes())
    except (OSError, ValueError):  # absent or damaged: the run then begins a new run of the library
        return {}
    return saved if isinstance(saved, dict) else {}
