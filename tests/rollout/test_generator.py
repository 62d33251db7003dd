"""Generation as a whole: a response depends only on its prompt, its seed and the weights."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from generation import ENGINES, assert_same, run
from tiny_models import LENGTHS, model_of, prompts_of, tokens_of, transformers_greedy

from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import PromptBatch, Rollout, concat_rows, pad_rows, select_rows

COUNT = len(LENGTHS)
GREEDY, WARM = SamplingParameters(top_k=1), SamplingParameters(temperature=1.3, top_p=0.95)
WITH_ENDS = StoppingCriteria(14, eos_ids=(5, 9, 30), stop_ids=(7,))
SEEDS = row_seeds(0, COUNT, 3)
WAYS = [{"rows": 3, **way} for way in ENGINES.values()]
by_each_engine = pytest.mark.parametrize("way", WAYS, ids=list(ENGINES))


def answer(name: str = "llama", prompts=LENGTHS, seeds=SEEDS, **how) -> Rollout:
    return run(name, prompts, seeds=seeds, **{"sampling": WARM, "stopping": WITH_ENDS, **how})


def part(prompts: PromptBatch, rows) -> PromptBatch:
    return select_rows(prompts, torch.tensor(rows))


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral-window"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def expected(name) -> Rollout:
    """Each response generated alone."""
    prompts = prompts_of()
    alone = [answer(name, part(prompts, [row]), SEEDS[row : row + 1]) for row in range(COUNT)]
    assert len({len(tokens_of(rollout)[0]) for rollout in alone}) > 2
    return concat_rows(alone)


@pytest.mark.parametrize(
    "way", [*WAYS, {"rows": 0}, {"rows": 128, "static": True}, {"rows": 3, "prepack": False}]
)
def test_a_response_does_not_depend_on_the_number_of_rows_or_the_engine(name, expected, way):
    found = answer(name, **way)
    assert_same(found, expected)
    assert torch.equal(found.prompt_ids, prompts_of().prompt_ids)
    assert torch.equal(found.prompt_mask, prompts_of().prompt_mask)


@cache
def repeated_prompts(samples: int):
    """Prompts, each of them `samples` times, and the responses to those."""
    prompts = prompts_of((40, 34, 3, 33, 12))
    several = part(prompts, torch.arange(5).repeat_interleave(samples).tolist())
    return prompts, several, answer("llama", several, row_seeds(0, 5 * samples, 2), rows=1)


@pytest.mark.parametrize(
    "way", [{"rows": 4}, {"rows": 128}, {"rows": 5, "static": True}, {"engine": "padded"}]
)
def test_samples_of_a_prompt_are_the_responses_of_their_seeds(way):
    """With and without a shared prefix."""
    samples = 4
    prompts, several, expected = repeated_prompts(samples)
    found = answer("llama", prompts, row_seeds(0, 5 * samples, 2), samples=samples, **way)
    assert_same(found, expected)
    assert torch.equal(found.prompt_ids, several.prompt_ids)
    assert len({tuple(row) for row in tokens_of(found)}) == 20


@by_each_engine
def test_padding_and_the_models_generation_config_change_nothing(way):
    first, streams = answer(**way), torch.get_rng_state()
    assert_same(answer(prompts=prompts_of(padding_id=9), **way), first)
    assert_same(answer(prompts=pad_rows(prompts_of(), max(LENGTHS) + 3, 0), **way), first)
    model = model_of("llama")
    before, model.generation_config = (
        model.generation_config,
        transformers.GenerationConfig(
            do_sample=False,
            temperature=0.1,
            top_k=1,
            eos_token_id=0,
            max_new_tokens=1,
            repetition_penalty=5.0,
        ),
    )
    try:
        assert_same(answer(**way), first)
    finally:
        model.generation_config = before
    assert torch.equal(torch.get_rng_state(), streams), (
        "generation does not use torch's random state"
    )


@cache
def greedy_alone(penalty: float) -> list[list[int]]:
    """10 tokens of each prompt by transformers."""
    alone = [part(prompts_of(), [row]) for row in range(COUNT)]
    return [
        transformers_greedy(model_of("llama"), one, 10, repetition_penalty=penalty)[0]
        for one in alone
    ]


@pytest.mark.parametrize("penalty", [1.5, pytest.param(0.6, marks=pytest.mark.release)])
@by_each_engine
def test_the_repetition_penalty_is_that_of_transformers(way, penalty):
    """Tokens of prompt and response count. transformers would count padding too, so each prompt
    runs alone there."""
    sampling, expected = (
        SamplingParameters(top_k=1, repetition_penalty=penalty),
        greedy_alone(penalty),
    )
    assert (
        tokens_of(answer(sampling=sampling, stopping=StoppingCriteria(10), **way))
        == expected
        != greedy_alone(1.0)
    )


# Log-probs


@by_each_engine
def test_logprobs_below_the_minimum_length_are_over_tokens_that_do_not_end_an_answer(way):
    stopping = replace(WITH_ENDS, min_new_tokens=4)
    rollout = answer(
        sampling=SamplingParameters(1.3, top_p=0.8, repetition_penalty=1.2),
        stopping=stopping,
        **way,
    )
    with torch.no_grad():
        fresh = response_logprobs(
            PolicyModel(model_of("llama")), rollout, 1.3, forbidden_tokens=stopping.forbidden_tokens
        ).logprobs
        free = response_logprobs(PolicyModel(model_of("llama")), rollout, 1.3).logprobs
    mask, early = rollout.response_mask, torch.arange(14)[: rollout.response_mask.shape[1]] < 4
    torch.testing.assert_close(rollout.rollout_logprobs[mask], fresh[mask], atol=2e-5, rtol=0)
    assert (fresh - free)[:, early].min() > 1e-3 and torch.equal(fresh[:, ~early], free[:, ~early])


# Lengths


@by_each_engine
@pytest.mark.parametrize("name", ["opt", pytest.param("gpt2", marks=pytest.mark.release)])
def test_prompt_and_response_may_fill_all_positions(name, way):
    """39 + 57 tokens in 96 positions; learned positions end there."""
    rollout = answer(name, (39, 3, 20), torch.arange(3), stopping=StoppingCriteria(57), **way)
    assert rollout.response_mask.all()
    assert rollout.response_ids.shape == (3, 57)


@by_each_engine
def test_each_response_has_its_own_limit(way):
    whole = answer(stopping=StoppingCriteria(14), **way)
    limits = torch.tensor([1, 14, 3, 2, 14, 7, 9, 1])
    cut = answer(stopping=StoppingCriteria(14), limits=limits, **way)
    assert tokens_of(cut) == [
        row[:n] for row, n in zip(tokens_of(whole), limits.tolist(), strict=True)
    ]
    assert not cut.ended.any()


@pytest.mark.parametrize(
    ("tokens", "engine"), [(0, "continuous"), (5, "continuous"), (5, "padded"), (14, "padded")]
)
def test_after_a_cancellation_only_finished_responses_have_tokens(engine, tokens):
    """`cancelled` is called before each token; padded batches also call it before each batch."""
    whole, calls = answer(engine=engine, rows=COUNT), []

    def cancelled() -> bool:
        calls.append(True)
        return len(calls) > tokens + (engine == "padded")

    how = GenerationConfig(WARM, WITH_ENDS, rows=COUNT, engine=engine)
    request = RolloutRequest(prompts_of(), SEEDS)
    found = generate(model_of("llama"), request, how, cancelled=cancelled)
    expected = [row if len(row) <= tokens else [] for row in tokens_of(whole)]
    assert tokens_of(found) == expected
    assert (found.finish_reason < 0).tolist() == [not row for row in expected]
    assert tokens in (0, 14) or 0 < sum(not row for row in expected) < COUNT, (
        "the case shows nothing"
    )
