"""Steps 1 and 2 with a real engine on one rank: `--packing`, its losses, gradients and steps; LoRA,
its rates, kernels, references and what is saved."""

import json
import math
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from checkpoints import NO_CHECKPOINTS
from datasets import Dataset
from one_rank import one_rank  # noqa: F401
from pairs_of_answers import ROWS as PAIRS
from pairs_of_answers import config_of
from pairs_of_answers import config_of as pairs_config
from test_trainer import TRAIN
from tiny_models import VOCABULARY, new_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.data.supervised_batches import PackingPlan, sample_tokens
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters.layers import adapter_layers, is_adapter_parameter
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import changes_to_train, load_causal_lm
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.supervised.objective import UsedRows
from dschat_ppo.supervised.policy_objectives import answer_logprobs, dpo_objective
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
LENGTHS = (1, 3, 9, 2, 20, 4, 1, 6, 2, 11, 5, 1)
RANDOM = np.random.default_rng(0)


def ids(count: int) -> list[int]:
    return RANDOM.integers(2, VOCABULARY, count).tolist()


ROWS = Dataset.from_list(
    [
        {
            "prompt_ids": ids(1 + n % 4),
            "answers": [ids(n), ids(1 + n // 2)],
            "margin": 0.0,
            "source": int(n > 4),
        }
        for n in LENGTHS
    ]
)
SFT_ROWS = ROWS.map(
    lambda row: {"answers": row["answers"][:1], "prompt_spans": [[0, len(row["prompt_ids"]) // 2]]}
)


def classifier(name: str):
    config = new_model(name).config
    config.num_labels, config.pad_token_id = 1, None
    return AutoModelForSequenceClassification.from_config(config).eval()


def gradients_of(module, objective, rows, micro_batches) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of a step over the micro-batches, and its gradients."""
    module.zero_grad()
    batches = [objective.collate(rows, indices) for indices in micro_batches]
    total, sums = (
        torch.stack([objective.units(batch).sum() for batch in batches]).sum(),
        MetricSums(),
    )
    for batch in batches:
        objective.loss(module, batch, total, sums).backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return sums.reduce()["loss"], grads


def packed_and_alone(module, of_packing, rows, max_len: int):
    """(loss, gradients) of packed rows, two a micro-batch, and of rows that run alone."""
    assert select_kernels(module.eval()) is None  # no dropout
    plan = PackingPlan(sample_tokens(rows), max_len * len(rows[0]["answers"]), 0).epoch(0, 0)
    micro_batches = [sum(plan[start : start + 2], []) for start in range(0, len(plan), 2)]
    assert max(map(len, micro_batches)) > 3 and len(micro_batches) > 1
    found = gradients_of(module, of_packing(True), rows, micro_batches)
    module.layout = replace(module.layout, packed=False)
    return found, gradients_of(module, of_packing(False), rows, [[row] for row in range(len(rows))])


def assert_equal(found, expected):
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert (
        found[1].keys() == expected[1].keys()
        and max(float(g.abs().max()) for g in expected[1].values()) > 1e-2
    )
    for name, gradient in expected[1].items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            found[1][name] / scale, gradient / scale, rtol=0, atol=4e-6, msg=name
        )


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "opt", "gpt-neox", "mixtral"])
def test_sft_on_packed_rows_has_the_loss_and_gradients_of_rows_alone(name):
    module = PolicyModel(new_model(name))
    assert_equal(*packed_and_alone(module, lambda _: sft_objective(0, False, CPU), SFT_ROWS, 25))


@pytest.mark.parametrize("name", ["mistral-window", "mixtral"])
def test_reward_training_on_packed_pairs_has_the_loss_and_gradients_of_pairs_alone(name):
    def objective(packing: bool):
        return reward_objective(
            0, CPU, config_of("--center_rewards_coef", "0.1", "--packing", str(packing))
        )

    module = ScalarModel(classifier(name))
    assert_equal(*packed_and_alone(module, objective, ROWS, 25))


def test_dpo_on_packed_pairs_has_the_loss_and_gradients_of_pairs_alone():
    module = PolicyModel(new_model("llama"))
    config = config_of("--objective", "dpo_nll", "--packing")
    rows = (
        dpo_objective(0, CPU, config)
        .prepare(PolicyModel(new_model("qwen2")), TokenRows(ROWS, None), UsedRows())
        .train
    )
    assert_equal(*packed_and_alone(module, lambda _: dpo_objective(0, CPU, config), rows, 25))


@pytest.mark.parametrize("packed", [False, True])
def test_the_head_on_last_tokens_alone_gives_the_same_scores(packed):
    model = ScalarModel(classifier("llama"), Layout(packed=packed))
    for lengths in (torch.tensor([7, 1, 4]), torch.tensor([7, 7, 7])):
        tokens = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
        last = model(tokens, lengths).gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(model(tokens, lengths, last_only=True), last, rtol=0, atol=1e-6)


def config_for(output, *more: str):
    words = (
        "--model_name_or_path m --data_path d --dtype fp32 --packing --max_seq_len 25"
        " --num_train_epochs 2"
    )
    words += " --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_warmup_steps 1"
    words += " --learning_rate 0.01 --lr_scheduler_type linear"
    return parse("sft", [*words.split(), "--output_dir", str(output), *more])


def trainer_of(config, model=None, sources=("short", "long")) -> SupervisedTrainer:
    torch.manual_seed(3)
    rows, objective = TokenRows(SFT_ROWS, None, sources), sft_objective(0, False, dist.device())
    module = PolicyModel(model or new_model("llama"))
    return SupervisedTrainer(module, fit_ds_config(config), rows, objective, config)


def run(trainer, folder, checkpointer=NO_CHECKPOINTS) -> list[dict]:
    folder.mkdir(exist_ok=True)
    with MetricsWriter(folder, None, None) as writer:
        trainer.run(writer, checkpointer, "title")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def test_each_epoch_trains_each_sample_once_in_fewer_steps_that_the_schedule_counts(tmp_path, said):
    trainer = trainer_of(config_for(tmp_path))
    tokens = sample_tokens(SFT_ROWS)
    packed = trainer.packing.rows
    assert packed == math.ceil(tokens.sum() / 25) == 4, "the test needs full rows"
    assert trainer.plan.total_steps == 4 < 2 * math.ceil(len(SFT_ROWS) / 2)
    steps = list(trainer.steps_left())
    for epoch in (steps[:2], steps[2:]):
        assert sorted(row for step in epoch for part in step for row in part) == list(
            range(len(SFT_ROWS))
        )
    assert steps[:2] != steps[2:]
    for trainer.steps in (3, 2, 1, 0):  # as after a resume
        assert list(trainer.steps_left()) == steps[trainer.steps :]
    lines = run(trainer, tmp_path)
    assert [line["samples"] for line in lines] == [sum(map(len, step)) for step in steps]
    assert [line["tokens"] for line in lines] == [
        sum(tokens[row] for part in step for row in part) for step in steps
    ]
    assert [line["lr"] for line in lines] == pytest.approx([0.0, 0.01, 0.01 * 2 / 3, 0.01 / 3])
    shown = [line[:8] for line in said if line.startswith("step ")]
    assert shown == ["step 1/4", "step 4/4"], "the first and the last"
    table = dict(trainer.plan.table())
    assert (
        table["packed rows"] == f"12 samples in 4 rows of 25 tokens, {tokens.sum():.1f} % full"
    ), "of 100"
    assert (
        table["tokens per optimizer step"]
        == f"{tokens.sum()} / 2 = {tokens.sum() / 2:.1f} on average"
    )


def test_metrics_by_data_set_by_hand_and_none_where_a_step_has_no_rows(tmp_path):
    trainer = trainer_of(config_for(tmp_path, "--learning_rate", "1e-12"))
    model, objective = PolicyModel(new_model("llama")).eval(), trainer.objective
    steps = [*list(trainer.steps_left())[:2], [[1, 0], [3]], [[4], [PADDING_ROW]]]

    @torch.no_grad()
    def mean_loss(rows: list[int]) -> float:
        total = [
            model(b.input_ids, b.loss_mask)[0]
            for b in (objective.collate(SFT_ROWS, [row]) for row in rows)
        ]
        return -float(torch.cat(total).mean())

    absent = []
    for micro_batches in steps:
        rows = [row for part in micro_batches for row in part if row != PADDING_ROW]
        metrics = trainer.train_step(micro_batches)
        for number, name in enumerate(("short", "long")):
            own = [row for row in rows if SFT_ROWS[row]["source"] == number]
            expected = pytest.approx(mean_loss(own), abs=1e-5) if own else None
            assert metrics.get(f"loss/{name}") == expected
            absent += [] if own else [name]
        assert metrics["loss"] == pytest.approx(mean_loss(rows), abs=1e-5)
    assert set(absent) == {"short", "long"}
    assert not any(
        "/" in name
        for name in trainer_of(config_for(tmp_path), sources=("one",)).train_step([[0], [1]])
        if name.startswith("loss")
    )


def test_a_model_that_cannot_pack_is_refused_before_training(tmp_path):
    with pytest.raises(
        UserError, match=r"^--packing: \w+ cannot run packed rows, because its sliding window"
    ):
        trainer_of(config_for(tmp_path), new_model("phimoe"))


IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(3))
FROZEN = ("--lora_dim", "4", "--only_optimize_lora", "--lora_learning_rate", "0.01")


def make(assets, folder, *more: str) -> SupervisedTrainer:
    words = (
        f"--model_name_or_path {assets / 'lm'} --data_path d --output_dir {folder} --dtype fp32"
        " --zero_stage 0"
    )
    words += (
        " --per_device_train_batch_size 4 --num_train_epochs 2 --lr_scheduler_type linear"
        " --num_warmup_steps 2"
    )
    config = parse("sft", [*words.split(), *more])
    ds_config = fit_ds_config(config)
    torch.manual_seed(5)
    model = PolicyModel(
        load_causal_lm(
            str(assets / "lm"),
            "fp32",
            ds_config,
            changes_to_train(config, dropout=config.fit.dropout),
        )
    )
    if config.fit.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    objective = sft_objective(0, False, dist.device())
    return SupervisedTrainer(model, ds_config, TokenRows(TRAIN, None), objective, config)


def train_all(trainer: SupervisedTrainer, folder) -> list[dict]:
    with MetricsWriter(folder, None) as writer:
        trainer.run(writer, NO_CHECKPOINTS, "title")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("more", "rates", "of_lora"),
    [
        (
            ("--lora_dim", "4", "--lora_learning_rate", "0.01"),
            [0, 1e-5, 2e-5, 1e-5],
            [0, 0.005, 0.01, 0.005],
        ),  # by default
        (FROZEN, [0, 0.005, 0.01, 0.005], [None] * 4),
        ((), [0, 1e-5, 2e-5, 1e-5], [None] * 4),
    ],
)
def test_lora_has_its_own_rate_in_the_metrics_and_the_log_if_other_weights_train(
    assets, tmp_path, said, more, rates, of_lora
):
    lines = train_all(make(assets, tmp_path, *more), tmp_path)
    assert [line["lr"] for line in lines] == pytest.approx(rates)
    assert [line.get("lora_lr") for line in lines] == (
        pytest.approx(of_lora) if of_lora[0] == 0 else of_lora
    )
    assert any("lr 1.00e-05  LoRA lr 5.00e-03" in line for line in said) is (of_lora[0] == 0)


def test_gradient_checkpointing_does_not_change_what_lora_learns(assets, tmp_path):
    """With a frozen base, the layers' inputs need no gradient, which checkpointing must not depend
    on."""
    losses = []
    for number, more in enumerate(((), ("--gradient_checkpointing",))):
        (tmp_path / str(number)).mkdir()
        trainer = make(assets, tmp_path, *FROZEN, *more)
        losses.append([line["loss"] for line in train_all(trainer, tmp_path / str(number))])
        grads = [
            weight
            for name, weight in trainer.engine.module.named_parameters()
            if weight.requires_grad
        ]
        assert len(grads) == 28
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] - losses[0][-1] > 0.1, "it learns"


def test_the_fused_head_and_packed_rows_work_with_adapters(assets, tmp_path, said):
    trainer = make(assets, tmp_path, *FROZEN, "--packing")
    policy = trainer.engine.module
    assert policy.layout.fused and policy.layout.packed
    assert not any("whole logits" in line or "rows are padded" in line for line in said)
    train_all(trainer, tmp_path)
    ids = torch.randint(3, 300, (3, 9), generator=torch.Generator().manual_seed(4))
    wanted = torch.arange(9) < torch.tensor([9, 4, 6]).unsqueeze(1)
    with torch.no_grad():
        policy.eval()
        fused = policy(ids, wanted)[0]
        policy.layout = replace(policy.layout, fused=False, packed=False)
        torch.testing.assert_close(policy(ids, wanted)[0], fused, rtol=1e-4, atol=1e-4)


def test_dropout_of_lora_is_on_in_training_only(assets, tmp_path):
    trainer = make(assets, tmp_path, *FROZEN, "--lora_dropout", "0.5")
    train_all(trainer, tmp_path)
    lm = trainer.engine.module.lm
    assert {layer.lora_dropout["default"].p for layer in adapter_layers(lm).values()} == {0.5}
    assert not torch.equal(lm.train()(input_ids=IDS).logits, lm(input_ids=IDS).logits)
    assert torch.equal(logits_of(lm), logits_of(lm))


@pytest.mark.parametrize(
    ("more", "is_merged"),
    [
        (FROZEN, False),
        ((*FROZEN, "--lora_merge"), True),
        (("--lora_dim", "4"), True),
    ],
)
def test_the_saved_folder_is_an_adapter_unless_other_weights_trained_or_it_is_merged(
    assets, tmp_path, more, is_merged
):
    trainer = make(assets, tmp_path, *more)
    train_all(trainer, tmp_path)
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
    unchanged = [
        name
        for name, weight in base.named_parameters()
        if name in held and torch.equal(weight, held[name])
    ]
    assert bool(unchanged) is ("--only_optimize_lora" in more)


def test_the_reference_of_dpo_is_the_model_without_its_adapter(assets, tmp_path):
    words = ("--objective", "dpo", "--dtype", "fp32", "--zero_stage", "0", *FROZEN)
    config = pairs_config(*words)
    ds_config = fit_ds_config(config)
    model = PolicyModel(
        load_causal_lm(str(assets / "lm"), "fp32", ds_config, changes_to_train(config, dropout=0.0))
    )
    objective = dpo_objective(0, dist.device(), config)
    trainer = SupervisedTrainer(model, ds_config, TokenRows(PAIRS, None), objective, config)
    base = PolicyModel(load_causal_lm(str(assets / "lm"), "fp32", None)).eval()
    batch = objective.collate(trainer.rows.train, [0, 1])
    with torch.no_grad():
        expected = answer_logprobs(base, batch.input_ids, batch.answer_mask)
    torch.testing.assert_close(
        batch.ref_logprobs.flatten(), expected.flatten(), rtol=1e-5, atol=1e-4
    )
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    first, *_ = trainer.steps_left()
    metrics = trainer.train_step(first)
    assert metrics["loss"] == pytest.approx(0.6931, abs=1e-3) and metrics[
        "margin"
    ] == pytest.approx(0, abs=1e-4)
    changed = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert changed and all(is_adapter_parameter(name) for name in changed)
