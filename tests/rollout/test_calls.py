"""Calls that open sequences late: the same tokens and log-probs as each call alone, in passes over
its whole history, whatever is asked, in whatever order, and however often rows start again."""

from functools import cache

import pytest
import torch
from pooled_runs import small_segments  # noqa: F401
from scripted_calls import (
    SAMPLING,
    STOPPING,
    ScriptedCalls,
    by_hand,
    reserved_for,
)
from tiny_models import model_of, plain_logprobs

from dschat_ppo.rollout import continuous_batching, generator
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.generator import generate_calls
from dschat_ppo.types import FinishReason

EPISODES = 5
PLANS = range(3)
expected_of = cache(lambda name, plan: by_hand(model_of(name), EPISODES, plan))


def assert_as_expected(rollout, numbers, partner, expected, model) -> None:
    """`expected`: of `by_hand`."""
    sequences, turns = expected
    for found, wanted in zip(partner.turns, turns, strict=True):
        for replies, wanted_replies in zip(found, wanted, strict=True):
            for reply, other in zip(replies, wanted_replies, strict=True):
                assert (reply.ids, reply.end, reply.reason) == (other.ids, other.end, other.reason)
                assert reply.sequence == other.sequence
                assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert numbers == sorted(sequences)
    logprobs = plain_logprobs(model, rollout, SAMPLING.temperature)
    lengths = rollout.response_lengths.tolist()
    for row, number in enumerate(numbers):
        written = sequences[number]
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
        assert prompt == list(written.opened.prompt_ids)
        assert rollout.response_ids[row, : lengths[row]].tolist() == written.tokens
        assert rollout.response_mask[row, : lengths[row]].tolist() == written.chosen
        assert rollout.finish_reason[row] == written.reason
    mask = rollout.response_mask
    torch.testing.assert_close(rollout.rollout_logprobs[mask], logprobs[mask], atol=1e-5, rtol=0)
    assert not rollout.rollout_logprobs[~mask].any()


WAYS = {
    "pool": {},
    "few rows": {"rows": 2},
    "little memory": {"rows": 3},
    "padded": {"engine": "padded"},
    "recomputed": {"engine": "recomputed"},
    "gathered layers": {},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", "pool"),
        ("llama", "few rows"),
        ("llama", "little memory"),
        ("mistral-window", "pool"),
        ("llama", "padded"),
        ("llama", "recomputed"),
        ("llama", "gathered layers"),
        ("lfm2", "pool"),
    ],
)
@pytest.mark.parametrize("plan", PLANS)
def test_calls_are_answered_as_each_one_alone(name, way, plan, monkeypatch, request):
    if way in ("few rows", "little memory"):  # several tokens between two checks, as on a GPU
        monkeypatch.setattr(continuous_batching, "CPU_POLL", 4)
    if way == "little memory":
        request.getfixturevalue("small_segments")
        monkeypatch.setattr(generator, "pool_limits", lambda model, rows, width: (rows, 90))
    max_over_ranks = None
    if way == "gathered layers":
        max_over_ranks = int
    model = model_of(name)
    partner = ScriptedCalls(EPISODES, plan, schedule=plan)
    config = GenerationConfig(SAMPLING, STOPPING, **WAYS[way])
    found = generate_calls(model, reserved_for(EPISODES), config, partner, max_over_ranks)
    assert_as_expected(*found, partner, expected_of(name, plan), model)


def test_the_plans_have_what_calls_may_have():
    """Else the tests above show little."""
    reasons, longest = set(), 0
    for plan in PLANS:
        sequences, turns = expected_of("llama", plan)
        prompts = [tuple(written.opened.prompt_ids) for written in sequences.values()]
        assert len(set(prompts)) < len(prompts), "equal prompts"
        for episode in turns:
            longest = max(longest, len(episode))
            reasons |= {reply.reason for replies in episode for reply in replies}
    assert reasons == set(FinishReason) and longest > 3
