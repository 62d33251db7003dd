"""Dynamic sampling: which groups are kept, how many prompts a round takes, what stays for the next
PPO step."""

import math
from dataclasses import replace

import pytest
import torch
from plain_ppo import PlainRun
from tiny_collection import CPU, RewardRequests, Stops, clipped, collect, collection_of, rows
from tiny_experience import record

from dschat_ppo.common import dist
from dschat_ppo.errors import StopRequested
from dschat_ppo.features.dynamic_sampling.group_pool import GroupPool
from dschat_ppo.rewards.reward_source import Scores
from dschat_ppo.types import ScoredRollout

DYNAMIC = "--dynamic_sampling --dynamic_sampling_rounds 3"


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
    assert collection.rounds.pool.accepted[0].groups.tolist() == [7, 7]
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
    collection.rounds.pool.add(rows([0, 0, 1, 1], [0.0, 1.0, 2.0, 3.0]))
    assert len(collection.next_prompts().rows) == 1  # 2 prompts, rounded up to 3
    # 4 of 8 rows were kept: 4 prompts, rounded up to 6
    collection.rounds.pool.add(rows([2, 2, 3, 3], [1.0] * 4))
    assert len(collection.next_prompts().rows) == 2
    # a share of 0.04 counts as 0.1: 20 prompts
    collection.rounds.pool.add(rows(list(range(6, 100)), [1.0] * 94))
    assert len(collection.next_prompts().rows) == 4, "at most as many as a step has"


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


def test_a_prompt_whose_scores_differ_by_the_rounding_of_their_sources_is_dropped():
    """0.9 - 3 * 0.3 and 0.3 - 3 * 0.1 are 0, and in fp32 two numbers of size 1e-8."""
    scores = (torch.tensor([0.9, 0.3, 1.0, 0.0]) - 3 * torch.tensor([0.3, 0.1, 0.0, 0.0])).tolist()
    assert scores[0] != scores[1]
    pool = GroupPool(
        4, clipped, magnitudes_of=lambda rows: torch.tensor([1.8, 0.6, 1.0, 0.0]).double()
    )
    pool.add(rows([0, 0, 1, 1], scores))
    assert [part.groups.tolist() for part in (*pool.accepted, *pool.dropped)] == [[1, 1], [0, 0]]


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
    ] and run.ppo.collection.rounds.pool.score_range == [
        0.2,
        2.8,
    ]
    assert run.ppo.collection.rounds.pool.source_weights == [1.0]
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


@pytest.mark.parametrize(("asked", "calls"), [(2, 2), (4, 3)])
def test_a_stop_inside_the_rounds_leaves_what_the_step_before_has_kept(asked, calls):
    collection = collection_of(DYNAMIC)
    alike(collection, keep={0, 1, 5, 6, 7})
    collect(collection)  # 0, 1, 5 and 6 fill the first step, and 7 is kept
    alike(collection, keep=())
    before, done = collection.state_dict(), len(collection.sampler.asked)
    with pytest.raises(StopRequested):
        collect(collection, 2, Stops(asked))
    assert len(collection.sampler.asked) - done == calls
    after = collection.state_dict()
    assert after["stream"] == before["stream"]
    assert after["pool"]["accepted"].keys() == before["pool"]["accepted"].keys()
    assert after["pool"]["accepted"]["groups"].tolist() == [7, 7]
    pool = collection.rounds.pool
    assert (pool.sampled_count, pool.dropped) == (0, [])


def test_a_pool_that_the_saved_run_did_not_have_starts_empty(capsys):
    collection = collection_of(DYNAMIC)
    collection.load_state_dict(collection_of().state_dict(), CPU)
    assert "--dynamic_sampling: was off when the checkpoint was saved" in capsys.readouterr().out
    assert collection.rounds.pool.accepted == []
