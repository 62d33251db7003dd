"""Each architecture on tiny models: greedy tokens equal those of transformers, log-probs those of a
plain forward."""

import pytest
import torch
from generation import run
from tiny_models import (
    CONTINUOUS,
    HYBRIDS,
    LENGTHS,
    NEW_TOKENS,
    PADDED_ONLY,
    RECOMPUTED,
    VOCABULARY,
    cut_at,
    eos_of,
    model_of,
    plain_logprobs,
    prompts_of,
    shared_greedy,
    tokens_of,
    transformers_greedy,
)

from dschat_ppo.rollout import decode_kernels
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import PromptBatch

GREEDY = SamplingParameters(top_k=1)
RELEASE = pytest.mark.release
# From 3 rows to more rows than sequences; static steps run without CUDA graphs here.
REFILL, STATIC, ALL_AT_ONCE = {"rows": 3}, {"rows": 3, "static": True}, {"rows": 128}
TRUNCATED = SamplingParameters(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01)
PENALTY = SamplingParameters(temperature=0.9, repetition_penalty=1.3)
# Whole rows of layers with a state run in chunks, which round otherwise than one token after
# another; padded batches with transformers' own cache are as far from them.
TOLERANCE = dict.fromkeys(HYBRIDS, 1e-4)


@pytest.fixture
def prefix_uses(monkeypatch) -> list[int]:
    """Grows by the number of rows whenever a step reads keys of a shared prefix."""
    uses, original = [], decode_kernels.by_prompt

    def counting(prefix, rows, *product):
        uses.append(len(rows))
        return original(prefix, rows, *product)

    monkeypatch.setattr(decode_kernels, "by_prompt", counting)
    return uses


@pytest.mark.parametrize(
    "way", [pytest.param(REFILL, id="refill"), pytest.param(STATIC, id="static", marks=RELEASE)]
)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_greedy_tokens_equal_those_of_transformers(name, way):
    check_greedy(name, way)


@pytest.mark.parametrize(
    "way",
    [pytest.param(REFILL, id="refill"), pytest.param(ALL_AT_ONCE, id="all at once", marks=RELEASE)],
)
@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_tokens_of_hybrids_equal_those_of_transformers(name, way):
    check_greedy(name, way)


@pytest.mark.parametrize(
    "way",
    [pytest.param(REFILL, id="refill"), pytest.param(ALL_AT_ONCE, id="all at once", marks=RELEASE)],
)
@pytest.mark.parametrize(
    "name", [*PADDED_ONLY, "opt", "gemma2", "mistral-window", "lfm2", "granite-hybrid"]
)
def test_greedy_tokens_of_padded_batches_equal_those_of_transformers(name, way):
    check_greedy(name, {**way, "engine": "padded"})


@pytest.mark.parametrize("name", [*RECOMPUTED, "llama", pytest.param("gemma2", marks=RELEASE)])
def test_greedy_tokens_of_whole_rows_equal_those_of_transformers_for_each_prompt_alone(name):
    model, prompts = model_of(name), prompts_of()
    alone = [
        transformers_greedy(model, PromptBatch(ids[mask][None], mask[mask][None]), NEW_TOKENS)[0]
        for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
    ]
    rollout = run(name, prompts, GREEDY, StoppingCriteria(NEW_TOKENS), rows=3, engine="recomputed")
    assert tokens_of(rollout) == alone
    check_logprobs(name, PENALTY, rows=3, engine="recomputed")


def check_greedy(name: str, way: dict) -> None:
    whole = shared_greedy(name)
    eos = eos_of(whole)
    expected = cut_at(whole, (eos,))
    assert len({len(row) for row in expected}) > 1
    rollout = run(name, LENGTHS, GREEDY, StoppingCriteria(NEW_TOKENS, eos_ids=(eos,)), **way)
    assert tokens_of(rollout) == expected
    assert rollout.ended.tolist() == [eos in row for row in whole]


@pytest.mark.parametrize("engine", ["continuous", "padded"])
def test_logprobs_under_a_penalty_equal_those_of_a_plain_forward_pass(engine):
    check_logprobs("opt", PENALTY, rows=3, engine=engine)


@pytest.mark.parametrize("name", [*CONTINUOUS, *HYBRIDS])
def test_logprobs_of_continuous_batching_equal_those_of_a_plain_forward_pass(name, prefix_uses):
    check_logprobs(name, TRUNCATED, rows=3, static=True)
    assert not prefix_uses


@pytest.mark.parametrize("name", PADDED_ONLY)
def test_logprobs_of_padded_batches_equal_those_of_a_plain_forward_pass(name):
    check_logprobs(name, TRUNCATED, rows=3, engine="padded")


@pytest.mark.parametrize("name", [*CONTINUOUS, *HYBRIDS])
def test_logprobs_with_prompts_shared_by_samples_equal_those_of_a_plain_forward_pass(
    name, prefix_uses
):
    check_logprobs(name, TRUNCATED, rows=9, samples=4, lengths=(33, 40, 36))
    assert prefix_uses
    assert max(prefix_uses) > 4  # rows of more than one prompt


def check_logprobs(
    name: str, sampling: SamplingParameters, lengths=LENGTHS, samples: int = 1, **others
) -> None:
    stopping = StoppingCriteria(NEW_TOKENS, eos_ids=(5, 9, 22), stop_ids=(7, 33, 40))
    seeds = torch.arange(300, 300 + samples * len(lengths))
    rollout = run(name, lengths, sampling, stopping, seeds, samples=samples, **others)
    expected = plain_logprobs(model_of(name), rollout, sampling.temperature)
    torch.testing.assert_close(
        rollout.rollout_logprobs, expected, atol=TOLERANCE.get(name, 2e-5), rtol=0
    )
    assert cut_at(tokens_of(rollout), stopping.ids) == tokens_of(rollout)
    assert rollout.response_ids.max() < VOCABULARY
    counts = rollout.response_mask.sum(dim=1)
    assert counts.min() < counts.max()
