"""`--on_nonfinite`: stop at the first failure, or skip a limited number of updates in a row. Rows
of a PPO step with a number that is not finite reach no update."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny_experience import experience, with_bad

from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.engine.optimizer_step import Fault, StepResult
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.nonfinite import NonFinitePolicy, bad_rows

NAN, INF = math.nan, math.inf
BAD = StepResult(INF, applied=False, fault=Fault("loss", 0, 1, [[0.5, NAN, 2.0]], []))
GOOD = StepResult(1.0, applied=True)
OVERFLOW = StepResult(INF, applied=False, overflow=True)
SKIPPED = StepResult(INF, applied=False)


def policy_of(how: str = "skip", most: int = 1, recorders=()) -> NonFinitePolicy:
    return NonFinitePolicy(SafetyFlags(on_nonfinite=how, max_nonfinite_skips=most), recorders)


def handle(policy: NonFinitePolicy, *results: StepResult, role: str = "actor") -> None:
    for step, result in enumerate(results, start=1):
        policy.handle(role, step, result, SimpleNamespace(), [], {})


def test_the_limit_of_skips_in_a_row_is_per_role():
    policy = policy_of(most=2)
    handle(policy, BAD, BAD, GOOD, BAD, BAD)
    handle(policy, BAD, GOOD, BAD, role="critic")
    assert policy.metrics("actor")["optim/nonfinite_skipped"] == 6
    handle(policy, OVERFLOW, SKIPPED)  # neither good nor bad
    with pytest.raises(NonFiniteError, match="; that makes 3 in a row"):
        handle(policy, BAD)


def test_counts_survive_a_resume():
    first, second = policy_of(most=2), policy_of(most=2)
    handle(first, OVERFLOW, BAD, BAD)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.metrics("actor", "critic") == {
        "optim/nonfinite_skipped": 2,
        "optim/overflow/actor": 1,
        "optim/overflow/critic": 0,
    }
    with pytest.raises(NonFiniteError, match="; that makes 3 in a row"):
        handle(second, BAD)


def test_a_stop_and_a_skip_name_the_place_and_what_is_recorded(said):
    recorders = [lambda bad: f" Recorded: {bad.role} {bad.step}", lambda bad: "."]
    with pytest.raises(
        NonFiniteError,
        match=r"^critic, step 3: the loss is not finite \(rank 0, micro-batch 1\); .* Recorded: c",
    ):
        handle(policy_of("stop", recorders=recorders), OVERFLOW, SKIPPED, BAD, role="critic")
    handle(policy_of(recorders=recorders), BAD)
    assert said == [
        "actor, step 1: the loss is not finite (rank 0, micro-batch 1); its update was skipped. "
        "Recorded: actor 1."
    ]


def test_good_rows_end_a_row_of_skips(said):
    policy, bad = policy_of(), experience(scores=torch.tensor([0.0, NAN, 1.0]))
    assert not policy.is_finite(bad, 1)
    assert said == ["PPO step 1: scores of 1 of 3 answers are not finite; its updates are skipped."]
    assert policy.is_finite(experience(), 2)
    assert not policy.is_finite(bad, 3)
    with pytest.raises(NonFiniteError, match="PPO step 4: scores of 1 of 3 .* in a row"):
        policy.is_finite(bad, 4)
    assert policy.metrics() == {"optim/nonfinite_skipped": 3}


BAD_NUMBERS = with_bad(NAN, (0, 0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"old_logprobs": BAD_NUMBERS, "kl": BAD_NUMBERS, "values": BAD_NUMBERS},
            "old_logprobs of 1 of 3",
        ),
        ({"kl": BAD_NUMBERS, "values": BAD_NUMBERS, "advantages": BAD_NUMBERS}, "kl of 1 of 3"),
        ({"scores": torch.tensor([NAN, 1.0, -INF]), "advantages": BAD_NUMBERS}, "scores of 2 of 3"),
        (
            {"rollout_logprobs": BAD_NUMBERS, "kl": BAD_NUMBERS, "old_logprobs": None},
            "rollout_logprobs of 1 of 3",
        ),
    ],
)
def test_the_first_cause_is_named(changes, said):
    with pytest.raises(NonFiniteError, match=said):
        policy_of("stop").is_finite(experience(**changes), 1)


def test_rows_are_checked_inside_the_response_mask_and_where_a_loss_uses_them():
    assert bad_rows(experience()) == {}
    found = bad_rows(
        experience(
            advantages=with_bad(NAN, (0, 2), (0, 1), (2, 1)),  # the last is outside
            values=with_bad(-INF, (1, 0)),  # of an empty answer
            scores=torch.tensor([1.0, INF, NAN]),
            source_scores=with_bad(NAN, (0, 0), shape=(3, 2)),  # may have a weight of 0
            rollout_logprobs=BAD_NUMBERS,  # there are others
        )
    )
    assert found == {"advantages": 1, "scores": 2}
