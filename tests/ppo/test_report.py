"""Metrics of the updates of a PPO step, its figures for trackers, and the contents of `result.json`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_mini_dataset import LENGTHS, experience

from dschat_ppo.common import dist
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.ppo.report import PPOReport, update_metrics
from dschat_ppo.ppo.state import PPOState

TOKENS = sum(LENGTHS) + sum(row % 3 + 1 for row in range(8))
FIRST = {"policy/first_log_ratio_abs_mean": 0.5, "policy/first_log_ratio_abs_max": 2.0, "policy/entropy": 1.0}


def parts(source="rollout", steps=3, applied=3, epochs=2, warmup=3) -> SimpleNamespace:
    state = PPOState(steps=steps, applied=applied)
    rows = experience(range(8))
    state.experience = replace(rows, rollout_logprobs=rows.old_logprobs + 0.25 * rows.response_mask)
    config = SimpleNamespace(ppo=SimpleNamespace(ppo_epochs=epochs))
    plan = SimpleNamespace(warmup_rollouts=warmup, global_batch=4, ppo_steps=5)
    return SimpleNamespace(
        state=state, config=config, plan=plan, clock=PhaseClock(), old_logprobs=source, data_sources=()
    )


def test_drift_is_that_of_the_first_update_where_log_probs_are_recorded():
    found = update_metrics(parts(), FIRST)
    assert found == {
        "rollout/logprob_diff_mean": 0.5, "rollout/logprob_diff_max": 2.0, "policy/updates_done_share": 0.75,
    }  # fmt: skip
    assert update_metrics(parts(), {}) == {"policy/updates_done_share": 0.75}


def test_drift_is_over_all_tokens_where_log_probs_are_recomputed():
    found = update_metrics(parts(source="recompute"), FIRST)
    assert (found["rollout/logprob_diff_mean"], found["rollout/logprob_diff_max"]) == pytest.approx((0.25, 0.25))


def test_old_log_probs_of_the_update_give_drift_and_kl():
    ppo = parts(source="update")
    rows = ppo.state.experience
    ppo.state.experience = replace(rows, ref_logprobs=rows.old_logprobs - 0.5 * rows.response_mask)
    found = update_metrics(ppo, FIRST)
    assert (found["rollout/logprob_diff_mean"], found["rollout/logprob_diff_max"]) == pytest.approx((0.25, 0.25))
    assert found["kl/ref_k1"] == pytest.approx(0.5)
    ppo.state.experience = replace(rows, old_logprobs=None)
    assert update_metrics(ppo, FIRST) == {"policy/updates_done_share": 0.75}, "no pass of the actor: the warm-up"


def test_tokens_of_training_are_counted_for_this_rank(monkeypatch):
    ppo = parts()
    update_metrics(ppo, FIRST)
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    other = parts()
    update_metrics(other, FIRST)
    assert (ppo.clock.take()[1], other.clock.take()[1]) == ({"train": 2 * TOKENS}, {"train": TOKENS})


def report_of(state: PPOState, evaluation=None) -> PPOReport:
    return PPOReport(SimpleNamespace(state=state, plan=SimpleNamespace(ppo_steps=5)), evaluation, None, None)


def test_the_result_compares_the_first_step_with_the_last():
    first = {"reward/score_mean": 1.0, "policy/loss": 2.0, "eval/score": 9.0, "kl/ref_k1": 0.5}
    last = {
        "reward/score_mean": 3.0,
        "policy/loss": 4.0,
        "eval/score": 0.5,
        "eval/pass@1": 0.25,
        "reward/total_mean": 1.0,
    }
    state = PPOState(steps=5, first=first, last=last, evaluated={"eval/score": 0.125})
    assert report_of(state).result() == {
        "reward/score_mean_before": 1.0, "reward/score_mean_after": 3.0,
        "eval/score_before": 0.125, "eval/score_after": 0.5,
    }  # fmt: skip
    found = report_of(state, SimpleNamespace(best=(0.75, 4))).result()
    assert (found["best_eval_score"], found["best_step"]) == (0.75, 4)
    assert "best_step" not in report_of(state, SimpleNamespace(best=None)).result()


def test_the_model_is_evaluated_once_before_training():
    class Evaluation:
        best = None

        def require_best_models(self, before):
            assert before == dict(state.evaluated)

        def is_due(self, step, last_step):
            assert (step, last_step) == (0, 5)
            return True

        def run(self, step):
            modes.append("run")
            return {"eval/score": 1.0}

    state, modes, written = PPOState(), [], []
    ppo = SimpleNamespace(
        state=state, plan=SimpleNamespace(ppo_steps=5), clock=PhaseClock(),
        engines=SimpleNamespace(eval=lambda: modes.append("eval")),
    )  # fmt: skip
    writer = SimpleNamespace(write=lambda step, metrics: written.append((step, metrics)))
    for _ in range(2):
        PPOReport(ppo, Evaluation(), None, writer).evaluate_before_training()
    assert modes == ["eval", "run"] and written == [(0, {"eval/score": 1.0})]
    assert set(ppo.clock.take()[0]) == {"evaluate"}
