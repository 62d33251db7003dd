"""From the flags of step 3 to generation."""

from types import SimpleNamespace

import pytest

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import load_tokenizer
from dschat_ppo.ppo.generate import check_stop_ids, end_ids, generation_config

NEEDED = [
    "--actor_model_name_or_path",
    "a",
    "--critic_model_name_or_path",
    "c",
    "--data_path",
    "d",
    "--output_dir",
    "o",
]


def model_with(eos) -> SimpleNamespace:
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))


@pytest.fixture(scope="module")
def tokenizer(assets):
    return load_tokenizer(str(assets / "lm"), "model")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [(None, (1,)), (1, (1,)), (7, (1,)), ([1, 7, 9], (1, 7, 9)), ([7, 1], (1, 7)), ([7, 9], (1,)), ([], (1,))],
)
def test_further_ends_count_where_the_list_knows_the_tokenizers_own(tokenizer, listed, expected):
    assert tokenizer.eos_token_id == 1
    assert end_ids(tokenizer, model_with(listed)) == expected
    assert end_ids(tokenizer, SimpleNamespace(generation_config=None)) == (1,)


def test_every_flag_of_generation_arrives(tokenizer):
    words = "--temperature 0.7 --top_p 0.9 --top_k 40 --min_p 0.05 --repetition_penalty 1.2 --n_samples_per_prompt 4 "
    words += "--max_answer_seq_len 99 --min_answer_seq_len 3 --stop_token_ids 8 9 --stop_strings END --rollout_rows 17 "
    words += "--rollout_engine padded --prepack_weights False"
    how = generation_config(parse("ppo", [*NEEDED, *words.split()]).ppo, tokenizer, model_with([1, 5]))
    sampling, stopping = how.sampling, how.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.2)
    assert (stopping.max_new_tokens, stopping.min_new_tokens) == (99, 3)
    assert (stopping.eos_ids, stopping.stop_ids, stopping.stop_strings) == ((1, 5), (8, 9), ("END",))
    assert stopping.decode([tokenizer("an END")["input_ids"]]) == ["an END"]
    assert (how.samples, how.rows, how.prepack, how.engine) == (4, 17, False, "padded")


def test_the_plain_flags_ask_for_the_fast_engine_and_whatever_memory_allows(tokenizer):
    how = generation_config(parse("ppo", NEEDED).ppo, tokenizer, model_with(1))
    assert (how.samples, how.rows, how.prepack, how.engine, how.static) == (1, 0, True, "continuous", None)
    assert not how.sampling.changes_distribution
    assert how.stopping.decode is None


def test_a_stop_token_that_is_none_is_refused_by_name(tokenizer):
    check_stop_ids([0, len(tokenizer) - 1], tokenizer)
    with pytest.raises(UserError, match=f"--stop_token_ids {len(tokenizer)}"):
        check_stop_ids([3, len(tokenizer)], tokenizer)
