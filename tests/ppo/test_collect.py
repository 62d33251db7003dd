"""From flags to answers, and the steps of experience collection with stand-ins for generation and
rewards."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from plain_ppo import PlainRun
from tiny_experience import record
from tiny_models import tokens_of

from dschat_ppo.common import dist, stop_requests
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.ppo.components import PPOComponents, PPOData
from dschat_ppo.ppo.generation_settings import check_stop_ids, generation_config, greedily
from dschat_ppo.ppo.group_pool import GroupPool
from dschat_ppo.ppo.score import ForwardPasses
from dschat_ppo.rewards.reward_source import (
    FailedRows,
    RewardFunctionError,
    RewardServiceError,
    Scores,
)
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import Rollout, ScoredRollout

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


CPU = torch.device("cpu")
WORDS = (
    "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    " --dtype fp32 "
)
WORDS += (
    "--advantage_estimator grpo --kl_coef 0 --old_logprobs rollout"
    " --per_device_generation_batch_size 4 "
)
WORDS += "--per_device_training_batch_size 4 --n_samples_per_prompt 2"
DYNAMIC = "--dynamic_sampling --dynamic_sampling_rounds 3"


def clipped(scores):
    return scores.clamp(-5, 5)


def rows(groups: list[int], scores: list[float]) -> ScoredRollout:
    """Rows of one prompt and one response token; the token is the row's score times ten."""
    tokens = (torch.tensor(scores) * 10).long().unsqueeze(1)
    return record(
        ScoredRollout,
        torch.ones(len(groups), 1).bool(),
        response_ids=tokens,
        scores=torch.tensor(scores),
        groups=torch.tensor(groups),
        ref_logprobs=None,
        kl=None,
        values=None,
    )


class Sampler:
    """Answers of one token: 10 x the prompt's row number + the answer's number; remembers how it
    was asked."""

    config = GenerationConfig(SamplingParameters(), StoppingCriteria(1), samples=2)
    extensions = ()

    def __init__(self):
        self.prompts = Dataset.from_dict(
            {"row": ["{}"] * 12, "source": [row % 3 for row in range(12)]}
        )
        self.asked = []

    def sample(
        self, indices, step, round_number=0, purpose="sampled", config=config, cancelled=never
    ):
        greedy = config.sampling.top_k == 1
        assert greedy is (purpose == "greedy")
        assert cancelled is (never if greedy else stop_requests.flag_is_set), (
            "a stop cancels sampling alone"
        )
        self.asked.append((list(indices), step, round_number, greedy))
        tokens = torch.tensor(
            [[10 * row + sample] for row in indices for sample in range(config.samples)]
        )
        ones = torch.ones_like(tokens)
        return Rollout(
            ones, ones.bool(), tokens, ones.bool(), -ones.float(), torch.full((len(tokens),), 2)
        )


class RewardRequests:
    """The score is the token; two answers fail in each rollout."""

    names = ["first", "second"]
    tokenizer = SimpleNamespace(
        batch_decode=lambda rows, skip_special_tokens: [str(row) for row in rows]
    )

    def __init__(self):
        self.failure, self.mixture, self.steps = None, self, []

    def request(self, rollout, indices, steps_done):
        self.steps.append(steps_done)
        return SimpleNamespace(indices=indices, step=steps_done)

    def __call__(self, request, rollout):
        if isinstance(self.failure, RewardServiceError):
            raise self.failure
        total = rollout.response_ids[:, 0].float()
        return Scores(total, torch.stack([total, -total], dim=1))

    def begin(self, request, rollout):
        return lambda: self(request, rollout)

    def count_failed_rows(self):
        if self.failure is not None:
            raise self.failure
        return FailedRows(faults=2, unscored=1)


class Stops:
    """A checkpointer that is asked to stop from its question `number` on."""

    def __init__(self, number=99):
        self.number, self.asked, self.saved = number, 0, 0

    def stop_requested(self):
        self.asked += 1
        return self.asked >= self.number

    def save_if_due(self):
        self.saved += 1
        if self.asked >= self.number:
            raise StopRequested("the state is saved")


def collection_of(
    words: str = "", several_data_sets: bool = False, old_logprobs="rollout"
) -> ExperienceCollection:
    config = parse("ppo", f"{WORDS} {words}".split())
    modes = []
    actor = SimpleNamespace(eval=lambda: modes.append("eval"), modes=modes, layout=Layout())
    plan = plan_ppo(config.ppo, 12, 1)
    passes = ForwardPasses(actor, None, None, 1.0, plan.micro_batch_tokens, old_logprobs, "k1")
    pool = GroupPool(plan.rollout_rows, clipped) if config.algorithm.dynamic_sampling else None
    parts = config, plan, Sampler(), RewardRequests(), passes, pool, PhaseClock()
    return ExperienceCollection(*parts, several_data_sets)


def collect(collection, step=1, checkpointer=None):
    """The body of `make_experience`, without the exchange between ranks."""
    checkpointer = checkpointer or Stops()
    with collection.cancelled_on_stop(checkpointer):
        rows = None
        while rows is None:
            prompts = collection.next_prompts()
            rollout = collection.sample(prompts, step, checkpointer)
            scores = collection.reward(rollout, prompts, step)
            rows = collection.add(collection.forward_passes(rollout, scores, prompts), step)
        return rows


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
    alone.plan = SimpleNamespace(prompts_per_rank=8)
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


# Dynamic sampling


def alike(collection, keep) -> None:
    """Let answers score alike, except in the groups with these numbers."""

    class Scorer(RewardRequests):
        def __call__(self, request, rollout):
            indices = request.indices
            first, samples = (
                collection.stream.taken - len(indices),
                len(rollout.response_ids) // len(indices),
            )
            scores = [
                sample * (first + row in keep)
                for row in range(len(indices))
                for sample in range(samples)
            ]
            total = torch.tensor(scores).float()
            return Scores(total, total.unsqueeze(1))

    collection.requests = Scorer()


def test_dynamic_sampling_samples_until_the_step_is_full_and_keeps_the_rest():
    collection = collection_of(DYNAMIC)
    alike(collection, keep={0, 1, 5, 6, 7, 8})
    found = collect(collection)
    # Of groups 0 to 3 a half is kept; for the 4 rows that are missing, 2 / 0.5 = 4 prompts are
    # taken.
    assert [(len(call[0]), call[2]) for call in collection.sampler.asked] == [(4, 0), (4, 1)]
    assert found.groups.tolist() == [0, 0, 1, 1, 5, 5, 6, 6]
    assert collection.metrics == {
        "reward/function_faults": 4.0,
        "rollout/unscored_share": 2 / 16,
        "rollout/left_share": 0.0,
        "rollout/dynamic_sampling_rounds": 2.0,
        "rollout/dynamic_sampling_kept_share": 5 / 8,
        "rollout/dynamic_sampling_filled_rows": 0.0,
    }
    assert collection.pool.accepted[0].groups.tolist() == [7, 7]
    # The next step counts its rounds and faults from 0. 3 prompts are missing and all are expected
    # to be kept.
    collect(collection, step=2)
    asked = [(len(call[0]), call[1], call[2]) for call in collection.sampler.asked[2:]]
    assert asked == [(3, 2, 0), (4, 2, 1), (4, 2, 2)]
    assert collection.metrics["rollout/dynamic_sampling_rounds"] == 3
    assert collection.metrics["reward/function_faults"] == 6


def test_dynamic_sampling_judges_a_group_by_its_scored_answers_and_keeps_it_whole():
    """Of groups 0 to 3, only the scored answers to the first differ; a mean over the others, or a
    comparison with NaN, would keep all."""
    nan = float("nan")
    scores = [[1, nan, 0, 0], [1, nan, 1, 1], [1, nan, nan, nan], [nan] * 4]
    total = torch.tensor(scores).flatten()
    mask = torch.ones(16, 1, dtype=torch.bool)
    rows = record(
        ScoredRollout,
        mask,
        scores=total,
        source_scores=total.unsqueeze(1),
        left_group=total.isnan(),
        groups=torch.arange(4).repeat_interleave(4),
    )
    pool = GroupPool(4, clipped)
    pool.add(rows)
    assert pool.accepted[0].groups.tolist() == [0] * 4 and pool.kept_share == 1 / 4
    assert pool.accepted[0].left_group.tolist() == [False, True, False, False]
    ranged = GroupPool(4, clipped, score_range=(0.3, 0.35))  # 1 / 3, not 1 / 4
    ranged.add(rows)
    assert ranged.accepted_count == 4


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


def test_dynamic_sampling_ends_after_its_rounds_with_rows_that_score_alike(said):
    collection = collection_of(DYNAMIC)
    alike(collection, keep={0})
    found = collect(collection)
    assert [call[2] for call in collection.sampler.asked] == [0, 1, 2]
    assert found.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert collection.metrics["rollout/dynamic_sampling_filled_rows"] == 6.0
    assert any("3 rounds gave too few prompts" in line and "6 rows" in line for line in said)


def test_dynamic_sampling_compares_scores_as_the_baseline_sees_them():
    """The scores of the prompt in row 0 are 0 and 1; all others are clipped to 5."""
    collection = collection_of(DYNAMIC)
    collect(collection)
    sampled = sum(len(call[0]) for call in collection.sampler.asked)
    rows = [row for call in collection.sampler.asked for row in call[0]]
    assert collection.metrics["rollout/dynamic_sampling_kept_share"] == rows.count(0) / sampled


def test_a_round_of_dynamic_sampling_takes_as_many_prompts_on_each_rank(monkeypatch):
    collection = collection_of(DYNAMIC)
    monkeypatch.setattr(dist, "world_size", lambda: 3)
    # 4 of 8 rows are missing, the share is 1
    collection.pool.add(rows([0, 0, 1, 1], [0.0, 1.0, 2.0, 3.0]))
    assert len(collection.next_prompts().rows) == 1  # 2 prompts, rounded up to 3
    # 4 of 8 rows were kept: 4 prompts, rounded up to 6
    collection.pool.add(rows([2, 2, 3, 3], [1.0] * 4))
    assert len(collection.next_prompts().rows) == 2
    # a share of 0.04 counts as 0.1: 20 prompts
    collection.pool.add(rows(list(range(6, 100)), [1.0] * 94))
    assert len(collection.next_prompts().rows) == 4, "at most as many as a step has"


# Stops


@pytest.mark.parametrize(
    ("words", "asked", "calls"), [("", 1, 1), ("", 2, 1), (DYNAMIC, 2, 2), (DYNAMIC, 4, 3)]
)
def test_a_stop_is_noticed_after_each_generation_and_at_the_end_and_nothing_is_left(
    words, asked, calls
):
    collection = collection_of(words)
    if collection.pool is not None:
        alike(collection, keep={0, 1, 5, 6, 7})
        collect(collection)  # 0, 1, 5 and 6 fill the first step, and 7 is kept
        alike(collection, keep=())
    before, done = collection.state_dict(), len(collection.sampler.asked)
    checkpointer = Stops(asked)
    with pytest.raises(StopRequested):
        collect(collection, 2, checkpointer)
    assert len(collection.sampler.asked) - done == calls and checkpointer.saved == 1
    after = collection.state_dict()
    assert after["stream"] == before["stream"]
    if collection.pool is not None:
        assert after["pool"]["accepted"].keys() == before["pool"]["accepted"].keys()
        assert after["pool"]["accepted"]["groups"].tolist() == [7, 7]
        assert (collection.pool.sampled_count, collection.pool.dropped) == (0, [])


@pytest.mark.parametrize(
    ("failure", "words"),
    [(RewardServiceError("no answer"), ""), (RewardFunctionError("failed on all"), DYNAMIC)],
)
def test_a_reward_that_fails_ends_the_run_unless_it_is_asked_to_stop(failure, words):
    """A stop may end the service or the processes of a reward before this rank notices it."""
    collection = collection_of(words)
    collection.requests.failure = failure
    with pytest.raises(type(failure)):
        collect(collection, 1, Stops())
    stopped = collection_of(words)
    stopped.requests.failure = failure
    with pytest.raises(StopRequested):
        collect(stopped, 1, Stops(2))
    assert stopped.stream.taken == 0 and len(stopped.sampler.asked) == 1


def test_a_range_of_dynamic_sampling_drops_prompts_by_the_mean_of_their_raw_scores():
    pool = GroupPool(4, clipped, (0.5, 9.0))
    pool.add(
        rows([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [0.0, 1.0, 1.0, 1.0, 0.0, 2.0, 4.0, 14.0, 4.0, 13.0])
    )
    assert [part.groups.tolist() for part in pool.accepted] == [[2, 2, 4, 4]]
    assert [part.groups.tolist() for part in pool.dropped] == [
        [0, 0, 1, 1, 3, 3]
    ] and pool.kept_share == 0.4


def test_sources_that_differ_keep_a_prompt_of_gdpo_whose_sums_are_equal():
    pool, nan = GroupPool(4, clipped, (), (1.0, 1.0, 0.0)), math.nan
    columns = [[1, 0, nan], [0, 1, nan], [1, nan, 2], [1, nan, 5]]  # the third has no weight
    pool.add(replace(rows([0, 0, 1, 1], [1.0, 1.0, 1.0, 1.0]), source_scores=torch.tensor(columns)))
    assert [part.groups.tolist() for part in (*pool.accepted, *pool.dropped)] == [[0, 0], [1, 1]]


def test_the_weights_of_the_sources_and_the_range_reach_the_parts_and_the_run_trains(
    assets, tmp_path
):
    words = (
        "--advantage_estimator gdpo --n_samples_per_prompt 2 --kl_coef 0.1 --policy_loss dppo_kl"
        " --clip_eps 0.05 "
    )
    words += (
        "--dynamic_sampling --dynamic_sampling_range 0.2 2.8 --importance_correction token"
        " --importance_floor 0.5"
    )
    run = PlainRun(assets, tmp_path / "run", words)
    assert run.ppo.advantage_computation.source_weights == [
        1.0
    ] and run.ppo.collection.pool.score_range == [
        0.2,
        2.8,
    ]
    assert run.ppo.collection.pool.source_weights == [1.0]
    before = {name: weight.clone() for name, weight in run.weights.items()}
    run.run()
    assert all(weight.isfinite().all() for weight in run.weights.values())
    assert any(not torch.equal(weight, before[name]) for name, weight in run.weights.items())


def test_groups_that_were_kept_are_restored():
    pool, other = GroupPool(4, clipped), GroupPool(4, clipped)
    pool.add(rows([0, 0, 1, 1, 2, 2], [0.0, 1.0, 2.0, 1.0, 5.0, 3.0]))
    pool.take()
    other.add(rows([8, 8, 9, 9], [0.0, 1.0, 1.0, 1.0]))
    other.load_state_dict(pool.state_dict(), CPU)
    assert (other.missing, other.dropped, other.kept_share) == (
        2,
        [],
        1.0,
    ), "rounds before are forgotten"
    other.add(rows([7, 7], [1.0, 0.0]))
    step, _ = other.take()
    assert (step.groups.tolist(), step.scores.tolist()) == ([2, 2, 7, 7], [5.0, 3.0, 1.0, 0.0])
