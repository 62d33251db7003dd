"""Pipes and devices are told from files and folders."""

import os

from dschat_ppo.common.regular_files import is_pipe_or_device


def test_only_pipes_and_devices_are_neither_files_nor_folders(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    ordinary = (tmp_path, tmp_path / "file", tmp_path / "link", tmp_path / "loop", tmp_path / "missing")
    assert not any(map(is_pipe_or_device, ordinary))
    assert is_pipe_or_device(tmp_path / "device") and is_pipe_or_device(tmp_path / "pipe")
