"""Log-probs of sampling and of training from the same hidden states, to the last bit on a CPU."""

import pytest
import torch

from dschat_ppo.algorithms import fused_logprobs
from dschat_ppo.algorithms.fused_logprobs import (
    FEWEST_ROWS,
    Forbidden,
    OutputLayer,
    fp32_product,
    fused_token_scores,
)
from dschat_ppo.rollout.sampling import SamplingParameters, sample

ROWS = 40
WIDTHS = {"narrow": 48, "one block": 2048, "several": 5000}  # of the vocabulary


def states_and_weight(width, dtype):
    """Small whole numbers, and sixteenths: their sums are exact, so that products have the same
    bits in any order and on any processor."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (ROWS, 64), generator=generator)
    weight = torch.randint(-4, 5, (width, 64), generator=generator) / 16
    return hidden.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sampling_and_the_fused_head_give_the_same_bits_in_any_number_of_rows(
    width, dtype, temperature
):
    hidden, weight = states_and_weight(width, dtype)
    ends = (1, 3)
    logits = torch.nn.functional.linear(hidden, weight)
    is_early = torch.arange(ROWS) % 3 == 0
    is_end = torch.zeros(width, dtype=torch.bool).index_fill_(0, torch.tensor(ends), True)
    forbidden = is_early.unsqueeze(1) & is_end
    uniforms = torch.rand(ROWS, generator=torch.Generator().manual_seed(1))
    parameters = SamplingParameters(temperature)
    tokens, logprobs = sample(logits, parameters, uniforms, forbidden=forbidden)

    for rows in (slice(0, ROWS), slice(5, 6), slice(7, 9), slice(10, 15)):
        alone = sample(logits[rows], parameters, uniforms[rows], forbidden=forbidden[rows])
        assert torch.equal(alone[0], tokens[rows])
        assert torch.equal(alone[1], logprobs[rows])
        in_training, _ = fused_token_scores(
            OutputLayer(hidden[rows], weight),
            tokens[rows],
            temperature,
            forbidden=Forbidden(is_early[rows], ends),
        )
        assert torch.equal(in_training, logprobs[rows])


def test_many_rows_do_not_change_the_log_prob_of_a_row():
    """There are several pieces of rows, the last one with fewer than `FEWEST_ROWS`."""
    hidden, weight = states_and_weight(300, torch.float32)
    count = 1024 + FEWEST_ROWS - 2
    many = hidden.repeat(-(-count // ROWS), 1)[:count]
    tokens = torch.arange(count) % 300
    logprobs, entropy = fused_token_scores(OutputLayer(many, weight), tokens)
    for rows in (slice(0, 1), slice(1020, count)):
        alone = fused_token_scores(OutputLayer(many[rows], weight), tokens[rows])
        assert torch.equal(alone[0], logprobs[rows])
        assert torch.equal(alone[1], entropy[rows])


def test_few_rows_are_computed_as_several(monkeypatch):
    shapes = []
    linear = torch.nn.functional.linear

    def recorded(hidden, weight, bias):
        shapes.append(hidden.shape)
        return linear(hidden, weight, bias)

    monkeypatch.setattr(fused_logprobs.torch.nn.functional, "linear", recorded)
    hidden, weight = states_and_weight(48, torch.float32)
    for count in (1, 3, 5):
        assert torch.equal(fp32_product(hidden[:count], weight, None), hidden[:count] @ weight.t())
    assert shapes == [(FEWEST_ROWS, 64), (FEWEST_ROWS, 64), (5, 64)]
