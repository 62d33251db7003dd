"""The random streams of responses, against published numbers and plain integers."""

import numpy as np
import pytest
import torch

from dschat_ppo.common.seeding import row_seeds, splitmix64
from dschat_ppo.rollout.sampling import row_uniforms


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
    states = np.array([(1234567 + t * 0x9E3779B97F4A7C15) % 2**64 for t in range(1, 6)], dtype=np.uint64)
    assert splitmix64(states).tolist() == PUBLISHED


@pytest.mark.parametrize("seed", [0, 1, 1234567, -1, -(2**63), 2**63 - 1])
def test_row_uniforms_are_the_upper_24_bits_of_splitmix64(seed):
    expected = [(z >> 40) / 2**24 for z in plain_splitmix64(seed % 2**64, 50)]
    result = row_uniforms(torch.tensor([seed]), 50)
    assert result.dtype == torch.float32
    assert result[0].tolist() == expected


def test_row_uniforms_depend_on_the_rows_own_seed_and_the_place_alone():
    seeds = torch.tensor([5, 6, 7])
    together = row_uniforms(seeds, 20)
    for row, seed in enumerate(seeds.tolist()):
        assert torch.equal(row_uniforms(torch.tensor([seed]), 8)[0], together[row, :8])


def test_seeds_depend_on_the_number_of_the_answer_and_the_path():
    seeds = row_seeds(0, 10, 3, 4)
    assert torch.equal(row_seeds(4, 6, 3, 4), seeds[4:])
    assert len({*seeds.tolist(), *row_seeds(0, 10, 3, 5).tolist(), *row_seeds(0, 10, 4, 4).tolist()}) == 30
