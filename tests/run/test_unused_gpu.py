"""A GPU that torch cannot use ends the run. The driver and the devices are files of a folder."""

from pathlib import Path

import pytest
import torch
from launch import ROOT

from dschat_ppo.errors import UserError
from dschat_ppo.run import process_group
from dschat_ppo.run.unused_gpu import require_usable_gpu

VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.3\n"
)
OPEN_VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A machine with a driver and one GPU, and a torch that does not find it."""
    (tmp_path / "version").write_text(VERSION)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def check(machine: Path) -> None:
    require_usable_gpu(machine / "version", machine / "dev")


@pytest.mark.parametrize(
    ("text", "driver", "cuda"),
    [(VERSION, "535.183.01", "13.0"), (OPEN_VERSION, "580.65.06", None), ("?", "of", "12.8")],
)
def test_a_gpu_that_torch_does_not_find_is_an_error_of_one_line(machine, monkeypatch, text, driver, cuda):
    (machine / "version").write_text(text)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    built = f"CUDA {cuda}" if cuda else "CPUs only"
    with pytest.raises(UserError, match=f"driver {driver}.* {built} .*TORCH_INDEX_URL.*DS_ACCELERATOR=cpu") as raised:
        check(machine)
    assert "\n" not in str(raised.value)


def test_who_asks_for_the_cpu_gets_it_and_a_gpu_that_torch_finds_is_used(machine, monkeypatch):
    for name, value in (("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            check(machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(machine)


@pytest.mark.parametrize("missing", ["version", "dev/nvidia0"])
def test_without_driver_or_device_there_is_no_gpu(machine, missing):
    """A container has the driver's file of its host, also without a device."""
    (machine / missing).unlink()
    (machine / "dev/nvidiactl").touch()
    check(machine)


def test_a_run_on_the_cpu_checks_before_it_joins_the_ranks(monkeypatch):
    def refuse():
        raise UserError("a GPU is not used")

    monkeypatch.setattr(process_group, "require_usable_gpu", refuse)
    monkeypatch.setattr("deepspeed.init_distributed", lambda **_: pytest.fail("joined"))
    monkeypatch.setenv("RANK", "0")
    if torch.cuda.is_available():
        pytest.skip("this run is not on the CPU")
    with pytest.raises(UserError, match="not used"):
        process_group.init_process_group()


def test_the_installation_checks_after_torch_and_before_the_rest():
    script = (ROOT / "training_scripts/setup_venv.sh").read_text()
    check, install = script.index("-m dschat_ppo.run.unused_gpu"), script.index("torch==")
    assert install < check < script.index("pip install -q")
