"""Ranks whose forward passes are collective: equal numbers of passes, and the responses of each rank by itself.

Real ranks are tested elsewhere. Here two ranks run one after the other, each with the numbers that the other one gave
in its last run, until both give the same numbers again.
"""

import pytest
import torch
from tiny_models import model_of, prompts_of, tokens_of

from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

ENDS = (3, 5, 8, 9, 17, 30)
# Prompt lengths of each rank: many and few prompts, equal ones, more prefills and shared prefixes on one rank.
RANKS = {
    "much and little": ((40, 9, 2, 1, 17, 30, 5), (1,)),
    "equal": ((9, 5, 2), (2, 9, 5)),
    "short and long": ((1, 1, 1, 2), (40, 35)),
}


class OtherRank:
    """`max_over_ranks` of a rank while the other one gives `others`, then 0. Records the numbers of this rank."""

    def __init__(self, others: list[int]):
        self.others, self.given = others, []

    def __call__(self, number: int) -> int:
        place = len(self.given)
        self.given.append(number)
        return max(number, self.others[place] if place < len(self.others) else 0)


class Passes:
    """Counts the forward passes of a model."""

    def __init__(self, model):
        self.count = 0
        self.hook = model.register_forward_pre_hook(self.note)

    def note(self, *_):
        self.count += 1


def one_rank(how: GenerationConfig, lengths, others: list[int], seed: int):
    model, max_over_ranks = model_of("llama"), OtherRank(others)
    passes = Passes(model)
    try:
        rollout = generate(model, prompts_of(lengths, seed), seeds_of(lengths, how, seed), how, max_over_ranks)
    finally:
        passes.hook.remove()
    return rollout, max_over_ranks.given, passes.count


def seeds_of(lengths, how: GenerationConfig, seed: int) -> torch.Tensor:
    return torch.arange(len(lengths) * how.samples) + 100 * seed


def both_ranks(how: GenerationConfig, ranks):
    given, results = [[], []], [None, None]
    for _ in range(20):
        before = [list(numbers) for numbers in given]
        for rank in (0, 1):
            results[rank] = one_rank(how, ranks[rank], given[1 - rank], seed=rank + 1)
            given[rank] = results[rank][1]
        if given == before:
            return results
    raise AssertionError(f"the ranks do not converge: {given}")


@pytest.mark.parametrize(("rows", "samples"), [(2, 1), (8, 4), (16, 1)])
@pytest.mark.parametrize("ranks", list(RANKS))
@pytest.mark.parametrize("engine", ["continuous", "padded"])
def test_ranks_make_equal_numbers_of_passes_and_their_own_responses(engine, ranks, rows, samples):
    stopping = StoppingCriteria(9, eos_ids=ENDS)
    how = GenerationConfig(SamplingParameters(1.3), stopping, samples=samples, rows=rows, engine=engine)
    results = both_ranks(how, RANKS[ranks])
    assert results[0][2] == results[1][2]
    assert len(results[0][1]) == len(results[1][1])
    for rank, (rollout, _, passes) in enumerate(results):
        lengths = RANKS[ranks][rank]
        _, _, alone_passes = one_rank(how, lengths, [], rank + 1)
        alone = generate(model_of("llama"), prompts_of(lengths, rank + 1), seeds_of(lengths, how, rank + 1), how)
        assert tokens_of(rollout) == tokens_of(alone)
        assert torch.equal(rollout.finish_reason, alone.finish_reason)
        torch.testing.assert_close(rollout.rollout_logprobs, alone.rollout_logprobs, atol=2e-5, rtol=0)
        assert passes >= alone_passes


@pytest.mark.parametrize("engine", ["continuous", "padded"])
def test_a_rank_with_few_prompts_makes_idle_passes(engine):
    how = GenerationConfig(SamplingParameters(1.3), StoppingCriteria(9, eos_ids=ENDS), rows=2, engine=engine)
    (_, _, busy), (_, _, idle) = both_ranks(how, RANKS["much and little"])
    _, _, alone = one_rank(how, RANKS["much and little"][1], [], 2)
    assert busy == idle > 2 * alone


def test_a_lack_of_memory_is_an_error_on_synchronised_ranks():
    """Starting again would give this rank more passes than the others."""
    passes = []

    def fail_once(*_):
        passes.append(1)
        if len(passes) == 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")

    hook = model_of("llama").model.layers[1].register_forward_pre_hook(fail_once)
    how = GenerationConfig(SamplingParameters(), StoppingCriteria(9), rows=4)
    try:
        with pytest.raises(RuntimeError, match="can't allocate"):
            generate(model_of("llama"), prompts_of(), torch.arange(8), how, lambda number: number)
    finally:
        hook.remove()


def test_static_steps_are_refused_on_synchronised_ranks():
    how = GenerationConfig(SamplingParameters(1.3), StoppingCriteria(9, eos_ids=ENDS), rows=3, static=True)
    with pytest.raises(ValueError, match="static"):
        generate(model_of("llama"), prompts_of(), torch.arange(8), how, lambda number: number)
