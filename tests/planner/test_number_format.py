"""What `--dtype auto` chooses, with measured times that the tests set, and that a run keeps it."""

import json
import time
from dataclasses import replace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from launch import forked, metrics_of, succeed
from transformers import AutoModelForCausalLM, LlamaConfig

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.config.run_flags import RunFlags
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.weight_headers import checkpoint_dtype
from dschat_ppo.planner import number_format
from dschat_ppo.planner.number_format import (
    dtype_for_plan,
    dtype_for_tool,
    faster_format,
    time_products,
    widths_of,
    with_dtype,
)
from dschat_ppo.run.output_folder import read_config


@pytest.fixture
def measured(monkeypatch):
    """What a measurement finds, which a test sets; no processor is measured."""
    seconds = {"bf16": 1.5, "fp32": 1.0}
    monkeypatch.setattr(number_format, "time_products", lambda hidden, inner: dict(seconds))
    monkeypatch.setattr(number_format, "_multiplies_bf16", lambda: True)
    return seconds


def config_of(assets, folder, *words, step="sft"):
    model = "--actor_model_name_or_path" if step == "ppo" else "--model_name_or_path"
    given = [model, assets / "lm", "--data_path", assets / "sft.jsonl", "--output_dir", folder]
    return parse(step, [*map(str, given), "--dtype", "auto", *words])


def test_auto_is_the_default():
    assert RunFlags("out").dtype == "auto"


@pytest.mark.parametrize(
    ("bf16", "fits", "line"),
    [
        (1.5, True, "dtype: fp32 (products 1.5 times as fast as in bf16 on this processor)"),
        (1.11, True, "dtype: fp32 (products 1.1 times as fast as in bf16 on this processor)"),
        (1.09, True, "dtype: bf16 (products about as fast as in fp32, with half the memory)"),
        (0.95, True, "dtype: bf16 (products about as fast as in fp32, with half the memory)"),
        (0.5, True, "dtype: bf16 (products 2.0 times as fast as in fp32 on this processor)"),
        (
            1.5,
            False,
            "dtype: bf16 (products in fp32 are 1.5 times as fast, but it does not fit in memory)",
        ),
    ],
)
def test_the_faster_format_wins_if_it_fits_and_bf16_within_ten_percent(bf16, fits, line):
    assert str(faster_format({"bf16": bf16, "fp32": 1.0}, fits)) == line


def test_the_run_gets_another_configuration_that_differs_in_the_format_alone(
    assets, tmp_path, measured, said
):
    config = config_of(assets, tmp_path)
    resolved = with_dtype(config)
    assert resolved == replace(config, run=replace(config.run, dtype="fp32"))
    assert config.run.dtype == "auto" and said == [
        "dtype: fp32 (products 1.5 times as fast as in bf16 on this processor)"
    ]
    measured["bf16"] = 0.5
    assert with_dtype(config).run.dtype == "bf16"
    assert with_dtype(resolved) is resolved and len(said) == 2, "given formats are not measured"


def test_fp32_that_does_not_fit_by_the_plan_is_not_chosen(assets, tmp_path, measured, monkeypatch):
    config = config_of(assets, tmp_path)
    monkeypatch.setattr(number_format, "host_memory", lambda: 2**40)
    assert with_dtype(config).run.dtype == "fp32"
    monkeypatch.setattr(number_format, "host_memory", lambda: 2**20)
    assert with_dtype(config).run.dtype == "bf16"


@pytest.mark.parametrize(("section", "dtype"), [("bf16", "bf16"), ("fp16", "fp16")])
def test_a_deepspeed_config_that_names_a_format_decides(assets, tmp_path, measured, section, dtype):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({section: {"enabled": True}}))
    config = config_of(assets, tmp_path, "--deepspeed_config", str(path))
    assert with_dtype(config).run.dtype == dtype
    planned = dtype_for_plan(config, load_config(str(assets / "lm"), "--model"), True, None)
    assert planned.dtype == dtype
    path.write_text(json.dumps({section: {"enabled": False}}))
    assert with_dtype(config).run.dtype == "fp32"


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_gets_bf16_if_it_has_it_without_emulation(assets, tmp_path, monkeypatch, bf16, dtype):
    monkeypatch.setattr(dist, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    assert with_dtype(config_of(assets, tmp_path)).run.dtype == dtype
    assert dtype_for_tool("auto", [str(assets / "lm")]) == dtype


def test_a_processor_without_bf16_arithmetic_is_not_measured(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_bf16_supported", lambda: None)
    monkeypatch.setattr(number_format, "time_products", None)
    assert with_dtype(config_of(assets, tmp_path)).run.dtype == "fp32"
    assert dtype_for_tool("auto", [str(assets / "lm")]) == "fp32"


def test_a_tool_takes_the_faster_format_whose_weights_fit_twice(
    assets, measured, monkeypatch, capsys
):
    folder = str(assets / "lm")
    parameters = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    monkeypatch.setattr(number_format, "available_memory", lambda: 8 * parameters)
    assert dtype_for_tool("auto", [folder]) == "fp32"
    assert "1.5 times as fast" in capsys.readouterr().err, "answers alone are on stdout"
    assert dtype_for_tool("auto", [folder, folder]) == "bf16"
    assert dtype_for_tool("fp16", [folder]) == "fp16"


def test_products_have_the_widths_of_the_model_up_to_a_limit():
    assert widths_of(LlamaConfig(hidden_size=32, intermediate_size=64)) == (32, 64)
    assert widths_of(LlamaConfig(hidden_size=4096, intermediate_size=11008)) == (1024, 1024)


def test_both_formats_are_timed_by_the_same_products(monkeypatch):
    ran = []
    clock = iter([0.0, 1.0, 0.0, 4.0, 0.0, 5.0, 0.0, 3.0, 0.0, 2.0, 0.0, 3.1, 0.0, 1.05, 0.0, 9.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    monkeypatch.setattr(number_format, "SECONDS", 0.0)
    monkeypatch.setattr(
        number_format,
        "_run_products",
        lambda *operands: ran.append(
            (operands[0].dtype, tuple(tuple(part.shape) for part in operands))
        ),
    )
    # bf16: 1, 5, 2 and 1.05 s; the fourth pass confirms the first
    assert time_products(32, 64) == {"bf16": 1.0, "fp32": 3.0}
    shapes = [
        ((256, 32), (32, 32), (256, 32)),
        ((256, 32), (64, 32), (256, 64)),
        ((256, 64), (32, 64), (256, 32)),
    ]
    one_pass = [(dtype, of) for dtype in (torch.bfloat16, torch.float32) for of in shapes]
    assert ran == 4 * one_pass


def test_a_model_that_is_not_there_is_named_before_anything_is_measured(assets, tmp_path, measured):
    config = config_of(assets, tmp_path)
    config = replace(config, fit=replace(config.fit, model_name_or_path=str(tmp_path / "none")))
    with pytest.raises(UserError, match="--model_name_or_path"):
        with_dtype(config)


def words_of(assets, folder, steps, *more):
    words = ["--model_name_or_path", assets / "lm", "--data_path", assets / "sft.jsonl"]
    words += ["--output_dir", folder, "--per_device_train_batch_size", 4, "--max_seq_len", 64]
    words += ["--lr_scheduler_type", "constant", "--max_steps", steps, "--dtype", "auto"]
    return [*map(str, [*words, "--keep_final_checkpoint", *more])]


def losses_of(folder):
    return [line["loss"] for line in metrics_of(folder) if "loss" in line]


@pytest.mark.ranks
def test_a_run_keeps_its_format_where_the_other_one_is_faster(assets, tmp_path):
    straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"

    def run(seconds, folder, steps, *more, ranks=1):
        words = words_of(assets, folder, steps, *more)
        return forked(ranks, "tests/workers/measured_main.py", seconds, *words)

    succeed(run(1.5, straight, 4, ranks=2))
    assert read_config(straight)["dtype"] == "fp32"
    succeed(run(1.5, interrupted, 2, ranks=2))
    (interrupted / "result.json").unlink()
    # from here on as on another machine
    said = succeed(run(0.5, straight, 4)).stdout
    assert f"dtype: fp32 (as the run in {straight})" in said
    assert "this run is done" in said, "no setting has changed"
    said = succeed(run(0.5, interrupted, 4, ranks=2)).stdout
    assert "dtype: fp32 (as in step_000002)" in said
    assert losses_of(interrupted) == losses_of(straight) and len(losses_of(straight)) == 4
    assert "--dtype: fp32 -> bf16" in run(0.5, interrupted, 6, "--dtype", "bf16").stderr
    succeed(run(0.5, interrupted, 1, "--resume", "never", "--overwrite_output_dir"))
    assert read_config(interrupted)["dtype"] == "bf16"
    assert checkpoint_dtype(str(straight)) == checkpoint_dtype(str(interrupted)) == torch.float32
    succeed(run(1.5, tmp_path / "half", 1, "--save_dtype", "bf16"))
    assert checkpoint_dtype(str(tmp_path / "half")) == torch.bfloat16
