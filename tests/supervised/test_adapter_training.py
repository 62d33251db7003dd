"""Steps 1 and 2 with LoRA, with a real engine on one rank: rates, metrics, kernels, references and what is saved."""

import json
from dataclasses import replace

import peft
import pytest
import torch
from checkpoints import NO_CHECKPOINTS
from one_rank import one_rank  # noqa: F401
from pairs_of_answers import ROWS as PAIRS
from pairs_of_answers import config_of as pairs_config
from test_trainer import TRAIN
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.config.supervised_flags import LoraFlags
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.adapters import adapter_layers, adapter_settings, is_adapter_parameter
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.supervised.policy_objectives import answer_logprobs, dpo_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config

pytestmark = pytest.mark.usefixtures("one_rank")

IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(3))
FROZEN = ("--lora_dim", "4", "--only_optimize_lora", "--lora_learning_rate", "0.01")


def make(assets, folder, *more: str) -> SupervisedTrainer:
    words = f"--model_name_or_path {assets / 'lm'} --data_path d --output_dir {folder} --dtype fp32 --zero_stage 0"
    words += " --per_device_train_batch_size 4 --num_train_epochs 2 --lr_scheduler_type linear --num_warmup_steps 2"
    config = parse("sft", [*words.split(), *more])
    adapter = adapter_settings(config.lora, config.adapters)
    ds_config = fit_ds_config(config)
    torch.manual_seed(5)
    model = PolicyModel(load_causal_lm(str(assets / "lm"), "fp32", ds_config, config.fit.dropout, adapter=adapter))
    if config.fit.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    objective = sft_objective(0, False, dist.device())
    return SupervisedTrainer(model, ds_config, TokenRows(TRAIN, None), objective, config)


def run(trainer: SupervisedTrainer, folder) -> list[dict]:
    with MetricsWriter(folder, None) as writer:
        trainer.run(writer, NO_CHECKPOINTS, "title")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize(("more", "rates", "of_lora"), [
    (("--lora_dim", "4", "--lora_learning_rate", "0.01"), [0, 1e-5, 2e-5, 1e-5], [0, 0.005, 0.01, 0.005]),  # by default
    (FROZEN, [0, 0.005, 0.01, 0.005], [None] * 4), ((), [0, 1e-5, 2e-5, 1e-5], [None] * 4),
])  # fmt: skip
def test_lora_has_its_own_rate_in_the_metrics_and_the_log_if_other_weights_train(
    assets, tmp_path, said, more, rates, of_lora
):
    lines = run(make(assets, tmp_path, *more), tmp_path)
    assert [line["lr"] for line in lines] == pytest.approx(rates)
    assert [line.get("lora_lr") for line in lines] == (pytest.approx(of_lora) if of_lora[0] == 0 else of_lora)
    assert any("lr 1.00e-05  LoRA lr 5.00e-03" in line for line in said) is (of_lora[0] == 0)


def test_gradient_checkpointing_does_not_change_what_lora_learns(assets, tmp_path):
    """With a frozen base, the layers' inputs need no gradient, which checkpointing must not depend on."""
    losses = []
    for number, more in enumerate(((), ("--gradient_checkpointing",))):
        (tmp_path / str(number)).mkdir()
        trainer = make(assets, tmp_path, *FROZEN, *more)
        losses.append([line["loss"] for line in run(trainer, tmp_path / str(number))])
        grads = [weight for name, weight in trainer.engine.module.named_parameters() if weight.requires_grad]
        assert len(grads) == 28
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] - losses[0][-1] > 0.1, "it learns"


def test_the_fused_head_and_packed_rows_work_with_adapters(assets, tmp_path, said):
    trainer = make(assets, tmp_path, *FROZEN, "--packing")
    policy = trainer.engine.module
    assert policy.layout.fused and policy.layout.packed
    assert not any("whole logits" in line or "rows are padded" in line for line in said)
    run(trainer, tmp_path)
    ids = torch.randint(3, 300, (3, 9), generator=torch.Generator().manual_seed(4))
    wanted = torch.arange(9) < torch.tensor([9, 4, 6]).unsqueeze(1)
    with torch.no_grad():
        policy.eval()
        fused = policy(ids, wanted)[0]
        policy.layout = replace(policy.layout, fused=False, packed=False)
        torch.testing.assert_close(policy(ids, wanted)[0], fused, rtol=1e-4, atol=1e-4)


def test_dropout_of_lora_is_on_in_training_only(assets, tmp_path):
    trainer = make(assets, tmp_path, *FROZEN, "--lora_dropout", "0.5")
    run(trainer, tmp_path)
    lm = trainer.engine.module.lm
    assert {layer.lora_dropout["default"].p for layer in adapter_layers(lm).values()} == {0.5}
    assert not torch.equal(lm.train()(input_ids=IDS).logits, lm(input_ids=IDS).logits)
    assert torch.equal(logits_of(lm), logits_of(lm))


@pytest.mark.parametrize(("more", "is_merged"), [
    (FROZEN, False), ((*FROZEN, "--lora_merge"), True), (("--lora_dim", "4"), True),
])  # fmt: skip
def test_the_saved_folder_is_an_adapter_unless_other_weights_trained_or_it_is_merged(assets, tmp_path, more, is_merged):
    trainer = make(assets, tmp_path, *more)
    run(trainer, tmp_path)
    out = tmp_path / "saved"
    trainer.save(out, AutoTokenizer.from_pretrained(assets / "lm"))
    assert (out / "adapter_config.json").exists() is not is_merged
    assert (out / "model.safetensors").exists() is is_merged
    kind = AutoModelForCausalLM if is_merged else peft.AutoPeftModelForCausalLM
    expected = logits_of(trainer.engine.module.lm)
    torch.testing.assert_close(logits_of(kind.from_pretrained(out)), expected, rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(assets / "lm")
    assert not torch.allclose(logits_of(base), expected, atol=1e-3)
    held = dict(trainer.engine.module.lm.named_parameters())
    unchanged = [name for name, weight in base.named_parameters() if name in held and torch.equal(weight, held[name])]
    assert bool(unchanged) is ("--only_optimize_lora" in more)


def test_the_reference_of_dpo_is_the_model_without_its_adapter(assets, tmp_path):
    config = pairs_config("--objective", "dpo", "--dtype", "fp32", "--zero_stage", "0", *FROZEN)
    adapter = adapter_settings(LoraFlags(4), config.adapters)
    ds_config = fit_ds_config(config)
    model = PolicyModel(load_causal_lm(str(assets / "lm"), "fp32", ds_config, 0.0, adapter=adapter))
    objective = dpo_objective(0, dist.device(), config)
    trainer = SupervisedTrainer(model, ds_config, TokenRows(PAIRS, None), objective, config)
    base = PolicyModel(load_causal_lm(str(assets / "lm"), "fp32", None)).eval()
    batch = objective.collate(trainer.rows.train, [0, 1])
    with torch.no_grad():
        expected = answer_logprobs(base, batch.input_ids, batch.answer_mask)
    torch.testing.assert_close(batch.ref_logprobs.flatten(), expected.flatten(), rtol=1e-5, atol=1e-4)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    first, *_ = trainer.steps_left()
    metrics = trainer.train_step(first)
    assert metrics["loss"] == pytest.approx(0.6931, abs=1e-3) and metrics["margin"] == pytest.approx(0, abs=1e-4)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed and all(is_adapter_parameter(name) for name in changed)
