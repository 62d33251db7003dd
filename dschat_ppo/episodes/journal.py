"""The answers of environments on the disk: a PPO step that runs again after a crash asks for none
of them again.

`JournalledEpisodes` has the interface of `Episodes`. An episode has no process while its questions
are in the journal. Where the journal ends, or the model says something else than before, its
process starts. An environment, which has a state, first hears again what the model said; functions
have none, and their process starts with the first message.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dschat_ppo.checkpoint.store import JOURNAL, CheckpointFolder, checkpoint_name
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import (
    checksum,
    make_folder,
    storage_errors,
    sync_entries,
    sync_file,
)
from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.episode_processes import ENDED, Episodes
from dschat_ppo.errors import reading
from dschat_ppo.rewards.worker_pool import CallError

SYNC_SECONDS = 0.05  # a power loss takes at most the answers of so long


class Journal:
    """Answers by question, in a file for each PPO step and rank; a line for each. Every rank reads
    those of all."""

    def __init__(self, output: Path):
        self.checkpoints = CheckpointFolder(output)
        self.folder = self.checkpoints.root / JOURNAL  # goes with the checkpoints
        self.known = dict[str, Any]()  # of this step, from before this start
        self._step, self._lines = -1, list[bytes]()
        self._path = self.folder
        self._synced = 0.0

    def begin(self, step: int) -> None:
        """Read the answers of PPO step `step`. Rank 0 removes those of steps that no checkpoint
        leads to."""
        if step == self._step:
            return
        self.sync()
        oldest = int(self._oldest_checkpoint(step).split("_")[1])
        self._step, self.known, self._path = (
            step,
            {},
            self.folder / f"step_{step:06d}_rank_{dist.rank()}.jsonl",
        )
        with storage_errors(self.folder):
            make_folder(self.folder)
            for file in sorted(self.folder.glob("step_*.jsonl")):
                number = int(file.name.split("_")[1])
                if number == step:
                    *lines, cut = file.read_bytes().split(b"\n")
                    with reading(
                        f"{file}: is damaged; remove it, and environments are asked again"
                    ):
                        for line in lines:
                            self.known |= json.loads(line)
                    if cut and file == self._path:
                        with file.open("rb+") as opened:
                            opened.truncate(sum(len(line) + 1 for line in lines))
                elif number < oldest and dist.is_main():
                    file.unlink(missing_ok=True)

    def _oldest_checkpoint(self, step: int) -> str:
        """The name of the oldest checkpoint that a run resumes from by itself. The best one stays
        for its model, and files since then would add up."""
        names = self.checkpoints.names() or [checkpoint_name(step)]
        best = self.checkpoints.best() if len(names) > 1 else None
        return next(name for name in names if name != best)

    def add(self, question: str, turn: Turn | CallError) -> None:
        """Note an answer; `write` puts it into the file."""
        answer = {"error": str(turn)} if isinstance(turn, CallError) else asdict(turn)
        self._lines.append(json.dumps({question: answer}).encode() + b"\n")

    def forget(self) -> None:
        """Remove the answers of this step, of all ranks, after the last one was written."""
        self._lines.clear()
        for file in (
            self.folder.glob(f"step_{self._step:06d}_rank_*.jsonl") if dist.is_main() else ()
        ):
            file.unlink(missing_ok=True)

    def write(self) -> None:
        """Write the new answers, where they survive the end of this process; and of the machine
        after a moment."""
        if self._lines:
            with storage_errors(self._path):
                is_new = not self._path.exists()
                with self._path.open("ab") as file:
                    file.write(b"".join(self._lines))
                    file.flush()
                    self._lines.clear()
                    if time.monotonic() >= self._synced + SYNC_SECONDS:
                        sync_file(file.fileno())
                        self._synced = time.monotonic()
                if is_new:
                    sync_entries(self.folder)

    def sync(self) -> None:
        """Flush the file to the disk."""
        self.write()
        if self._path.is_file():
            with storage_errors(self._path):
                sync_entries(self._path)


@dataclass(eq=False)
class _Episode:
    start: tuple[Any, ...]  # row, seed, prompt, messages
    # the last one: where it was asked, and a digest of all that the environment was told
    question: str
    requests: list[tuple[Any, ...]] = field(default_factory=list)  # all after the reset
    has_process: bool = False
    # what its process hears before it answers the question
    due: deque[tuple[Any, ...]] = field(default_factory=deque)

    def ask(self, *request: Any) -> None:
        place, _, digest = self.question.rpartition(":")
        told = json.dumps([digest, *request], sort_keys=True, default=str).encode()
        self.question = f"{place}:{hashlib.sha256(told).hexdigest()[:24]}"


class JournalledEpisodes:
    """`Episodes` that answers from the journal where it can. `has_state` is False for functions
    alone. `files`: of the environments, whose content is part of each question."""

    def __init__(
        self, episodes: Episodes, journal: Journal, has_state: bool, files: Sequence[str] = ()
    ):
        self.episodes, self.journal, self.has_state = episodes, journal, has_state
        self._files = "".join(checksum(Path(file))[:16] for file in files)
        self._begun = dict[int, _Episode]()
        self._answers = list[tuple[int, Turn | CallError]]()
        self._place = ""
        self._first = 0

    def begin(self, step: int, rollout: str, first: int) -> None:
        """The episodes that start next are those of a rollout of PPO step `step`; `first`: the
        number of episode 0 among those of all ranks."""
        self.journal.begin(step)
        self._place, self._first = rollout, first

    def start(self, number: int, *start: Any) -> None:
        self._begun[number] = _Episode(start, f"{self._place}/{self._first + number}:{self._files}")
        self._ask(number, "reset", *start)

    def step(self, number: int, action: dict[str, Any]) -> None:
        self._ask(number, "step", action)

    def finish(self, number: int) -> None:
        self._ask(number, "finish")

    def _ask(self, number: int, *request: Any) -> None:
        episode = self._begun[number]
        episode.ask(*request)
        answer = None if episode.has_process else self.journal.known.get(episode.question)
        if not self.has_state and request[0] != "step":
            # functions have nothing to begin or end: a process starts for the first call
            answer = {}
        if answer is not None:
            error = answer.get("error")
            self._answers.append((number, Turn(**answer) if error is None else CallError(error)))
        elif episode.has_process:
            self._send(number, *request)
        else:
            episode.has_process = True
            episode.due.extend(episode.requests if self.has_state else ())
            episode.due.extend([request] if request[0] != "reset" else ())
            self.episodes.start(number, *episode.start)
        episode.requests += [request] if request[0] != "reset" else []

    def _send(self, number: int, method: str, *arguments: Any) -> None:
        getattr(self.episodes, method)(number, *arguments)

    def poll(self, seconds: float = 0.0) -> list[tuple[int, Turn | CallError]]:
        found, self._answers = self._answers, []
        for number, turn in self.episodes.poll(0.0 if found else seconds):
            episode = self._begun[number]
            if episode.due and not isinstance(turn, CallError):
                self._send(number, *episode.due.popleft())
                continue
            found.append((number, turn))
            # as when the whole job is killed
            if not (isinstance(turn, CallError) and str(turn).startswith(ENDED)):
                self.journal.add(episode.question, turn)
        self.journal.write()
        return found

    def end(self, number: int) -> None:
        if self._begun[number].has_process:
            self.episodes.end(number)

    def end_all(self) -> None:
        self._answers.clear()
        self.episodes.end_all()
        self.journal.sync()

    def close(self) -> None:
        self.episodes.close()
