"""DeepSpeed configurations."""

import json

import pytest

from dschat_ppo.config.memory_flags import MemoryFlags
from dschat_ppo.engine.ds_config import check_zero_plus_plus, eval_config, merge, read_overlay, train_config
from dschat_ppo.errors import UserError


def test_offload_moves_the_optimizer_and_at_stage_3_the_parameters():
    for stage, keys in (
        (1, {"offload_optimizer"}),
        (2, {"offload_optimizer"}),
        (3, {"offload_optimizer", "offload_param"}),
    ):
        zero = train_config(stage, "bf16", offload=True, world_size=2, max_grad_norm=1.0)["zero_optimization"]
        assert {key for key, value in zero.items() if value == {"device": "cpu"}} == keys
        zero = train_config(stage, "bf16", offload=False, world_size=2, max_grad_norm=1.0)["zero_optimization"]
        assert not any(value == {"device": "cpu"} for value in zero.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_alone_may_be_offloaded(stage):
    memory = MemoryFlags(offload_optimizer=True)
    zero = train_config(stage, "bf16", False, 2, 1.0, memory=memory)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert zero.get("offload_param", {"device": "none"}) == {"device": "none"}


def test_zero_plus_plus_reaches_stage_3_alone():
    memory = MemoryFlags(zero_hpz_partition_size=4, zero_quantized_weights=True, zero_quantized_gradients=True)
    zero = train_config(3, "bf16", False, 8, 1.0, None, memory, quantised_frozen=True)["zero_optimization"]
    assert {name: value for name, value in zero.items() if name.startswith("zero_")} == {
        "zero_hpz_partition_size": 4,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_quantized_nontrainable_weights": True,
    }
    zero = train_config(2, "bf16", False, 8, 1.0, None, memory)["zero_optimization"]
    assert not any(name.startswith("zero_") for name in zero)
    assert eval_config(3, "bf16", False, 8, quantised=True)["zero_optimization"]["zero_quantized_weights"] is True


@pytest.mark.parametrize(
    ("flags", "frozen", "ranks", "device", "refused"),
    [
        ({"zero_hpz_partition_size": 2}, False, 4, "cpu", None),
        (
            {"zero_hpz_partition_size": 3},
            False,
            4,
            "cuda",
            "--zero_hpz_partition_size 3 must divide the number of ranks, 4",
        ),
        (
            {"zero_hpz_partition_size": 8},
            False,
            4,
            "cuda",
            "--zero_hpz_partition_size 8 must divide the number of ranks, 4",
        ),
        ({"zero_quantized_weights": True}, False, 2, "cuda", None),
        ({"zero_quantized_weights": True}, False, 2, "cpu", "--zero_quantized_weights: .* CUDA kernels"),
        ({"zero_quantized_gradients": True}, False, 2, "cpu", "--zero_quantized_gradients: .* CUDA kernels"),
        ({}, True, 2, "cpu", "--enable_mixed_precision_lora: .* CUDA kernels"),
        ({}, True, 2, "cuda", None),
    ],
)
def test_zero_plus_plus_is_refused_where_the_machine_cannot_run_it(flags, frozen, ranks, device, refused):
    memory = MemoryFlags(**flags)
    if refused is None:
        check_zero_plus_plus(memory, frozen, ranks, device)
        return
    with pytest.raises(UserError, match=refused):
        check_zero_plus_plus(memory, frozen, ranks, device)


def test_eval_engines_are_partitioned_at_stage_3_only():
    stages = [eval_config(stage, "fp32", False, 1)["zero_optimization"]["stage"] for stage in range(4)]
    assert stages == [0, 0, 0, 3]


def test_the_overlay_takes_precedence_and_arguments_are_not_modified():
    base = {"a": {"x": 1, "y": 2}, "b": 3}
    overlay = {"a": {"y": 5, "z": 6}, "c": [1]}
    assert merge(base, overlay) == {"a": {"x": 1, "y": 5, "z": 6}, "b": 3, "c": [1]}
    assert base == {"a": {"x": 1, "y": 2}, "b": 3}
    config = train_config(3, "bf16", False, 2, 1.0, {"zero_optimization": {"overlap_comm": True}})
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(("device", "overlaps"), [("cpu", [False] * 4), ("cuda", [False, False, False, True])])
def test_on_a_gpu_zero_3_overlaps_and_buckets_are_small(device, overlaps):
    """DeepSpeed's own buckets have 500 million numbers."""
    for stage, overlap in enumerate(overlaps):
        zero = train_config(stage, "fp32", False, 2, 1.0, device=device)["zero_optimization"]
        sizes = [zero.get(f"{name}_bucket_size") for name in ("reduce", "allgather")]
        assert (zero["overlap_comm"], sizes) == (overlap, [10**8 if device == "cuda" else None] * 2)
    mine = {"zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 7}}
    zero = train_config(3, "bf16", False, 2, 1.0, mine, device="cuda")["zero_optimization"]
    assert (zero["overlap_comm"], zero["reduce_bucket_size"]) == (False, 7)


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"gradient_accumulation_steps": 4})])
def test_invalid_overlay_files_are_named_in_the_error(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--deepspeed_config .*mine\.json"):
        read_overlay(str(path))


@pytest.mark.parametrize(
    "settings", [{"bf16": {"check_grad_overflow": False}}, {"zero_optimization": {"compute_grad_norm": False}}]
)
def test_gradient_checks_cannot_be_turned_off(tmp_path, settings):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"mine\.json: .* false would let gradients"):
        read_overlay(str(path))
    path.write_text(json.dumps(settings).replace("false", "true"))
    assert read_overlay(str(path)) != {}


def test_without_a_file_the_overlay_is_empty():
    assert read_overlay(None) == {}
