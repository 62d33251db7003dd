"""Numbers that are not finite: found, skipped, stopped at, dumped."""

import json
import math
import shutil
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from dschat_ppo.config.cli import parse
from dschat_ppo.config.safety_flags import SafetyFlags
from dschat_ppo.engine.skip_update import Fault, StepResult, gradient_fault, loss_fault
from dschat_ppo.errors import NonFiniteError, UserError
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite.find import bad_places
from dschat_ppo.nonfinite.policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import FailureContext, ReproBundles, read_bundle
from dschat_ppo.types import Experience, ScoredRollout

NAN, INF = math.nan, math.inf
FAULT = Fault("loss", 0, 1, [[0.5, NAN, 2.0]], [])
BAD = StepResult(INF, applied=False, fault=FAULT)
GOOD = StepResult(1.0, applied=True)
OVERFLOW = StepResult(INF, applied=False, overflow=True)
LEFT_OUT = StepResult(INF, applied=False)


def experience(**changes) -> Experience:
    """Three answers of 3, 0 and 1 tokens."""
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, False]])
    numbers = {name: torch.zeros(3, 3) for name in (
        "rollout_logprobs", "old_logprobs", "ref_logprobs", "kl", "values", "rewards", "advantages", "returns",
        "loss_weights",
    )}  # fmt: skip
    made = {
        "prompt_ids": torch.tensor([[0, 7], [8, 9], [5, 6]]),
        "prompt_mask": torch.tensor([[False, True], [True, True], [True, True]]),
        "response_ids": torch.arange(9).view(3, 3), "response_mask": mask, "loss_mask": mask,
        "finish_reason": torch.zeros(3, dtype=torch.int8), "entropies": None, "selected": None, "baselines": None,
        "source_scores": torch.zeros(3, 2), "scores": torch.tensor([1.0, 2.0, 3.0]), "groups": torch.arange(3),
        **numbers,
    }  # fmt: skip
    return Experience(**{**made, **changes})


def scored(**changes) -> ScoredRollout:
    made = experience(**changes)
    return ScoredRollout(**{field.name: getattr(made, field.name) for field in fields(ScoredRollout)})


def with_bad(value: float, *places: tuple[int, ...], shape=(3, 3)) -> torch.Tensor:
    made = torch.zeros(shape)
    for place in places:
        made[place] = value
    return made


# Finding


def test_bad_places_are_those_inside_the_mask():
    assert bad_places(experience()) == {}
    found = bad_places(experience(
        advantages=with_bad(NAN, (0, 2), (0, 1), (2, 1)),  # the last is outside
        values=with_bad(-INF, (1, 0)),  # of an empty answer
        scores=torch.tensor([1.0, INF, NAN]),
        source_scores=with_bad(NAN, (0, 0), shape=(3, 2)),  # may have a weight of 0
    ))  # fmt: skip
    assert found == {"advantages": [[0, 1], [0, 2]], "scores": [[1], [2]]}


def test_the_first_bad_loss_is_named_with_all_losses():
    assert loss_fault(torch.tensor([0.5, -3.0, 0.0]), []) is None
    fault = loss_fault(torch.tensor([0.5, INF, NAN]), [])
    assert (fault.kind, fault.rank, fault.micro_batch) == ("loss", 0, 1)
    assert str(fault.numbers) == "[[0.5, inf, nan]]"
    assert loss_fault(torch.tensor([0.5, -INF]), []) is not None


def test_a_gradient_is_bad_itself_or_only_in_its_norm():
    bad, large = gradient_fault(torch.tensor([9.0, 0.5, NAN]), []), gradient_fault(torch.tensor([1.0, 3e38, 2.0]), [])
    assert (bad.kind, bad.micro_batch) == ("gradient", 2)
    assert (large.kind, large.micro_batch) == ("norm", 1)


# Stopping and counting


def judged(guard: NonFinitePolicy, *results: StepResult, role: str = "actor") -> None:
    for step, result in enumerate(results, start=1):
        guard.judge(role, step, result, lambda: FailureContext([], {}))


def test_stop_names_role_step_rank_and_micro_batch():
    guard = NonFinitePolicy(SafetyFlags())
    judged(guard, GOOD, OVERFLOW, LEFT_OUT)
    with pytest.raises(NonFiniteError, match=r"critic, step 1: the loss is not finite \(rank 0, micro-batch 1\)"):
        judged(guard, BAD, role="critic")


def test_skips_in_a_row_are_counted_for_each_role():
    guard = NonFinitePolicy(SafetyFlags(on_nonfinite="skip", max_nonfinite_skips=2))
    judged(guard, BAD, BAD, GOOD, BAD, BAD)
    judged(guard, BAD, GOOD, BAD, role="critic")
    assert guard.metrics("actor")["nonfinite/skipped"] == 6
    judged(guard, OVERFLOW, LEFT_OUT)  # neither good nor bad
    with pytest.raises(NonFiniteError, match="; 3 were left out in a row"):
        judged(guard, BAD)


def test_a_resumed_run_goes_on_counting():
    flags = SafetyFlags(on_nonfinite="skip", max_nonfinite_skips=2)
    first, second = NonFinitePolicy(flags), NonFinitePolicy(flags)
    judged(first, OVERFLOW, BAD, BAD)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.metrics("actor", "critic") == {"nonfinite/skipped": 2, "overflow/actor": 1, "overflow/critic": 0}
    with pytest.raises(NonFiniteError, match="; 3 were left out in a row"):
        judged(second, BAD)


# Dumping


def dumps_of(tmp_path, *words: str) -> ReproBundles:
    flags = [
        "--actor_model_name_or_path",
        "a",
        "--critic_model_name_or_path",
        "c",
        "--data_path",
        "d",
        "--output_dir",
        str(tmp_path),
    ]
    return ReproBundles("ppo", parse("ppo", [*flags, *words]), SimpleNamespace())


def test_a_dump_is_read_back_as_it_was(tmp_path):
    rows = experience(advantages=with_bad(NAN, (0, 1)))
    state = [torch.get_rng_state()]
    folder = dumps_of(tmp_path).write(
        12, 0, FailureContext([rows, rows], {"x": INF}, random_state=state), {"role": "actor"}
    )
    assert folder == str(tmp_path / "nonfinite/step_000012_rank_0")
    what, records, states = read_bundle(tmp_path / "nonfinite/step_000012_rank_0")
    assert (what["step"], what["rank"], what["role"], what["constants"]) == (12, 0, "actor", {"x": "inf"})
    assert len(records) == 2
    for name, value in vars(rows).items():
        if value is None:
            assert getattr(records[1], name) is None
        else:
            assert torch.equal(value.nan_to_num(7.5), getattr(records[1], name).nan_to_num(7.5)), name
    assert torch.equal(states[0], state[0])


def test_the_newest_dumps_are_kept(tmp_path):
    dumps = dumps_of(tmp_path, "--max_nonfinite_skips", "2")
    names = [dumps.write(step, 0, FailureContext([experience()], {}), {}).split("/")[-1] for step in (3, 3, 4, 5)]
    assert names == ["step_000003_rank_0", "step_000003_rank_0_2", "step_000004_rank_0", "step_000005_rank_0"]
    assert sorted(path.name for path in (tmp_path / "nonfinite").iterdir()) == names[1:]


def test_an_output_that_cannot_be_written_does_not_hide_the_fault(tmp_path):
    (tmp_path / "nonfinite").write_text("in the way")
    guard = NonFinitePolicy(SafetyFlags(), dumps_of(tmp_path))
    with pytest.raises(NonFiniteError, match="the loss is not finite.*no dump: .*nonfinite cannot be written"):
        judged(guard, BAD)


def test_a_disk_that_is_too_full_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**24))
    assert "has 16777216 bytes left" in dumps_of(tmp_path).write(1, 0, FailureContext([experience()], {}), {})
    assert not list((tmp_path / "nonfinite").iterdir())


@pytest.mark.parametrize("damage", ["what.json", "batch.safetensors", "newer"])
def test_half_dumps_and_newer_ones_are_refused(tmp_path, damage):
    folder = tmp_path / "nonfinite/step_000001_rank_0"
    dumps_of(tmp_path).write(1, 0, FailureContext([experience()], {}), {})
    if damage == "newer":
        (folder / "what.json").write_text((folder / "what.json").read_text().replace('"format": 1', '"format": 2'))
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:-9])
    with pytest.raises(UserError, match="newer version" if damage == "newer" else "no whole dump"):
        read_bundle(folder)


def test_a_dump_that_made_room_for_newer_ones_is_missed(tmp_path):
    with pytest.raises(UserError, match="there is no such folder; of the dumps the newest are kept"):
        read_bundle(tmp_path / "nonfinite/step_000001_rank_0")


# Metrics


def test_metrics_of_an_update_are_merged_and_picked():
    total, part = MetricSums(), MetricSums()
    for sums, values in ((total, [1.0, 2.0]), (part, [6.0])):
        sums.add_mean("mean", torch.tensor(values))
        sums.add_max("largest", torch.tensor(values))
    part.add_mean("other", torch.tensor([4.0]))
    total.merge(part)
    assert total.reduce() == {"mean": 3.0, "other": 4.0, "largest": 6.0}
    assert part.only("largest").reduce() == {"largest": 6.0}
    assert part.only("other").reduce() == {"other": 4.0}
