"""The real loop of step 3 on tiny models, in this process. The behaviours that are locked here:

1. A PPO step takes prompts, generates, rewards, scores, adds the rows, computes advantages, and
   then updates. An evaluation comes before the first step and at its interval. After each update
   and each step there is a point where a checkpoint may be saved (`test_the_order_of_a_run`).
2. Actor and critic train in the same update; in the critic's warm-up the critic trains alone.
   What follows the actor moves once for each update of the actor (`test_the_order_of_a_run`).
3. A line of metrics belongs to each PPO step. The first update of a step has a ratio of 1; the
   coefficients of KL and entropy adapt from one step to the next, and not in the warm-up
   (`test_the_metrics_of_a_run`).
4. A run on the CPU of a machine with GPUs calls no function of `torch.cuda` (the fixture `whole`).
5. A run that is stopped at a save point and resumed equals the whole run to the last bit: events,
   metrics, weights, result. That holds between steps, inside a step, and behind a step's last
   update (`test_a_run_that_is_stopped_and_resumed_equals_the_whole_run`).
6. A stop during a rollout discards the rollout; the resumed run samples it again
   (`test_a_stop_during_a_rollout_discards_it_and_the_resumed_run_samples_it_again`).
7. A limit on KL or on the log-ratio ends the updates of its own step alone, and a resumed run makes
   no further update in that step.
8. What follows the actor from step to step moves after the last update of a step and before its
   evaluation (`test_the_order_of_a_run`).
9. Numbers that are not finite stop the run by default. With `--on_nonfinite skip` the step makes no
   update, and counts; a skipped update of the actor changes neither what follows it nor metrics nor
   the entropy coefficient.
10. A resumed run in another output folder looks for its best model again.
    `--early_stop_patience` ends a run after evaluations that do not improve the best score.
11. A trace of a step is kept if the run stops inside the step.
"""

import inspect
import math
import sys

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from plain_ppo import EVERYTHING, STEPS, UPDATES, PlainRun, StopAt, started, stopped

from dschat_ppo.checkpoint.manager import capture_rng_state
from dschat_ppo.engine.optimizer_step import random_state as optimizer_random_state
from dschat_ppo.errors import NonFiniteError, StopRequested, UserError
from dschat_ppo.monitor.step_trace import StepTrace
from dschat_ppo.rewards.reward_source import CallCounts

WHOLE = [f"evaluate {step} eval" for step in range(STEPS + 1)]
SKIP = "--on_nonfinite skip --max_nonfinite_skips 9"


def update_events(step: int, number: int) -> list:
    """One update of actor and critic, or of the critic alone in the warm-up, and the save point
    after it."""
    done = (
        [(step, "critic", "train")] if step == 1 else [(step, "actor", "critic", "train"), "follow"]
    )
    return [*done, ("save_if_due", (step - 1, number), False)]


def refuse_cuda_calls(patch: pytest.MonkeyPatch) -> None:
    """No code of the package may call a function of `torch.cuda`."""

    def refusing(name, function):
        def noted(*arguments, **named):
            caller = sys._getframe(1).f_code
            assert "/dschat_ppo/" not in caller.co_filename, f"{name} in {caller.co_name}"
            return function(*arguments, **named)

        return noted

    for name, value in vars(torch.cuda).items():
        if inspect.isfunction(value):
            patch.setattr(torch.cuda, name, refusing(name, value))


@pytest.fixture(scope="module")
def whole(assets, tmp_path_factory):
    """(an uninterrupted run, what it did, its result). It is on the CPU of a machine with GPUs, and
    asks none."""
    run, checkpointer, did = started(assets, tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        refuse_cuda_calls(patch)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return run, did, run.run(checkpointer)


def test_the_order_of_a_run(whole):
    expected = [WHOLE[0]]
    for step in range(1, STEPS + 1):
        expected += [
            "take 4",
            f"generate {step}",
            f"reward {step}",
            "score eval",
            "add",
            f"advantages {step}",
        ]
        expected += sum((update_events(step, number) for number in range(1, UPDATES + 1)), [])
        expected += [f"follow the actor of step {step}"] + [WHOLE[step]] * (step > 1)
        expected += [("save_if_due", (step, 0), step == 2)]
    assert whole[1] == expected


def test_the_metrics_of_a_run(whole):
    run, _, result = whole
    zero, first, second, third = run.lines
    assert [line["step"] for line in run.lines] == [0, 1, 2, 3]
    assert all(name.startswith("eval/") for name in zero if name != "step")
    assert [line.get("eval/score") for line in run.lines] == [1.0, None, 3.0, 2.0]
    assert (result["eval/score_before"], result["eval/score_after"]) == (1.0, 2.0)
    assert (result["best_eval_score"], result["best_step"]) == (3.0, 2) and run.saved_best == [
        (3.0, 2)
    ]
    assert result["reward/score_mean_before"] == first["reward/score_mean"]
    assert (
        result["reward/score_mean_after"]
        == third["reward/score_mean"]
        != first["reward/score_mean"]
    )
    assert (first["kl/coef"], second["kl/coef"]) == (
        0.1,
        0.1,
    ), "the policy does not move in the warm-up"
    # The coefficient of step 3 comes from the KL of step 2, which is 0: 0.1 (1 - 0.2 x 4 / 8).
    assert third["kl/coef"] == pytest.approx(0.09)
    assert [line["policy/entropy_coef"] for line in (first, second, third)] == [
        0.01,
        0.01,
        pytest.approx(0.015),
    ]
    assert {
        line[f"optim/lr/{role}"] for line in (first, second, third) for role in ("actor", "critic")
    } == {0.003}
    assert (
        "optim/grad_norm/actor" not in first
        and "policy/loss" not in first
        and first["optim/grad_norm/critic"] > 0
    )
    assert "policy/updates_done_share" not in first
    for line in (second, third):
        assert line["policy/updates_done_share"] == 1.0
        assert (
            0 <= line["policy/first_log_ratio_abs_mean"] < 1e-4 < line["policy/log_ratio_abs_mean"]
        )
        assert line["policy/first_log_ratio_abs_max"] < 1e-4 < line["policy/log_ratio_abs_max"]
        assert line["rollout/logprob_diff_mean"] == line["policy/first_log_ratio_abs_mean"]
        assert line["rollout/logprob_diff_max"] == line["policy/first_log_ratio_abs_max"]
    for line in (first, second, third):
        assert line["reward/function_faults"] == line["optim/nonfinite_skipped"] == 0


def test_random_states_on_the_cpu_of_a_machine_with_gpus_ask_none(monkeypatch):
    refuse_cuda_calls(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        capture_rng_state()
        optimizer_random_state()
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cuda")
    with pytest.raises(AssertionError, match="get_rng_state in random_state"):
        optimizer_random_state()


@pytest.mark.parametrize(
    "at",
    [(1, 4), (2, 0), *(pytest.param(at, marks=pytest.mark.release) for at in ((0, 1), (2, 3)))],
)
def test_a_run_that_is_stopped_and_resumed_equals_the_whole_run(assets, tmp_path, whole, at):
    """Position (1, 4) is behind the last update of a PPO step: the resumed run finishes the step
    without another."""
    before, _, after, require_equal = stopped(assets, tmp_path, position=at)
    assert (
        after.resumable.position == at
        and after.resumable.is_best is before.resumable.is_best is (at == (2, 0))
    )
    require_equal(whole)


def test_a_step_that_a_limit_has_ended_is_not_resumed_with_further_updates(assets, tmp_path):
    words = "--target_kl 0.0001"
    run, checkpointer, did = started(assets, tmp_path / "whole", words)
    *_, after, require_equal = stopped(assets, tmp_path, words, position=(0, 2))
    assert after.ppo.state.updates_ended
    require_equal((run, did, run.run(checkpointer)))


@pytest.mark.parametrize("at", [pytest.param((1, 0), marks=pytest.mark.release), (0, 2)])
def test_a_trace_is_kept_if_the_run_stops_after_the_step_or_inside(assets, tmp_path, at):
    run, checkpointer, _ = started(assets, tmp_path, position=at)
    with pytest.raises(StopRequested):
        run.run(checkpointer, trace=StepTrace(tmp_path, 1))
    assert len(list(tmp_path.glob("profile/step_1_*.gz"))) == 1


@pytest.mark.parametrize(
    ("question", "last"), [pytest.param(3, "generate 2", marks=pytest.mark.release), (4, "add")]
)
def test_a_stop_during_a_rollout_discards_it_and_the_resumed_run_samples_it_again(
    assets, tmp_path, whole, question, last
):
    before, did_before, _, require_equal = stopped(assets, tmp_path, question=question)
    assert did_before[-2:] == [last, ("save_if_due", (1, 0), False)]
    state, collection = before.ppo.state, before.ppo.collection
    assert (
        state.experience,
        collection.stream.taken,
        before.ppo.advantage_computation.running.count,
    ) == (
        None,
        4,
        4,
    )
    assert [line["step"] for line in before.lines] == [0, 1]
    del did_before[did_before.index("take 4", did_before.index("advantages 1")) :]
    require_equal(whole)


def test_rows_that_are_not_finite_make_no_update_but_a_step(assets, tmp_path):
    run, checkpointer, did = started(assets, tmp_path / "run", f"{EVERYTHING} {SKIP}")
    run.reward.bad_step = 2
    run.run(checkpointer)
    start = did.index("generate 2")
    tail = [
        "generate 2",
        "reward 2",
        "score eval",
        "add",
        "advantages 2",
        "follow the actor of step 2",
        WHOLE[2],
        ("save_if_due", (2, 0), True),
    ]
    assert did[start : start + len(tail)] == tail
    line = run.lines[2]
    assert (line["step"], line["eval/score"], line["optim/nonfinite_skipped"]) == (2, 3.0, 1)
    assert not any(
        name.startswith(("policy/", "reward/score", "optim/lr/", "kl/", "rollout/c"))
        for name in line
    )
    assert (
        run.lines[3]["policy/updates_done_share"] == 1.0
        and run.lines[3]["policy/entropy_coef"] == 0.01
    )


class Fails:
    """The reward of a run as a source whose calls fail: on all answers in some PPO steps, and on
    those with an odd second token in all."""

    name, spec, numbers, counts = "fails", "--reward_function fails", {}, CallCounts()
    kind = "the function"

    def __init__(self, run: PlainRun, steps=()):
        self.run, self.steps = run, steps

    def __call__(self, request, rollout):
        odd = rollout.response_ids[:, 1] % 2 == 1
        self.failed = odd | (self.run.ppo.state.steps + 1 in self.steps)
        return self.run.reward(request, rollout).masked_fill(self.failed, math.nan)

    def close(self):
        pass


def let_fail(run: PlainRun, *steps: int) -> None:
    run.ppo.collection.requests.mixture.sources = [(Fails(run, steps), 1.0)]


def test_a_run_in_which_answers_leave_is_resumed_exactly(assets, tmp_path):
    words = f"{EVERYTHING} --advantage_estimator gae"
    runs = []
    for name, position in (("whole", None), ("before", (1, 2)), ("after", None)):
        saved = tmp_path / "saved" if name == "after" else None
        run, checkpointer, _ = started(assets, tmp_path / "run", words, saved, position=position)
        let_fail(run)
        if name == "whole":
            result = run.run(checkpointer)
            lines = run.lines
        elif name == "before":
            with pytest.raises(StopRequested):
                run.run(checkpointer)
            assert 0 < int(run.ppo.state.experience.left_group.sum()) < 8
            run.save(tmp_path / "saved")
        else:
            length = (tmp_path / "run/metrics.jsonl").stat().st_size
            assert run.run(checkpointer, (length, 2)) == result
        runs.append(run)
    whole, _, after = runs
    assert after.lines == lines and 0 < lines[2]["rollout/left_share"] < 1
    for name, weight in whole.weights.items():
        assert torch.equal(after.weights[name], weight), name


def test_a_step_without_a_score_makes_no_update_and_three_in_a_row_end_the_run(assets, tmp_path):
    run, checkpointer, did = started(assets, tmp_path / "run")
    let_fail(run, 2)
    run.run(checkpointer)
    line = run.lines[2]
    assert line["rollout/left_share"] == 1 and "reward/score_mean" not in line
    assert not any(what[:1] == (2,) for what in did), "no update"
    assert run.lines[3]["policy/updates_done_share"] == 1.0

    words = "--num_train_epochs 2"
    run, checkpointer, _ = started(assets, tmp_path / "ends", words, position=(2, 0))
    let_fail(run, 1, 2, 3)
    with pytest.raises(StopRequested):
        run.run(checkpointer)
    run.save(tmp_path / "saved")
    resumed, checkpointer, _ = started(assets, tmp_path / "ends", words, tmp_path / "saved")
    let_fail(resumed, 3)
    with pytest.raises(
        UserError, match="PPO step 3: no answer has a score, .* third step in a row"
    ):
        resumed.run(checkpointer)


@pytest.mark.parametrize(
    ("flag", "applied"), [("--target_kl 0.0001", 2), ("--max_log_ratio 0.001", 1)]
)
def test_a_limit_ends_the_updates_of_its_step_alone(assets, tmp_path, flag, applied):
    """The first update starts from the sampling policy; the second one measures what the first has
    moved, and is applied or, beyond the second limit, not."""
    run, checkpointer, did = started(assets, tmp_path / "run", flag)
    run.run(checkpointer)
    assert [sum(what[:1] == (step,) for what in did) for step in (1, 2, 3)] == [2, 2, 2]
    assert did.count("follow") == 3 * applied
    assert checkpointer.passed[:3] == [((0, 1), False), ((0, 2), False), ((1, 0), False)]
    assert [line["policy/updates_done_share"] for line in run.lines] == [applied / 4] * 3
    within = [line["policy/log_ratio_abs_max"] < 0.001 for line in run.lines]
    assert within == [applied == 1] * 3, "metrics of applied updates alone"


def spoil_gradients(run: PlainRun, is_bad) -> None:
    """The actor's gradients are NaN where `is_bad(PPO step, number of the update)`."""
    state = run.ppo.state
    weight = run.ppo.engines.actor.module.lm.model.norm.weight
    weight.register_hook(
        lambda g: g * math.nan if is_bad(state.steps + 1, state.updates + 1) else g
    )


def test_an_update_of_the_actor_that_is_skipped_leaves_followers_and_metrics_alone(
    assets, tmp_path
):
    run, checkpointer, did = started(assets, tmp_path / "run", SKIP)
    spoil_gradients(run, lambda step, update: (step, update) == (2, 1))
    run.run(checkpointer)
    assert did.count("follow") == 11
    after = did.index((2, "actor", "critic", "train")) + 1
    assert did[after] == ("save_if_due", (1, 1), False) and did[after + 1] != "follow"
    assert [line["policy/updates_done_share"] for line in run.lines] == [1.0, 0.75, 1.0]
    assert (
        run.lines[1]["optim/nonfinite_skipped"] == 1
        and "policy/first_log_ratio_abs_mean" not in run.lines[1]
    )
    assert "rollout/logprob_diff_mean" not in run.lines[1] and run.lines[1]["policy/loss"] != 0


def test_updates_of_the_critic_alone_do_not_adapt_the_entropy_coefficient(assets, tmp_path):
    run, checkpointer, did = started(assets, tmp_path / "run", f"--entropy_target 9 {SKIP}")
    spoil_gradients(run, lambda step, _: step == 1)
    run.run(checkpointer)
    first, second, third = run.lines
    assert (first["policy/updates_done_share"], first["optim/nonfinite_skipped"]) == (0.0, 4)
    assert (
        not {"policy/entropy", "optim/grad_norm/actor"} & set(first)
        and first["optim/grad_norm/critic"] > 0
    )
    assert [line["policy/entropy_coef"] for line in (first, second, third)] == [0.0, 0.0, 0.005]
    assert did.count("follow") == 8 and did.index("follow") > did.index(
        (2, "actor", "critic", "train")
    )


@pytest.mark.parametrize(
    ("words", "folder", "best"),
    [
        ("", "other", (2.0, 3)),
        pytest.param("", "run", (3.0, 2), marks=pytest.mark.release),
        pytest.param("--save_best False", "other", (3.0, 2), marks=pytest.mark.release),
    ],
)
def test_best_models_that_another_output_folder_does_not_hold_are_looked_for_again(
    assets, tmp_path, said, words, folder, best
):
    """Scores are 1 before training, and 3 and 2 after PPO steps 2 and 3."""
    words = f"--eval_data_path unused --eval_interval 2 {words}"
    before = PlainRun(assets, tmp_path / "run", words)
    with pytest.raises(StopRequested):
        before.run(StopAt(before, (2, 0)))
    before.save(tmp_path / "saved")
    after, checkpointer, _ = started(assets, tmp_path / folder, words, tmp_path / "saved")
    size = (tmp_path / "run/metrics.jsonl").stat().st_size if folder == "run" else 0
    result = after.run(checkpointer, (size, 3))
    assert (result["best_eval_score"], result["best_step"]) == best
    assert after.saved_best == ([best] if best == (2.0, 3) else [])
    assert sum("does not hold the models of step 2" in line for line in said) == (best == (2.0, 3))


@pytest.mark.parametrize(("patience", "steps"), [(1, 1), (2, 3)])
def test_a_run_ends_after_evaluations_that_do_not_improve_and_a_resumed_one_does_no_more(
    assets, tmp_path, said, patience, steps
):
    """Scores are 1 before training, and 0.5, 3 and 2 after PPO steps 1, 2 and 3."""
    words = f"--eval_data_path unused --eval_interval 1 --early_stop_patience {patience}"
    before = PlainRun(assets, tmp_path / "run", words)
    result = before.run()
    assert [line["eval/score"] for line in before.lines] == [1.0, 0.5, 3.0, 2.0][: steps + 1]
    assert (result["ppo_steps"], result["optimizer_steps"]) == (steps, steps * UPDATES)
    before.save(tmp_path / "saved")
    after = PlainRun(assets, tmp_path / "run", words)
    after.load(tmp_path / "saved")
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    assert after.run(resumed=(length, steps + 1)) == result and after.lines == before.lines
    reasons = [line for line in said if line.startswith("--early_stop_patience 1: the run ends")]
    assert len(reasons) == (2 if steps < STEPS else 0)
    assert result.get("early_stop") == (reasons[0] if reasons else None)


def test_rows_that_are_not_finite_stop_the_run_by_default(assets, tmp_path):
    run = PlainRun(assets, tmp_path / "run")
    run.reward.bad_step = 1
    with pytest.raises(NonFiniteError, match="PPO step 1: scores of 1 of 4 answers are not finite"):
        run.run()
    assert run.lines == []
