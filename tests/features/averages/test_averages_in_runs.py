"""The moving average and the reference that follows the actor, in runs of step 3 on tiny models in
this process, and in a checkpoint."""

from dataclasses import replace

import pytest
import torch
from plain_ppo import EVERYTHING, PlainRun, started, stopped

AVERAGED = f"{EVERYTHING} --enable_ema --ema_decay 0.5"
SYNCED = (
    "--eval_data_path unused --eval_interval 2 --eval_batch_size 2 --ref_sync_interval 2"
    " --ref_sync_mixup 0.5"
)


@pytest.fixture(scope="module")
def synced(assets, tmp_path_factory):
    """(an uninterrupted run whose reference moves, what it did, its result)"""
    run, checkpointer, did = started(assets, tmp_path_factory.mktemp("synced"), SYNCED)
    return run, did, run.run(checkpointer)


def test_the_average_follows_each_update_of_the_actor(assets, tmp_path):
    run, checkpointer, did = started(assets, tmp_path / "run", AVERAGED)
    [average, _] = run.ppo.followers
    weights = run.ppo.engines.actor.module.lm.state_dict()
    expected = {name: weight.clone() for name, weight in weights.items()}

    def averaged() -> None:
        average.after_update()
        for name, weight in weights.items():
            expected[name].lerp_(weight, 0.5)

    run.ppo.followers[0] = replace(average, after_update=averaged)
    run.run(checkpointer)
    assert did.count("follow") == 8, "after the warm-up of the critic"
    for name, weight in average.weights.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_a_stopped_run_resumes_with_its_average(assets, tmp_path):
    run, checkpointer, did = started(assets, tmp_path / "whole", AVERAGED)
    result = run.run(checkpointer)
    *_, require_equal = stopped(assets, tmp_path, AVERAGED, position=(1, 3))
    assert any(name.startswith("actor_average.") for name in run.weights)
    require_equal((run, did, result))


def test_the_reference_moves_between_the_last_update_of_a_step_and_its_evaluation(synced, assets):
    """`test_loop.py` has the place of all that follows the actor."""
    run, _, _ = synced
    _, first, second, third = run.lines
    assert "kl/reference_moved" not in first | third and second["kl/reference_moved"] > 0
    before = PlainRun(assets, run.folder.parent / "fixed", SYNCED.split(" --ref_sync")[0])
    before.run()
    assert second["kl/ref_k1"] == before.lines[2]["kl/ref_k1"] > 0, (
        "of the rows that were sampled before"
    )
    assert third["kl/ref_k1"] < 0.8 * before.lines[3]["kl/ref_k1"]


def test_a_stopped_run_resumes_with_the_reference_where_it_was(assets, tmp_path, synced):
    *_, after, require_equal = stopped(assets, tmp_path, SYNCED, position=(2, 2))
    require_equal(synced)
    references = [run.ppo.engines.reference.state_dict() for run in (after, synced[0])]
    assert all(torch.equal(references[0][name], weight) for name, weight in references[1].items())


def test_what_was_off_when_the_checkpoint_was_saved_starts_from_the_weights_of_now(
    assets, tmp_path, said
):
    before = PlainRun(assets, tmp_path / "run")
    before.run()
    before.save(tmp_path / "saved")
    words = "--enable_ema --ref_sync_interval 2"
    after, _, _ = started(assets, tmp_path / "other", words, tmp_path / "saved")
    for flag in ("--enable_ema", "--ref_sync_interval"):
        assert any(f"{flag}: was off when the checkpoint was saved" in line for line in said)
    average = after.weights
    for name, weight in before.ppo.engines.actor.module.lm.state_dict().items():
        assert torch.equal(average[f"actor_average.{name}"], weight), name
