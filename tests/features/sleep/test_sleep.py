"""Training states and weights in host memory during a rollout."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from one_rank import one_rank  # noqa: F401
from torch import nn

from dschat_ppo.checkpoint.engine_state import flat_masters
from dschat_ppo.common import dist
from dschat_ppo.engine.build_engine import (
    OptimizerSettings,
    eval_engine,
    train_engine,
    whole_weights,
)
from dschat_ppo.engine.ds_config import eval_config, train_config
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.engine.optimizer_step import accumulate, apply
from dschat_ppo.features.sleep import sleep
from dschat_ppo.features.sleep.generation import Sleep
from dschat_ppo.features.sleep.sleep import (
    asleep,
    gradient_buffers,
    reused_memory,
    training_states,
    weights_of,
)
from dschat_ppo.models.loading import DTYPES

pytestmark = pytest.mark.usefixtures("one_rank")


SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)
CASES = [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")]


@pytest.fixture
def simulated(monkeypatch):
    """All tensors count as tensors of a device, so that the moves happen on a CPU too."""
    monkeypatch.setattr(sleep, "is_in_device_memory", lambda tensor: True)
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


def engine_of(stage: int, dtype: str):
    torch.manual_seed(0)
    config = train_config(stage, dtype, False, 1, 1.0)
    config["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1}
    # a sleep fills the default one, 2 GB, with zeros
    config["zero_optimization"] |= {"reduce_bucket_size": 1000}
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).to(DTYPES[dtype])
    return train_engine(model, config, SETTINGS)


def sleeping_hybrid(actor, sleeping) -> HybridEngine:
    return HybridEngine(actor, around=[Sleep(actor, sleeping).asleep])


def step(engine, number: int, dtype: str) -> float:
    generator = torch.Generator().manual_seed(number)
    batches = [
        torch.randn(2, 4, generator=generator).to(dist.device(), DTYPES[dtype]) for _ in range(2)
    ]
    return apply(
        accumulate(engine, batches, lambda x: engine(x).float().pow(2).sum() / 12)
    ).grad_norm


def numbers_of(engine) -> list[torch.Tensor]:
    if (whole := whole_weights(engine)) is not None:
        whole.gather()  # an update drops them
    return [tensor.detach().clone() for tensor in (*training_states(engine), *weights_of(engine))]


def held_bytes(tensors) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_training_is_bit_equal_with_and_without_sleep_at_every_stage_and_dtype(
    stage, dtype, simulated
):
    """Meanwhile states, masters and gradients have left the device, and the actor's weights
    stay."""
    awake, sleeper = engine_of(stage, dtype), engine_of(stage, dtype)
    hybrid, weights = sleeping_hybrid(sleeper, [sleeper]), 4 * 9 + 9 + 9 * 3 + 3
    for number in range(3):
        assert step(awake, number, dtype) == step(sleeper, number, dtype)
        before = numbers_of(sleeper)
        moments = [
            value for state in sleeper.basic_optimizer.state.values() for value in state.values()
        ]
        with hybrid.generating() as model:
            assert held_bytes(model.parameters()) > 0
            model(torch.zeros(1, 4, dtype=DTYPES[dtype], device=dist.device()))
            assert held_bytes(moments) == 0 and len(moments) > 0
            # else the parameters are the fp32 weights
            if not isinstance(sleeper.optimizer, torch.optim.Optimizer):
                assert (
                    held_bytes(flat_masters(sleeper)) == held_bytes(training_states(sleeper)) == 0
                )
        # two moments of 4 bytes each; at stage 3 padded
        assert held_bytes(moments) >= 2 * 4 * weights
        assert len(before) > 4 and all(map(torch.equal, before, numbers_of(sleeper)))
    assert all(map(torch.equal, numbers_of(awake), numbers_of(sleeper)))


@pytest.mark.parametrize(("stage", "dtype"), [(3, "fp32"), (3, "bf16"), (2, "bf16"), (1, "bf16")])
def test_buffers_of_gradients_leave_the_device_without_a_copy_and_12_bytes_a_weight_are_copied(
    stage, dtype, simulated
):
    engine = engine_of(stage, dtype)
    step(engine, 0, dtype)
    buffers, weights = (
        list(gradient_buffers(engine)),
        sum(flat.numel() for flat in flat_masters(engine)),
    )
    # the actor's weights stay
    size, copied = held_bytes(buffers), held_bytes(training_states(engine))
    bucket = engine.optimizer.reduce_bucket_size * DTYPES[dtype].itemsize if stage == 3 else 0
    assert size == bucket + 4 * weights * (stage != 2)
    # fp32 weights and two moments, besides counts of steps
    assert 12 * weights <= copied <= 12 * weights + 64
    sleeper, host = Sleep(engine, [engine]), []
    with HybridEngine(engine, around=[sleeper.asleep]).generating():
        assert held_bytes(buffers) == 0
        host += [memory.nbytes() for memory in sleeper.host_memory.values()]
    assert held_bytes(buffers) == size and not any(buffer.any() for buffer in buffers)
    assert sum(host) == copied
    with asleep(training_states(engine), scratch=buffers) as moved:
        assert moved == size + copied
    assert step(engine, 1, dtype) > 0


@pytest.mark.parametrize("stage", [1, 2])
def test_views_of_the_fp32_weights_see_the_updates_after_a_sleep(stage, simulated):
    engine = engine_of(stage, "bf16")
    for number in range(2):
        step(engine, number, "bf16")
        with sleeping_hybrid(engine, [engine]).generating():
            pass
    step(engine, 2, "bf16")
    [weight, *_] = engine.module.parameters()
    assert torch.equal(safe_get_full_fp32_param(weight).bfloat16(), weight.detach())


def test_engines_that_generation_does_not_use_sleep_with_their_weights(simulated):
    """All but those that the actor shares with another engine."""
    actor, critic, base = engine_of(2, "bf16"), engine_of(3, "bf16"), nn.Linear(4, 9).bfloat16()
    base.weight = actor.module[0].weight  # one base for several models
    reference = eval_engine(nn.Linear(4, 4).bfloat16(), eval_config(0, "bf16", False, 1))
    reward = eval_engine(nn.Sequential(base), eval_config(0, "bf16", False, 1))
    with sleeping_hybrid(actor, [actor, critic, reference, reward]).generating():
        assert (
            held_bytes(weights_of(critic))
            == held_bytes(weights_of(reference))
            == held_bytes([base.bias])
            == 0
        )
        assert held_bytes(weights_of(actor)) > 0 and held_bytes([base.weight]) > 0
    assert held_bytes(weights_of(critic)) > 0 and held_bytes(weights_of(reference)) > 0


def test_an_error_in_the_block_and_while_falling_asleep_brings_everything_back(
    simulated, monkeypatch
):
    tensors = [torch.arange(5.0), torch.arange(3.0)]
    with pytest.raises(KeyError), asleep(tensors):
        assert held_bytes(tensors) == 0
        raise KeyError
    assert [tensor.sum().item() for tensor in tensors] == [10, 3]

    calls = []

    def failing(size):
        calls.append(size)
        if len(calls) == 2:
            raise RuntimeError("no host memory")
        return torch.UntypedStorage(size)

    monkeypatch.setattr(sleep, "allocate_on_host", failing)
    with pytest.raises(RuntimeError, match="no host memory"), asleep(tensors):
        pass
    assert [tensor.sum().item() for tensor in tensors] == [10, 3]


def test_host_memory_is_kept_for_tensors_of_the_same_size(simulated, monkeypatch):
    made = []
    monkeypatch.setattr(
        sleep, "allocate_on_host", lambda size: made.append(size) or torch.UntypedStorage(size)
    )
    tensors, host = [torch.arange(5.0), torch.arange(3.0)], {}
    for number in range(3):
        with asleep(tensors, host=host):
            assert held_bytes(tensors) == 0
        assert [tensor.sum().item() for tensor in tensors] == [10 + 5 * number, 3 + 3 * number]
        for tensor in tensors:
            tensor += 1
    assert made == [20, 12]
    with asleep([torch.arange(5.0), torch.arange(4.0)], host=host):
        assert made == [20, 12, 16]


class Runtime:
    """CUDA's functions for host memory. As there, an error stays until a kernel is launched, which
    then fails."""

    def __init__(self, monkeypatch):
        self.held, self.most, self.error = {}, 2**40, 0
        ones = torch.ones
        monkeypatch.setattr(sleep, "on_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(
            torch, "ones", lambda *args, **named: self.launch() or ones(*args, **named)
        )

    def cudaHostRegister(self, place, size, flags):  # noqa: N802  CUDA's name
        assert flags == 0 and all(
            place + size <= first or place >= end for first, end in self.held.items()
        )
        if sum(end - first for first, end in self.held.items()) + size > self.most:
            self.error = 2
            return 2
        self.held[place] = place + size
        return 0

    def cudaHostUnregister(self, place):  # noqa: N802  CUDA's name
        del self.held[place]
        return 0

    def launch(self):
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")

    @property
    def sizes(self):
        return sorted(end - first for first, end in self.held.items())


def test_with_a_gpu_host_memory_is_page_locked_until_it_is_freed_or_replaced(
    monkeypatch, simulated, said
):
    runtime, mib, host = Runtime(monkeypatch), 2**20, {}
    sizes = (mib, 3 * mib + 4, mib - 1)
    memory = [reused_memory(host, number, size) for number, size in enumerate(sizes)]
    assert [part.nbytes() for part in memory] == list(sizes)
    assert runtime.sizes == [mib, 3 * mib + 4], "in the exact size; small memory is not"
    assert reused_memory(host, 1, sizes[1]).data_ptr() == memory[1].data_ptr()
    del memory
    reused_memory(host, 1, 2 * mib)
    assert runtime.sizes == [mib, 2 * mib]
    with asleep([torch.arange(mib)]):
        assert runtime.sizes == [mib, 2 * mib, 8 * mib]
    assert runtime.sizes == [mib, 2 * mib]
    del host
    assert runtime.sizes == []
    runtime.most = 0
    kept = sleep.allocate_on_host(mib)
    assert (
        kept.nbytes() == mib
        and len(said) == 1
        and "cannot be page-locked (CUDA error 2)" in said[0]
    )
    runtime.launch()  # no kernel is blamed for it
