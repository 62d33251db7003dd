"""Calls that open sequences late: the same tokens and log-probs as each call alone, in passes over
its whole history, whatever is asked, in whatever order, and however often rows start again."""

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from pooled_runs import small_segments  # noqa: F401
from scripted_calls import (
    MOST_TOKENS,
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
from dschat_ppo.rollout.partners import ContinuedSequence, OpenedSequence
from dschat_ppo.rollout.sampling import StoppingCriteria
from dschat_ppo.types import FinishReason

EPISODES = 6
expected_of = cache(lambda name, plan: by_hand(model_of(name), EPISODES, plan))


def assert_as_expected(rollout, numbers, partner, expected, model) -> None:
    """`expected`: of `by_hand`."""
    sequences, turns = expected
    for found, wanted in zip(partner.turns, turns, strict=True):
        for replies, wanted_replies in zip(found, wanted, strict=True):
            for reply, other in zip(replies, wanted_replies, strict=True):
                assert (reply.ids, reply.end, reply.reason) == (other.ids, other.end, other.reason)
                assert reply.sequence == other.sequence
                assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-5, rel=1e-5)
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
    torch.testing.assert_close(rollout.rollout_logprobs[mask], logprobs[mask], atol=1e-5, rtol=1e-5)
    assert not rollout.rollout_logprobs[~mask].any()


WAYS = {
    "pool": {},
    "few rows": {"rows": 2},
    "little memory": {"rows": 3},
    "padded": {"engine": "padded"},
    "recomputed": {"engine": "recomputed"},
    "gathered layers": {},
}
IN_ROUNDS = ("padded", "recomputed", "gathered layers")
OFTEN = (
    ("llama", "few rows", 0),
    ("llama", "little memory", 1),
    ("llama", "padded", 0),
    ("llama", "gathered layers", 1),
    ("lfm2", "pool", 0),
)
BEFORE_A_RELEASE = [
    (name, way, plan)
    for name, way in (
        *(("llama", way) for way in WAYS),
        ("mistral-window", "pool"),
        ("lfm2", "pool"),
    )
    for plan in (0, 1, 2, 3)
    if (name, way, plan) not in OFTEN
]


@pytest.mark.parametrize(
    ("name", "way", "plan"),
    [*OFTEN, *(pytest.param(*case, marks=pytest.mark.release) for case in BEFORE_A_RELEASE)],
)
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
    if way not in IN_ROUNDS and name != "lfm2":
        assert partner.waits and not any(partner.waits), "it waits while no call is open"


def test_the_plans_have_what_calls_may_have():
    """Else the test above shows little."""
    reasons, most_turns, equal_prompts = set(), 0, 0
    for plan in (0, 1):
        sequences, turns = expected_of("llama", plan)
        prompts = [tuple(written.opened.prompt_ids) for written in sequences.values()]
        equal_prompts += len(prompts) - len(set(prompts))
        for episode in turns:
            most_turns = max(most_turns, len(episode))
            reasons |= {reply.reason for replies in episode for reply in replies}
    assert reasons == set(FinishReason) and most_turns > 3 and equal_prompts > 3


def test_when_memory_runs_out_no_call_is_lost(monkeypatch):
    """Passes fail at several places; the calls are those of a generation with memory."""
    model, passes = model_of("llama"), []
    reserved = reserved_for(EPISODES)

    def fail_at_times(*_):
        passes.append(1)
        if len(passes) in (4, 15, 16):
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
            )

    expected, partner = ScriptedCalls(EPISODES, 2, 2), ScriptedCalls(EPISODES, 2, 2)
    config = GenerationConfig(SAMPLING, STOPPING, rows=8)
    generate_calls(model, reserved, config, expected)
    hook = model.model.layers[1].register_forward_pre_hook(fail_at_times)
    try:
        generate_calls(model, reserved, config, partner)
    finally:
        hook.remove()
    assert len(passes) > 30

    def written(turns):
        return [[[reply.ids for reply in turn] for turn in episode] for episode in turns]

    assert written(partner.turns) == written(expected.turns)


@dataclass
class Step:
    """What an episode does once `after` of its calls have ended."""

    after: int = 0
    continued: list[ContinuedSequence] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    opened: list[OpenedSequence] = field(default_factory=list)


class Asking:
    """One episode that makes these steps, at most one each time it is asked."""

    def __init__(self, *steps):
        self.steps, self.now, self.ended = list(steps), Step(), []

    @property
    def live(self) -> int:
        return int(bool(self.steps))

    @property
    def all_wait(self) -> bool:
        return not self.steps or len(self.ended) < self.steps[0].after

    def observed(self, wait):
        self.now = Step()
        if self.steps and len(self.ended) >= self.steps[0].after:
            self.now = self.steps.pop(0)
        return self.now.continued

    def closed(self):
        return self.now.closed

    def opened(self):
        return self.now.opened

    def end_call(self, call):
        self.ended.append(call)


ENDLESS = GenerationConfig(SAMPLING, StoppingCriteria(MOST_TOKENS))


@pytest.mark.parametrize("engine", ["continuous", "padded"])
def test_the_tokens_of_a_call_that_is_closed_are_in_no_row(engine):
    """Its second call is closed while it runs, or before its round begins. Calls that are open when
    the episode ends are answered."""
    opened = [OpenedSequence(n, range(2, 12), seed=n, limit=2 + n) for n in range(3)]
    steps = (
        Step(opened=opened[:2]),
        Step(after=2, continued=[ContinuedSequence(1, [5, 6], limit=100)]),
        Step(after=2, closed=[1]),
        Step(after=2, opened=[opened[2]]),
    )
    partner = Asking(*steps)
    config = replace(ENDLESS, engine=engine)
    rollout, numbers = generate_calls(model_of("llama"), reserved_for(1), config, partner)
    assert numbers == [0, 1, 2] and sorted(call.sequence for call in partner.ended) == numbers
    assert rollout.response_lengths.tolist() == [2, 3, 4]
    assert rollout.response_mask.sum(dim=1).tolist() == [2, 3, 4]
    for call in partner.ended:
        length = len(call.ids)
        assert rollout.response_ids[call.sequence, :length].tolist() == call.ids


def test_equal_prompts_are_prefilled_once():
    """Three of 36 tokens, two of 5, and later one more of 36, which the parked rows have in the
    pool."""
    long, short = range(2, 38), range(2, 7)
    prompts = [long, short, long, short, long, long]
    opened = [OpenedSequence(n, ids, seed=n, limit=2) for n, ids in enumerate(prompts)]
    shapes = []

    def note(module, args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    model = model_of("llama")
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    partner = Asking(Step(opened=opened[:5]), Step(after=5, opened=opened[5:]))
    try:
        rollout, _ = generate_calls(model, reserved_for(2), ENDLESS, partner)
    finally:
        hook.remove()
    assert [shape for shape in shapes if shape[1] > 1] == [(2, 35)]
    logprobs = plain_logprobs(model, rollout, SAMPLING.temperature)
    torch.testing.assert_close(rollout.rollout_logprobs, logprobs, atol=1e-5, rtol=1e-5)


def test_a_prompt_that_no_sequence_has_any_more_is_not_shared():
    """Sequence 0 begins again, with the prompt of sequence 1; then one has the first prompt."""
    first, second = range(2, 38), range(3, 39)
    steps = (
        Step(opened=[OpenedSequence(0, first, seed=0, limit=2)]),
        Step(after=1, opened=[OpenedSequence(n, second, seed=n, limit=2) for n in (0, 1)]),
        Step(after=3, opened=[OpenedSequence(2, first, seed=0, limit=2)]),
    )
    partner, model = Asking(*steps), model_of("llama")
    rollout, _ = generate_calls(model, reserved_for(1), ENDLESS, partner)
    assert partner.ended[0].ids == partner.ended[-1].ids
    logprobs = plain_logprobs(model, rollout, SAMPLING.temperature)
    torch.testing.assert_close(rollout.rollout_logprobs, logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["continuous", "padded"])
def test_without_a_call_there_is_no_row_and_a_cancelled_generation_ends(engine):
    config = replace(ENDLESS, engine=engine)
    rollout, numbers = generate_calls(model_of("llama"), reserved_for(1), config, Asking())
    assert numbers == [] and rollout.response_ids.shape == (0, 0)
    asked = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 5

    endless = Asking(Step(opened=[OpenedSequence(0, [3], 0, 40)]), Step(after=99))
    generate_calls(model_of("llama"), reserved_for(1), config, endless, cancelled=cancelled)


OPENED = OpenedSequence(0, [3, 4], seed=1, limit=2)
WRONG = {
    "sequence 3: 3 are reserved": Step(opened=[replace(OPENED, sequence=3)]),
    "a prompt of 0 tokens": Step(opened=[replace(OPENED, prompt_ids=[])]),
    "a prompt of 41 tokens": Step(opened=[replace(OPENED, prompt_ids=[3] * 41)]),
    "a call of 0 tokens": Step(opened=[replace(OPENED, limit=0)]),
    "opened while a call of it is running": Step(opened=[OPENED, OPENED]),
    "need `StoppingCriteria.decode`": Step(opened=[replace(OPENED, stop_strings=("x",))]),
    "no call of it has ended": Step(continued=[ContinuedSequence(1, [3], 2)]),
}


@pytest.mark.parametrize("engine", ["continuous", "padded"])
@pytest.mark.parametrize("message", WRONG)
def test_what_a_partner_may_not_ask(message, engine):
    config = replace(ENDLESS, engine=engine)
    with pytest.raises(ValueError, match=message):
        generate_calls(model_of("llama"), reserved_for(1), config, Asking(WRONG[message]))


@pytest.mark.parametrize("engine", ["continuous", "padded"])
def test_a_sequence_without_room_cannot_go_on(engine):
    config = replace(ENDLESS, engine=engine)
    steps = (
        Step(opened=[replace(OPENED, limit=38)]),
        Step(after=1, continued=[ContinuedSequence(0, [3, 4], limit=5)]),
    )
    with pytest.raises(ValueError, match="no token is left for a call of 5 tokens, after 2 new"):
        generate_calls(model_of("llama"), reserved_for(1), config, Asking(*steps))
