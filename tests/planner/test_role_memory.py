"""What a model holds and what its passes need, by hand arithmetic."""

from dataclasses import replace

import pytest
import torch
from one_rank import one_rank  # noqa: F401
from torch import nn

from dschat_ppo.config.run_flags import MemoryFlags
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.planner import role_memory
from dschat_ppo.planner.model_parts import ModelParts, SavedActivations
from dschat_ppo.planner.role_memory import Memory, Role

SAVED = SavedActivations((100, 120), 20, 16)
PARTS = ModelParts(
    embedding=300, layers=(200, 200), head=300, other=0, trained=1000, adapted=0, largest=300, packed=700, hidden=8,
    vocabulary=50, kv_bytes=64, saved=SAVED,
)  # fmt: skip


def role(stage=1, dtype="bf16", ranks=4, **settings):
    running = 1 if stage == 0 and dtype != "fp32" else stage
    return Role("actor", PARTS, dtype, ranks, running, True, **settings)


MIB = 2**20
SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)


def sized(planned, **parts):
    return replace(planned, parts=replace(PARTS, **parts))


LARGE = sized(role(2, on_gpu=True), trained=4 * 10**8, other=4 * 10**8)
BUFFER = 4 * 300  # of the largest parameter, in fp32
# (function, role, what it needs): 1,000 parameters train on 4 ranks, and fit into one bucket
CASES = [
    ("weights", role(0, "bf16"), Memory(2000)), ("weights", role(0, "fp32"), Memory(4000)),
    ("weights", role(3, "bf16"), Memory(500)), ("weights", role(3, offloads_weights=True), Memory(0, 500)),
    ("weights", sized(role(2, bits=4), adapted=400, trained=100), Memory(2000 - 600)),
    ("weights", sized(role(2, bits=8), adapted=400, trained=100), Memory(2000 - 400)),
    ("gathered", role(3, kept_whole=True), Memory(2000)),
    ("gathered", role(3, kept_whole=True, ranks=1), Memory()),  # they are the part
    ("gathered_layer_by_layer", role(3, offloads_weights=True), Memory(2000)),
    ("gathered_layer_by_layer", role(3, kept_whole=True), Memory()), ("gathered_layer_by_layer", role(2), Memory()),
    ("gathered_layer_by_layer", sized(role(3), other=3 * 10**9), Memory(2 * 10**9)),  # at most a billion numbers
    ("optimizer", role(1, "bf16"), Memory(12 * 250)), ("optimizer", role(3, "bf16"), Memory(12 * 250)),
    ("optimizer", role(0, "fp32"), Memory(8 * 1000)), ("optimizer", role(2, "fp32"), Memory(12 * 250)),
    ("optimizer", role(2, offloads_optimizer=True), Memory(BUFFER, 250 * (12 + 4 + 2) + BUFFER)),
    ("optimizer", role(3, offloads_optimizer=True), Memory(0, 250 * (12 + 4))),
    ("gradients", role(1, "bf16"), Memory(4 * 1000)), ("gradients", role(1, "fp16"), Memory()),
    ("gradients", role(3, "bf16"), Memory(4 * 250)), ("gradients", role(3, "fp16"), Memory(2 * 250)),
    ("gradients", role(0, "fp32"), Memory()), ("gradients", role(3, offloads_optimizer=True), Memory(0, 1000)),
    ("update_gradients", role(0, "fp32"), Memory(4 * 1000 + 4 * 1000)),
    ("update_gradients", role(1, "bf16"), Memory(4 * 1000)),
    ("update_gradients", role(1, "fp16"), Memory(2 * 1000 + 2 * 1000 + 4 * 250)),
    ("update_gradients", role(3, "bf16"), Memory(2 * 1000)),
    ("update_gradients", role(2, offloads_optimizer=True), Memory(2 * 1000 + 2 * 1000)),  # sums are in host memory
    ("update_gradients", sized(role(1, on_gpu=True), trained=6 * 10**8, other=6 * 10**8), Memory((2 + 4) * 300)),
    ("update_gradients", LARGE, Memory(2 * 10**8 * 2 + 4 * 10**8)),  # a bucket twice, 4 T / N
    ("update_gradients", replace(LARGE, stage=3), Memory(2 * 10**8)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "planned", "size"), CASES)
def test_what_a_model_holds(function, planned, size):
    assert getattr(role_memory, function)(planned) == size


def test_frozen_models_hold_weights_alone():
    frozen = replace(role(3), trains=False)
    assert role_memory.weights(frozen) == Memory(500)
    held = (role_memory.optimizer, role_memory.gradients, role_memory.buckets, role_memory.accumulated,
            role_memory.update_gradients)  # fmt: skip
    assert [part(frozen) for part in held] == [Memory()] * 5


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("stage", "dtype", "offloads"), [
    (0, "fp32", False), (0, "bf16", False), (0, "bf16", True), (1, "fp32", True), (2, "fp32", False),
    (2, "bf16", False), (3, "bf16", False),
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
    planned = sized(role(stage, dtype, ranks=1, offloads_optimizer=offloads), trained=900)
    assert role_memory.accumulated(planned) + role_memory.gradients(planned) == Memory(size)


def test_activations_in_proportion_to_tokens_with_checkpointing_and_on_the_host():
    assert role_memory.activations(role(), 10) == Memory(10 * (100 + 120 + 20))
    # with checkpointing, the inputs of the layers and the layer that runs again
    assert role_memory.activations(role(checkpoints=True), 10) == Memory(10 * (2 * 16 + 20) + 10 * 120)
    many = 10_000
    found = role_memory.activations(role(on_gpu=True), many, on_host=True)
    assert found == Memory(many * 120, many * 240)
    assert role_memory.activations(role(), many, on_host=True) == Memory(many * 240)  # no effect on a CPU
    checkpointed = role_memory.activations(role(on_gpu=True, checkpoints=True), many, on_host=True)
    assert checkpointed == Memory(many * 120 * 2, many * (2 * 16 + 20))


def test_the_fused_head_holds_three_blocks_and_the_states():
    states = (2 + 4) * 8 * 10
    assert role_memory.head_memory(role(), 10) == Memory(3 * 4 * 10 * 50 + states)
    many = 10**7  # a block is full
    assert role_memory.head_memory(role(), many, with_gradient=False) == Memory(3 * 8 * MIB)
    assert role_memory.head_memory(role(on_gpu=True), many, with_gradient=False) == Memory(3 * 256 * MIB)
    assert role_memory.head_memory(sized(role(), vocabulary=1), many) == Memory()


def test_running_rows():
    assert role_memory.running_rows(role(), 8, 20, 0, free=10**9) == 8
    assert role_memory.running_rows(role(), 8, 20, 5, free=10**9) == 5
    assert role_memory.running_rows(role(), 8, 20, 0, free=2 * 3 * 20 * 64) == 3  # half of what is free
    row = 20 * 64 + 24 * 50
    assert role_memory.running_rows(role(on_gpu=True), 800, 20, 200, free=100 * row) == 100
    assert role_memory.running_rows(role(on_gpu=True), 800, 20, 0, free=100 * row) == 20  # a tenth is for logits
    assert role_memory.running_rows(role(on_gpu=True), 8, 20, 0, free=-5) == 1
