"""A model of a power loss: it records syncs and renames, and tells what the disk holds afterwards."""

import os
from collections.abc import Iterator
from pathlib import Path


class PowerLoss:
    """The content of a file is safe once it is synced, a name once its folder is synced, or earlier.

    `too_early`: names that a file was given before its content was safe, so that it can be empty or cut under them.
    """

    def __init__(self, monkeypatch):
        self.content: dict[int, bytes] = {}  # by inode
        self.names: dict[int, dict[str, int]] = {}  # by inode of the folder
        self.too_early: list[str] = []
        sync, rename, replace = os.fsync, os.rename, os.replace

        def synced(number):
            sync(number)
            path, inode = Path(os.readlink(f"/proc/self/fd/{number}")), os.fstat(number).st_ino
            if path.is_dir():
                self.names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self.content[inode] = path.read_bytes()

        def named(act):
            def give_name(old, new, **more):
                for file in [] if ".partial/" in str(new) else files_of(Path(old)):  # files there never count
                    if self.content.get(file.stat().st_ino) != file.read_bytes():
                        self.too_early.append(str(new))
                act(old, new, **more)

            return give_name

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", named(rename))
        monkeypatch.setattr(os, "replace", named(replace))

    def left(self, folder: Path) -> dict[str, bytes]:
        """The content of a folder after the power loss: path -> content."""
        return dict(self._below(folder, folder.stat().st_ino, Path()))

    def _below(self, folder: Path, inode: int, place: Path) -> Iterator[tuple[str, bytes]]:
        for name, child in self.names.get(inode, {}).items():
            if child in self.names or (folder / name).is_dir():
                yield from self._below(folder / name, child, place / name)
            else:
                yield str(place / name), self.content.get(child, b"")


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files below the folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
