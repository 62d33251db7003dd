"""`--on_nonfinite`: stop at the first failure, or skip a limited number of updates in a row. Rows
of a PPO step with a number that is not finite reach no update. Repro bundles are written, read
back, bounded in number, refused if damaged."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_experience import experience, ppo_bundles, with_bad

from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.engine.optimizer_step import Fault, StepResult
from dschat_ppo.errors import NonFiniteError, StorageError, UserError
from dschat_ppo.models.backbone import Layout
from dschat_ppo.nonfinite import NonFinitePolicy, bad_rows
from dschat_ppo.tools.replay_bundle import read_bundle
from dschat_ppo.types import tensors_of

NAN, INF = math.nan, math.inf
BAD = StepResult(INF, applied=False, fault=Fault("loss", 0, 1, [[0.5, NAN, 2.0]], []))
GOOD = StepResult(1.0, applied=True)
OVERFLOW = StepResult(INF, applied=False, overflow=True)
SKIPPED = StepResult(INF, applied=False)


def policy_of(how: str = "skip", most: int = 1, bundles=None) -> NonFinitePolicy:
    return NonFinitePolicy(SafetyFlags(on_nonfinite=how, max_nonfinite_skips=most), bundles)


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


def test_a_stop_and_a_skip_name_the_place_and_the_replay_command(said):
    bundles = SimpleNamespace(write=lambda *given: f"nonfinite/{given[0]}_{given[1]}")
    with pytest.raises(
        NonFiniteError,
        match=r"^critic, step 3: the loss is not finite \(rank 0, micro-batch 1\); .* Rep",
    ):
        handle(policy_of("stop", bundles=bundles), OVERFLOW, SKIPPED, BAD, role="critic")
    handle(policy_of(bundles=bundles), BAD)
    assert said == [
        "actor, step 1: the loss is not finite (rank 0, micro-batch 1); its update was skipped. "
        "Replay: python -m dschat_ppo.tools.replay nonfinite/actor_1"
    ]


def test_an_output_folder_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    (tmp_path / "nonfinite").write_text("in the way")
    with pytest.raises(
        NonFiniteError,
        match="the loss is not finite.*no repro bundle: .*nonfinite: cannot be written",
    ):
        handle(policy_of("stop", bundles=ppo_bundles(tmp_path)), BAD)


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


FAULT = Fault("loss", 0, 1, [[0.5, NAN, 2.0]], [torch.get_rng_state()])


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("dschat_ppo.nonfinite.save_model", lambda *_: None)


def write(bundles, step=1, records=(), **constants) -> Path:
    engine = SimpleNamespace(
        module=SimpleNamespace(layout=Layout(packed=True)), fp16_enabled=lambda: False
    )
    return bundles.write("actor", step, FAULT, engine, list(records), constants)


def test_a_bundle_round_trips(no_model, tmp_path):
    rows = experience(advantages=with_bad(NAN, (0, 1)))
    folder = write(ppo_bundles(tmp_path), 12, [rows, rows], x=INF)
    assert folder == tmp_path / "nonfinite/step_000012_rank_0"
    what, records = read_bundle(folder)
    assert (what["step"], what["role"], what["constants"]) == (12, "actor", {"x": INF})
    assert (what["fault"], what["layout"]["packed"]) == (
        "the loss is not finite (rank 0, micro-batch 1)",
        True,
    )
    columns = tensors_of(records[1])
    assert columns.keys() == tensors_of(rows).keys()
    for name, value in tensors_of(rows).items():
        assert torch.equal(value.nan_to_num(7.5), columns[name].nan_to_num(7.5)), name
    assert torch.equal(what["random_state"][0], FAULT.random_state[0])


def test_the_newest_bundles_are_kept(no_model, tmp_path):
    bundles = ppo_bundles(tmp_path, "--max_nonfinite_skips", "2")
    names = [write(bundles, step).name for step in (3, 3, 4, 5)]
    assert names == [
        "step_000003_rank_0",
        "step_000003_rank_0_2",
        "step_000004_rank_0",
        "step_000005_rank_0",
    ]
    assert sorted(path.name for path in (tmp_path / "nonfinite").iterdir()) == names[1:]


def test_a_bundle_that_cannot_be_saved_is_one_error(no_model, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("dschat_ppo.nonfinite.save_state", full)
    with pytest.raises(StorageError, match="no space left on device"):
        write(ppo_bundles(tmp_path))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("cut", "bundle.pt: cannot be loaded"),
        ("bundle.pt", "bundle.pt is missing or not a file"),
        ("config.yaml", "config.yaml is missing or not a file"),
    ],
)
def test_damaged_bundles_are_refused(no_model, tmp_path, damage, problem):
    folder = write(ppo_bundles(tmp_path))
    if damage == "cut":
        (folder / "bundle.pt").write_bytes((folder / "bundle.pt").read_bytes()[:-9])
    else:
        (folder / damage).unlink()
    with pytest.raises(UserError, match=problem):
        read_bundle(folder)
    with pytest.raises(UserError, match="is missing or not a file.; a run keeps its newest"):
        read_bundle(tmp_path / "nonfinite/step_000002_rank_0")
