"""What a run that ran out of memory says."""

import dataclasses
import re

import pytest
import torch

from dschat_ppo.common import stop_requests
from dschat_ppo.common.memory_advice import memory_advice, ran_out_of_memory
from dschat_ppo.common.phases import PhaseClock, reset_phases
from dschat_ppo.config.cli import parse
from dschat_ppo.run.launch import run_step


@pytest.fixture(autouse=True)
def own_signals():
    yield
    stop_requests.restore()
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
