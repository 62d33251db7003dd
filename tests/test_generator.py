"""Generation on tiny models, against transformers' own and against a fresh forward pass."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import Sampling
from dschat_ppo.types import PromptBatch

VOCABULARY = 32
LENGTHS = (7, 1, 4, 5)
GREEDY = Sampling(top_k=1)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(2)
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(2)
    return GPT2LMHeadModel(config).eval()


MODELS = {"llama": llama(), "gpt2": gpt2()}


@pytest.fixture(params=list(MODELS))
def model(request):
    return MODELS[request.param]


def prompts(padding_id: int = 0) -> PromptBatch:
    """Left-padded prompts of mixed lengths."""
    ids = torch.randint(0, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS).unsqueeze(1)
    return PromptBatch(torch.where(mask, ids, padding_id), mask)


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def greedy_row_by_row(model, count: int) -> list[list[int]]:
    """Greedy tokens of each prompt alone, without padding and without a cache."""
    batch, answers = prompts(), []
    for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True):
        sequence = ids[mask].unsqueeze(0)
        for _ in range(count):
            logits = model(input_ids=sequence, use_cache=False).logits
            sequence = torch.cat([sequence, logits[:, -1:].argmax(dim=-1)], dim=1)
        answers.append(sequence[0, -count:].tolist())
    return answers


def some_eos(model, count: int) -> int:
    """A token that ends at least one greedy answer early, and not all at the same place."""
    answers = greedy_row_by_row(model, count)
    ends = {token: [row.index(token) if token in row else count for row in answers] for row in answers for token in row}
    return next(token for token, places in ends.items() if len(set(places)) > 1 and max(places) == count)


def test_greedy_tokens_equal_those_of_transformers(model):
    batch = prompts()
    with torch.no_grad():
        expected = model.generate(
            input_ids=batch.prompt_ids, attention_mask=batch.prompt_mask.long(), do_sample=False, max_new_tokens=10,
            pad_token_id=0,
        )  # fmt: skip
    rollout = generate(model, batch, GREEDY, 10, eos_id=-1, generator=noise())
    assert torch.equal(rollout.response_ids, expected[:, batch.prompt_ids.shape[1] :])
    assert rollout.response_mask.all()


def test_greedy_tokens_equal_those_of_each_prompt_alone(model):
    rollout = generate(model, prompts(), GREEDY, 10, eos_id=-1, generator=noise())
    with torch.no_grad():
        assert rollout.response_ids.tolist() == greedy_row_by_row(model, 10)


def test_mask_holds_every_token_up_to_and_including_eos(model):
    with torch.no_grad():
        answers, eos = greedy_row_by_row(model, 10), some_eos(model, 10)
    rollout = generate(model, prompts(), GREEDY, 10, eos, noise())
    lengths = [row.index(eos) + 1 if eos in row else 10 for row in answers]
    assert rollout.response_mask.sum(dim=1).tolist() == lengths
    assert rollout.ended.tolist() == [eos in row for row in answers]
    for row, length in enumerate(lengths):
        assert rollout.response_mask[row].tolist() == [column < length for column in range(10)]
        assert rollout.response_ids[row, :length].tolist() == answers[row][:length]
    assert len(set(lengths)) > 1


def test_responses_are_as_long_as_the_longest_one(model):
    with torch.no_grad():
        answers = greedy_row_by_row(model, 12)
    row = answers[0]
    one_prompt = PromptBatch(prompts().prompt_ids[:1], prompts().prompt_mask[:1])
    rollout = generate(model, one_prompt, GREEDY, 12, eos_id=row[3], generator=noise())
    assert rollout.response_ids.shape[1] == row.index(row[3]) + 1
    assert rollout.ended.tolist() == [True]


def test_a_row_that_ends_at_once_has_one_token_and_changes_no_other_row(model):
    whole = generate(model, prompts(), GREEDY, 8, eos_id=-1, generator=noise())
    first = whole.response_ids[:, 0].tolist()
    row = next(i for i, token in enumerate(first) if first.count(token) == 1)
    rollout = generate(model, prompts(), GREEDY, 8, eos_id=first[row], generator=noise())
    assert rollout.response_mask[row].long().tolist() == [1] + [0] * (rollout.response_mask.shape[1] - 1)
    assert rollout.ended[row].item() is True
    for other in range(len(LENGTHS)):
        tokens = rollout.response_ids[other][rollout.response_mask[other]]
        assert tokens.tolist() == whole.response_ids[other, : len(tokens)].tolist()


def test_all_rows_ending_at_once_stop_the_generation(model):
    batch = PromptBatch(prompts().prompt_ids[:1].expand(3, -1), prompts().prompt_mask[:1].expand(3, -1))
    first = int(generate(model, batch, GREEDY, 1, eos_id=-1, generator=noise()).response_ids[0, 0])
    rollout = generate(model, batch, GREEDY, 8, eos_id=first, generator=noise())
    assert rollout.response_ids.tolist() == [[first]] * 3
    assert rollout.response_mask.tolist() == [[True]] * 3
    assert rollout.ended.tolist() == [True] * 3


def test_eos_as_the_last_token_the_limit_allows_counts_as_ended(model):
    batch = PromptBatch(prompts().prompt_ids[:1], prompts().prompt_mask[:1])
    row = generate(model, batch, Sampling(3.0), 10, -1, noise()).response_ids[0].tolist()
    length = next(n for n in range(2, 11) if row[n - 1] not in row[: n - 1])
    eos = row[length - 1]
    whole = generate(model, batch, Sampling(3.0), length, eos, noise())
    assert (whole.ended.tolist(), whole.response_mask.sum().item()) == ([True], length)
    cut = generate(model, batch, Sampling(3.0), length - 1, eos, noise())
    assert (cut.ended.tolist(), cut.response_mask.sum().item()) == ([False], length - 1)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.4, top_p=0.8, top_k=10), GREEDY])
def test_logprobs_equal_those_of_a_fresh_forward(model, sampling):
    with torch.no_grad():
        eos = some_eos(model, 10)
    rollout = generate(model, prompts(), sampling, 10, eos, noise())
    with torch.no_grad():
        fresh = response_logprobs(model, rollout, sampling.temperature)
    mask = rollout.response_mask
    torch.testing.assert_close(rollout.rollout_logprobs[mask], fresh[mask], atol=1e-5, rtol=0)
    assert rollout.rollout_logprobs[~mask].eq(0).all()


def test_fresh_logprobs_equal_a_plain_log_softmax_of_each_row_alone(model):
    rollout = generate(model, prompts(), Sampling(0.7), 6, -1, noise())
    with torch.no_grad():
        fresh = response_logprobs(model, rollout, 0.7)
        for row in range(len(LENGTHS)):
            prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
            sequence = torch.cat([prompt, rollout.response_ids[row]]).unsqueeze(0)
            table = torch.log_softmax(model(input_ids=sequence, use_cache=False).logits[0].double() / 0.7, dim=-1)
            expected = [table[len(prompt) + t - 1, int(rollout.response_ids[row, t])].item() for t in range(6)]
            assert fresh[row].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, top_p=0.9)])
def test_what_stands_in_padding_changes_nothing(model, sampling):
    with torch.no_grad():
        eos = some_eos(model, 10)
    first = generate(model, prompts(padding_id=0), sampling, 10, eos, noise())
    second = generate(model, prompts(padding_id=eos), sampling, 10, eos, noise())
    assert torch.equal(first.response_ids, second.response_ids)
    assert torch.equal(first.response_mask, second.response_mask)
    torch.testing.assert_close(first.rollout_logprobs, second.rollout_logprobs, atol=1e-6, rtol=0)
    random_ids = torch.randint(0, VOCABULARY, first.response_ids.shape, generator=noise())
    polluted = replace(first, response_ids=torch.where(first.response_mask, first.response_ids, random_ids))
    with torch.no_grad():
        before, after = response_logprobs(model, first, 1.0), response_logprobs(model, polluted, 1.0)
    mask = first.response_mask
    torch.testing.assert_close(before[mask], after[mask], atol=1e-6, rtol=0)


def test_sampled_tokens_are_reproducible_from_the_generator(model):
    first = generate(model, prompts(), Sampling(), 8, -1, noise())
    again = generate(model, prompts(), Sampling(), 8, -1, noise())
    other = generate(model, prompts(), Sampling(), 8, -1, torch.Generator().manual_seed(3))
    assert torch.equal(first.response_ids, again.response_ids)
    assert not torch.equal(first.response_ids, other.response_ids)


def test_a_generation_config_of_the_model_has_no_say(model):
    plain = generate(model, prompts(), Sampling(), 8, -1, noise())
    before = model.generation_config
    model.generation_config = type(before)(do_sample=False, temperature=0.1, top_k=1, eos_token_id=0, max_new_tokens=1)
    try:
        steered = generate(model, prompts(), Sampling(), 8, -1, noise())
    finally:
        model.generation_config = before
    assert torch.equal(plain.response_ids, steered.response_ids)
