"""What tests of generation share: one call of `generate` on a tiny model, and the comparison of two
rollouts."""

import logging

import torch
from tiny_models import LENGTHS, model_of, prompts_of, tokens_of

from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import Rollout

ENGINES = {"continuous": {}, "static": {"static": True}, "padded": {"engine": "padded"}}
PENALTY = SamplingParameters(temperature=1.3, repetition_penalty=1.5)  # marks tokens as seen
ENDS = StoppingCriteria(12, eos_ids=(3, 5, 8, 17))


OF_GENERATE = ("max_over_ranks", "recorder", "partner")  # its arguments


def run(
    model="llama",
    prompts=LENGTHS,
    sampling=PENALTY,
    stopping=ENDS,
    seeds=None,
    limits=None,
    **how,
) -> Rollout:
    """A rollout of `prompts`, or of random ones of these lengths, by `model`, or the shared model
    of that name. The other settings are those of `GenerationConfig`, or arguments of `generate`.
    Answer n has the seed n if there are no `seeds`."""
    options = {name: how.pop(name) for name in OF_GENERATE if name in how}
    prompts = prompts_of(prompts) if isinstance(prompts, tuple) else prompts
    config = GenerationConfig(sampling, stopping, **how)
    seeds = torch.arange(len(prompts.prompt_ids) * config.samples) if seeds is None else seeds
    model = model_of(model) if isinstance(model, str) else model
    request = RolloutRequest(prompts, seeds, limits)
    return generate(model, request, config, **options)


def assert_same(found: Rollout, expected: Rollout, atol: float = 2e-5) -> None:
    """Same tokens and ends; log-probs up to the rounding of products of other shapes, with `atol` 0
    to the bit."""
    assert tokens_of(found) == tokens_of(expected)
    assert torch.equal(found.finish_reason, expected.finish_reason)
    torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, atol=atol, rtol=0)


def warnings_of(caplog) -> list[str]:
    """The warnings of the project."""
    return [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith("dschat_ppo") and r.levelno == logging.WARNING
    ]
