"""Exit codes of a run by the exception that ends it, and what a run without memory says."""

import dataclasses
import errno
import re

import pytest
import torch

from dschat_ppo.common.exit_codes import exit_code, ran_out_of_memory
from dschat_ppo.common.phases import PhaseClock, reset_phases
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import NonFiniteError, StopRequested, StorageError, UnhealthyRun, UserError
from dschat_ppo.run.launch import memory_advice, run_step


@pytest.mark.parametrize(("problem", "code"), [
    (StopRequested("saved"), 0), (ZeroDivisionError("x"), 1), (KeyboardInterrupt(), 1), (UserError("--x"), 2),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 1), (FloatingPointError("nan"), 3),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),  # a web service, not a rank
    (NonFiniteError("nan"), 3), (StorageError("full"), 4), (UnhealthyRun("kl_spike"), 6),
    (OSError(errno.ENOSPC, "No space left on device", "x"), 4), (OSError(errno.EROFS, "Read-only file system", "x"), 4),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), 4), (RuntimeError("NCCL error: invalid usage"), 1),
    (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), 4),  # safetensors
    (RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:34502: Connection reset by peer"), 5),
    (RuntimeError("NCCL error: remote process exited or there was a network error"), 5),
], ids=str)  # fmt: skip
def test_the_exit_code_of_each_exception(problem, code):
    assert exit_code(problem) == code


@pytest.fixture(autouse=True)
def own_phases():
    yield
    reset_phases()


def error_after(first: Exception, then: Exception) -> Exception:
    try:
        try:
            raise first
        finally:
            raise then
    except Exception as problem:  # noqa: BLE001
        return problem


@pytest.mark.parametrize(("problem", "expected"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
    (MemoryError("Unable to allocate 9.31 GiB for an array"), True),
    (error_after(torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("capture failed")), True),
    (RuntimeError("CUDA error: device-side assert triggered"), False), (ValueError("CUDA error: out of memory"), False),
])  # fmt: skip
def test_a_lack_of_memory_is_known_by_class_or_message(problem, expected):
    assert ran_out_of_memory(problem) is expected


def test_a_run_without_memory_names_flags_of_its_phase(capsys):
    def train(_config):
        with PhaseClock().phase("rollout"):
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert run_step(lambda argv: argv, train, []) == 1
    *_, problem, advice = capsys.readouterr().err.splitlines()
    assert problem.endswith("CUDA out of memory")
    assert advice.startswith("out of memory in phase 'rollout'; what helps") and "--unpin_actor_parameters" in advice


def flags_of(step: str, **models: str) -> set[str]:
    """All flags of a step."""
    words = [word for name, value in models.items() for word in (f"--{name}", value)]
    config = parse(step, [*words, "--data_path", "d", "--output_dir", "o"])
    groups = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return {f"--{field.name}" for group in groups for field in dataclasses.fields(group)}


@pytest.mark.parametrize("phase", ["train", "score", "rollout", "load models", "save"])
def test_every_flag_of_the_advice_exists(phase):
    named = set(re.findall(r"--\w+", memory_advice(phase)))
    known = flags_of("sft", model_name_or_path="m")
    known |= flags_of("ppo", actor_model_name_or_path="m", critic_model_name_or_path="c")
    assert named and named <= known
