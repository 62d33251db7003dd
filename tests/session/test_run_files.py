"""`metrics.jsonl` of a resumed run holds the lines of the run, and other content is kept."""

import json

import pytest
from stub_runs import Trainer, open_run, run, steps_of, train

from dschat_ppo.checkpoint.store import Manifest
from dschat_ppo.common.logging import logger


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    monkeypatch.setattr(logger(), "warning", lines.append)
    return lines


def doubled(lines):
    return [lines[0], *lines]


DAMAGE = {
    "a line twice": doubled,
    "CRLF": lambda lines: [line.replace(b"\n", b"\r\n") for line in lines],
    "zeros": lambda lines: [bytes(len(b"".join(lines)))],
    "zeros in a line": lambda lines: [lines[0], bytes(len(lines[1])), *lines[2:]],
    "a line by hand at the start": lambda lines: [b'{"note": 1}\n', *lines],
    "another number": lambda lines: [line.replace(b'"a": 1.0', b'"a": 2.0') for line in lines],
    "cut": lambda lines: [lines[0], lines[1][:5]],
    "empty": lambda lines: [],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_changed_metrics_are_kept_under_another_name_and_restored_from_the_checkpoint(tmp_path, warnings, damage):
    run(tmp_path, 3)
    place = tmp_path / "metrics.jsonl"
    written = place.read_bytes()
    changed = b"".join(damage(written.splitlines(keepends=True)))
    place.write_bytes(changed)
    assert run(tmp_path, 5).position == (5, 0)
    assert place.read_bytes().startswith(written) and steps_of(tmp_path) == [1, 2, 3, 4, 5]
    assert len(warnings) == 1 and f"{place} is not as the run wrote it" in warnings[0]
    assert "step_000003" in warnings[0]
    if changed:
        assert (tmp_path / "metrics.1.jsonl").read_bytes() == changed and "kept as metrics.1.jsonl" in warnings[0]
    else:
        assert not (tmp_path / "metrics.1.jsonl").exists()


def test_missing_metrics_are_restored(tmp_path, warnings):
    run(tmp_path, 3)
    written = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").unlink()
    run(tmp_path, 4)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(written) and steps_of(tmp_path) == [1, 2, 3, 4]
    assert len(warnings) == 1


@pytest.mark.parametrize("later", [b"", b'{"step": 4}\n{"step": 5}\n', b'{"step": 4}\n{"st', bytes(40)])
def test_later_lines_of_the_run_itself_are_no_damage(tmp_path, warnings, later):
    run(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(later)
    run(tmp_path, 4)
    assert steps_of(tmp_path) == [1, 2, 3, 4] and warnings == []
    assert not (tmp_path / "metrics.1.jsonl").exists()


def test_a_checkpoint_without_a_copy_of_the_metrics_can_be_resumed(tmp_path, warnings):
    run(tmp_path, 3)
    folder = tmp_path / "checkpoints/step_000003"
    manifest = Manifest.read(folder)
    manifest.files.pop("metrics.jsonl")
    (folder / "metrics.jsonl").unlink()
    manifest.write(folder)
    run(tmp_path, 4)
    assert steps_of(tmp_path) == [1, 2, 3, 4] and warnings == []


def test_the_copy_holds_the_metrics_up_to_the_checkpoint(tmp_path):
    run(tmp_path, 3, "--save_steps", "1", "--save_total_limit", "3")
    for step in (1, 2, 3):
        lines = (tmp_path / f"checkpoints/step_{step:06d}/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    trainer = Trainer()
    earlier = open_run(tmp_path, "--resume", str(tmp_path / "checkpoints/step_000001"))
    train(earlier, trainer, trainer.to(2))
    assert steps_of(tmp_path) == [1, 2]
