"""The plan at the start of a run: its lines, and the memory and hardware of this machine."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import LlamaConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.planner import show_plan
from dschat_ppo.planner.hardware import GIB, HARDWARE


@pytest.fixture
def config(tmp_path):
    LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return parse("sft", ["--model_name_or_path", str(tmp_path), "--data_path", "d", "--output_dir", "o"])


def pretend(monkeypatch, host):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=host))


def test_one_line_says_what_a_run_needs(config, capsys, monkeypatch):
    pretend(monkeypatch, 16 * GIB)
    show_plan.show_memory_plan(config)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("expected peak: 0.8 ") and "GiB of 16.0 GiB of host memory (phase 'update'" in line


def test_a_second_line_warns(config, capsys, monkeypatch):
    pretend(monkeypatch, GIB // 2)
    show_plan.show_memory_plan(config)
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: may run out of memory: the phase 'update' needs about 0.8 ")


def test_a_model_that_the_planner_does_not_understand_ends_no_run(config, capsys, monkeypatch):
    models = show_plan.read_model_configs(config)
    vars(models["model"])["num_attention_heads"] = None
    monkeypatch.setattr(show_plan, "read_model_configs", lambda config: models)
    show_plan.show_memory_plan(config)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: no memory plan: LlamaConfig: a model without weights: ")


def test_mistakes_of_the_planner_are_not_hidden(config, monkeypatch):
    def mistaken(*_):
        raise KeyError("ours")

    monkeypatch.setattr(show_plan, "plan_step", mistaken)
    with pytest.raises(KeyError, match="ours"):
        show_plan.show_memory_plan(config)


def test_a_container_has_the_memory_of_its_limit(config, capsys, monkeypatch):
    monkeypatch.setattr(show_plan, "host_memory", lambda: 8 * GIB)
    show_plan.show_memory_plan(config)
    assert "GiB of 8.0 GiB of host memory" in capsys.readouterr().out


def test_other_ranks_are_silent(config, capsys, monkeypatch):
    pretend(monkeypatch, GIB // 2)
    monkeypatch.setattr(show_plan.dist, "is_main", lambda: False)
    show_plan.show_memory_plan(config)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "gib", "kind"), [
    ("NVIDIA H100 80GB HBM3", 79, "h100"), ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
    ("Tesla V100-SXM2-32GB", 31, "v100"),
    ("NVIDIA GeForce RTX 4090", 24, "rtx4090"), ("NVIDIA L4", 22, "l4"), ("NVIDIA L40S", 45, "l40s"),
    ("Some GPU", 79, "a100-80gb"),
])  # fmt: skip
def test_a_gpu_is_recognised_by_its_name_and_memory(monkeypatch, name, gib, kind):
    monkeypatch.setattr(show_plan.dist, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(name=name, total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    hardware, memory = show_plan.hardware_here()
    assert (hardware.name, memory, hardware.memory) == (kind, gib * GIB, gib * GIB)


def test_a_cpu_has_the_memory_of_the_host(monkeypatch):
    pretend(monkeypatch, 7 * GIB)
    monkeypatch.setattr(show_plan.dist, "on_gpu", lambda: False)
    assert show_plan.hardware_here() == (HARDWARE["cpu"], 7 * GIB)
