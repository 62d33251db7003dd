"""The planner counts what sleeps, and proposes sleep where it helps."""

from planned_runs import CHECKPOINTING, STAGE_3, held, plan_ppo


def test_sleep_frees_the_device_in_a_rollout_and_keeps_host_memory():
    awake, asleep = (
        plan_ppo(f"{STAGE_3} {CHECKPOINTING}"),
        plan_ppo(f"{STAGE_3} {CHECKPOINTING} --sleep_in_rollout"),
    )
    size = held(awake, "rollout", "critic", "optimizer")
    found = [
        [held(asleep, phase, "critic", "optimizer", place) for place in (False, True)]
        for phase in ("rollout", "actor update", "checkpoint")
    ]
    assert found == [[0, size], [size, size], [size, size]]
    weights = [held(asleep, "rollout", "actor", "weights", place) for place in (False, True)]
    assert weights == [held(awake, "rollout", "actor", "weights"), 0]
    assert held(asleep, "rollout", "reward", "weights", True) == held(
        awake, "rollout", "reward", "weights"
    )
