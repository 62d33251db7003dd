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
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.features.environments.environments import Turn
from dschat_ppo.features.environments.episode_processes import ENDED, Episodes
from dschat_ppo.rewards.worker_pool import CallError


@dataclass(frozen=True)
class RolloutKey:
    """What the journal knows the episodes of a rollout by."""

    step: int  # PPO step
    rollout: str  # its name, one for each rollout of a step
    first: int  # the number of episode 0 of this rank among those of all ranks


FIRST_ROLLOUT = RolloutKey(step=0, rollout="", first=0)


@dataclass(eq=False)
class _JournalledEpisode:
    """An episode that may answer from the journal, and what its process must hear once it has
    one."""

    start: tuple[Any, ...]  # row, seed, prompt, messages
    # the last one: where it was asked, and a digest of all that the environment was told
    question: str
    requests: list[tuple[Any, ...]] = field(default_factory=list)  # all after the reset
    has_process: bool = False
    # what its process hears before it answers the question
    due: deque[tuple[Any, ...]] = field(default_factory=deque)

    def ask(self, *request: Any) -> None:
        """Let the question become the next one, whose digest is that of the last one and
        `request`."""
        asked_where, _, digest = self.question.rpartition(":")
        told = json.dumps([digest, *request], sort_keys=True, default=str).encode()
        self.question = f"{asked_where}:{hashlib.sha256(told).hexdigest()[:24]}"


class JournalledEpisodes:
    """`Episodes` that answers from the journal where it can. `has_state` is False for functions
    alone. `files`: of the environments, whose content is part of each question."""

    def __init__(
        self, episodes: Episodes[Turn], journal: Journal, has_state: bool, files: Sequence[str] = ()
    ):
        self.episodes = episodes
        self.journal = journal
        self.has_state = has_state
        self._files = "".join(checksum(Path(file))[:16] for file in files)
        self._begun = dict[int, _JournalledEpisode]()
        self._answers = list[tuple[int, Turn | CallError]]()  # from the journal, for `poll`
        self._key = FIRST_ROLLOUT

    def begin(self, key: RolloutKey) -> None:
        """The episodes that start next are those of the rollout `key`. `UserError` on all ranks if
        a journal cannot be read. Collective."""
        self.journal.begin(key.step)
        self.journal.raise_problem()
        self._key = key

    def start(self, episode_index: int, *start: Any) -> None:
        """Begin an episode with a row, a seed, a prompt and messages; see `Episodes.start`."""
        asked_where = f"{self._key.rollout}/{self._key.first + episode_index}"
        self._begun[episode_index] = _JournalledEpisode(start, f"{asked_where}:{self._files}")
        self._ask(episode_index, "reset", *start)

    def step(self, episode_index: int, action: dict[str, Any]) -> None:
        """Send the model's message to an episode."""
        self._ask(episode_index, "step", action)

    def finish(self, episode_index: int) -> None:
        """Let an episode end."""
        self._ask(episode_index, "finish")

    def _ask(self, episode_index: int, *request: Any) -> None:
        """Answer a request from the journal, or send it to the process of the episode. One without
        a process gets it now, and hears all earlier requests first."""
        episode = self._begun[episode_index]
        episode.ask(*request)
        is_reset = request[0] == "reset"
        answer: dict[str, Any] | None = None
        if not self.has_state and request[0] != "step":
            # functions have nothing to begin or end: a process starts for the first call
            answer = {}
        elif not episode.has_process:
            answer = self.journal.known.get(episode.question)
        if answer is not None:
            if answer.get("error") is not None:
                self._answers.append((episode_index, CallError(answer["error"])))
            else:
                self._answers.append((episode_index, Turn(**answer)))
        elif episode.has_process:
            self._send(episode_index, *request)
        else:
            episode.has_process = True
            if self.has_state:
                episode.due.extend(episode.requests)
            if not is_reset:
                episode.due.append(request)
            self.episodes.start(episode_index, *episode.start)
        if not is_reset:
            episode.requests.append(request)

    def _send(self, episode_index: int, method: str, *arguments: Any) -> None:
        getattr(self.episodes, method)(episode_index, *arguments)

    def poll(self, seconds: float = 0.0) -> list[tuple[int, Turn | CallError]]:
        """The episodes that answered since the last call, with their turns; see `Episodes.poll`.
        What a process answers goes into the journal."""
        answers = self._answers
        self._answers = []
        if answers:
            seconds = 0.0
        for episode_index, turn in self.episodes.poll(seconds):
            episode = self._begun[episode_index]
            is_error = isinstance(turn, CallError)
            if episode.due and not is_error:
                self._send(episode_index, *episode.due.popleft())
                continue
            answers.append((episode_index, turn))
            # not that its process ended, which also happens when the whole job is killed
            if not (is_error and str(turn).startswith(ENDED)):
                self.journal.add(episode.question, _answer_of(turn))
        self.journal.write()
        return answers

    def end(self, episode_index: int) -> None:
        """End the process of an episode that has answered."""
        if self._begun[episode_index].has_process:
            self.episodes.end(episode_index)

    def end_all(self) -> None:
        """End all episodes, also in the middle of a call."""
        self._answers.clear()
        self.episodes.end_all()
        self.journal.sync()

    def close(self) -> None:
        """End the processes."""
        self.episodes.close()


def _answer_of(turn: Turn | CallError) -> dict[str, Any]:
    """What the journal keeps of a turn, or of a call that failed."""
    if isinstance(turn, CallError):
        return {"error": str(turn)}
    return asdict(turn)
