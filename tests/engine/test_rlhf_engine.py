"""The engines of step 3 on one rank."""

import json

import pytest
import torch
from one_rank import one_rank  # noqa: F401
from transformers import LlamaForCausalLM

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.optimizer_step import learning_rates
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel

pytestmark = pytest.mark.usefixtures("one_rank")


def engines_of(
    assets, *words: str, critic: bool = True, reward: bool = True, reference: str | None = None, ratio: bool = False
) -> RLHFEngine:
    lm, scalar = str(assets / "lm"), str(assets / "reward")
    flags = ["--actor_model_name_or_path", lm, "--critic_model_name_or_path", scalar, "--data_path", "d"]
    flags += ["--output_dir", "o", "--dtype", "fp32", "--actor_zero_stage", "0", "--critic_zero_stage", "0"]
    flags += ["--actor_learning_rate", "0.25", "--critic_learning_rate", "0.5", *words]
    flags += [] if ratio else ["--num_warmup_steps", "0"]
    config = parse("ppo", flags)
    plan = plan_ppo(config.ppo, 40, 1, 0)
    return RLHFEngine(config, plan, ModelFolders(lm, scalar if critic else None, scalar if reward else None, reference))


def logprobs(engine) -> torch.Tensor:
    ids = torch.tensor([[5, 6, 7, 8]], device=dist.device())
    return engine(ids, torch.ones_like(ids, dtype=torch.bool))[0]


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
    assert plain.actor_average is None
    assert plain.hybrid.model is plain.actor.module.lm and plain.hybrid.sleeping == []
    assert plain.reward.module.layout == plain.critic.module.layout
    assert plain.reference.module.layout == plain.actor.module.layout, "the same bits before any update"


def test_every_role_has_the_attention_of_the_flag(assets, plain):
    roles = ("actor", "reference", "critic", "reward")
    eager = engines_of(assets, "--attn_implementation", "eager", reference=str(assets / "uniform_lm"))
    for choice, engines in (("auto", plain), ("eager", eager)):
        modules = [getattr(engines, role).module for role in roles]
        assert [module.layout.attention for module in modules] == 4 * [choice]
        assert all(module.layout.packed and module.layout.shares for module in modules)
        assert [module.config._attn_implementation for module in modules] == 4 * ["sdpa"]
    torch.testing.assert_close(logprobs(eager.actor), logprobs(plain.actor), rtol=0, atol=1e-5)


def test_dropout_checkpointing_average_and_sleep_follow_their_flags(assets):
    words = "--actor_gradient_checkpointing --critic_gradient_checkpointing --enable_ema --sleep_in_rollout"
    engines = engines_of(assets, *words.split(), "--actor_dropout", "0.5")
    assert engines.hybrid.sleeping == [engines.actor, engines.reference, engines.critic, engines.reward]
    assert engines.actor.module.lm.is_gradient_checkpointing
    assert engines.critic.module.classifier.is_gradient_checkpointing
    assert set(engines.actor_average.state_dict()) == {name for name, _ in engines.actor.module.lm.named_parameters()}
    assert not torch.equal(logprobs(engines.actor), logprobs(engines.actor)), "training mode, with dropout"
    engines.eval()
    assert not engines.critic.module.training
    assert torch.equal(logprobs(engines.actor), logprobs(engines.reference))
    engines.train()
    assert engines.actor.module.training and engines.critic.module.training
    assert not engines.reference.module.training and not engines.reward.module.training


def test_roles_that_the_run_does_not_use_are_none(assets):
    words = ("--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--kl_loss_coef", "0")
    engines = engines_of(assets, *words, critic=False, reward=False)
    assert engines.critic is engines.reward is engines.reference is None
    assert list(engines.trained) == ["actor"]


def test_memory_and_schedule_flags_reach_each_built_engine(assets):
    """40 prompts in steps of 16, one update each: 3 updates."""
    words = "--actor_zero_stage 3 --critic_zero_stage 2 --offload_optimizer"
    words += " --lr_scheduler_type linear --warmup_ratio 0.5 --min_lr_ratio 0.4 --max_grad_norm 2"
    engines = engines_of(assets, *words.split(), reward=False, ratio=True)
    actor, critic = engines.actor, engines.critic
    assert actor.zero_offload_optimizer().device == critic.zero_offload_optimizer().device == "cpu"
    assert actor.zero_offload_param().device == "none"
    assert actor.zero_hpz_partition_size() == 1
    assert [actor.zero_quantized_weights(), actor.zero_quantized_gradients()] == [False, False]
    assert not actor.zero_quantized_nontrainable_weights()
    found = {role: (rates_of(engine), engine.gradient_clipping()) for role, engine in engines.trained.items()}
    factors = [0, 0.5, 1]  # 2 warm-up steps of 3
    assert found == {"actor": ([0.25 * f for f in factors], 2.0), "critic": ([0.5 * f for f in factors], 2.0)}


def test_the_reference_may_be_another_model_with_kernels_of_its_own(assets):
    """With LoRA too, where it would otherwise be the actor without its adapter."""
    other, lora = str(assets / "uniform_lm"), ("--actor_lora_dim", "2", "--only_optimize_lora")
    words = ("--ref_model_name_or_path", other, *lora)
    engines = engines_of(assets, *words, reference=other, reward=False)
    expected = PolicyModel(LlamaForCausalLM.from_pretrained(other), Layout(fused=False))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = expected(ids, torch.ones_like(ids, dtype=torch.bool))[0]
    assert torch.allclose(logprobs(engines.reference).cpu(), expected, atol=1e-5)
    assert not torch.allclose(logprobs(engines.reference), logprobs(engines.actor), atol=1e-2)
    assert engines.reference_sync is None and not engines.reference.module.training
    kernels = [engine.module.layout for engine in (engines.reference, engines.actor)]
    assert kernels[0] == kernels[1], "selected for it by itself; the architecture is the same"


def rates_of(engine) -> list[float]:
    """The learning rates of the first three optimizer steps."""
    scheduler = engine.lr_scheduler
    return [scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step) for step in range(3)]


@pytest.mark.parametrize("stages", [("0", 3), ("3", 2)])
def test_a_sync_moves_the_reference_at_any_zero_stage(assets, tmp_path, stages):
    """The actor may be at another stage than the reference, by --deepspeed_config."""
    flag, overlay = stages
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": overlay}}))
    other = str(assets / "uniform_lm")
    words = ["--actor_zero_stage", flag, "--ref_sync_interval", "1", "--ref_sync_mixup", "0.25"]
    words += ["--deepspeed_config", str(tmp_path / "ds.json"), "--ref_model_name_or_path", other]
    engines = engines_of(assets, *words, reference=other, reward=False)
    assert [hasattr(next(engine.module.parameters()), "ds_id") for engine in (engines.actor, engines.reference)] == [
        overlay == 3, flag == "3"
    ]  # fmt: skip
    before = logprobs(engines.reference)
    moved = engines.reference_sync.update()
    expected = LlamaForCausalLM.from_pretrained(other)
    actor, size, change = LlamaForCausalLM.from_pretrained(assets / "lm"), 0.0, 0.0
    with torch.no_grad():
        for weight, source in zip(expected.parameters(), actor.parameters(), strict=True):
            change += float((0.25 * (source - weight)).square().sum())
            size += float(weight.square().sum())
            weight.copy_(0.25 * source + 0.75 * weight)
        ids = torch.tensor([[5, 6, 7, 8]])
        expected = PolicyModel(expected, Layout(fused=False))(ids, torch.ones_like(ids, dtype=torch.bool))[0]
    assert moved == pytest.approx((change / size) ** 0.5, rel=1e-5)
    assert torch.allclose(logprobs(engines.reference).cpu(), expected, atol=1e-5), "in the next forward pass"
    assert not torch.allclose(before.cpu(), expected, atol=1e-2)
