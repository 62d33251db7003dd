"""A GPU that torch cannot use ends the run. The devices are files of a folder."""

from pathlib import Path

import pytest
import torch
from launch import ROOT

from dschat_ppo.errors import UserError
from dschat_ppo.run import process_group
from dschat_ppo.run.unused_gpu import require_usable_gpu


@pytest.fixture
def devices(tmp_path, monkeypatch) -> Path:
    """The devices of a machine with one GPU, and a torch that does not find it."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(("cuda", "built"), [("13.0", "for CUDA 13.0"), (None, "for CPUs only")])
def test_a_gpu_that_torch_does_not_find_is_an_error_of_one_line(devices, monkeypatch, cuda, built):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=f"^[^\\n]* {built} [^\\n]*TORCH_INDEX_URL[^\\n]*DS_ACCELERATOR=cpu[^\\n]*$"):
        require_usable_gpu(devices)


def test_who_asks_for_the_cpu_gets_it_and_a_gpu_that_torch_finds_is_used(devices, monkeypatch):
    for name, value in (("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            require_usable_gpu(devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_usable_gpu(devices)
    monkeypatch.undo()
    (devices / "nvidia0").rename(devices / "nvidiactl")  # as in a container that was given no GPU
    require_usable_gpu(devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this run is not on the CPU")
def test_a_run_on_the_cpu_checks_before_it_joins_the_ranks(monkeypatch):
    def refuse():
        raise UserError("a GPU is not used")

    monkeypatch.setattr(process_group, "require_usable_gpu", refuse)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="not used"):
        process_group.init_process_group()


def test_the_installation_checks_after_torch_and_before_the_rest():
    script = (ROOT / "training_scripts/setup_venv.sh").read_text()
    check, install = script.index("-m dschat_ppo.run.unused_gpu"), script.index("torch==")
    assert install < check < script.index("pip install -q")
