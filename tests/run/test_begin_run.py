"""The start of a step: checks and messages before a model is loaded."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from dschat_ppo.common.logging import logger
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.run import session
from dschat_ppo.run.session import naming


@pytest.fixture
def events(monkeypatch, tmp_path):
    """The steps of `begin_run` in the order in which they run; the ranks do not join."""
    done = []

    def noted(name, result=None):
        return lambda *_: done.append(name) or result

    names = ("set_deterministic", "init_process_group", "open_log", "check_earlier_outputs", "seed_everything")
    for name in names:
        monkeypatch.setattr(session, name, noted(name))
    monkeypatch.setattr(session.watchdog, "start", noted("watchdog"))
    monkeypatch.setattr(session, "lock_folder", noted("lock"))
    return done


def config_of(folder, *more, model="m"):
    return parse("sft", ["--model_name_or_path", str(model), "--data_path", "d", "--output_dir", str(folder), *more])


def test_a_validation_has_its_own_folder_whatever_training_left(events, tmp_path):
    folder = tmp_path / "validation"
    folder.mkdir()
    (folder / "result.json").write_text("{}")
    assert session.begin_run(config_of(tmp_path, "--validate_only", model=tmp_path))[1] == folder
    assert "lock" in events and "check_earlier_outputs" not in events
    assert [path.name for path in folder.iterdir()] == ["config.yaml"], "the result of an earlier one is removed"
    with pytest.raises(UserError, match="would be written over a model"):
        session.begin_run(config_of(tmp_path, model=tmp_path))


def test_ranks_that_cannot_share_rows_are_refused_before_they_join(events, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = config_of(tmp_path, "--sequence_parallel_size", "3")
    with pytest.raises(UserError, match="--sequence_parallel_size 3 does not divide the 4 ranks"):
        session.begin_run(config)
    assert "init_process_group" not in events


@pytest.mark.parametrize(("dtype", "supported", "usable"), [
    ("fp16", {"bf16"}, "bf16, fp32"), ("bf16", set(), "fp32"),
])  # fmt: skip
def test_a_number_format_that_the_device_lacks_is_refused(events, tmp_path, monkeypatch, dtype, supported, usable):
    accelerator = get_accelerator()
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(
            accelerator, f"is_{name}_supported", lambda name=name: name in supported or None
        )  # as DeepSpeed says no
    device = accelerator.device_name()
    with pytest.raises(UserError, match=f"^--dtype {dtype}: this {device} does not support it; use one of {usable}$"):
        session.begin_run(config_of(tmp_path, "--dtype", dtype))


def test_a_processor_without_bf16_arithmetic_gets_a_warning(events, tmp_path, monkeypatch, caplog):
    if get_accelerator().device_name() != "cpu":
        pytest.skip("a run on a GPU asks the GPU")
    monkeypatch.setattr(logger(), "propagate", True)
    for library, multiplies in ((True, True), (True, False), (False, True)):
        caplog.clear()
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda library=library: library)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda multiplies=multiplies: multiplies)
        session.begin_run(config_of(tmp_path))
        assert ("--dtype fp32 is several times as fast" in caplog.text) is not (library and multiplies)


def test_errors_of_a_block_name_its_flag():
    with pytest.raises(UserError, match="^--rank 8: not that of m$"), naming("--model"):
        raise UserError("--rank 8: not that of m")
    with pytest.raises(UserError, match="^--model m: no such folder$"), naming("--model"):
        raise UserError("m: no such folder")
    hint = r"\(are actor and critic swapped\?\)"
    with pytest.raises(UserError, match=f"^--critic m: lacks score.weight {hint}$"), naming("--critic"):
        raise UserError("m: lacks score.weight")


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_folder_is_locked_before_anything_is_written_and_compared_once_the_flags_are_checked(
    events, tmp_path, dry_run
):
    config = config_of(tmp_path, "--dry_run", str(dry_run))
    session.begin_run(config, check=lambda: events.append("flags"))
    joined = ["set_deterministic", "lock", "init_process_group", "watchdog", "open_log", "flags"]
    assert events == (["flags"] if dry_run else [*joined, "check_earlier_outputs", "seed_everything"])
