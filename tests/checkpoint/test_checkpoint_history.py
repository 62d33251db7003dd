"""After any sequence of saves, prunes and damage the newest intact checkpoint is found, if there is one."""

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

from checkpoints import CONTENT, fill
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat_ppo.checkpoint.folder import CheckpointFolder, checkpoint_name

FILES = [*CONTENT, "manifest.json"]
which = st.integers(0, 3)  # how many from the newest
OPERATIONS = st.one_of(
    st.tuples(st.just("save"), st.booleans()),
    st.tuples(st.just("prune"), st.integers(1, 3)),
    st.tuples(st.just("cut"), which, st.sampled_from(FILES), st.floats(0, 0.99)),
    st.tuples(st.just("lose"), which, st.sampled_from(FILES)),
    st.tuples(st.just("flip"), which, st.sampled_from(FILES), st.floats(0, 0.99)),
    st.tuples(st.just("latest"), st.sampled_from(["", "step_000001", "step_000099", "?"])),
)


class History:
    """The checkpoints of a run, and the state that is expected of them, by name."""

    def __init__(self, output: Path):
        self.folder = CheckpointFolder(output)
        self.there: list[str] = []
        self.sizes_wrong: set[str] = set()
        self.content_wrong: set[str] = set()
        self.best: set[str] = set()
        self.without_manifest: set[str] = set()
        self.saved = 0

    def intact(self, wrong: set[str]) -> list[str]:
        return [name for name in self.there if name not in wrong]

    def save(self, best: bool) -> None:
        self.saved += 1
        name = checkpoint_name(self.saved // 3, self.saved % 3)
        fill(self.folder.partial(name), best=best)
        self.folder.commit(name)
        self.there.append(name)
        if best:
            self.best.add(name)

    def prune(self, limit: int) -> None:
        by_size = self.intact(self.sizes_wrong)
        best = ([name for name in self.there if name in self.best - self.without_manifest] or [None])[-1]
        removed = self.folder.prune(limit)
        if removed:
            assert self.there[-1] in by_size and len(by_size) >= limit
        kept = [name for name in self.there if name not in removed]
        assert self.folder.names() == kept
        assert best not in removed
        assert by_size[-limit:] == [name for name in by_size if name in kept][-limit:]
        self.there = kept

    def target(self, back: int, file: str) -> Path | None:
        path = self.folder.root / self.there[-1 - back] / file if back < len(self.there) else None
        return path if path is not None and path.exists() and path.stat().st_size else None

    def spoil(self, kind: str, back: int, file: str, where: float = 0.0) -> None:
        path = self.target(back, file)
        if path is None or (kind == "flip" and self.there[-1 - back] in self.content_wrong):  # twice would mend it
            return
        content = path.read_bytes()
        position = int(where * len(content))
        if kind == "flip":
            self.content_wrong.add(self.there[-1 - back])
            flipped = bytes([content[position] ^ 1])
            path.write_bytes(content[:position] + flipped + content[position + 1 :])
        elif kind == "cut":
            path.write_bytes(content[:position])
        else:
            path.unlink()
        if kind != "flip" or file == "manifest.json":
            self.sizes_wrong.add(self.there[-1 - back])
        if file == "manifest.json":
            self.without_manifest.add(self.there[-1 - back])

    def check(self) -> None:
        for checksums in (True, False):
            wrong = self.sizes_wrong | (self.content_wrong if checksums else set())
            newest, _ = self.folder.newest_intact(checksums)
            assert newest == (self.intact(wrong) or [None])[-1]


@settings(max_examples=120, deadline=None)
@given(st.lists(OPERATIONS, max_size=14))
def test_the_newest_intact_checkpoint_is_found_and_never_removed(operations):
    with tempfile.TemporaryDirectory() as place, patch.object(os, "fsync", lambda number: None):
        history = History(Path(place))
        for kind, *arguments in operations:
            had = bool(history.intact(history.sizes_wrong))
            if kind == "save":
                history.save(*arguments)
            elif kind == "prune":
                history.prune(*arguments)
                assert bool(history.intact(history.sizes_wrong)) == had
            elif kind == "latest" and history.folder.root.is_dir():
                (history.folder.root / "latest").write_text(arguments[0])
            elif kind in ("cut", "lose", "flip"):
                history.spoil(kind, *arguments)
            history.check()
