"""Every kind of file that a later start reads is on the disk before it counts, in a model of a
power loss."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from checkpoints import CONTENT, fill
from conftest import tiny_config
from stub_runs import run
from transformers import AutoTokenizer, LlamaForSequenceClassification

from dschat_ppo.checkpoint.state_files import BackgroundWriter
from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.prepare import prepare
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.run.output_folder import keep_old_metrics, restore_metrics
from dschat_ppo.tools import toy


class PowerLoss:
    """The content of a file is safe once it is synced, a name once its folder is synced, or
    earlier.

    `too_early`: names that a file was given before its content was safe, so that it can be empty or
    cut under them.
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
                # files there never count
                for file in [] if ".partial/" in str(new) else files_of(Path(old)):
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


def kept(power, folder) -> dict[str, bytes]:
    """The content of a folder after a power loss: every file is as written, and no name came too
    early."""
    left = power.left(folder)
    assert power.too_early == []
    assert all(content == (folder / name).read_bytes() for name, content in left.items())
    return left


def test_all_files_of_a_checkpoint_are_durable(tmp_path, monkeypatch):
    power = PowerLoss(monkeypatch)
    writer = BackgroundWriter()
    writer.save({"weight": torch.ones(3)}, tmp_path / "states.pt")
    assert writer.wait()
    assert (
        power.content[(tmp_path / "states.pt").stat().st_ino]
        == (tmp_path / "states.pt").read_bytes()
    )
    folder = CheckpointFolder(tmp_path)
    fill(folder.make_partial("step_000012"), step=12, update=0)
    folder.commit("step_000012")
    assert {f"checkpoints/step_000012/{name}" for name in CONTENT} <= set(power.left(tmp_path))


def test_a_checkpoint_latest_metrics_and_flags_are_durable(tmp_path, monkeypatch):
    power = PowerLoss(monkeypatch)
    run(tmp_path, 2)
    left, saved = kept(power, tmp_path), tmp_path / "checkpoints/step_000002"
    files = {
        f"checkpoints/step_000002/{name}"
        for name in ("manifest.json", "rank_0.pt", "shared.pt", "metrics.jsonl")
    }
    assert set(left) == {
        "config.yaml",
        "metrics.jsonl",
        "starts.jsonl",
        "checkpoints/latest",
        *files,
    }
    assert left["metrics.jsonl"] == (saved / "metrics.jsonl").read_bytes()


def test_set_aside_checkpoints_and_kept_or_restored_metrics_are_durable(tmp_path, monkeypatch):
    run(tmp_path, 2, "--save_steps", "1")
    power = PowerLoss(monkeypatch)
    CheckpointFolder(tmp_path).set_aside_after(tmp_path / "checkpoints/step_000001")
    root = tmp_path / "checkpoints"
    assert CheckpointFolder(tmp_path).names() == ["step_000001"]
    assert "step_000002" not in power.names[root.stat().st_ino]
    written = (tmp_path / "metrics.jsonl").read_bytes()
    keep_old_metrics(tmp_path / "metrics.jsonl")
    names = power.names[tmp_path.stat().st_ino]
    assert "metrics.1.jsonl" in names and "metrics.jsonl" not in names
    restore_metrics(tmp_path, tmp_path / "checkpoints/step_000001")
    assert written.startswith(power.left(tmp_path)["metrics.jsonl"])


def test_prepared_rows_are_durable(tmp_path, monkeypatch):
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}:", "response": "b"}) + "\n" for n in range(5))
    )
    words = (
        f"--model_name_or_path m --output_dir o --data_split 1,0,0 --data_path {path}"
        f" --data_output_path {cache}"
    )
    power = PowerLoss(monkeypatch)
    prepare(StepData("sft", parse("sft", words.split()).data, 64), toy.make_tokenizer(["words"]))
    entries = sorted(folder.name for folder in (cache / "dschat_ppo").iterdir() if folder.is_dir())
    wanted = {f"dschat_ppo/{entry}/{name}" for entry in entries for name in ("rows_00000.arrow",)}
    assert len(entries) == 2, "the file as a table, and its rows as tokens"
    assert wanted <= set(kept(power, cache))


def test_an_exported_model_is_durable(assets, tmp_path, monkeypatch):
    power = PowerLoss(monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    model = ScalarModel(LlamaForSequenceClassification(tiny_config(num_labels=1)))
    save_model(SimpleNamespace(module=model), tokenizer, tmp_path)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(kept(power, tmp_path))
