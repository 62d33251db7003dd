"""`--on_nonfinite`: stop at the first failure, or skip a limited number of updates in a row."""

import json
import math

import pytest
import torch
from tiny_experience import experience, ppo_bundles, with_bad

from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.engine.optimizer_step import Fault, StepResult
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import FailureContext, read_bundle

NAN, INF = math.nan, math.inf
FAULT = Fault("loss", 0, 1, [[0.5, NAN, 2.0]], [])
BAD = StepResult(INF, applied=False, fault=FAULT)
GOOD = StepResult(1.0, applied=True)
OVERFLOW = StepResult(INF, applied=False, overflow=True)
SKIPPED = StepResult(INF, applied=False)


def handle(policy: NonFinitePolicy, *results: StepResult, role: str = "actor") -> None:
    for step, result in enumerate(results, start=1):
        policy.handle(role, step, result, lambda: FailureContext([], {}))


def test_stop_names_role_step_rank_and_micro_batch():
    policy = NonFinitePolicy(SafetyFlags())
    handle(policy, GOOD, OVERFLOW, SKIPPED)
    with pytest.raises(NonFiniteError, match=r"critic, step 1: the loss is not finite \(rank 0, micro-batch 1\)"):
        handle(policy, BAD, role="critic")


def test_the_limit_of_skips_in_a_row_is_per_role():
    policy = NonFinitePolicy(SafetyFlags(on_nonfinite="skip", max_nonfinite_skips=2))
    handle(policy, BAD, BAD, GOOD, BAD, BAD)
    handle(policy, BAD, GOOD, BAD, role="critic")
    assert policy.metrics("actor")["optim/nonfinite_skipped"] == 6
    handle(policy, OVERFLOW, SKIPPED)  # neither good nor bad
    with pytest.raises(NonFiniteError, match="; that makes 3 in a row"):
        handle(policy, BAD)


def test_reset_ends_a_row_of_failures():
    policy = NonFinitePolicy(SafetyFlags(on_nonfinite="skip", max_nonfinite_skips=1))
    for _ in range(3):
        policy.report("rows", 1, 0, "scores are not finite", FailureContext([], {}), {})
        policy.reset("rows")
    assert policy.metrics() == {"optim/nonfinite_skipped": 3}


def test_counts_survive_a_resume():
    flags = SafetyFlags(on_nonfinite="skip", max_nonfinite_skips=2)
    first, second = NonFinitePolicy(flags), NonFinitePolicy(flags)
    handle(first, OVERFLOW, BAD, BAD)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.metrics("actor", "critic") == {
        "optim/nonfinite_skipped": 2,
        "optim/overflow/actor": 1,
        "optim/overflow/critic": 0,
    }
    with pytest.raises(NonFiniteError, match="; that makes 3 in a row"):
        handle(second, BAD)


def test_a_skip_logs_the_replay_command_and_records_the_inputs(tmp_path, said):
    bundles = ppo_bundles(tmp_path, "--on_nonfinite", "skip")
    policy = NonFinitePolicy(bundles.config.safety, bundles)
    records = [experience(), experience(advantages=with_bad(NAN, (0, 1)))]
    policy.handle("actor", 4, BAD, lambda: FailureContext(records, {}))
    folder = tmp_path / "nonfinite/step_000004_rank_0"
    assert said == [
        "actor, step 4: the loss is not finite (rank 0, micro-batch 1); its update was skipped. "
        f"Replay: python -m dschat_ppo.tools.replay {folder}"
    ]
    what, [_, bad] = read_bundle(folder)
    assert what["role"] == "actor" and bad.advantages[0, 1].isnan()
    assert str(what["fault"]) == "{'kind': 'loss', 'micro_batch': 1, 'numbers': [[0.5, nan, 2.0]]}"


def test_an_output_folder_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    (tmp_path / "nonfinite").write_text("in the way")
    policy = NonFinitePolicy(SafetyFlags(), ppo_bundles(tmp_path))
    with pytest.raises(NonFiniteError, match="the loss is not finite.*no repro bundle: .*nonfinite cannot be written"):
        handle(policy, BAD)


def test_the_context_is_not_built_without_a_fault():
    policy = NonFinitePolicy(SafetyFlags())

    def context():
        raise AssertionError

    for result in (GOOD, OVERFLOW, SKIPPED):
        policy.handle("actor", 1, result, context)
    assert torch.equal(torch.tensor(list(policy.metrics("actor").values())), torch.tensor([0.0, 1.0]))
