"""Rollouts of decode steps at fixed addresses, whose rows share a KV pool, on a tiny model."""

import pytest
from generation import run

from dschat_ppo.rollout import continuous_batching, running_batches, running_pool
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

PROMPTS = (1, 9, 30, 5, 17, 12)


def decode(rows):
    return ["".join(chr(97 + token // 7) + chr(65 + token % 7) for token in row) for row in rows]


STOPPING = {
    "eos": StoppingCriteria(30, eos_ids=(3, 8)),
    "stop strings": StoppingCriteria(30, eos_ids=(3,), stop_strings=("Ab", "dC"), decode=decode),
}
LITTLE = {"ample": 10**6, "little": 110, "one long row": 0}


@pytest.fixture
def small_segments(monkeypatch) -> None:
    """Segments that fill up in the middle of an answer, and shared prompts of 8 tokens."""
    monkeypatch.setattr(running_pool, "FIRST_TOKENS", 5)
    monkeypatch.setattr(running_batches, "GROWTH", 4)
    monkeypatch.setattr(continuous_batching, "MIN_SHARED_TOKENS", 8)


def pooled(samples=1, stopping="eos", model="llama", sampling=None, static=True, recorder=None):
    sampling, how = (
        sampling or SamplingParameters(1.3, repetition_penalty=1.2),
        {"rows": 6, "static": static},
    )
    return run(
        model, PROMPTS, sampling, STOPPING[stopping], recorder=recorder, samples=samples, **how
    )
