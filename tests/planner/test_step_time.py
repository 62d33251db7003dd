"""Times of steps, by hand arithmetic."""

from dataclasses import replace

import pytest
from planned_role import PARTS, role

from dschat_ppo.planner import step_time
from dschat_ppo.planner.hardware import HARDWARE

GPU = replace(
    HARDWARE["h100"], flops=1000.0, fp32_flops=100.0, utilisation=0.5, bandwidth=200.0, decode_share=0.5, link=10.0,
    host_link=5.0, step_seconds=1.0,
)  # fmt: skip


def test_flops_of_passes():
    assert step_time.pass_flops(role(), 10, 6, 3) == 3 * 10 * (2 * 700 + 2 * 16 * 6)


def test_an_update_costs_three_passes_and_less_with_frozen_weights():
    assert step_time.update_passes(role()) == 3
    assert step_time.update_passes(role(checkpoints=True)) == 4
    assert step_time.update_passes(replace(role(), parts=replace(PARTS, trained=100))) == pytest.approx(2.1)


def test_seconds_of_compute_depend_on_the_dtype():
    assert step_time.compute_seconds(5000, role(), GPU) == 10
    assert step_time.compute_seconds(5000, role(dtype="fp32"), GPU) == 100


def test_gathers():
    assert step_time.gather_seconds(role(2), GPU, 6) == 0
    assert step_time.gather_seconds(role(3), GPU, 6) == pytest.approx(6 * 2000 * 3 / 4 / 10)
    assert step_time.gather_seconds(role(3, kept_whole=True), GPU, 6, 2) == pytest.approx(2 * 2000 * 3 / 4 / 10)
    assert step_time.gather_seconds(role(3, kept_whole=True), GPU, 6) == 0  # frozen: whole since the start
    offloaded = step_time.gather_seconds(role(3, offloads_weights=True), GPU, 1)
    assert offloaded == pytest.approx(2000 * 3 / 4 / 10 + 500 / 5)


def test_an_update_of_the_optimizer():
    once, states = 2000 * 3 / 4 / 10, 250 * 28 / 200
    for stage, moved in ((1, 2 * 2 + 1), (2, 3 * 2 + 1), (3, 3)):  # 3 micro-batches
        assert step_time.optimizer_seconds(role(stage), GPU, 3) == pytest.approx(moved * once + states), stage
    assert step_time.optimizer_seconds(role(0, "fp32"), GPU, 3) == pytest.approx(2 * 2 * once + 4 * states)
    offloaded = step_time.optimizer_seconds(role(2, offloads_optimizer=True), GPU, 1)
    reduced = 3 * once
    assert offloaded == pytest.approx(reduced + 250 * 28 / step_time.HOST_BANDWIDTH + 250 * 6 / 5)


def test_decoding_reads_weights_and_cache_for_each_token():
    read = (2 * 700 + 64 * 1 * (10 + 4 / 2)) / 100
    assert step_time.decode_seconds(role(3), GPU, 1, 10, 4, by_layer=False) == pytest.approx(4 * (read + 1))
    gathered = 1400 * 3 / 4 / 10
    by_layer = step_time.decode_seconds(role(3), GPU, 1, 10, 4, by_layer=True)
    assert by_layer == pytest.approx(4 * (read + 1 + gathered))
    slow = replace(GPU, flops=10.0)  # then arithmetic is the limit
    computed = (2 * 700 + 2 * 16 * 14) / 5
    assert step_time.decode_seconds(role(3), slow, 1, 10, 4, by_layer=False) == pytest.approx(4 * (computed + 1))


def test_the_models_that_score():
    assert step_time.scored_roles("update") == ("reference", "reward")
    assert "actor" in step_time.scored_roles("recompute") and "actor" not in step_time.scored_roles("rollout")
