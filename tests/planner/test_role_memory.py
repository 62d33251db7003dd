"""What a model holds and what its passes need, by hand arithmetic."""

from dataclasses import replace

import pytest
import torch
from one_rank import one_rank  # noqa: F401
from planned_role import PARTS, role
from torch import nn

from dschat_ppo.config.memory_flags import MemoryFlags
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.planner import role_memory
from dschat_ppo.planner.role_memory import Memory

MIB = 2**20
SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)


@pytest.mark.parametrize(("stage", "dtype", "size"), [
    (0, "bf16", 2000), (2, "fp16", 2000), (0, "fp32", 4000), (3, "bf16", 500), (3, "fp32", 1000),
])  # fmt: skip
def test_weights(stage, dtype, size):
    assert role_memory.weights(role(stage, dtype)) == Memory(size)


def test_offloaded_weights_are_in_host_memory():
    assert role_memory.weights(role(3, offloads_weights=True)) == Memory(0, 500)
    assert role_memory.gathered_layer_by_layer(role(3, offloads_weights=True)) == Memory(2000)


@pytest.mark.parametrize(("stage", "dtype", "size"), [
    (1, "bf16", 12 * 250), (2, "bf16", 12 * 250), (3, "bf16", 12 * 250), (0, "fp32", 8 * 1000), (2, "fp32", 12 * 250),
])  # fmt: skip
def test_optimizer_states(stage, dtype, size):
    assert role_memory.optimizer(role(stage, dtype)) == Memory(size)


def test_an_offloaded_optimizer_has_gradients_and_buffers_there_too():
    buffer = 4 * 300  # of the largest parameter, in fp32
    below = role_memory.optimizer(role(2, offloads_optimizer=True))
    assert below == Memory(buffer, 250 * (12 + 4 + 2) + buffer)
    assert role_memory.optimizer(role(3, offloads_optimizer=True)) == Memory(0, 250 * (12 + 4))


@pytest.mark.parametrize(("stage", "dtype", "size"), [
    (1, "bf16", 4 * 1000), (1, "fp16", 0), (2, "bf16", 0), (3, "bf16", 4 * 250), (3, "fp16", 2 * 250), (0, "fp32", 0),
])  # fmt: skip
def test_gradients_between_updates(stage, dtype, size):
    assert role_memory.gradients(role(stage, dtype)) == Memory(size)


def test_gradients_of_an_offloaded_optimizer_at_stage_3_are_in_host_memory():
    assert role_memory.gradients(role(3, offloads_optimizer=True)) == Memory(0, 1000)


def test_frozen_models_hold_weights_alone():
    frozen = replace(role(3), trains=False)
    assert role_memory.weights(frozen) == Memory(500)
    held = (role_memory.optimizer, role_memory.gradients, role_memory.buckets, role_memory.accumulated,
            role_memory.update_gradients)  # fmt: skip
    assert [part(frozen) for part in held] == [Memory()] * 5


def test_weights_that_are_kept_whole_stay_beside_the_part():
    whole = role(3, kept_whole=True)
    assert role_memory.gathered(whole) == Memory(2000)
    assert role_memory.gathered_layer_by_layer(whole) == Memory()
    alone = role(3, kept_whole=True, ranks=1)
    assert role_memory.gathered(alone) == Memory()  # they are the part


def test_a_pass_at_stage_3_gathers_at_most_a_billion_numbers():
    parts = replace(PARTS, other=3 * 10**9)
    assert role_memory.gathered_layer_by_layer(replace(role(3), parts=parts)) == Memory(2 * 10**9)
    assert role_memory.gathered_layer_by_layer(role(2)) == Memory()


@pytest.mark.parametrize(("stage", "dtype", "size"), [
    (0, "fp32", 4 * 1000 + 4 * 1000), (1, "bf16", 4 * 1000), (1, "fp16", 2 * 1000 + 2 * 1000 + 4 * 250),
    (2, "bf16", 2 * 1000 + 2 * 1000 + 4 * 250), (3, "bf16", 2 * 1000),
])  # fmt: skip
def test_gradients_of_an_update(stage, dtype, size):
    """All of the 1,000 trained numbers fit into one bucket."""
    assert role_memory.update_gradients(role(stage, dtype)) == Memory(size)


def test_the_sums_of_a_large_model_are_not_copied():
    parts = replace(PARTS, trained=6 * 10**8, other=6 * 10**8)
    assert role_memory.update_gradients(replace(role(1, on_gpu=True), parts=parts)) == Memory((2 + 4) * 300)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("stage", "dtype", "offloads"), [
    (0, "fp32", False), (0, "bf16", False), (0, "bf16", True), (1, "fp32", False), (1, "fp32", True),
    (2, "fp32", False), (2, "bf16", False), (3, "bf16", False),
])  # fmt: skip
def test_gradients_between_micro_batches_are_those_of_an_engine(stage, dtype, offloads):
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 10, bias=False)).to(DTYPES[dtype])
    flags = MemoryFlags(offload_optimizer=offloads)
    engine = train_engine(model, train_config(stage, dtype, False, 1, 1.0, memory=flags), SETTINGS)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(torch.ones(2, 20, dtype=DTYPES[dtype])).float().sum(), scale_wrt_gas=False)
    held = [getattr(weight, name, None) for weight in engine.module.parameters() for name in ("grad", "grad_accum")]
    held += getattr(engine.optimizer, "fp32_groups_gradients_flat", [])
    for name in ("all_grad_tensors", "averaged_gradients"):
        held += [part for parts in getattr(engine.optimizer, name, {}).values() for part in parts or []]
    size = sum({part.data_ptr(): part.nbytes for part in held if part is not None}.values())
    planned = role(stage, dtype, ranks=1, offloads_optimizer=offloads)
    planned = replace(planned, parts=replace(PARTS, trained=900))
    assert role_memory.accumulated(planned) + role_memory.gradients(planned) == Memory(size)


def test_a_bucket_bounds_the_gradients_of_an_update_on_a_gpu():
    parts = replace(PARTS, trained=4 * 10**8, other=4 * 10**8)
    large = replace(role(2, on_gpu=True), parts=parts)
    assert role_memory.update_gradients(large) == Memory(2 * 10**8 * 2 + 4 * 10**8)  # a bucket twice, 4 T / N
    assert role_memory.update_gradients(replace(large, stage=3)) == Memory(2 * 10**8)


def test_an_offloaded_optimizer_sums_gradients_in_host_memory():
    assert role_memory.update_gradients(role(2, offloads_optimizer=True)) == Memory(2 * 1000 + 2 * 1000)


def test_quantised_weights():
    parts = replace(PARTS, adapted=400, trained=100)
    four = replace(role(2, bits=4), parts=parts)
    assert role_memory.weights(four) == Memory(2000 - 600)
    eight = replace(role(2, bits=8), parts=parts)
    assert role_memory.weights(eight) == Memory(2000 - 400)


def test_activations_are_in_proportion_to_tokens():
    assert role_memory.activations(role(), 10) == Memory(10 * (100 + 120 + 20))


def test_checkpointing_keeps_the_inputs_of_layers_and_the_layer_that_runs_again():
    found = role_memory.activations(role(checkpoints=True), 10)
    assert found == Memory(10 * (2 * 16 + 20) + 10 * 120)


def test_activations_on_the_host():
    many = 10_000
    found = role_memory.activations(role(on_gpu=True), many, on_host=True)
    assert found == Memory(many * 120, many * 240)
    assert role_memory.activations(role(), many, on_host=True) == Memory(many * 240)  # no effect on a CPU
    checkpointed = role_memory.activations(role(on_gpu=True, checkpoints=True), many, on_host=True)
    assert checkpointed == Memory(many * 120 * 2, many * (2 * 16 + 20))


def test_a_tiled_mlp_needs_one_piece():
    saved = replace(PARTS.saved, piece=30)
    tiled = replace(role(), parts=replace(PARTS, saved=saved))
    assert role_memory.activations(tiled, 100) == Memory(100 * 240 + 8 * 30)  # hidden size 8
    assert role_memory.activations(tiled, 5) == Memory(5 * 240 + 5 * 30)


def test_the_fused_head_holds_three_blocks_and_the_states():
    states = (2 + 4) * 8 * 10
    assert role_memory.head_memory(role(), 10) == Memory(3 * 4 * 10 * 50 + states)
    many = 10**7  # a block is full
    assert role_memory.head_memory(role(), many, with_gradient=False) == Memory(3 * 8 * MIB)
    assert role_memory.head_memory(role(on_gpu=True), many, with_gradient=False) == Memory(3 * 256 * MIB)
    scalar = replace(role(), parts=replace(PARTS, vocabulary=1))
    assert role_memory.head_memory(scalar, many) == Memory()


def test_running_rows():
    assert role_memory.running_rows(role(), 8, 20, 0, free=10**9) == 8
    assert role_memory.running_rows(role(), 8, 20, 5, free=10**9) == 5
    assert role_memory.running_rows(role(), 8, 20, 0, free=2 * 3 * 20 * 64) == 3  # half of what is free
    row = 20 * 64 + 24 * 50
    assert role_memory.running_rows(role(on_gpu=True), 800, 20, 200, free=100 * row) == 100
    assert role_memory.running_rows(role(on_gpu=True), 800, 20, 0, free=100 * row) == 20  # a tenth is for logits
    assert role_memory.running_rows(role(on_gpu=True), 8, 20, 0, free=-5) == 1
