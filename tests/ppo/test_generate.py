"""From the flags of step 3 to generation."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plain_ppo import PlainRun
from tiny_models import tokens_of

from dschat_ppo.common import dist
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.collect import check_stop_ids, generation_config, greedily
from dschat_ppo.ppo.state import PPOComponents, PPOData

NEEDED = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o".split()


def model_with(eos) -> SimpleNamespace:
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))


@pytest.fixture(scope="module")
def tokenizer(assets):
    return load_tokenizer(str(assets / "lm"), "model")


def test_every_flag_of_generation_arrives(tokenizer):
    words = "--temperature 0.7 --top_p 0.9 --top_k 40 --min_p 0.05 --repetition_penalty 1.2 --n_samples_per_prompt 4 "
    words += "--max_answer_seq_len 99 --min_answer_seq_len 3 --stop_token_ids 8 9 --stop_strings END --rollout_rows 17 "
    words += "--rollout_engine padded"
    how = generation_config(parse("ppo", [*NEEDED, *words.split()]).ppo, tokenizer, model_with([1, 5]))
    sampling, stopping = how.sampling, how.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.2)
    assert (stopping.max_new_tokens, stopping.min_new_tokens) == (99, 3)
    assert (stopping.eos_ids, stopping.stop_ids, stopping.stop_strings) == ((1, 5), (8, 9), ("END",))
    assert stopping.decode([tokenizer("an END")["input_ids"]]) == ["an END"]
    assert (how.samples, how.rows, how.engine) == (4, 17, "padded")


def test_a_stop_token_that_is_none_is_refused_by_name(tokenizer):
    check_stop_ids([0, len(tokenizer) - 1], tokenizer)
    with pytest.raises(UserError, match=f"--stop_token_ids {len(tokenizer)}"):
        check_stop_ids([3, len(tokenizer)], tokenizer)


# Answers


@pytest.fixture(scope="module")
def generator(assets, tmp_path_factory):
    words = "--n_samples_per_prompt 2 --temperature 1.3"
    return PlainRun(assets, tmp_path_factory.mktemp("run"), words).ppo.collection.generator


def test_answers_do_not_depend_on_the_rank_that_generates_them(generator, monkeypatch):
    whole = tokens_of(generator.answer([0, 1, 2, 3], 1))
    monkeypatch.setattr(dist, "rank", lambda: 1)
    assert tokens_of(generator.answer([2, 3], 1)) == whole[4:]


def test_a_greedy_rollout_has_one_answer_to_each_prompt_and_the_log_probs_of_sampling(generator):
    one = replace(greedily(generator.config), samples=1)
    first, second = (generator.answer([0, 1, 2], step, config=one) for step in (1, 2))
    assert tokens_of(first) == tokens_of(second) and len(tokens_of(first)) == 3
    config = greedily(generator.config)
    assert (config.sampling.top_k, config.sampling.temperature, config.samples) == (1, 1.3, 2)
    assert float(first.rollout_logprobs[first.response_mask].max()) < 0, "not those of a greedy policy"


def test_once_a_stop_is_noticed_only_greedy_answers_are_finished(generator, monkeypatch):
    assert not generator.answer([0, 1], 1, cancelled=lambda: True).response_mask.any()
    assert generator.answer([0, 1], 1).response_mask.any()


def test_building_the_parts_leaves_the_random_stream_of_the_rank_as_seeded(assets, tmp_path):
    """The self-check of generation draws numbers; dropout must not depend on how many."""
    ppo = PlainRun(assets, tmp_path / "run").ppo
    seed_this_rank(ppo.config.run.seed)
    expected = torch.rand(3)
    torch.manual_seed(99)
    scorer = ppo.collection.requests
    PPOComponents(ppo.config, ppo.plan, PPOData(scorer.prompts, scorer.tokenizer), ppo.engines, scorer.mixture)
    assert torch.equal(torch.rand(3), expected)
