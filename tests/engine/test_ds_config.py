"""DeepSpeed configurations; which models ZeRO-3 keeps whole, and that doing so changes no
number."""

import json
import re
from pathlib import Path

import deepspeed
import pytest
import torch
from command_lines import NEEDED
from deepspeed import DeepSpeedConfig
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from one_rank import one_rank  # noqa: F401
from tiny_models import new_model

from dschat_ppo.config.cli import parse
from dschat_ppo.config.run_flags import MemoryFlags
from dschat_ppo.engine import build_engine
from dschat_ppo.engine.build_engine import (
    OptimizerSettings,
    eval_engine,
    may_be_whole,
    train_engine,
)
from dschat_ppo.engine.build_engine import whole_weights as whole_weights_of
from dschat_ppo.engine.ds_config import (
    DERIVED,
    KNOWN,
    ZeroOptions,
    check_zero_plus_plus,
    eval_config,
    merge,
    read_overlay,
    require_agreement,
    train_config,
)
from dschat_ppo.engine.optimizer_step import accumulate, apply, skip_update
from dschat_ppo.errors import UserError
from dschat_ppo.models.saving import gather_state
from dschat_ppo.models.wrapped_models import PolicyModel


def test_offload_moves_the_optimizer_and_at_stage_3_the_parameters():
    for stage, keys in ((2, {"offload_optimizer"}), (3, {"offload_optimizer", "offload_param"})):
        zero = train_config(stage, "bf16", offload=True, world_size=2, max_grad_norm=1.0)[
            "zero_optimization"
        ]
        assert {key for key, value in zero.items() if value == {"device": "cpu"}} == keys
        zero = train_config(stage, "bf16", offload=False, world_size=2, max_grad_norm=1.0)[
            "zero_optimization"
        ]
        assert not any(value == {"device": "cpu"} for value in zero.values())


def test_zero_plus_plus_reaches_stage_3_alone():
    memory = MemoryFlags(zero_hpz_partition_size=4)
    options = ZeroOptions(memory, quantised_frozen=True)
    zero = train_config(3, "bf16", False, 8, 1.0, None, options)["zero_optimization"]
    assert {name: value for name, value in zero.items() if name.startswith("zero_")} == {
        "zero_hpz_partition_size": 4,
        "zero_quantized_nontrainable_weights": True,
    }
    zero = train_config(2, "bf16", False, 8, 1.0, None, options)["zero_optimization"]
    assert not any(name.startswith("zero_") for name in zero)


def test_zero_plus_plus_is_refused_where_it_cannot_divide_the_ranks():
    check_zero_plus_plus(MemoryFlags(zero_hpz_partition_size=2), 4)
    with pytest.raises(
        UserError, match="--zero_hpz_partition_size 3 must divide the number of ranks, 4"
    ):
        check_zero_plus_plus(MemoryFlags(zero_hpz_partition_size=3), 4)


def test_the_overlay_takes_precedence_and_arguments_are_not_modified():
    base = {"a": {"x": 1, "y": 2}, "b": 3}
    overlay = {"a": {"y": 5, "z": 6}, "c": [1]}
    assert merge(base, overlay) == {"a": {"x": 1, "y": 5, "z": 6}, "b": 3, "c": [1]}
    assert base == {"a": {"x": 1, "y": 2}, "b": 3}
    config = train_config(3, "bf16", False, 2, 1.0, {"zero_optimization": {"overlap_comm": True}})
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("device", "overlaps"), [("cpu", [False] * 4), ("cuda", [False, False, False, True])]
)
def test_on_a_gpu_zero_3_overlaps_and_buckets_are_small(device, overlaps):
    """DeepSpeed's own buckets have 500 million numbers."""
    options = ZeroOptions(device=device)
    for stage, overlap in enumerate(overlaps):
        zero = train_config(stage, "fp32", False, 2, 1.0, None, options)["zero_optimization"]
        sizes = [zero.get(f"{name}_bucket_size") for name in ("reduce", "allgather")]
        assert (zero["overlap_comm"], sizes) == (overlap, [10**8 if device == "cuda" else None] * 2)
    mine = {"zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 7}}
    options = ZeroOptions(device="cuda")
    zero = train_config(3, "bf16", False, 2, 1.0, mine, options)["zero_optimization"]
    assert (zero["overlap_comm"], zero["reduce_bucket_size"]) == (False, 7)


AUTO = "auto"
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
}
BATCHES = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
}
FP16 = {
    "enabled": AUTO,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ON_HOST = {"device": "cpu", "pin_memory": True}
FILES = {  # as users of these projects have them
    "LLaMA-Factory, ds_z3_config.json": {
        **BATCHES,
        "gradient_clipping": AUTO,
        "zero_allow_untested_optimizer": True,
        "fp16": FP16,
        "bf16": {"enabled": AUTO},
        "zero_optimization": STAGE_3 | {"overlap_comm": False},
    },
    "axolotl, zero3_bf16.json": {
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {
            **STAGE_3,
            "sub_group_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        **BATCHES,
        "gradient_clipping": AUTO,
        "wall_clock_breakdown": False,
    },
    "Hugging Face, ds_config_zero3.json": {
        "fp16": FP16,
        "bf16": {"enabled": AUTO},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": STAGE_3 | {"offload_optimizer": ON_HOST, "offload_param": ON_HOST},
        **BATCHES,
        "gradient_clipping": AUTO,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
}


def config_with(tmp_path, settings, step="sft", *words):
    """The configuration of a step whose --deepspeed_config holds the settings."""
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    return parse(step, [*NEEDED[step], "--deepspeed_config", str(tmp_path / "mine.json"), *words])


@pytest.mark.parametrize("step", ["sft", "ppo"])
@pytest.mark.parametrize("name", FILES)
def test_files_of_other_projects_are_used_as_they_are(tmp_path, name, step):
    schedule = ["--lr_scheduler_type", "constant_with_warmup"] if "scheduler" in FILES[name] else []
    config = config_with(tmp_path, FILES[name], step, *schedule)
    require_agreement(config, ranks=2)
    overlay = read_overlay(config.run.deepspeed_config)
    assert '"auto"' not in json.dumps(overlay) and not set(overlay) & set(DERIVED)
    made, zero = train_config(0, "bf16", False, 2, 1.0, overlay), FILES[name]["zero_optimization"]
    assert (
        made["zero_optimization"].items()
        >= {key: value for key, value in zero.items() if value != AUTO}.items()
    )
    assert (made["gradient_clipping"], made["bf16"]["enabled"]) == (1.0, True)
    DeepSpeedConfig(made | {"train_batch_size": 1})  # DeepSpeed's own check, here with one rank


AGREE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "train_batch_size": 24,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 7},
    },
    "bf16": {"enabled": True},
}
FIT = (
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 3 --learning_rate 2e-5"
    " --weight_decay 0.1 --lr_scheduler_type linear --num_warmup_steps 7"
).split()


@pytest.mark.parametrize(
    ("place", "value", "flag", "ours"),
    [
        ("train_micro_batch_size_per_gpu", 8, "per_device_train_batch_size", "4"),
        ("gradient_accumulation_steps", 1, "gradient_accumulation_steps", "3"),
        (
            "train_batch_size",
            64,
            "per_device_train_batch_size x --gradient_accumulation_steps x ranks",
            "24",
        ),
        ("optimizer.params.lr", 1e-4, "learning_rate", "2e-05"),
        ("optimizer.params.eps", 1e-6, "adam_epsilon", "1e-08"),
        ("optimizer.params.betas", [0.9, 0.999], "adam_beta1", "0.95"),
        ("optimizer.params.weight_decay", 0.0, "weight_decay", "0.1"),
        ("scheduler.type", "WarmupCosineLR", "lr_scheduler_type", "linear"),
        ("scheduler.params.warmup_num_steps", 100, "num_warmup_steps", "7"),
        ("scheduler.params.warmup_max_lr", 1e-4, "learning_rate", "2e-05"),
        ("bf16.enabled", False, "dtype", "bf16"),
        ("fp16.enabled", True, "dtype", "bf16"),
        ("optimizer.params.adam_lr", 1e-4, "learning_rate", "2e-05"),
    ],
)
def test_settings_that_differ_from_the_flags_are_named_with_both_values(
    tmp_path, place, value, flag, ours
):
    settings, words = json.loads(json.dumps(AGREE)), FIT
    *sections, key = place.split(".")
    inner = settings
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    with pytest.raises(UserError) as problem:
        require_agreement(config_with(tmp_path, settings, "sft", *words), ranks=2)
    said = str(problem.value)
    assert (
        f"mine.json: {place} is {json.dumps(value)}, but --{flag}" in said
        and ours in said.split(", but ")[1]
    )


def test_the_rate_of_a_file_is_that_of_actor_and_critic(tmp_path):
    settings = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-6}}}
    one = ["--actor_learning_rate", "1e-6"]
    with pytest.raises(UserError, match="lr is 1e-06, but --critic_learning_rate is 5e-06"):
        require_agreement(config_with(tmp_path, settings, "ppo", *one), ranks=1)
    require_agreement(
        config_with(tmp_path, settings, "ppo", *one, "--critic_learning_rate", "1e-6"), ranks=1
    )
    without = ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "2"]
    require_agreement(config_with(tmp_path, settings, "ppo", *one, *without), ranks=1)


def test_deepspeed_reads_every_known_setting():
    sources = "".join(path.read_text() for path in Path(deepspeed.__file__).parent.rglob("*.py"))
    assert [key for key in KNOWN + DERIVED if not re.search(rf"[\"']{key}[\"']", sources)] == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{", "cannot be read as JSON"),
        ([1], "must be a JSON object"),
        ({"gradient_accumulation": 4}, "no setting gradient_accumulation"),
        (
            {"zero_optimisation": {"stage": 3}},
            "no setting zero_optimisation; did you mean zero_optimization?",
        ),
        ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag: .*; did you mean stage?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: "),
        ({"zero_optimization": 3}, "zero_optimization must be an object"),
        ({"bf16": {"enable": True}}, "bf16.enable: .*; did you mean enabled?"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type is Muon, but --optimizer is adamw"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param.device is nvme.*use cpu",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device is nvme.*use cpu",
        ),
        ({"bf16": {"check_grad_overflow": False}}, "false would let gradients"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "false would let gradients"),
        ({"bf16": {"check_grad_overflow": True}}, None),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, None),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_the_nearest(tmp_path, settings, said):
    (tmp_path / "mine.json").write_text(
        settings if isinstance(settings, str) else json.dumps(settings)
    )
    config = parse("sft", [*NEEDED["sft"], "--deepspeed_config", str(tmp_path / "mine.json")])
    if said is None:
        require_agreement(config, ranks=1)
        return
    with pytest.raises(
        UserError, match=f"mine.json: .*{re.escape(said).replace(re.escape('.*'), '.*')}"
    ):
        require_agreement(config, ranks=1)


@pytest.mark.parametrize(
    ("stage", "dtype", "overlay", "expected"),
    [
        (0, "bf16", {}, "fp32"),
        (1, "bf16", {}, "fp32"),
        (2, "bf16", {}, None),
        (3, "bf16", {}, None),
        (1, "fp16", {}, None),
        (0, "fp32", {}, None),
        (1, "bf16", {"communication_data_type": "bf16"}, "bf16"),
        (1, "bf16", {"zero_optimization": {"stage": 2}}, None),
        (0, "bf16", {"zero_optimization": {"stage": 0}}, "fp32"),
        (1, "bf16", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, None),
    ],
)
def test_fp32_sums_of_gradients_are_reduced_in_fp32(stage, dtype, overlay, expected):
    assert (
        train_config(stage, dtype, False, 2, 1.0, overlay).get("communication_data_type")
        == expected
    )


GIB = 2**30
SETTINGS = OptimizerSettings(0.01, 0.1, "constant", 0, 6, (0.8, 0.9), 1e-6)
IDS = torch.randint(2, 48, (4, 9), generator=torch.Generator().manual_seed(0))


def test_weights_that_fit_many_times_are_whole():
    config = train_config(3, "bf16", False, 8, 1.0)
    assert may_be_whole(config, int(2 * 0.5e9), 8, 80 * GIB), "Qwen2-0.5B in bf16"
    for size, ranks, memory in ((0.5e9, 8, 24), (7e9, 64, 141)):
        assert not may_be_whole(config, int(2 * size), ranks, memory * GIB)
    assert may_be_whole(config, int(2 * 7e9), 1, 80 * GIB), "one rank holds everything in any case"


@pytest.mark.parametrize(
    ("stage", "zero", "whole"),
    [
        (3, {}, True),
        (2, {}, False),
        (3, {"stage3_param_persistence_threshold": 10**9}, False),
        (3, {"stage3_max_live_parameters": 10**6}, False),
        (3, {"mics_shard_size": 2}, False),
        (3, {"reduce_bucket_size": 10**6}, True),
        (3, {"offload_param": {"device": "cpu"}}, False),
        (3, {"zero_hpz_partition_size": 2}, False),
        (3, {"zero_quantized_weights": True}, False),
        (3, {"zero_quantized_nontrainable_weights": True}, False),
        (3, {"offload_optimizer": {"device": "cpu"}}, True),
    ],
)
def test_settings_under_which_weights_stay_partitioned(stage, zero, whole):
    config = train_config(stage, "fp32", False, 2, 1.0, {"zero_optimization": zero})
    assert may_be_whole(config, 24, 2, GIB) is whole


def trained(layer_by_layer: bool):
    """A ZeRO-3 engine after three updates, with what they returned."""
    torch.manual_seed(1)
    model = PolicyModel(new_model("llama"))
    engine = train_engine(model, train_config(3, "bf16", False, 1, 0.5), SETTINGS, layer_by_layer)
    results = [
        apply(accumulate(engine, [IDS[:2], IDS[2:]], lambda ids: loss_of(engine, ids)))
        for _ in range(3)
    ]
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
    assert (
        all(torch.equal(after[name], weight) for name, weight in before.items())
        and len(before) > 10
    )
    assert whole_weights_of(layers) is None and torch.nn.functional.linear is build_engine.linear


def test_weights_are_gathered_once_after_an_update(engines, monkeypatch):
    engine, _ = engines[False]
    weight, calls = next(engine.module.parameters()), []
    for parameter in engine.module.parameters():
        own = parameter.all_gather_coalesced
        monkeypatch.setattr(
            parameter,
            "all_gather_coalesced",
            lambda ws, own=own: (calls.append(len(ws)), own(ws))[1],
            raising=False,
        )
    skip_update(engine)
    assert weight.numel() == 0, "an update drops the whole weights"
    with torch.no_grad():
        first, second = (engine(IDS, IDS > 0)[0] for _ in range(2))
    assert calls == [len(list(engine.module.parameters()))] and torch.equal(first, second)
    gather_state(engine.module)  # partitions each weight again
    with torch.no_grad():
        assert torch.equal(
            engine.module.lm.model(IDS).last_hidden_state,
            engine.module.lm.model(IDS).last_hidden_state,
        )
    assert calls[1:] == [len(list(engine.module.parameters()))], (
        "a part of the model that is called by itself too"
    )


def test_whole_weights_have_the_product_of_pytorch_with_the_same_bits(monkeypatch):
    monkeypatch.setattr(
        build_engine,
        "zero3_linear_wrap",
        lambda *given: calls.append(given) or of_deepspeed(*given),
    )
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
