"""Which models ZeRO-3 keeps whole, and that doing so changes no number (on two ranks: test_ranks_small_models.py)."""

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from one_rank import one_rank  # noqa: F401
from tiny_models import new_model

from dschat_ppo.engine import build_engine
from dschat_ppo.engine.build_engine import OptimizerSettings, eval_engine, may_be_whole, train_engine
from dschat_ppo.engine.build_engine import whole_weights as whole_weights_of
from dschat_ppo.engine.ds_config import eval_config, train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply, skip_update
from dschat_ppo.models.saving import gather_state
from dschat_ppo.models.wrapped_models import PolicyModel

GIB = 2**30
SETTINGS = OptimizerSettings(0.01, 0.1, "constant", 0, 6, (0.8, 0.9), 1e-6)
IDS = torch.randint(2, 48, (4, 9), generator=torch.Generator().manual_seed(0))


def test_weights_that_fit_many_times_are_whole():
    config = train_config(3, "bf16", False, 8, 1.0)
    assert may_be_whole(config, int(2 * 0.5e9), 8, 80 * GIB), "Qwen2-0.5B in bf16"
    for size, ranks, memory in ((0.5e9, 8, 24), (7e9, 64, 141)):
        assert not may_be_whole(config, int(2 * size), ranks, memory * GIB)
    assert may_be_whole(config, int(2 * 7e9), 1, 80 * GIB), "one rank holds everything in any case"


@pytest.mark.parametrize(("stage", "zero", "whole"), [
    (3, {}, True), (2, {}, False), (3, {"stage3_param_persistence_threshold": 10**9}, False),
    (3, {"stage3_max_live_parameters": 10**6}, False), (3, {"mics_shard_size": 2}, False),
    (3, {"reduce_bucket_size": 10**6}, True), (3, {"offload_param": {"device": "cpu"}}, False),
    (3, {"zero_hpz_partition_size": 2}, False), (3, {"zero_quantized_weights": True}, False),
    (3, {"zero_quantized_nontrainable_weights": True}, False), (3, {"offload_optimizer": {"device": "cpu"}}, True),
])  # fmt: skip
def test_settings_under_which_weights_stay_partitioned(stage, zero, whole):
    config = train_config(stage, "fp32", False, 2, 1.0, {"zero_optimization": zero})
    assert may_be_whole(config, 24, 2, GIB) is whole


def trained(layer_by_layer: bool):
    """A ZeRO-3 engine after three updates, with what they returned."""
    torch.manual_seed(1)
    model = PolicyModel(new_model("llama"))
    engine = train_engine(model, train_config(3, "bf16", False, 1, 0.5), SETTINGS, layer_by_layer)
    results = [apply(accumulate(engine, [IDS[:2], IDS[2:]], lambda ids: loss_of(engine, ids))) for _ in range(3)]
    return engine, results


def loss_of(engine, ids):
    return -engine(ids, torch.ones_like(ids, dtype=torch.bool))[0].sum() / 30


@pytest.fixture(scope="module")
def engines(one_rank):  # noqa: F811
    return {layer_by_layer: trained(layer_by_layer) for layer_by_layer in (False, True)}


def test_updates_are_those_of_layers_gathered_one_by_one(engines):
    (whole, results), (layers, expected) = engines[False], engines[True]
    assert results == expected and all(result.applied for result in results)
    before, after = gather_state(layers.module), gather_state(whole.module)
    assert all(torch.equal(after[name], weight) for name, weight in before.items()) and len(before) > 10
    assert whole_weights_of(layers) is None and torch.nn.functional.linear is build_engine.linear


def test_weights_are_gathered_once_after_an_update(engines, monkeypatch):
    engine, _ = engines[False]
    weight, calls = next(engine.module.parameters()), []
    for parameter in engine.module.parameters():
        own = parameter.all_gather_coalesced
        monkeypatch.setattr(
            parameter, "all_gather_coalesced", lambda ws, own=own: (calls.append(len(ws)), own(ws))[1], raising=False
        )
    skip_update(engine)
    assert weight.numel() == 0, "an update drops the whole weights"
    with torch.no_grad():
        first, second = (engine(IDS, IDS > 0)[0] for _ in range(2))
    assert calls == [len(list(engine.module.parameters()))] and torch.equal(first, second)
    gather_state(engine.module)  # partitions each weight again
    with torch.no_grad():
        assert torch.equal(engine.module.lm.model(IDS).last_hidden_state, engine.module.lm.model(IDS).last_hidden_state)
    assert calls[1:] == [len(list(engine.module.parameters()))], "a part of the model that is called by itself too"


def test_whole_weights_have_the_product_of_pytorch_with_the_same_bits(monkeypatch):
    monkeypatch.setattr(build_engine, "zero3_linear_wrap", lambda *given: calls.append(given) or of_deepspeed(*given))
    calls, found, of_deepspeed, dtype = [], [], zero3_linear_wrap, torch.bfloat16
    for is_whole, bias in ((True, None), (False, None), (True, torch.zeros(7, dtype=dtype))):
        torch.manual_seed(0)
        states = torch.randn(2, 5, 33, dtype=dtype, requires_grad=True)
        weight = torch.nn.Parameter(torch.randn(7, 33, dtype=dtype))
        weight.is_kept_whole = is_whole
        output = build_engine.linear(states, weight, bias)
        output.float().pow(2).sum().backward()
        found.append((output, states.grad, weight.grad))
    assert len(calls) == 2, "partitioned, or with a bias"
    assert all(torch.equal(one, other) for one, other in zip(*found[:2], strict=True))


def test_an_evaluating_engine_keeps_its_weights(one_rank):  # noqa: F811
    torch.manual_seed(1)
    model = new_model("llama").eval()
    expected = model(IDS).logits
    engine = eval_engine(model, eval_config(3, "fp32", False, 1))
    assert torch.equal(engine(IDS).logits, expected)
    assert all(weight.numel() for weight in engine.module.parameters()), "whole after the pass"
    assert whole_weights_of(engine) is not None


def test_a_rank_without_a_gpu_has_its_share_of_the_host(monkeypatch):
    """Which is the limit of a container, if it has one, as in the planner."""
    monkeypatch.setattr(build_engine, "host_memory", lambda: 8000)
    monkeypatch.setattr(build_engine, "local_world_size", lambda: 4)
    monkeypatch.setattr(build_engine, "on_gpu", lambda: False)
    assert build_engine._memory_of_device() == 2000
