"""Generation as a whole: a response depends only on its prompt, its seed and the weights."""

from dataclasses import replace

import pytest
import torch
import transformers
from tiny_models import (
    LENGTHS,
    VOCABULARY,
    cut_at,
    eos_of,
    model_of,
    plain_logprobs,
    prompts_of,
    tokens_of,
    transformers_greedy,
)

from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.rollout.generator import GenerationConfig, engine_text, generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import PromptBatch, Rollout, concat_rows, pad_rows, select_rows

COUNT = len(LENGTHS)
WARM = SamplingParameters(temperature=1.3, top_p=0.95)
WITH_ENDS = StoppingCriteria(14, eos_ids=(5, 9, 30), stop_ids=(7,))
SEEDS = row_seeds(0, COUNT, 3)
ENGINES = ("continuous", "padded")


def answer(name: str = "llama", prompts=None, seeds=SEEDS, limits=None, **how) -> Rollout:
    settings = {"sampling": WARM, "stopping": WITH_ENDS, **how}
    return generate(model_of(name), prompts or prompts_of(), seeds, GenerationConfig(**settings), limits=limits)


def part(prompts: PromptBatch, rows) -> PromptBatch:
    return select_rows(prompts, torch.tensor(rows))


def assert_same(found: Rollout, expected: Rollout) -> None:
    """Same tokens and ends, and log-probs up to the rounding of other shapes."""
    assert tokens_of(found) == tokens_of(expected)
    assert torch.equal(found.finish_reason, expected.finish_reason)
    both = concat_rows([found, expected]).rollout_logprobs.chunk(2)
    torch.testing.assert_close(both[0], both[1], atol=2e-5, rtol=0)


# A response depends on its prompt, its seed and the weights


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral-window"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def expected(name) -> Rollout:
    """Each response generated alone."""
    prompts = prompts_of()
    alone = [answer(name, part(prompts, [row]), SEEDS[row : row + 1]) for row in range(COUNT)]
    lengths = {len(tokens_of(rollout)[0]) for rollout in alone}
    assert len(lengths) > 2
    return concat_rows(alone)


@pytest.mark.parametrize("rows", [0, 3, 128])
@pytest.mark.parametrize("way", [{}, {"static": True}, {"engine": "padded"}, {"prepack": False}])
def test_a_response_does_not_depend_on_the_number_of_rows_or_the_engine(name, expected, rows, way):
    found = answer(name, rows=rows, **way)
    assert_same(found, expected)
    assert torch.equal(found.prompt_ids, prompts_of().prompt_ids)
    assert torch.equal(found.prompt_mask, prompts_of().prompt_mask)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_give_the_responses_of_one(name, expected, engine):
    """Halves of the prompts, numbered as parts of one whole."""
    first, second = [0, 1, 2], [3, 4, 5, 6, 7]
    halves = [
        answer(name, part(prompts_of(), rows), row_seeds(rows[0], len(rows), 3), rows=2, engine=engine)
        for rows in (first, second)
    ]
    assert_same(concat_rows(halves), expected)


@pytest.mark.parametrize(
    "way", [{"rows": 4}, {"rows": 9}, {"rows": 128}, {"rows": 5, "static": True}, {"engine": "padded"}]
)
def test_samples_of_a_prompt_are_the_responses_of_their_seeds(way):
    """With and without a shared prefix; the expected responses come from repeated prompts."""
    lengths, samples = (40, 34, 3, 33, 12), 4
    prompts, seeds = prompts_of(lengths), row_seeds(0, 5 * samples, 2)
    several = part(prompts, torch.arange(5).repeat_interleave(samples).tolist())
    expected = answer("llama", several, seeds, rows=1)
    found = answer("llama", prompts, seeds, samples=samples, **way)
    assert_same(found, expected)
    assert torch.equal(found.prompt_ids, several.prompt_ids)
    assert len({tuple(row) for row in tokens_of(found)}) == 20


@pytest.mark.parametrize("sampling", [SamplingParameters(top_k=1), WARM])
@pytest.mark.parametrize("way", [{"rows": 3}, {"static": True}, {"engine": "padded"}])
def test_ids_in_padding_change_nothing(sampling, way):
    first = answer(prompts=prompts_of(padding_id=0), sampling=sampling, **way)
    second = answer(prompts=prompts_of(padding_id=9), sampling=sampling, **way)
    wider = answer(prompts=pad_rows(prompts_of(), max(LENGTHS) + 3, 0), sampling=sampling, **way)
    assert_same(second, first)
    assert_same(wider, first)


@pytest.mark.parametrize("penalty", [1.5, 0.6])
@pytest.mark.parametrize("way", [{"rows": 3}, {"rows": 3, "static": True}, {"rows": 3, "engine": "padded"}])
def test_the_repetition_penalty_is_that_of_transformers(way, penalty):
    """Tokens of prompt and response count. transformers would count padding too, so each prompt runs alone there."""
    prompts = prompts_of()
    alone = [part(prompts, [row]) for row in range(COUNT)]
    expected = [transformers_greedy(model_of("llama"), one, 10, repetition_penalty=penalty)[0] for one in alone]
    found = answer(
        sampling=SamplingParameters(top_k=1, repetition_penalty=penalty), stopping=StoppingCriteria(10), **way
    )
    assert tokens_of(found) == expected
    assert expected != [transformers_greedy(model_of("llama"), one, 10)[0] for one in alone]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_models_generation_config_is_ignored(engine):
    model = model_of("llama")
    plain, before = answer(engine=engine), model.generation_config
    steering = transformers.GenerationConfig(
        do_sample=False, temperature=0.1, top_k=1, eos_token_id=0, max_new_tokens=1, repetition_penalty=5.0
    )
    model.generation_config = steering
    try:
        steered = answer(engine=engine)
        assert model.generation_config is steering
    finally:
        model.generation_config = before
    assert torch.equal(plain.response_ids, steered.response_ids)


def test_generation_does_not_change_torchs_random_state():
    before = torch.get_rng_state()
    answer()
    assert torch.equal(torch.get_rng_state(), before)


# Log-probs


@pytest.mark.parametrize("way", [{"engine": "padded"}, {"rows": 3}, {"rows": 3, "static": True}], ids=str)
def test_logprobs_below_the_minimum_length_are_over_tokens_that_do_not_end_an_answer(way):
    stopping = replace(WITH_ENDS, min_new_tokens=4)
    rollout = answer(sampling=SamplingParameters(1.3, top_p=0.8, repetition_penalty=1.2), stopping=stopping, **way)
    with torch.no_grad():
        fresh = response_logprobs(model_of("llama"), rollout, 1.3, late_ends=stopping.late_ends).logprobs
        free = response_logprobs(model_of("llama"), rollout, 1.3).logprobs
    mask, early = rollout.response_mask, torch.arange(14)[: rollout.response_mask.shape[1]] < 4
    torch.testing.assert_close(rollout.rollout_logprobs[mask], fresh[mask], atol=2e-5, rtol=0)
    assert (fresh - free)[:, early].min() > 1e-3 and torch.equal(fresh[:, ~early], free[:, ~early])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("engine", ENGINES)
def test_logprobs_equal_those_that_training_computes(temperature, engine):
    rollout = answer(sampling=SamplingParameters(temperature, top_p=0.8, top_k=20), engine=engine, rows=3)
    with torch.no_grad():
        fresh = response_logprobs(model_of("llama"), rollout, temperature).logprobs
    plain, mask = plain_logprobs(model_of("llama"), rollout, temperature), rollout.response_mask
    torch.testing.assert_close(rollout.rollout_logprobs[mask], fresh[mask], atol=2e-5, rtol=0)
    torch.testing.assert_close(plain[mask], fresh[mask], atol=2e-5, rtol=0)
    assert rollout.rollout_logprobs[~mask].eq(0).all()


@pytest.mark.parametrize("way", [{"rows": 64}, {"rows": 64, "static": True}, {"rows": 64, "engine": "padded"}])
def test_first_tokens_follow_the_models_distribution(way):
    """4000 samples of one prompt of 33 tokens against softmax of its logits, by chi-square."""
    prompts, count = prompts_of((33,)), 4000
    rollout = answer(
        prompts=prompts, seeds=row_seeds(0, count, 5), samples=count, sampling=SamplingParameters(1.5),
        stopping=StoppingCriteria(1), **{**way, "rows": 1000},
    )  # fmt: skip
    with torch.no_grad():
        logits = model_of("llama")(prompts.prompt_ids).logits[0, -1].double()
    expected = count * torch.softmax(logits / 1.5, dim=0)
    counts = torch.bincount(rollout.response_ids[:, 0], minlength=VOCABULARY)
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = int(common.sum())
    assert freedom > 10
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


# Lengths


@pytest.mark.parametrize("way", [{"rows": 2}, {"rows": 2, "engine": "padded"}, {"rows": 2, "static": True}])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_prompt_and_response_may_fill_all_positions(name, way):
    """39 + 57 tokens in 96 positions; learned positions end there."""
    rollout = answer(name, prompts_of((39, 3, 20)), torch.arange(3), stopping=StoppingCriteria(57), **way)
    assert rollout.response_mask.all()
    assert rollout.response_ids.shape == (3, 57)


# Limits of single responses


@pytest.mark.parametrize("way", [{"rows": 3}, {"rows": 3, "static": True}, {"rows": 3, "engine": "padded"}])
def test_each_response_has_its_own_limit(way):
    whole = answer(stopping=StoppingCriteria(14), **way)
    limits = torch.tensor([1, 14, 3, 2, 14, 7, 9, 1])
    cut = answer(stopping=StoppingCriteria(14), limits=limits, **way)
    assert tokens_of(cut) == [row[:n] for row, n in zip(tokens_of(whole), limits.tolist(), strict=True)]
    assert not cut.ended.any()


# Errors


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_prompt_is_refused(engine):
    prompts = prompts_of()
    mask = prompts.prompt_mask.clone()
    mask[3] = False
    with pytest.raises(ValueError, match="empty"):
        answer(prompts=replace(prompts, prompt_mask=mask), engine=engine)


# Cancellation


@pytest.mark.parametrize("tokens", [0, 5, 14])
@pytest.mark.parametrize("engine", ENGINES)
def test_after_a_cancellation_only_finished_responses_have_tokens(engine, tokens):
    """`cancelled` is called before each token; padded batches also call it before each batch."""
    whole, calls = answer(engine=engine, rows=COUNT), []

    def cancelled() -> bool:
        calls.append(True)
        return len(calls) > tokens + (engine == "padded")

    how = GenerationConfig(WARM, WITH_ENDS, rows=COUNT, engine=engine)
    found = generate(model_of("llama"), prompts_of(), SEEDS, how, cancelled=cancelled)
    expected = [row if len(row) <= tokens else [] for row in tokens_of(whole)]
    assert tokens_of(found) == expected
    assert (found.finish_reason < 0).tolist() == [not row for row in expected]
    assert tokens in (0, 14) or 0 < sum(not row for row in expected) < COUNT, "the case shows nothing"


def test_greedy_answers_are_cut_at_the_first_end():
    whole = tokens_of(answer(sampling=SamplingParameters(top_k=1), stopping=StoppingCriteria(14)))
    eos = eos_of(whole)
    for engine in ENGINES:
        found = answer(
            sampling=SamplingParameters(top_k=1), stopping=StoppingCriteria(14, eos_ids=(eos,)), engine=engine
        )
        assert tokens_of(found) == cut_at(whole, (eos,))


# What a run prints about the engine


@pytest.mark.parametrize(("settings", "synchronised", "text"), [
    ({}, False, "continuous batching, PyTorch attention, whole weights"),
    ({"engine": "padded"}, False, "padded batches, whole weights"),
    ({}, True, "continuous batching, PyTorch attention, weights gathered layer by layer"),
])  # fmt: skip
def test_the_engine_is_described_with_its_kernels(settings, synchronised, text):
    config = GenerationConfig(WARM, WITH_ENDS, **settings)
    assert engine_text(model_of("llama"), config, (lambda number: number) if synchronised else None) == text
