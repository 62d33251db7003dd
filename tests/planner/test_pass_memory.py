"""What passes need, by hand arithmetic."""

from dataclasses import replace

from planned_role import PARTS, role

from dschat_ppo.planner import pass_memory
from dschat_ppo.planner.role_memory import Memory

MIB = 2**20


def test_activations_are_in_proportion_to_tokens():
    assert pass_memory.activations(role(), 10) == Memory(10 * (100 + 120 + 20))


def test_checkpointing_keeps_the_inputs_of_layers_and_the_layer_that_runs_again():
    found = pass_memory.activations(role(checkpoints=True), 10)
    assert found == Memory(10 * (2 * 16 + 20) + 10 * 120)


def test_activations_on_the_host():
    many = 10_000
    found = pass_memory.activations(role(on_gpu=True), many, on_host=True)
    assert found == Memory(many * 120, many * 240)
    assert pass_memory.activations(role(), many, on_host=True) == Memory(many * 240)  # no effect on a CPU
    checkpointed = pass_memory.activations(role(on_gpu=True, checkpoints=True), many, on_host=True)
    assert checkpointed == Memory(many * 120 * 2, many * (2 * 16 + 20))


def test_a_tiled_mlp_needs_one_piece():
    saved = replace(PARTS.saved, piece=30)
    tiled = replace(role(), parts=replace(PARTS, saved=saved))
    assert pass_memory.activations(tiled, 100) == Memory(100 * 240 + 8 * 30)  # hidden size 8
    assert pass_memory.activations(tiled, 5) == Memory(5 * 240 + 5 * 30)


def test_the_fused_head_holds_three_blocks_and_the_states():
    states = (2 + 4) * 8 * 10
    assert pass_memory.head_memory(role(), 10) == Memory(3 * 4 * 10 * 50 + states)
    many = 10**7  # a block is full
    assert pass_memory.head_memory(role(), many, with_gradient=False) == Memory(3 * 8 * MIB)
    assert pass_memory.head_memory(role(on_gpu=True), many, with_gradient=False) == Memory(3 * 256 * MIB)
    scalar = replace(role(), parts=replace(PARTS, vocabulary=1))
    assert pass_memory.head_memory(scalar, many) == Memory()


def test_the_cache_and_the_logits_of_generation():
    assert pass_memory.kv_cache(role(), 3, 20) == Memory(3 * 20 * 64)
    assert pass_memory.sampling_logits(role(), 3) == Memory(24 * 3 * 50)


def test_running_rows():
    assert pass_memory.running_rows(role(), 8, 20, 0, free=10**9) == 8
    assert pass_memory.running_rows(role(), 8, 20, 5, free=10**9) == 5
    assert pass_memory.running_rows(role(), 8, 20, 0, free=2 * 3 * 20 * 64) == 3  # half of what is free
    row = 20 * 64 + 24 * 50
    assert pass_memory.running_rows(role(on_gpu=True), 800, 20, 200, free=100 * row) == 100
    assert pass_memory.running_rows(role(on_gpu=True), 800, 20, 0, free=100 * row) == 20  # a tenth is for logits
    assert pass_memory.running_rows(role(on_gpu=True), 8, 20, 0, free=-5) == 1


def test_experience():
    assert pass_memory.experience(4, 10, 20, on_host=False, on_gpu=True) == Memory(4 * (90 + 820))
    assert pass_memory.experience(4, 10, 20, on_host=True, on_gpu=True) == Memory(0, 4 * 910)
