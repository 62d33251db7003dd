"""Ranks whose forward passes are collective: equal numbers of passes, and the responses of each
rank by itself.

Real ranks are tested elsewhere. Here two ranks run one after the other, each with the numbers that
the other one gave in its last run, until both give the same numbers again.
"""

import pytest
from generation import assert_same, run
from tiny_models import model_of, prompts_of

from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

HOW = {
    "sampling": SamplingParameters(1.3),
    "stopping": StoppingCriteria(7, eos_ids=(3, 5, 8, 9, 17, 30)),
}
# Prompt lengths of each rank: many and few prompts, equal ones, more prefills and shared prefixes
# on one rank.
RANKS = {
    "much and little": ((40, 9, 2, 1, 17, 30, 5), (1,)),
    "equal": ((9, 5, 2), (2, 9, 5)),
    "short and long": ((1, 1, 1, 2), (40, 35)),
}


class OtherRank:
    """`max_over_ranks` of a rank while the other one gives `others`, then 0. Records the numbers of
    this rank."""

    def __init__(self, others: list[int]):
        self.others, self.given = others, []

    def __call__(self, number: int) -> int:
        place = len(self.given)
        self.given.append(number)
        return max(number, self.others[place] if place < len(self.others) else 0)


def one_rank(how: dict, lengths, others: list[int], seed: int):
    """The rollout of a rank, the numbers that it gave, and how many forward passes it made."""
    model, max_over_ranks, passes = model_of(how["model"]), OtherRank(others), []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        rollout = run(prompts=prompts_of(lengths, seed), max_over_ranks=max_over_ranks, **how)
    finally:
        hook.remove()
    return rollout, max_over_ranks.given, len(passes)


def both_ranks(how: dict, ranks):
    given, results = [[], []], [None, None]
    for _ in range(20):
        before = [list(numbers) for numbers in given]
        for rank in (0, 1):
            results[rank] = one_rank(how, ranks[rank], given[1 - rank], seed=rank + 1)
            given[rank] = results[rank][1]
        if given == before:
            return results
    raise AssertionError(f"the ranks do not converge: {given}")


@pytest.mark.parametrize(
    ("engine", "model", "rows", "samples", "ranks"),
    [
        *(("continuous", "llama", 2, 1, ranks) for ranks in RANKS),
        *(("continuous", "llama", 8, 4, ranks) for ranks in RANKS),
        ("padded", "llama", 2, 1, "much and little"),
        ("continuous", "lfm2", 8, 4, "much and little"),
    ],
)
def test_ranks_make_equal_numbers_of_passes_and_their_own_responses(
    engine, model, rows, samples, ranks
):
    how = {**HOW, "samples": samples, "rows": rows, "engine": engine, "model": model}
    results = both_ranks(how, RANKS[ranks])
    (_, given, passes), (_, others, other_passes) = results
    assert passes == other_passes and len(given) == len(others)
    for rank, (rollout, _, passes) in enumerate(results):
        lengths = RANKS[ranks][rank]
        _, _, alone_passes = one_rank(how, lengths, [], rank + 1)
        assert_same(rollout, run(prompts=prompts_of(lengths, rank + 1), **how))
        assert passes >= alone_passes
    if (ranks, rows) == ("much and little", 2):
        assert passes > 2 * alone_passes, "the rank with one prompt makes idle passes"


def test_a_lack_of_memory_is_an_error_on_synchronised_ranks():
    """Starting again would give this rank more passes than the others."""
    passes = []

    def fail_once(*_):
        passes.append(1)
        if len(passes) == 3:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
            )

    hook = model_of("llama").model.layers[1].register_forward_pre_hook(fail_once)
    try:
        with pytest.raises(RuntimeError, match="can't allocate"):
            run(rows=4, max_over_ranks=lambda number: number)
    finally:
        hook.remove()
