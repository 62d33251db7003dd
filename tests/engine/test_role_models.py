"""The models of the four roles with LoRA, on one rank: what is shared, and what the reference computes."""

import json

import pytest
import torch
from adapter_folders import save_adapter
from one_rank import one_rank  # noqa: F401
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.adapters import adapter_layers, is_adapter_parameter
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.policy_model import PolicyModel

pytestmark = pytest.mark.usefixtures("one_rank")

FROZEN = ("--actor_lora_dim", "4", "--critic_lora_dim", "4", "--only_optimize_lora", "--lora_alpha", "8")
STAGE_3 = ("--actor_zero_stage", "3", "--critic_zero_stage", "3")


@pytest.fixture(scope="module")
def adapters(assets):
    save_adapter(assets / "lm", assets / "role_actor", scalar=False, seed=5)
    save_adapter(assets / "lm", assets / "role_reward", scalar=True, seed=6)
    return assets


def engines_of(assets, actor: str, *words: str) -> RLHFEngine:
    lm, scalar = str(assets / actor), str(assets / "role_reward")
    flags = ["--actor_model_name_or_path", lm, "--critic_model_name_or_path", scalar, "--data_path", "d"]
    config = parse("ppo", [*flags, "--output_dir", "o", "--dtype", "fp32", "--num_warmup_steps", "0", *words])
    return RLHFEngine(config, plan_ppo(config.ppo, 40, 1, 0), ModelFolders(lm, scalar, scalar))


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    ids = torch.tensor([[5, 6, 7, 8]], device=dist.device())
    return model(ids, torch.ones_like(ids, dtype=torch.bool))[0]


def held(*engines) -> int:
    """Elements of the distinct parameters of some engines."""
    parameters = {id(p): p for engine in engines for p in engine.module.parameters()}
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters.values())


def change_adapter(engine) -> None:
    with torch.no_grad():
        for name, weight in engine.module.named_parameters():
            if is_adapter_parameter(name):
                weight += 0.1


def test_the_reference_uses_the_weights_of_the_actor_and_stays_when_its_adapter_trains(adapters, said):
    engines = engines_of(adapters, "lm", *FROZEN, "--enable_ema")
    actor, reference = engines.actor, engines.reference
    assert held(actor, reference) == held(actor)
    assert "no reference model is held" in str(said) and "no adapter" in str(said)
    before = logprobs(reference)
    assert torch.equal(logprobs(actor), before), "to the last bit"
    trained = {name for name, p in actor.module.named_parameters() if p.requires_grad}
    assert trained and all(is_adapter_parameter(name) for name in trained)
    change_adapter(actor)
    assert not torch.equal(logprobs(actor), before)
    assert torch.equal(logprobs(reference), before)
    averaged = engines.actor_average.state_dict()
    assert averaged and all(is_adapter_parameter(name) for name in averaged)
    assert not reference.module.training and actor.module.training


def test_an_actor_that_continues_an_adapter_has_a_frozen_copy_of_it_as_the_reference(adapters, said):
    engines = engines_of(adapters, "role_actor", *FROZEN)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adapters / "lm"), adapters / "role_actor")
    expected = logprobs(PolicyModel(plain.merge_and_unload().eval(), Layout(fused=False)).to(dist.device()))
    torch.testing.assert_close(logprobs(engines.reference), expected, rtol=1e-5, atol=1e-5)
    before = logprobs(engines.reference)
    assert torch.equal(logprobs(engines.actor), before)
    change_adapter(engines.actor)
    assert torch.equal(logprobs(engines.reference), before)
    assert "a frozen copy of its first adapter" in str(said)
    assert not any(p.requires_grad for p in engines.reference.module.parameters())


def test_a_reference_beside_weights_that_train_is_a_model_itself(adapters, said):
    engines = engines_of(adapters, "role_actor", "--actor_lora_dim", "4", "--lora_alpha", "8")
    held_alone = held(engines.reference)
    assert held(engines.actor, engines.reference) == held(engines.actor) + held_alone
    assert not adapter_layers(engines.reference.module)
    torch.testing.assert_close(logprobs(engines.reference), logprobs(engines.actor), rtol=1e-5, atol=1e-5)
    assert "no reference model is held" not in str(said)
    assert engines.saves_merged


def test_one_base_holds_four_models(adapters):
    engines = engines_of(adapters, "lm", *FROZEN, "--share_base", *STAGE_3)
    four = (engines.actor, engines.reference, engines.critic, engines.reward)
    base = held(engines.reference)
    adapter = held(engines.actor) - base
    head = next(getattr(p, "ds_numel", p.numel()) for n, p in engines.critic.module.named_parameters() if "score" in n)
    assert 0 < adapter < base / 2
    assert held(*four) == base + 3 * adapter + 2 * head, "actor, critic and reward model have adapters"
    separate = engines_of(adapters, "lm", *FROZEN)
    ids, lengths = torch.tensor([[5, 6, 7, 8]], device=dist.device()), torch.tensor([4], device=dist.device())
    for role in ("critic", "reward"):
        shared, alone = getattr(engines, role), getattr(separate, role)
        with torch.no_grad():
            torch.testing.assert_close(shared(ids, lengths), alone(ids, lengths), rtol=1e-5, atol=1e-5)
    assert engines.reward.module is not engines.critic.module
    registries = {id(engine.module.ds_inflight_param_registry) for engine in four}
    assert len(registries) == 1, "engines over one base share the record of what they gather"
    assert not engines.saves_merged


def test_the_stage_that_the_deepspeed_config_sets_is_that_of_all_models_over_the_base(adapters, tmp_path):
    """Layers that are gathered one by one generate with their adapters beside."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    words = ("--deepspeed_config", str(tmp_path / "ds.json"), "--share_base", "--unpin_actor_parameters")
    engines = engines_of(adapters, "role_actor", *FROZEN, *words)
    engines.eval()
    assert torch.equal(logprobs(engines.actor), logprobs(engines.reference))
    with torch.no_grad():
        ids, lengths = torch.tensor([[5, 6, 7, 8]], device=dist.device()), torch.tensor([4], device=dist.device())
        assert torch.equal(engines.critic(ids, lengths), engines.reward(ids, lengths))
    expected = logprobs(engines.actor)
    with engines.hybrid.generating() as model:
        assert adapter_layers(model)
        found = logprobs(PolicyModel(model, Layout(fused=False)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_actor_generates_with_its_adapter_merged(adapters):
    engines = engines_of(adapters, "role_actor", *FROZEN)
    engines.eval()
    with engines.hybrid.generating() as model:
        assert not adapter_layers(model)
        found = logprobs(PolicyModel(model, Layout(fused=False)))
    torch.testing.assert_close(found, logprobs(engines.actor), rtol=1e-4, atol=1e-5)
    assert adapter_layers(engines.actor.module)
