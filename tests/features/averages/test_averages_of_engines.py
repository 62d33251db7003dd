"""The moving average and the reference that follows the actor, over real engines of one rank."""

import json

import pytest
import torch
from command_lines import config_of
from one_rank import one_rank  # noqa: F401
from role_engines import engines_of, logprobs
from transformers import LlamaForCausalLM

from dschat_ppo.common import dist
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.models.adapters.layers import is_adapter_parameter
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.ppo.followers import Follower, followers_of_run

pytestmark = pytest.mark.usefixtures("one_rank")
ADAPTER = ("--actor_lora_dim", "4", "--only_optimize_lora")


def follower_of(engines, *words: str) -> Follower:
    """The only follower that these flags ask for."""
    [follower] = followers_of_run(config_of("ppo", *words), engines, PhaseClock())
    return follower


def test_nothing_follows_the_actor_without_the_flags(assets):
    assert followers_of_run(config_of("ppo"), engines_of(assets), PhaseClock()) == []


@pytest.mark.parametrize("adapter", [(), ADAPTER])
def test_the_weights_that_train_are_averaged(assets, adapter):
    engines = engines_of(assets, *adapter)
    averaged = set(follower_of(engines, "--enable_ema", *adapter).weights.state_dict())
    trained = [
        name for name, weight in engines.actor.module.lm.named_parameters() if weight.requires_grad
    ]
    assert averaged == set(trained)
    assert all(map(is_adapter_parameter, averaged)) is bool(adapter)


@pytest.mark.parametrize("stages", [("0", 3), ("3", 2)])
def test_a_sync_moves_the_reference_at_any_zero_stage(assets, tmp_path, stages):
    """The actor may be at another stage than the reference, by --deepspeed_config."""
    flag, overlay = stages
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": overlay}}))
    words = ["--actor_zero_stage", flag, "--ref_sync_interval", "1", "--ref_sync_mixup", "0.25"]
    words += ["--deepspeed_config", str(tmp_path / "ds.json")]
    engines = engines_of(assets, *words, reference="uniform_lm", reward=False)
    assert [
        hasattr(next(engine.module.parameters()), "ds_id")
        for engine in (engines.actor, engines.reference)
    ] == [overlay == 3, flag == "3"]
    before = logprobs(engines.reference)
    sync = follower_of(engines, *words)
    moved = sync.after_step(1)["kl/reference_moved"]
    expected, actor = (
        LlamaForCausalLM.from_pretrained(assets / name) for name in ("uniform_lm", "lm")
    )
    size, change = 0.0, 0.0
    with torch.no_grad():
        for weight, source in zip(expected.parameters(), actor.parameters(), strict=True):
            change += float((0.25 * (source - weight)).square().sum())
            size += float(weight.square().sum())
            weight.copy_(0.25 * source + 0.75 * weight)
    by_hand = logprobs(PolicyModel(expected, Layout(fused=False)).to(dist.device()))
    assert moved == pytest.approx((change / size) ** 0.5, rel=1e-5)
    assert torch.allclose(logprobs(engines.reference), by_hand, atol=1e-5), (
        "in the next forward pass"
    )
    assert not torch.allclose(before, by_hand, atol=1e-2)
