"""Experiment trackers: what TensorBoard, W&B, Trackio and classes of the user receive from a run,
and the ids of its runs there.

A tracker exists on rank 0 only. Its `failures` are the exceptions by which the library says that it
cannot write: the run then continues without the tracker. Every other exception is a bug and ends
the run.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_ppo.common.atomic_files import storage_errors, write_file
from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.own_functions import own_function, running_own
from dschat_ppo.config.schema import is_own_function
from dschat_ppo.errors import UserError, in_one_line

RUN_IDS = "trackers.json"
TRACKER = "--tracker"


@dataclass(frozen=True)
class SampledResponse:
    """A prompt and a response to it, as text."""

    prompt: str
    response: str
    score: float
    tokens: int  # of the response


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
    # the last step that earlier starts wrote to `metrics.jsonl`; -1 if there is none
    written: int = -1


def require_trackers(libraries: Sequence[str]) -> None:
    """Check, before a model is loaded, that these libraries can be used. Call it on rank 0, which
    alone uses them."""
    for library in libraries:
        if is_own_function(library):
            continue
        require_extra(library, f"--report_to {library}")
        if library == "wandb":
            check_wandb()


def check_own_tracker(name: str) -> None:
    """Check, before a model is loaded, that `FILE.py:CLASS` is a class with the methods of a
    tracker. Call it on rank 0."""
    fault = _fault_of_tracker(own_function(TRACKER, name))
    if fault is not None:
        raise UserError(
            f"{TRACKER} {name}: {fault}; a tracker is a class with __init__(self, run_name,"
            " config), log(self, metrics, step) and close(self)"
        )


def _fault_of_tracker(tracker: Any) -> str | None:
    """What an object lacks to be the class of a tracker."""
    if not isinstance(tracker, type):
        return "it is no class"
    calls: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("__init__", tracker, ("run name", {})),
        ("log", getattr(tracker, "log", None), (tracker, {}, 0)),
        ("close", getattr(tracker, "close", None), (tracker,)),
    )
    for method, function, arguments in calls:
        if not callable(function):
            return f"it has no method {method}"
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as problem:
            return f"{method}: {problem}"
    return None


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
        self._library: Any = importlib.import_module(library)
        # Trackio turns all others into warnings itself
        self.failures: tuple[type[Exception], ...] = (OSError,)
        ids = _run_ids(tracking.folder)
        saved_id = None
        if start.first_step is not None:
            saved_id = ids.get(library)
        if library == "wandb":
            self.failures += _wandb_failures()
            settings = _wandb_settings(tracking, saved_id)
            run_id = settings["id"]
        else:
            settings = _trackio_settings(tracking, saved_id)
            run_id = settings["name"]
        content = json.dumps(ids | {library: run_id}, indent=2) + "\n"
        # before `init`: a run that crashes in it exists already
        with storage_errors(tracking.folder / RUN_IDS):
            write_file(tracking.folder / RUN_IDS, content.encode())
        try:
            self._run: Any = self._library.init(**settings)
        except self.failures as problem:
            raise UserError(f"--report_to {library}: {problem}") from problem
        self._next_step = 0  # the first one that is sent
        if saved_id:
            self._next_step = start.written + 1
        if saved_id and library == "wandb":
            self._next_step = max(self._next_step, self._run.step)

    def write(
        self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]
    ) -> None:
        """Send the metrics of a step, unless the run has them, and responses as a table."""
        if step < self._next_step:
            return
        entries: dict[str, Any] = dict(metrics)
        if responses:
            entries["samples/answers"] = self._library.Table(
                columns=["prompt", "answer", "score", "tokens"],
                data=[[row.prompt, row.response, row.score, row.tokens] for row in responses],
            )
        options = {}
        if self.name == "wandb":
            # W&B otherwise keeps a step back until the next one begins, and a killed run loses it
            options["commit"] = True
        self._run.log(entries, step=step, **options)

    def close(self, succeeded: bool) -> None:
        """Write what is buffered, and mark the run as finished or failed, for which Trackio has no
        mark."""
        if self.name == "wandb":
            self._run.finish(exit_code=0 if succeeded else 1)
        else:
            self._run.finish()


def _wandb_settings(tracking: Tracking, saved_id: str | None) -> dict[str, Any]:
    """Arguments of `wandb.init`; `saved_id`: of the run that is continued. The environment fills
    what the flags leave open."""
    environment = os.environ
    folder = tracking.folder.resolve()
    run_id = saved_id or environment.get("WANDB_RUN_ID") or secrets.token_hex(4)
    name = tracking.run_name or environment.get("WANDB_NAME") or folder.name or "run"
    return {
        "project": _project("WANDB_PROJECT", tracking),
        "config": dict(tracking.flags),
        "id": run_id,
        "resume": environment.get("WANDB_RESUME", "allow"),
        "allow_val_change": True,
        "name": name,
        "dir": environment.get("WANDB_DIR", str(tracking.folder)),
    }


def _trackio_settings(tracking: Tracking, saved_name: str | None) -> dict[str, Any]:
    """Arguments of `trackio.init`; `saved_name`: of the run that is continued."""
    name = tracking.run_name or tracking.folder.resolve().name or "run"
    return {
        "project": _project("TRACKIO_PROJECT", tracking),
        "config": dict(tracking.flags),
        "name": saved_name or f"{name}-{secrets.token_hex(3)}",
        "resume": "allow",
        "embed": False,
    }


def _project(variable: str, tracking: Tracking) -> str:
    """The project of a run: by its flag, by this variable of the environment, or by the folder
    above its own."""
    folder = tracking.folder.resolve().parent.name
    return tracking.project or os.environ.get(variable) or folder or "dschat_ppo"


def _wandb_failures() -> tuple[type[Exception], ...]:
    """The exceptions of W&B's library, and those when its process, which sends to the server, has
    ended."""
    import wandb
    from wandb.sdk import mailbox

    return (wandb.errors.Error, mailbox.MailboxClosedError, mailbox.HandleAbandonedError)


class TensorBoardTracker:
    """Writes event files with scalars and texts, of which one has the flags. A resumed run writes
    another one; TensorBoard drops the points of earlier files from `first_step` on
    (`purge_step`)."""

    name = "tensorboard"
    # also those of the thread that writes the file
    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, tracking: Tracking, start: Start):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(tracking.tensorboard), purge_step=start.first_step)
        self._writer.add_text(
            "flags", "\n".join(f"    {name}: {value}" for name, value in tracking.flags.items())
        )
        self._writer.flush()

    def write(
        self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]
    ) -> None:
        """Write the metrics of a step as scalars, and responses as one text."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if responses:
            self._writer.add_text("samples/answers", "\n\n".join(map(_markdown, responses)), step)

    def close(self, succeeded: bool) -> None:
        """Write what is buffered. TensorBoard has no mark for the end of a run."""
        self._writer.close()


class OwnTracker:
    """Passes the metrics on to an object of the class that `--tracker` names. A step that an
    earlier start has logged is not logged again."""

    failures: tuple[type[Exception], ...] = (UserError,)

    def __init__(self, name: str, tracking: Tracking, start: Start):
        self.name = f"{TRACKER} {name}"
        self._class = name
        self._last_logged = start.written
        run_name = tracking.run_name or tracking.folder.resolve().name or "run"
        with running_own(f"{self.name}: __init__:", name):
            self._tracker = own_function(TRACKER, name)(run_name, dict(tracking.flags))

    def write(
        self, step: int, metrics: Mapping[str, float], responses: Sequence[SampledResponse]
    ) -> None:
        """Log the metrics of a step; `UserError` if the user's method raises anything."""
        if step <= self._last_logged:
            return
        with running_own(f"rank 0: log of step {step}:", self._class):
            self._tracker.log(dict(metrics), step)

    def close(self, succeeded: bool) -> None:
        """Close the user's object, however the run has ended."""
        with running_own("rank 0: close:", self._class):
            self._tracker.close()


Tracker = TensorBoardTracker | WandbTracker | OwnTracker


def open_trackers(tracking: Tracking, start: Start) -> list[Tracker]:
    """Begin the run in each library, or continue it. Call it on rank 0. `UserError` if one does not
    begin it."""
    trackers: list[Tracker] = []
    for library in tracking.libraries:
        if library == "tensorboard":
            trackers.append(TensorBoardTracker(tracking, start))
        elif is_own_function(library):
            trackers.append(OwnTracker(library, tracking, start))
        else:
            trackers.append(WandbTracker(library, tracking, start))
    return trackers


def _markdown(row: SampledResponse) -> str:
    """Indented lines are shown as they are."""
    paragraphs = [f"**score {row.score:.4g}**, {row.tokens} tokens"]
    for title, text in (("prompt", row.prompt), ("answer", row.response)):
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        paragraphs.append(f"{title}:\n\n{lines}")
    return "\n\n".join(paragraphs)


def _run_ids(folder: Path) -> dict[str, str]:
    """Library -> the id of its run that an earlier start in this output folder began."""
    try:
        saved = json.loads((folder / RUN_IDS).read_bytes())
    except (OSError, ValueError):  # absent or damaged: the run then begins a new run of the library
        return {}
    if not isinstance(saved, dict):
        return {}
    return saved
