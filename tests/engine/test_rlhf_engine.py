"""The engines of step 3 on one rank: which train, and with LoRA what they share and what the
reference computes."""

import json

import pytest
import torch
from adapter_folders import save_adapter
from one_rank import one_rank  # noqa: F401
from peft import PeftModel
from role_engines import IDS, LENGTHS, engines_of, logprobs
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dschat_ppo.common import dist
from dschat_ppo.engine.optimizer_step import learning_rates
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.models.adapters.layers import adapter_layers, is_adapter_parameter
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel

pytestmark = pytest.mark.usefixtures("one_rank")


@torch.no_grad()
def values(model) -> torch.Tensor:
    return model(IDS.to(dist.device()), LENGTHS.to(dist.device()))


@pytest.fixture(scope="module")
def plain(assets) -> RLHFEngine:
    return engines_of(assets)


def test_actor_and_critic_train_and_reference_and_reward_do_not(plain):
    kinds = [type(e.module) for e in (plain.actor, plain.reference, plain.critic, plain.reward)]
    assert kinds == [PolicyModel, PolicyModel, ScalarModel, ScalarModel]
    assert plain.trained == {"actor": plain.actor, "critic": plain.critic}
    assert [learning_rates(engine)["lr"] for engine in plain.trained.values()] == [0.25, 0.5]
    assert torch.equal(logprobs(plain.actor), logprobs(plain.reference)), "to the last bit"
    frozen = [*plain.reference.module.parameters(), *plain.reward.module.parameters()]
    assert not any(parameter.requires_grad for parameter in frozen)
    assert plain.hybrid.model is plain.actor.module.lm and plain.hybrid.around == []
    assert plain.reward.module.layout == plain.critic.module.layout
    assert plain.reference.module.layout == plain.actor.module.layout, (
        "the same bits before any update"
    )


def test_every_role_has_the_attention_of_the_flag(assets, plain):
    roles = ("actor", "reference", "critic", "reward")
    eager = engines_of(assets, "--attn_implementation", "eager", reference="uniform_lm")
    for choice, engines in (("auto", plain), ("eager", eager)):
        modules = [getattr(engines, role).module for role in roles]
        assert [module.layout.attention for module in modules] == 4 * [choice]
        assert all(module.layout.packed and module.layout.shares for module in modules)
        assert [module.config._attn_implementation for module in modules] == 4 * ["sdpa"]
    torch.testing.assert_close(logprobs(eager.actor), logprobs(plain.actor), rtol=0, atol=1e-5)


def test_dropout_and_checkpointing_follow_their_flags(assets):
    words = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
    engines = engines_of(assets, *words.split(), "--actor_dropout", "0.5")
    assert engines.actor.module.lm.is_gradient_checkpointing
    assert engines.critic.module.classifier.is_gradient_checkpointing
    assert not torch.equal(logprobs(engines.actor), logprobs(engines.actor)), (
        "training mode, with dropout"
    )
    engines.eval()
    assert not engines.critic.module.training
    assert torch.equal(logprobs(engines.actor), logprobs(engines.reference))
    engines.train()
    assert engines.actor.module.training and engines.critic.module.training
    assert not engines.reference.module.training and not engines.reward.module.training


def test_roles_that_the_run_does_not_use_are_none(assets):
    words = ("--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--kl_loss_coef", "0")
    engines = engines_of(assets, *words, critic=None, reward=False)
    assert engines.critic is engines.reward is engines.reference is None
    assert list(engines.trained) == ["actor"]


@pytest.mark.parametrize(
    ("flag", "weights"), [("--offload_optimizer", "none"), ("--offload", "cpu")]
)
def test_memory_and_schedule_flags_reach_each_built_engine(flag, weights, assets):
    """40 prompts in steps of 16, one update each: 3 updates."""
    words = f"--actor_zero_stage 3 --critic_zero_stage 2 {flag}"
    words += " --lr_scheduler_type linear --warmup_ratio 0.5 --min_lr_ratio 0.4 --max_grad_norm 2"
    engines = engines_of(assets, *words.split(), reward=False)
    actor, critic = engines.actor, engines.critic
    assert actor.zero_offload_optimizer().device == critic.zero_offload_optimizer().device == "cpu"
    assert actor.zero_offload_param().device == weights
    found = {
        role: (rates_of(engine), engine.gradient_clipping())
        for role, engine in engines.trained.items()
    }
    factors = [0, 0.5, 1]  # 2 warm-up steps of 3
    assert found == {
        "actor": ([0.25 * f for f in factors], 2.0),
        "critic": ([0.5 * f for f in factors], 2.0),
    }


def test_the_reference_may_be_another_model_with_kernels_of_its_own(assets):
    """With LoRA too, where it would otherwise be the actor without its adapter."""
    words = ("--actor_lora_dim", "2", "--only_optimize_lora")
    engines = engines_of(assets, *words, reference="uniform_lm", reward=False)
    expected = PolicyModel(
        LlamaForCausalLM.from_pretrained(assets / "uniform_lm"), Layout(fused=False)
    )
    assert torch.allclose(
        logprobs(engines.reference), logprobs(expected.to(dist.device())), atol=1e-5
    )
    assert not torch.allclose(logprobs(engines.reference), logprobs(engines.actor), atol=1e-2)
    assert not engines.reference.module.training
    kernels = [engine.module.layout for engine in (engines.reference, engines.actor)]
    assert kernels[0] == kernels[1], "selected for it by itself; the architecture is the same"


def rates_of(engine) -> list[float]:
    """The learning rates of the first three optimizer steps."""
    scheduler = engine.lr_scheduler
    return [scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step) for step in range(3)]


# Adapters


FROZEN = (
    "--actor_lora_dim",
    "4",
    "--critic_lora_dim",
    "4",
    "--only_optimize_lora",
    "--lora_alpha",
    "8",
)
CONTINUED = {"actor": "role_actor", "critic": "role_reward"}


@pytest.fixture(scope="module")
def adapters(assets):
    save_adapter(assets / "lm", assets / "role_actor", scalar=False, seed=5)
    save_adapter(assets / "lm", assets / "role_reward", scalar=True, seed=6)
    return assets


def held(*engines) -> int:
    """Elements of the distinct parameters of some engines."""
    parameters = {id(p): p for engine in engines for p in engine.module.parameters()}
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters.values())


def change_adapter(engine) -> None:
    with torch.no_grad():
        for name, weight in engine.module.named_parameters():
            if is_adapter_parameter(name):
                weight += 0.1


def test_the_reference_uses_the_weights_of_the_actor_and_stays_when_its_adapter_trains(
    adapters, said
):
    engines = engines_of(adapters, *FROZEN, critic="role_reward")
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
    assert not reference.module.training and actor.module.training


def test_an_actor_that_continues_an_adapter_has_a_frozen_copy_of_it_as_the_reference(
    adapters, said
):
    engines = engines_of(adapters, *FROZEN, **CONTINUED)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(adapters / "lm"), adapters / "role_actor"
    )
    expected = logprobs(
        PolicyModel(plain.merge_and_unload().eval(), Layout(fused=False)).to(dist.device())
    )
    torch.testing.assert_close(logprobs(engines.reference), expected, rtol=1e-5, atol=1e-5)
    before = logprobs(engines.reference)
    assert torch.equal(logprobs(engines.actor), before)
    change_adapter(engines.actor)
    assert torch.equal(logprobs(engines.reference), before)
    assert "a frozen copy of its first adapter" in str(said)
    assert not any(p.requires_grad for p in engines.reference.module.parameters())
    engines.eval()
    with engines.hybrid.generating() as model:
        assert not adapter_layers(model), "the actor generates with its adapter merged"
        found = logprobs(PolicyModel(model, Layout(fused=False)))
    torch.testing.assert_close(found, logprobs(engines.actor), rtol=1e-4, atol=1e-5)
    assert adapter_layers(engines.actor.module)


def test_a_reference_beside_weights_that_train_is_a_model_itself(adapters, said):
    engines = engines_of(adapters, "--actor_lora_dim", "4", "--lora_alpha", "8", **CONTINUED)
    held_alone = held(engines.reference)
    assert held(engines.actor, engines.reference) == held(engines.actor) + held_alone
    assert not adapter_layers(engines.reference.module)
    torch.testing.assert_close(
        logprobs(engines.reference), logprobs(engines.actor), rtol=1e-5, atol=1e-5
    )
    assert "no reference model is held" not in str(said)


def test_one_base_holds_four_models(adapters):
    words = ("--share_base", "--actor_zero_stage", "3", "--critic_zero_stage", "3")
    engines = engines_of(adapters, *FROZEN, *words, critic="role_reward")
    four = (engines.actor, engines.reference, engines.critic, engines.reward)
    base = held(engines.reference)
    adapter = held(engines.actor) - base
    head = next(
        getattr(p, "ds_numel", p.numel())
        for n, p in engines.critic.module.named_parameters()
        if "score" in n
    )
    assert 0 < adapter < base / 2
    assert held(*four) == base + 3 * adapter + 2 * head, (
        "actor, critic and reward model have adapters"
    )
    separate = engines_of(adapters, *FROZEN, critic="role_reward")
    for role in ("critic", "reward"):
        found, alone = values(getattr(engines, role)), values(getattr(separate, role))
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    assert engines.reward.module is not engines.critic.module
    registries = {id(engine.module.ds_inflight_param_registry) for engine in four}
    assert len(registries) == 1, "engines over one base share the record of what they gather"


@pytest.mark.release
def test_the_stage_that_the_deepspeed_config_sets_is_that_of_all_models_over_the_base(
    adapters, tmp_path
):
    """Layers that are gathered one by one generate with their adapters beside."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    words = (
        "--deepspeed_config",
        str(tmp_path / "ds.json"),
        "--share_base",
        "--unpin_actor_parameters",
    )
    engines = engines_of(adapters, *FROZEN, *words, **CONTINUED)
    engines.eval()
    assert torch.equal(logprobs(engines.actor), logprobs(engines.reference))
    assert torch.equal(values(engines.critic), values(engines.reward))
    expected = logprobs(engines.actor)
    with engines.hybrid.generating() as model:
        assert adapter_layers(model)
        found = logprobs(PolicyModel(model, Layout(fused=False)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
