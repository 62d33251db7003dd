"""Dialogues in generation: the same tokens and log-probs as a loop that reads the whole history for
every token, whatever the partner replies, in whatever order."""

import random
from functools import cache, partial

import numpy as np
import pytest
import torch
from generation import assert_same
from tiny_models import (
    CONTINUOUS,
    LENGTHS,
    VOCABULARY,
    model_of,
    new_model,
    plain_logprobs,
    prompts_of,
)

from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.models.backbone import slot_arguments
from dschat_ppo.rollout import continuous_batching
from dschat_ppo.rollout.continuous_batching import ContinuousBatching
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria, row_uniforms, sample
from dschat_ppo.types import FinishReason

ENDS, LIMIT, SAMPLES, TURNS = (3, 7, 11, 19), 40, 2, 4
COUNT = len(LENGTHS) * SAMPLES
SEEDS = row_seeds(0, COUNT, 5)
SAMPLING = SamplingParameters(temperature=1.4, top_p=0.95)


def observation(sequence: int, ids: list[int], turn: int) -> list[int]:
    """What the environment of a sequence answers to an action: up to twelve tokens; [] ends the
    episode."""
    chance = random.Random(f"{sequence} {turn} {ids}")
    return [] if turn >= TURNS else [chance.randrange(48) for _ in range(chance.choice([1, 3, 12]))]


class Scripted:
    """Environments that answer in another order than they were asked, some late."""

    def __init__(self, seed: int):
        self.chance, self.asked = random.Random(seed), []
        self.actions = [[] for _ in range(COUNT)]
        self.cuts, self.stops = {}, []

    def end_turn(self, sequence, ids, end):
        self.actions[sequence].append(end)
        self.asked.append((sequence, observation(sequence, ids, len(self.actions[sequence]))))

    def observed(self, wait):
        self.chance.shuffle(self.asked)
        number = self.chance.randint(int(wait), len(self.asked)) if self.asked else 0
        found, self.asked = self.asked[:number], self.asked[number:]
        return found

    def cut(self, sequence, end):
        self.cuts[sequence] = end

    def stop(self, sequence):
        self.stops.append(sequence)


@cache
@torch.no_grad()
def by_hand(name: str) -> list[tuple[list[int], list[bool], bool]]:
    """(response tokens, which of them were chosen, whether a limit ended it) of each episode, one
    token at a time."""
    model, prompts, results = model_of(name), prompts_of(), []
    uniforms = row_uniforms(SEEDS, LIMIT)
    for sequence in range(COUNT):
        prompt = prompts.prompt_ids[sequence // SAMPLES][
            prompts.prompt_mask[sequence // SAMPLES]
        ].tolist()
        tokens, chosen, action, turn = [], [], [], 0
        while True:
            row = torch.tensor([prompt + tokens])
            logits = model(input_ids=row, use_cache=False, **slot_arguments(model, row)).logits[
                :, -1
            ]
            token = int(sample(logits, SAMPLING, uniforms[sequence, sum(chosen)].view(1))[0])
            tokens, chosen, action = [*tokens, token], [*chosen, True], [*action, token]
            if token in ENDS:
                turn += 1
                seen, action = observation(sequence, action, turn), []
                if not seen or len(tokens) + len(seen) >= LIMIT:
                    results.append((tokens, chosen, bool(seen)))
                    break
                tokens, chosen = tokens + seen, chosen + [False] * len(seen)
            elif len(tokens) == LIMIT:
                results.append((tokens, chosen, True))
                break
    return results


WAYS = {
    "pool": {},
    "few rows": {"rows": 3},
    "turn by turn": {"engine": "padded"},
    "recomputed": {"engine": "recomputed"},
}


OFTEN = (
    ("llama", "few rows"),
    ("mistral-window", "pool"),
    ("gpt-oss", "pool"),
    ("lfm2", "turn by turn"),
)
BEFORE_A_RELEASE = [
    *((name, way) for name in ("llama", "gpt2", "mistral-window", "lfm2") for way in WAYS),
    *((name, "pool") for name in CONTINUOUS if name not in ("llama", "gpt2", "mistral-window")),
]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *OFTEN,
        *(
            pytest.param(*case, marks=pytest.mark.release)
            for case in BEFORE_A_RELEASE
            if case not in OFTEN
        ),
    ],
)
def test_tokens_and_log_probs_are_those_of_a_loop_over_whole_histories(name, way, monkeypatch):
    if way == "few rows":
        # as on a GPU
        monkeypatch.setattr(continuous_batching, "CPU_POLL", continuous_batching.POLL)
    model, turns = model_of(name), Scripted(1)
    config = GenerationConfig(SAMPLING, StoppingCriteria(LIMIT, ENDS), SAMPLES, **WAYS[way])
    found = generate(model, RolloutRequest(prompts_of(), SEEDS), config, partner=turns)
    expected = by_hand(name)
    assert len({len(tokens) for tokens, _, _ in expected}) > 1 and any(
        not all(chosen) for _, chosen, _ in expected
    )
    lengths = found.response_lengths.tolist()
    for row, (tokens, chosen, was_cut) in enumerate(expected):
        assert found.response_ids[row, : lengths[row]].tolist() == tokens
        assert found.response_mask[row, : lengths[row]].tolist() == chosen
        assert (
            (found.finish_reason[row] == FinishReason.LENGTH)
            == was_cut
            == (row in turns.cuts or row in turns.stops)
        )
        ends = [place for place, token in enumerate(tokens) if chosen[place] and token in ENDS]
        assert turns.actions[row] == ends
    mask = found.response_mask
    np.testing.assert_allclose(
        found.rollout_logprobs[mask],
        plain_logprobs(model, found, SAMPLING.temperature)[mask],
        atol=2e-5,
    )
    assert not found.rollout_logprobs[~mask].any()


def a_token_at_a_time(original):
    """As decode steps: in each pass at most one token of each row."""

    def passes(self, counts):
        whole = [one.args for one in original(self, counts)]
        return [
            partial(self._extend, rows, numbers, first + column, 1)
            for rows, numbers, first, columns in whole
            for column in range(columns)
        ]

    return passes


@pytest.mark.parametrize("pairs", [None, 1, 40, 300])
def test_observations_are_one_pass_and_equal_decode_steps_however_they_are_divided(
    pairs, monkeypatch
):
    """`pairs`: of tokens and keys in one pass; with 40, a row has several passes, with 300, some
    passes have rows with other numbers of tokens. The prompts of 40 tokens share them, the others
    do not."""
    config, passes, observed = (
        GenerationConfig(SAMPLING, StoppingCriteria(LIMIT, ENDS), SAMPLES),
        [],
        [],
    )
    original, extend = ContinuousBatching._extends, ContinuousBatching._extend

    class Noting(Scripted):
        def observed(self, wait):
            observed.append(super().observed(wait))
            return observed[-1]

    monkeypatch.setattr(ContinuousBatching, "_extends", a_token_at_a_time(original))
    request = RolloutRequest(prompts_of(), SEEDS)
    expected = generate(model_of("gemma3"), request, config, partner=Scripted(2))
    monkeypatch.setattr(ContinuousBatching, "_extends", original)
    monkeypatch.setattr(
        ContinuousBatching, "_extend", lambda *args: passes.append(args[1:]) or extend(*args)
    )
    if pairs is not None:
        monkeypatch.setattr(continuous_batching, "MAX_EXTEND_PAIRS", pairs)
    found = generate(model_of("gemma3"), request, config, partner=Noting(2))
    assert_same(found, expected)
    counts = [
        count
        for rows, numbers, first, columns in passes
        for count in np.clip(numbers - first, 0, columns)
    ]
    added = [len(tokens) for some in observed for _, tokens in some]
    assert sum(counts) <= sum(added), "without those that leave no token"
    if pairs is None:
        assert (
            len(passes)
            <= sum(any(tokens for _, tokens in some) for some in observed)
            < len(list(filter(None, added)))
        )
    if pairs == 300:
        assert any(len(set(numbers)) > 1 for _, numbers, _, _ in passes) and any(
            first for _, _, first, _ in passes
        )


def test_a_short_observation_at_the_last_position_of_the_model_may_come_with_a_long_one():
    """Every token ends an action. The second row ends at position 33, eleven tokens before the
    padding would."""
    model, turns = new_model("gpt2", n_positions=35), Scripted(0)

    def together(wait):
        asked, turns.asked = (turns.asked, []) if wait else ([], turns.asked)
        return [
            (row, [9] * (12, 1)[row] if len(turns.actions[row]) == 1 else []) for row, _ in asked
        ]

    turns.observed = together
    ends = StoppingCriteria(14, tuple(range(VOCABULARY)))
    found = generate(
        model,
        RolloutRequest(prompts_of((20, 32)), SEEDS[:2], limits=torch.tensor([14, 3])),
        GenerationConfig(SAMPLING, ends),
        partner=turns,
    )
    assert found.response_lengths.tolist() == [14, 3]
    expected = plain_logprobs(model, found, SAMPLING.temperature)[found.response_mask]
    np.testing.assert_allclose(found.rollout_logprobs[found.response_mask], expected, atol=2e-5)
