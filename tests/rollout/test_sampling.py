"""Random streams against published numbers, truncation against transformers, draws against the
exact distribution."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dschat_ppo.common.seeding import row_seeds, splitmix64
from dschat_ppo.rollout.sampling import (
    BLOCK,
    NucleusSearch,
    SamplingParameters,
    draw,
    row_uniforms,
    sample,
)


def check_chi_square(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Fail if counts do not fit: mean + 6 deviations, which a correct sampler exceeds less than
    once in 10^6 seeds."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    common = expected >= 5  # rarer outcomes form one class
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(1, len(observed) - 1)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 10


LAST = 1 - 2.0**-24  # the largest uniform number


def uniforms(count: int, seed: int = 0) -> torch.Tensor:
    return row_uniforms(torch.tensor([seed]), count)[0]


def even(count: int) -> torch.Tensor:
    """Evenly spaced numbers in [0, 1)."""
    return (torch.arange(count) + 0.5) / count


def plain_splitmix64(seed: int, count: int) -> list[int]:
    """Steele, Lea and Flood 2014, in integers of any size."""
    state, outputs = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


PUBLISHED = [  # outputs of the reference implementation (Vigna's splitmix64.c) for the seed 1234567
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_splitmix64_gives_the_published_numbers():
    assert plain_splitmix64(1234567, 5) == PUBLISHED
    states = np.array(
        [(1234567 + t * 0x9E3779B97F4A7C15) % 2**64 for t in range(1, 6)], dtype=np.uint64
    )
    assert splitmix64(states).tolist() == PUBLISHED


def test_uniforms_are_the_upper_24_bits_of_splitmix64_of_the_rows_own_seed():
    seeds = torch.tensor([0, 1, 1234567, -1, -(2**63), 2**63 - 1])
    found = row_uniforms(seeds, 50)
    assert found.dtype == torch.float32
    assert found.tolist() == [
        [(z >> 40) / 2**24 for z in plain_splitmix64(seed % 2**64, 50)] for seed in seeds.tolist()
    ]


def test_seeds_depend_on_the_number_of_the_answer_and_the_path():
    seeds = row_seeds(0, 10, 3, 4)
    assert torch.equal(row_seeds(4, 6, 3, 4), seeds[4:])
    assert (
        len({*seeds.tolist(), *row_seeds(0, 10, 3, 5).tolist(), *row_seeds(0, 10, 4, 4).tolist()})
        == 30
    )


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3000])
def test_draw_is_the_inverse_of_the_cumulative_distribution(size):
    weights = torch.rand(size, generator=torch.Generator().manual_seed(size)) ** 3
    weights[::3] = 0.0 if size > 3 else 1.0
    points = even(2000)
    exact = weights.double().numpy().cumsum()
    expected = np.searchsorted(exact, points.double().numpy() * exact[-1], side="right")
    drawn = draw(weights.expand(2000, -1), points)
    assert drawn.dtype == torch.int64
    clear = (
        np.abs(points.double().numpy()[:, None] * exact[-1] - exact).min(axis=1) > 1e-5 * exact[-1]
    )
    assert clear.mean() > 0.9
    assert np.array_equal(drawn.numpy()[clear], expected[clear])
    assert (weights[drawn] > 0).all()


@pytest.mark.parametrize("size", [5, BLOCK, 50_257])
def test_an_index_of_weight_0_is_never_drawn(size):
    generator = torch.Generator().manual_seed(size)
    weights = torch.exp(torch.randn(64, size, generator=generator) * 8)
    weights[torch.rand(64, size, generator=generator) < 0.7] = 0.0
    weights[:, 1] = 1e-6
    for points in (
        torch.zeros(64),
        torch.full((64,), LAST),
        torch.full((64,), 2.0**-24),
        uniforms(64),
    ):
        drawn = draw(weights, points)
        assert (weights.gather(1, drawn.unsqueeze(1)) > 0).all()


# Samplers against the exact distribution


def exact_distribution(
    logits: np.ndarray, sampling: SamplingParameters, seen=(), forbidden=()
) -> np.ndarray:
    """Penalty, prohibition, temperature, top-k, the smallest set that reaches top-p, then min-p, in
    float64."""
    logits = logits.astype(np.float64).copy()
    for token in seen:
        up = logits[token] <= 0
        logits[token] *= sampling.repetition_penalty if up else 1 / sampling.repetition_penalty
    weights = np.exp(logits / sampling.temperature - logits.max() / sampling.temperature)
    weights[list(forbidden)] = 0.0
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0.0
    weights /= weights.sum()
    reached = np.cumsum(weights[order]) - weights[order]
    weights[order[reached >= sampling.top_p]] = 0.0
    weights[weights < sampling.min_p * weights.max()] = 0.0
    return weights / weights.sum()


def frequencies(
    logits: torch.Tensor, sampling: SamplingParameters, points: torch.Tensor, **others
) -> np.ndarray:
    tokens = [
        sample(
            logits.expand(len(part), -1),
            sampling,
            part,
            **{k: v.expand(len(part), -1) for k, v in others.items()},
        )
        for part in points.split(2000)
    ]
    return np.bincount(torch.cat([part[0] for part in tokens]).numpy(), minlength=len(logits))


def mask_of(size: int, tokens) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(tokens)] = True
    return mask


SAMPLERS = {
    "plain": SamplingParameters(),
    "hot": SamplingParameters(temperature=2.0),
    "top-k beyond the vocabulary": SamplingParameters(top_k=1000),
    "top-p": SamplingParameters(top_p=0.7),
    "min-p": SamplingParameters(min_p=0.1),
    "penalty": SamplingParameters(repetition_penalty=1.7),
    "encouragement": SamplingParameters(repetition_penalty=0.6),
    "top-k, top-p": SamplingParameters(top_k=9, top_p=0.8),
    "temperature, top-p": SamplingParameters(temperature=1.8, top_p=0.8),
    "all": SamplingParameters(
        temperature=1.4, top_p=0.9, top_k=12, min_p=0.02, repetition_penalty=1.3
    ),
}


def test_a_nucleus_beyond_the_first_guess_is_found_among_all_tokens():
    """So flat a distribution has its nucleus in 0.9 of 300 tokens; a peaked row in the batch keeps
    its own."""
    size, sampling, search = 300, SamplingParameters(top_p=0.9), NucleusSearch(100)
    logits = (
        torch.randn(size, generator=torch.Generator().manual_seed(3)) * 0.1
        - torch.arange(size) * 1e-6
    )
    exact = exact_distribution(logits.numpy(), sampling)
    assert (exact > 0).sum() > 2 * search.tokens
    peaked = logits + 20 * (torch.arange(size) == 77)
    counts = np.zeros(size)
    for points in uniforms(2_000).split(500):
        rows = torch.cat([peaked.unsqueeze(0), logits.expand(len(points), -1)])
        tokens, _ = sample(rows, sampling, torch.cat([points[:1], points]), search=search)
        assert tokens[0] == 77
        counts += np.bincount(tokens[1:].numpy(), minlength=size)
    edge = np.argsort(-exact)[int((exact > 0).sum()) - 3 : int((exact > 0).sum()) + 3]
    inside = np.delete(np.arange(size), edge)  # rounding decides at the edge
    assert counts[edge].sum() < 60
    check_chi_square(counts[inside], exact[inside] / exact[inside].sum())


def test_a_search_that_may_not_ask_marks_the_rows_whose_nucleus_it_cannot_hold():
    """The other rows, and a search of all tokens, draw what a search that asks draws."""
    sampling, points = SamplingParameters(top_p=0.9), uniforms(40)
    spread = torch.linspace(0.1, 6, 40).unsqueeze(1)
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(3)) * spread
    expected = sample(logits, sampling, points)
    sizes = [int((exact_distribution(row.numpy(), sampling) > 0).sum()) for row in logits]
    overflow = torch.zeros(40, dtype=torch.bool)
    tokens, _ = sample(logits, sampling, points, search=NucleusSearch(500, overflow))
    assert overflow.tolist() == [size > 500 for size in sizes]
    assert 5 < overflow.sum() < 35
    assert torch.equal(tokens[~overflow], expected[0][~overflow])
    assert not torch.equal(tokens, expected[0])
    found = sample(
        logits, sampling, points, search=NucleusSearch(None, overflow := torch.zeros_like(overflow))
    )
    assert (
        torch.equal(found[0], expected[0])
        and torch.equal(found[1], expected[1])
        and not overflow.any()
    )


# Against transformers

WARPERS = {
    "top-p": (SamplingParameters(top_p=0.8), [TopPLogitsWarper(0.8)]),
    "min-p": (SamplingParameters(min_p=0.05), [MinPLogitsWarper(0.05)]),
    "top-k, top-p": (
        SamplingParameters(top_k=30, top_p=0.9),
        [TopKLogitsWarper(30), TopPLogitsWarper(0.9)],
    ),
    "all": (
        SamplingParameters(
            temperature=1.3, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.2
        ),
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(1.3),
            MinPLogitsWarper(0.01),
            TopKLogitsWarper(50),
            TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", list(WARPERS))
def test_support_and_probabilities_are_those_of_transformers(name):
    """With evenly spaced numbers a token's frequency is its probability, to within one count."""
    sampling, warpers = WARPERS[name]
    size, count = 200, 20_000
    for seed in range(2):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2
        prompt = torch.randint(0, size, (1, 30), generator=torch.Generator().manual_seed(seed))
        expected = (
            LogitsProcessorList(warpers)(prompt, logits.unsqueeze(0))
            .softmax(dim=1)[0]
            .double()
            .numpy()
        )
        others = (
            {"seen": mask_of(size, prompt[0].tolist())} if sampling.repetition_penalty != 1 else {}
        )
        counts = frequencies(logits, sampling, even(count), **others)
        np.testing.assert_allclose(counts / count, expected, atol=1.5 / count)
        assert set(counts.nonzero()[0]) >= set((expected > 2 / count).nonzero()[0])
        assert counts[expected == 0].sum() == 0


# The log-prob


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in SAMPLERS),
        ("plain", torch.bfloat16),
        ("all", torch.bfloat16),
    ],
)
def test_logprob_is_that_of_the_temperature_scaled_distribution_without_forbidden_tokens(
    name, dtype
):
    sampling = SAMPLERS[name]
    logits = (torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    before = logits.clone()
    seen = torch.rand(6, 300, generator=torch.Generator().manual_seed(1)) < 0.3
    forbidden = torch.rand(6, 300, generator=torch.Generator().manual_seed(2)) < 0.3
    tokens, logprobs = sample(logits, sampling, uniforms(6), seen, forbidden)
    scaled = logits.double().masked_fill(forbidden, -torch.inf).numpy() / sampling.temperature
    table = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    np.testing.assert_allclose(
        logprobs.numpy(), table[np.arange(6), tokens.numpy()], rtol=1e-5, atol=1e-5
    )
    assert torch.equal(logits, before)
    assert not forbidden.gather(1, tokens.unsqueeze(1)).any()


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_huge_and_infinite_logits(name):
    sampling, minus = SAMPLERS[name], float("-inf")
    logits = torch.full((5, 300), minus)
    logits[0, 7] = 3.0
    logits[1, 7], logits[1, 8] = 1e30, -1e30
    logits[2] = 1e4
    logits[3] = -1e4
    logits[4, [7, 8]] = torch.tensor([1e4, 1e4 - 100])
    seen = torch.zeros(5, 300, dtype=torch.bool)
    for point in (0.0, 0.5, LAST):
        tokens, logprobs = sample(logits, sampling, torch.full((5,), point), seen)
        assert tokens[[0, 1, 4]].tolist() == [7, 7, 7]
        assert logprobs.tolist() == pytest.approx([0, 0, -np.log(300), -np.log(300), 0], abs=1e-5)
        assert ((tokens >= 0) & (tokens < 300)).all()


def test_greedy_takes_the_likeliest_token_with_any_other_settings():
    logits = torch.tensor([[0.1, 0.3, 0.2], [5.0, 4.9, -1.0]])
    for point in (0.0, LAST):
        tokens, _ = sample(logits, SamplingParameters(3.0, 0.5, 1), torch.full((2,), point))
        assert tokens.tolist() == [1, 0]
    forbidden = torch.tensor([[False, True, False], [True, False, False]])
    assert sample(logits, SamplingParameters(top_k=1), torch.zeros(2), None, forbidden)[
        0
    ].tolist() == [2, 1]


def test_a_nucleus_does_not_depend_on_the_order_of_equal_weights_or_on_other_rows():
    # many are equal
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    points = even(200)
    alone = sample(logits.expand(200, -1), SamplingParameters(top_p=0.3), points)[0]
    flat = torch.zeros(1, 3000).bfloat16()  # its nucleus is beyond the first guess
    beside = [
        sample(torch.cat([logits, flat]), SamplingParameters(top_p=0.3), point.expand(2))[0][0]
        for point in points
    ]
    assert alone.tolist() == torch.stack(beside).tolist()
