"""From flags to answers, and the steps of experience collection with stand-ins for generation and
rewards."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plain_ppo import PlainRun
from tiny_collection import RewardRequests, Stops, collect, collection_of
from tiny_models import tokens_of

from dschat_ppo.common import dist
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.components import PPOComponents, PPOData
from dschat_ppo.ppo.generation_settings import check_stop_ids, generation_config, greedily
from dschat_ppo.ppo.rounds import OneRound
from dschat_ppo.rewards.reward_source import (
    RewardFunctionError,
    RewardServiceError,
)
from dschat_ppo.types import concat_rows

NEEDED = (
    "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
).split()


def model_with(eos) -> SimpleNamespace:
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))


@pytest.fixture(scope="module")
def tokenizer(assets):
    return load_tokenizer(str(assets / "lm"), "model")


def test_every_flag_of_generation_arrives(tokenizer):
    words = (
        "--temperature 0.7 --top_p 0.9 --top_k 40 --min_p 0.05 --repetition_penalty 1.2"
        " --n_samples_per_prompt 4 "
    )
    words += (
        "--max_answer_seq_len 99 --min_answer_seq_len 3 --stop_token_ids 8 9 --stop_strings END"
        " --rollout_rows 17 "
    )
    words += "--rollout_engine padded"
    how = generation_config(
        parse("ppo", [*NEEDED, *words.split()]).ppo, tokenizer, model_with([1, 5])
    )
    sampling, stopping = how.sampling, how.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.2)
    assert (stopping.max_new_tokens, stopping.min_new_tokens) == (99, 3)
    assert (stopping.eos_ids, stopping.stop_ids, stopping.stop_strings) == (
        (1, 5),
        (8, 9),
        ("END",),
    )
    assert stopping.decode([tokenizer("an END")["input_ids"]]) == ["an END"]
    assert (how.samples, how.rows, how.engine) == (4, 17, "padded")


def test_a_stop_token_that_is_none_is_refused_by_name(tokenizer):
    check_stop_ids([0, len(tokenizer) - 1], tokenizer)
    with pytest.raises(UserError, match=f"--stop_token_ids {len(tokenizer)}"):
        check_stop_ids([3, len(tokenizer)], tokenizer)


# Answers


@pytest.fixture(scope="module")
def sampler(assets, tmp_path_factory):
    words = "--n_samples_per_prompt 2 --temperature 1.3"
    return PlainRun(assets, tmp_path_factory.mktemp("run"), words).ppo.collection.sampler


def test_answers_do_not_depend_on_the_rank_that_generates_them(sampler, monkeypatch):
    whole = tokens_of(sampler.sample([0, 1, 2, 3], 1))
    monkeypatch.setattr(dist, "rank", lambda: 1)
    assert tokens_of(sampler.sample([2, 3], 1)) == whole[4:]


def test_a_greedy_rollout_has_one_answer_to_each_prompt_and_the_log_probs_of_sampling(sampler):
    one = replace(greedily(sampler.config), samples=1)
    first, second = (sampler.sample([0, 1, 2], step, config=one) for step in (1, 2))
    assert tokens_of(first) == tokens_of(second) and len(tokens_of(first)) == 3
    config = greedily(sampler.config)
    assert (config.sampling.top_k, config.sampling.temperature, config.samples) == (1, 1.3, 2)
    assert float(first.rollout_logprobs[first.response_mask].max()) < 0, (
        "not those of a greedy policy"
    )


def test_once_a_stop_is_noticed_only_greedy_answers_are_finished(sampler, monkeypatch):
    assert not sampler.sample([0, 1], 1, cancelled=lambda: True).response_mask.any()
    assert sampler.sample([0, 1], 1).response_mask.any()


def test_building_the_parts_leaves_the_random_stream_of_the_rank_as_seeded(assets, tmp_path):
    """The self-check of generation draws numbers; dropout must not depend on how many."""
    ppo = PlainRun(assets, tmp_path / "run").ppo
    seed_this_rank(ppo.config.run.seed)
    expected = torch.rand(3)
    torch.manual_seed(99)
    scorer = ppo.collection.requests
    PPOComponents(
        ppo.config,
        ppo.plan,
        PPOData(TokenRows(scorer.prompts, None), scorer.tokenizer),
        ppo.engines,
        scorer.mixture,
    )
    assert torch.equal(torch.rand(3), expected)


# Prompts, groups, rounds, stops


def test_prompts_answers_scores_and_groups_stay_together():
    collection = collection_of()
    assert collection.plan.prompts_per_rank == 4
    first, second = collect(collection), collect(collection, step=2)
    assert [call[1:] for call in collection.sampler.asked] == [(1, 0, False), (2, 0, False)]
    assert collection.requests.steps == [0, 1], "those that are done"
    for number, (found, call) in enumerate(
        zip((first, second), collection.sampler.asked, strict=True)
    ):
        assert found.response_ids[:, 0].tolist() == [
            10 * row + sample for row in call[0] for sample in (0, 1)
        ]
        assert torch.equal(found.scores, found.response_ids[:, 0].float())
        assert torch.equal(found.source_scores, torch.stack([found.scores, -found.scores], dim=1))
        assert found.groups.tolist() == [4 * number + prompt for prompt in range(4) for _ in (0, 1)]
        assert found.baselines is None
    taken = [row for call in collection.sampler.asked for row in call[0]]
    assert len(set(taken)) == 8, "each prompt once an epoch"
    assert collection.passes.actor.modes == ["eval"] * 2
    assert collection.metrics == {
        "reward/function_faults": 2.0,
        "rollout/unscored_share": 1 / 8,
        "rollout/left_share": 0.0,
    }


def test_rows_carry_the_number_of_their_data_set_if_there_are_several():
    rows = collect(collection_of(several_data_sets=True))
    prompts = rows.response_ids[:, 0] // 10
    assert torch.equal(rows.data_sources, prompts % 3) and len(set(rows.data_sources.tolist())) > 1
    assert collect(collection_of()).data_sources is None


def test_ranks_share_the_prompts_and_number_their_groups_as_one_rank_does(monkeypatch):
    alone = collection_of()
    alone.rounds = OneRound(8)
    everything = [alone.next_prompts(), alone.next_prompts()]
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "rank", lambda: 1)
    collection = collection_of()
    for step, whole in enumerate(everything):
        prompts = collection.next_prompts()
        assert (prompts.rows, prompts.first) == (
            whole.rows[4:],
            whole.first + 4,
        ) and whole.first == 8 * step


def test_remax_scores_one_greedy_answer_to_each_prompt():
    collection = collection_of("--advantage_estimator remax")
    found = collect(collection)
    [sampled, greedy] = collection.sampler.asked
    assert sampled[1:] == (1, 0, False) and greedy == (sampled[0], 1, 0, True)
    assert found.baselines.tolist() == [10.0 * row for row in sampled[0] for _ in (0, 1)]
    assert found.scores.tolist() == [10.0 * row + sample for row in sampled[0] for sample in (0, 1)]


def test_answers_are_printed_every_n_steps(capsys):
    for words, steps in (
        ("", []),
        ("--print_answers", [1, 2]),
        ("--print_answers --print_answers_interval 2", [2]),
    ):
        collection = collection_of(words)
        for step in (1, 2):
            collect(collection, step)
            assert capsys.readouterr().out.count("] score ") == (8 if step in steps else 0)


def test_remax_leaves_a_prompt_whose_greedy_answer_has_no_score():
    class Scorer(RewardRequests):
        def __call__(self, request, rollout):
            scores = super().__call__(request, rollout)
            is_greedy = len(rollout.response_ids) == len(request.indices)
            left = torch.zeros_like(scores.total, dtype=torch.bool)
            left[1] = True
            if is_greedy:
                left = scores.total == 10.0 * request.indices[2]
            return replace(scores, left_group=left, total=scores.total.masked_fill(left, torch.nan))

    collection = collection_of("--advantage_estimator remax")
    collection.requests = Scorer()
    rows = collect(collection)
    assert rows.left_group.tolist() == [False, True, False, False, True, True, False, False]
    assert collection.metrics["rollout/left_share"] == 3 / 8


# Stops


class FourRounds:
    """The rows of four rounds of two prompts each are those of a PPO step."""

    metrics = {"rollout/rounds": 4.0}

    def __init__(self):
        self.rounds = []

    def prompts_per_rank(self):
        return 2

    def rows_of_step(self, rows, rounds_done):
        self.rounds.append(rows)
        assert len(self.rounds) == rounds_done
        return concat_rows(self.rounds) if rounds_done == 4 else None

    def state_dict(self):
        return None

    def load_state_dict(self, state, device):
        self.rounds = []


def test_rounds_take_prompts_with_seeds_of_their_own_until_they_have_enough_rows():
    collection = collection_of()
    collection.rounds = FourRounds()
    rows = collect(collection)
    asked = [(len(indices), step, number) for indices, step, number, _ in collection.sampler.asked]
    assert asked == [(2, 1, number) for number in range(4)]
    assert rows.groups.tolist() == [group for group in range(8) for _ in (0, 1)]
    assert collection.metrics["rollout/rounds"] == 4.0
    assert collection.metrics["reward/function_faults"] == 8.0
    assert collection.metrics["rollout/unscored_share"] == 4 / 16


@pytest.mark.parametrize(("rounds", "asked", "calls"), [(1, 1, 1), (1, 2, 1), (4, 2, 2), (4, 5, 4)])
def test_a_stop_is_noticed_after_each_generation_and_at_the_end_and_nothing_is_left(
    rounds, asked, calls
):
    collection = collection_of()
    if rounds == 4:
        collection.rounds = FourRounds()
    before, checkpointer = collection.state_dict(), Stops(asked)
    with pytest.raises(StopRequested):
        collect(collection, 2, checkpointer)
    assert len(collection.sampler.asked) == calls and checkpointer.saved == 1
    assert collection.state_dict()["stream"] == before["stream"]
    if rounds == 4:
        assert collection.rounds.rounds == []


@pytest.mark.parametrize(
    "failure", [RewardServiceError("no answer"), RewardFunctionError("failed on all")], ids=str
)
def test_a_reward_that_fails_ends_the_run_unless_it_is_asked_to_stop(failure):
    """A stop may end the service or the processes of a reward before this rank notices it."""
    collection = collection_of()
    collection.requests.failure = failure
    with pytest.raises(type(failure)):
        collect(collection, 1, Stops())
    stopped = collection_of()
    stopped.requests.failure = failure
    with pytest.raises(StopRequested):
        collect(stopped, 1, Stops(2))
    assert stopped.stream.taken == 0 and len(stopped.sampler.asked) == 1
