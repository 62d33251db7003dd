"""`--attn_implementation`: every choice runs where it should, gives the numbers of rows alone, and is refused early."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from looping_flash_attn import flash_attn_varlen_func, install
from test_forward import FAMILIES, TEMPERATURE, both, model_of, rows_alone, scores_alone
from test_shared_prompts import rollout, without_dropout
from tiny_models import KINDS, new_model
from torch.nn.attention import flex_attention as of_torch

from dschat_ppo.common.extras import how_to_install
from dschat_ppo.config.cli import parse
from dschat_ppo.config.memory_flags import MemoryFlags
from dschat_ppo.errors import UserError
from dschat_ppo.models.attention_choice import check_attention, check_attention_dropout, reason_against
from dschat_ppo.models.backbone import Layout, backbone_of
from dschat_ppo.models.forward import response_logprobs, response_values
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.long_sequences import apply_memory_flags, check_long_sequences
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel

CHOICES = ("sdpa", "eager", "flash_attention_2", "flex_attention")
LAYOUTS = {"padded": {}, "packed": {"packed": True}, "shared": {"packed": True, "shares": True}}
SUITS = {
    "llama": CHOICES,
    "mistral_window": CHOICES,
    "opt": CHOICES,
    "gpt2": CHOICES[:2],
    "gemma2": CHOICES[1:],
}
CASES = [(name, choice) for name, choices in SUITS.items() for choice in choices]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """flash-attn in loops, and gradients of PyTorch's flex attention for a CPU, which it does not offer there."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None, raising=False)
    return install(monkeypatch)


# Numbers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "choice"), CASES)
def test_log_probs_and_gradients_are_those_of_each_row_alone(name, choice, layout):
    lm, rows = without_dropout(model_of(name, 1)), rollout()
    before = lm.config._attn_implementation
    weights = torch.linspace(-1, 1, int(rows.response_mask.sum()))
    parameters = dict(lm.named_parameters())

    def gradients(logprobs, entropies):
        return torch.autograd.grad((weights * logprobs + 0.1 * entropies).sum(), parameters.values(), allow_unused=True)

    policy = PolicyModel(lm, Layout(**LAYOUTS[layout], attention=choice))
    found = both(response_logprobs(policy, rows, TEMPERATURE, entropy_grad=True))
    assert lm.config._attn_implementation == before
    found, expected = tuple(part[rows.response_mask] for part in found), scores_alone(lm, rows)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for key, a, b in zip(parameters, gradients(*found), gradients(*expected), strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize(("name", "choice"), [case for case in CASES if FAMILIES[case[0]][2] and case[0] != "gemma2"])
def test_values_are_those_of_each_row_alone(name, choice, layout):
    classifier, rows = without_dropout(model_of(name, 2)), rollout()
    model = ScalarModel(classifier, Layout(**LAYOUTS[layout], attention=choice))
    with torch.no_grad():
        alone = [classifier.score(classifier.base_model(input_ids=ids).last_hidden_state)[0, start - 1 : -1, 0]
                 for start, ids in rows_alone(rows)]  # fmt: skip
        found = response_values(model, rows)[rows.response_mask]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-5)


def test_sinks_in_flex_and_eager_attention():
    lm, rows = new_model("gpt-oss"), rollout(48)
    with torch.no_grad():
        expected = scores_alone(lm, rows)
        for choice in ("flex_attention", "eager"):
            for layout in LAYOUTS.values():
                policy = PolicyModel(lm, Layout(**layout, attention=choice))
                found = both(response_logprobs(policy, rows, TEMPERATURE))
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a[rows.response_mask], b, rtol=0, atol=1e-5)


# Which function computes the attention


def count_calls(monkeypatch, kernels) -> dict[str, int]:
    """Calls of each kernel since; those of flash-attn are in `kernels`."""
    calls = {"sdpa": 0, "flex_attention": 0, "eager of transformers": 0, "softmax": 0}

    def counted(name, function):
        def call(*args, **options):
            calls[name] += 1
            return function(*args, **options)

        return call

    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted("sdpa", sdpa))
    monkeypatch.setattr(of_torch, "flex_attention", counted("flex_attention", of_torch.flex_attention))
    llama = sys.modules["transformers.models.llama.modeling_llama"]
    eager = llama.eager_attention_forward
    monkeypatch.setattr(llama, "eager_attention_forward", counted("eager of transformers", eager))
    monkeypatch.setattr(torch, "softmax", counted("softmax", torch.softmax))
    kernels.clear()
    return calls


LAYERS, SEGMENTS = 2, {"padded": 1, "packed": 8, "shared": 8}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choice", ["auto", *CHOICES])
def test_each_choice_calls_its_kernel_and_no_other(monkeypatch, kernels, choice, layout):
    policy, rows = PolicyModel(new_model("llama"), Layout(**LAYOUTS[layout])), rollout(48)
    policy.layout = replace(policy.layout, attention=choice)
    calls = count_calls(monkeypatch, kernels)
    with torch.no_grad():
        response_logprobs(policy, rows, 1.0)
    found = {name: number for name, number in calls.items() if number and name != "softmax"}
    found |= {"flash_attention_2": len(kernels)} if kernels else {}
    of_segments = LAYERS * SEGMENTS[layout]
    expected = {"auto": {"sdpa": of_segments}, "sdpa": {"sdpa": of_segments}, "flash_attention_2": {choice: LAYERS},
                "flex_attention": {choice: LAYERS}, "eager": {}}[choice]  # fmt: skip
    if (choice, layout) == ("eager", "padded"):
        expected = {"eager of transformers": LAYERS}
    assert found == expected
    if choice == "eager" and layout != "padded":
        assert calls["softmax"] >= of_segments
    if choice == "flash_attention_2":
        assert {call["segments"] for call in kernels} == {8}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpointed_layers_attend_alike_in_the_backward_pass(monkeypatch, kernels, choice, layout):
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(new_model("llama"), Layout(**LAYOUTS[layout])).train()
        policy.layout = replace(policy.layout, attention=choice)
        if checkpointing:
            policy.gradient_checkpointing_enable()
            calls = count_calls(monkeypatch, kernels)
        response_logprobs(policy, rollout(48), 1.0).logprobs.sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    twice = 2 * LAYERS * (SEGMENTS[layout] if choice == "sdpa" else 1)
    counted = {"sdpa": calls["sdpa"], "flash_attention_2": len(kernels), "flex_attention": calls["flex_attention"]}
    assert {name: number for name, number in counted.items() if number} == (
        {} if choice == "eager" else {choice: twice}
    )


def test_whole_logits_use_it_too(kernels):
    policy = PolicyModel(new_model("llama"), Layout(fused=False))
    policy.layout = replace(policy.layout, attention="flash_attention_2")
    with torch.no_grad():
        response_logprobs(policy, rollout(48), 1.0)
    assert len(kernels) == LAYERS


@pytest.mark.parametrize("choice", CHOICES)
def test_kernels_are_selected_and_saved_models_do_not_name_the_choice(tmp_path, choice):
    policy = PolicyModel(new_model("llama"))
    apply_memory_flags(policy, MemoryFlags(attn_implementation=choice))
    assert policy.layout.attention == choice
    assert select_kernels(policy) is None
    assert policy.layout.packed and policy.layout.shares and policy.layout.fused
    policy.lm.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not [key for key in saved if "attn" in key]
    assert transformers.AutoConfig.from_pretrained(tmp_path)._attn_implementation in (None, "sdpa")


@pytest.mark.parametrize("choice", ["flash_attention_2", "flex_attention"])
def test_a_window_that_is_only_in_the_mask_is_found_before_training(choice):
    policy = PolicyModel(new_model("phimoe"))
    policy.layout = replace(policy.layout, attention=choice)
    with pytest.raises(
        UserError, match=rf"^--attn_implementation {choice}: the sliding window of PhimoeModel .* sdpa$"
    ):
        select_kernels(policy)


def test_soft_caps_pack_in_flex_attention():
    policy = PolicyModel(new_model("gemma2"))
    policy.layout = replace(policy.layout, attention="flex_attention")
    select_kernels(policy)
    assert policy.layout.packed and policy.layout.shares


# Refusals


def gpu(monkeypatch, capability=(9, 0)) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    return torch.device("cuda:0")


def refusal(function, *args) -> str:
    with pytest.raises(UserError) as raised:
        function(*args)
    [line] = str(raised.value).splitlines()
    return line


def test_without_a_gpu():
    for choice in ("flash_attention_2", "flex_attention"):
        line = refusal(check_attention, choice, torch.device("cpu"))
        assert line.startswith(f"--attn_implementation {choice} needs a GPU, because ") and line.endswith("use sdpa")


def test_without_flash_attn_or_with_an_old_one(monkeypatch):
    device = gpu(monkeypatch)

    def old(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, causal=False):
        return flash_attn_varlen_func

    install(monkeypatch, old)
    line = refusal(check_attention, "flash_attention_2", device)
    assert line.endswith(f"older than 2.6: {how_to_install('flash_attn')}")
    monkeypatch.delitem(sys.modules, "flash_attn")
    line = refusal(check_attention, "flash_attention_2", device)
    command = 'pip install --no-build-isolation -e ".[flash]"'
    assert line == f"--attn_implementation flash_attention_2 needs the package flash-attn: {command}"


@pytest.mark.parametrize(
    ("kind", "choice", "changes", "reason"),
    [
        ("bloom", "sdpa", {}, "its attention, 'eager', be replaced"),
        ("gptj", "flex_attention", {}, "be replaced"),
        ("gemma2", "sdpa", {}, "soft cap"),
        ("gpt-oss", "sdpa", {}, "sinks"),
        ("gpt-oss", "flash_attention_2", {}, "has no sinks"),
        ("gpt2", "flex_attention", {}, "does not know that flex attention suits it"),
        ("llama", "flash_attention_2", {"head_dim": 320}, "320 numbers, and FlashAttention-2 at most 256"),
        ("llama", "flash_attention_2", {"hidden_size": 1056, "num_attention_heads": 4}, "264 numbers"),
    ],
)
def test_models_that_a_kernel_does_not_suit_are_refused_by_name(tmp_path, monkeypatch, kind, choice, changes, reason):
    monkeypatch.setattr("dschat_ppo.models.long_sequences.device", lambda: gpu(monkeypatch))
    model, config, settings = KINDS[kind]
    getattr(transformers, config)(**{**settings, **changes}).save_pretrained(tmp_path)
    flags = MemoryFlags(attn_implementation=choice)
    line = refusal(check_long_sequences, flags, "--model", str(tmp_path), False)
    name = type(backbone_of(new_model(kind))).__name__
    assert line.startswith(f"--attn_implementation {choice}: --model {tmp_path}: {name} cannot use it, because ")
    assert reason in line


@pytest.mark.parametrize(("name", "choice"), CASES)
def test_models_that_a_kernel_suits(name, choice):
    assert reason_against(choice, model_of(name, 1).base_model) is None


@pytest.mark.parametrize(("kind", "choice"), [("bloom", "eager"), ("falcon", "sdpa"), ("gptj", "eager")])
def test_the_models_own_attention_is_always_allowed(kind, choice):
    policy = PolicyModel(new_model(kind))
    assert reason_against(choice, policy.backbone) is None
    policy.layout, rows = replace(policy.layout, attention=choice), rollout(48)
    with torch.no_grad():
        found = both(response_logprobs(policy, rows, TEMPERATURE))
        for a, b in zip(found, scores_alone(policy.lm, rows), strict=True):
            torch.testing.assert_close(a[rows.response_mask], b, rtol=0, atol=1e-5)


def test_keys_and_values_of_two_sizes_do_not_suit_flash_attention():
    class Backbone:
        _supports_attention_backend = _supports_flash_attn = True
        config = SimpleNamespace(_attn_implementation="sdpa", model_type="x", qk_head_dim=192, v_head_dim=128)
        config.get_text_config = lambda: Backbone.config

        def modules(self):
            return iter(())

    assert reason_against("flash_attention_2", Backbone()) == "its keys and values differ in size"


def test_dropout_in_the_attention_is_refused_with_flex_attention(tmp_path, monkeypatch):
    config = transformers.LlamaConfig(attention_dropout=0.2)
    check_attention_dropout("flex_attention", config, 0.0, "--m f")
    check_attention_dropout("sdpa", config, None, "--m f")
    line = refusal(check_attention_dropout, "flex_attention", config, None, "--m f")
    assert line.startswith("--attn_implementation flex_attention: --m f trains with a dropout of 0.2 ")
    monkeypatch.setattr("dschat_ppo.models.long_sequences.device", lambda: gpu(monkeypatch))
    new_model("llama", attention_dropout=0.3).save_pretrained(tmp_path)
    flags = MemoryFlags(attn_implementation="flex_attention")
    check_long_sequences(flags, "--m", str(tmp_path), False)
    for scalar, dropout in ((False, None), (True, None), (False, 0.1)):
        line = refusal(check_long_sequences, flags, "--m", str(tmp_path), scalar, dropout)
        assert f"trains with a dropout of {dropout or 0.3}" in line


PPO = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o --dtype fp32".split()
SFT = "--model_name_or_path a --data_path d --output_dir o --dtype fp32".split()


@pytest.mark.parametrize(("step", "line"), [("ppo", PPO), ("sft", SFT), ("reward", SFT), ("dpo", SFT)])
def test_every_step_has_the_flag_and_flash_attention_needs_half_precision(step, line):
    assert parse(step, line).memory.attn_implementation == "auto"
    assert (
        parse(step, [*line, "--attn_implementation", "flex_attention"]).memory.attn_implementation == "flex_attention"
    )
    found = refusal(parse, step, [*line, "--attn_implementation", "flash_attention_2"])
    assert found.startswith("--attn_implementation flash_attention_2 needs --dtype bf16 or fp16")
