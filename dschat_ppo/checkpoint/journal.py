"""What services and programs answered in rollouts, and what the model replied to them, on the disk:
a PPO step that runs again after a crash asks for none of it again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder, storage_errors, sync_entries, sync_file
from dschat_ppo.errors import UserError, reading

SYNC_SECONDS = 0.05  # a power loss takes at most the answers of so long


class Journal:
    """Answers by question, in a file for each PPO step and rank; a line for each. Every rank reads
    those of all. Files of steps that no checkpoint leads to are removed.

    A file that cannot be read or written is a `problem` of this rank, and nothing is written after
    it; `raise_problem` raises it on all ranks.

    Args:
        output: the folder of the run.
        name: of the folder next to the checkpoints, which goes with them.
        answering: who answers, for messages.
        writer: tells apart the files of several journals in one folder.
    """

    def __init__(self, output: Path, name: str, answering: str, writer: str = ""):
        self.checkpoints = CheckpointFolder(output)
        self.folder = self.checkpoints.root / name
        self.answering = answering
        self.known = dict[str, Any]()  # of this step, from before this start
        self.problem: UserError | None = None
        self._file_name = f"rank_{dist.rank()}.jsonl"
        if writer:
            self._file_name = f"{writer}_{self._file_name}"
        self._step = -1
        self._lines = list[bytes]()
        self._path = self.folder
        self._synced = 0.0

    def begin(self, step: int) -> None:
        """Read the answers of PPO step `step`. Rank 0 removes those of steps that no checkpoint
        leads to."""
        if step == self._step:
            return
        self.sync()
        self._step = step
        self.known = {}
        self._path = self.folder / f"step_{step:06d}_{self._file_name}"
        with self._keeping_problem(self.folder):
            oldest_step = self._oldest_step(step)
            make_folder(self.folder)
            for file in sorted(self.folder.glob("step_*.jsonl")):
                step_of_file = int(file.name.split("_")[1])
                if step_of_file == step:
                    self._read(file)
                elif step_of_file < oldest_step and dist.is_main():
                    file.unlink(missing_ok=True)

    def _oldest_step(self, step: int) -> int:
        """The step of the oldest checkpoint that a run resumes from by itself; `step` if there is
        none. The best one stays for its model, and files since then would add up."""
        names = self.checkpoints.names()
        if len(names) > 1:
            best = self.checkpoints.best()
            names = [name for name in names if name != best]
        if not names:
            return step
        return int(names[0].split("_")[1])

    def _read(self, file: Path) -> None:
        """Read the answers in a file. A last line without its end was cut by a crash: this rank
        removes it from its own file."""
        *lines, cut_line = file.read_bytes().split(b"\n")
        with reading(f"{file}: is damaged; remove it, and {self.answering} are asked again"):
            for line in lines:
                self.known |= json.loads(line)
        if cut_line and file == self._path:
            with file.open("rb+") as opened:
                opened.truncate(sum(len(line) + 1 for line in lines))

    def add(self, question: str, answer: Any) -> None:
        """Note an answer, of which JSON can be made; `write` puts it into the file."""
        self._lines.append(json.dumps({question: answer}).encode() + b"\n")

    def forget(self) -> None:
        """Remove the answers of this step, of all ranks, after the last one was written."""
        self._lines.clear()
        if dist.is_main():
            for file in self.folder.glob(f"step_{self._step:06d}_*.jsonl"):
                file.unlink(missing_ok=True)

    def write(self) -> None:
        """Write the new answers, where they survive the end of this process; and of the machine
        after a moment."""
        if not self._lines or self.problem is not None:
            return
        with self._keeping_problem(self._path):
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
            with self._keeping_problem(self._path):
                sync_entries(self._path)

    @contextmanager
    def _keeping_problem(self, path: Path) -> Iterator[None]:
        """What the block cannot read or write becomes the `problem`, if there is none yet."""
        try:
            with storage_errors(path):
                yield
        except UserError as problem:
            self.problem = self.problem or problem

    def raise_problem(self) -> None:
        """Raise the `problem` of the first rank that has one, on every rank. Collective."""
        first = next(filter(None, dist.gather_objects(self.problem)), None)
        if first is not None:
            raise first
