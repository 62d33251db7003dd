"""The probe that selects kernels: fused or plain heads, packed or padded rows."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from pretended_gpu import moved, pretended_gpu
from test_forward import TEMPERATURE, model_of, rollout, scores_alone
from test_segment_attention import flash_by_hand
from tiny_models import model_of as tiny_model_of
from tiny_models import new_model

from dschat_ppo.errors import UserError
from dschat_ppo.models import packing, probes, segment_attention
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", ["scale", "cap", "before"])
def test_unknown_heads_are_not_fused_and_warned_about(change, dtype, said):
    lm = model_of("llama", 1).to(dtype)
    inner = lm.forward

    def forward(*args, **kwargs):
        if change == "before":
            kwargs["position_ids"] = kwargs["position_ids"] * 2  # the model runs its backbone differently
            return inner(*args, **kwargs)
        output = inner(*args, **kwargs)
        output.logits = output.logits * 0.5 if change == "scale" else 2 * torch.tanh(output.logits / 2)
        return output

    lm.forward = forward
    policy = PolicyModel(lm)
    select_kernels(policy)
    assert not policy.layout.fused
    [line] = said
    assert "LlamaForCausalLM" in line
    rows = rollout()
    with torch.no_grad():
        found = response_logprobs(policy, rows, 1.0).logprobs
    assert not torch.equal(found, response_logprobs(PolicyModel(model_of("llama", 1).to(dtype)), rows, 1.0).logprobs)


def test_a_head_that_is_not_a_linear_layer_is_not_fused(said):
    class Head(torch.nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    lm = model_of("llama", 1)
    lm.lm_head.__class__ = Head
    policy = PolicyModel(lm)
    assert not policy.layout.fused
    select_kernels(policy)
    assert len(said) == 1
    rows = rollout()
    with torch.no_grad():
        found = response_logprobs(policy, rows, TEMPERATURE).logprobs
        torch.testing.assert_close(found[rows.response_mask], scores_alone(lm, rows)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_would_mix_packed_rows_are_found(kind, dtype):
    """A layer that carries a state along the row, as in Mamba: padded rows are right, packed rows are not."""
    model = model_of("llama", kind).to(dtype)

    def add_previous(module, inputs, output):
        return output + torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    for mixes in (False, True):
        module = PolicyModel(model) if kind == 1 else ScalarModel(model)
        select_kernels(module)
        assert module.layout.packed is not mixes
        model.base_model.layers[0].register_forward_hook(add_previous)


@pytest.mark.parametrize(("name", "packed"), [("llama", True), ("mistral-window", True), ("phimoe", False)])
def test_a_model_whose_window_is_only_in_its_mask_is_not_packed(name, packed):
    policy = PolicyModel(tiny_model_of(name))
    select_kernels(policy)
    assert policy.layout.packed is packed


def test_wrong_positions_are_found_in_bf16(monkeypatch):
    policy = PolicyModel(new_model("llama").to(torch.bfloat16))
    select_kernels(policy)
    assert policy.layout.packed
    backbone_forward = policy.backbone.forward

    def without_positions(**inputs):
        if policy.config._attn_implementation == packing.NAME:
            inputs["position_ids"] = torch.zeros_like(inputs["position_ids"])
        return backbone_forward(**inputs)

    monkeypatch.setattr(policy.backbone, "forward", without_positions)
    policy.layout = replace(policy.layout, packed=False)
    select_kernels(policy)
    assert not policy.layout.packed


@pytest.mark.parametrize("name", ["bloom", "gemma2"])
def test_the_log_says_why_rows_are_padded(name, said):
    policy = PolicyModel(model_of(name, 1))
    reason = select_kernels(policy)
    assert reason is not None and f"{type(policy.backbone).__name__}: {reason}, so rows are padded" in said


@pytest.mark.parametrize(("name", "said_of"), [
    ("rwkv", "a last MLP for some tokens"), ("electra", "output head"), ("lfm2", "the row before it"),
    ("granite-hybrid", "the row before it"), ("doge", "a mask of its own"),
])  # fmt: skip
def test_a_way_that_does_not_fit_a_model_is_not_taken_and_the_log_says_why(name, said_of, said):
    """RWKV's MLP takes a state, ELECTRA projects before its head, hybrids carry states; Doge adds a learned bias that
    is 0 at first, so packed rows would have the same numbers."""
    policy = PolicyModel(new_model(name)).eval()
    plain = PolicyModel(policy.lm, Layout(fused=False)).eval()
    select_kernels(policy)
    assert [line for line in said if said_of in line]
    assert (policy.layout.fused, policy.layout.packed) == (name != "electra", name == "electra")
    ids, wanted = torch.randint(2, 48, (3, 12), generator=torch.Generator().manual_seed(0)), torch.ones(3, 12).bool()
    wanted[1, 5:] = wanted[2, 8:] = False
    torch.testing.assert_close(policy(ids, wanted), plain(ids, wanted), rtol=0, atol=1e-5)


def test_a_way_that_fails_on_another_rank_is_taken_on_none(monkeypatch, said):
    monkeypatch.setattr(probes, "all_reduce", lambda value, op: torch.ones_like(value))
    policy = PolicyModel(new_model("llama"))
    assert "another rank" in select_kernels(policy)
    assert not (policy.layout.fused or policy.layout.packed or policy.layout.shares or policy.layout.reads_few)
    assert [line for line in said if "another rank cannot run it" in line]


def test_memory_that_runs_out_in_a_probe_ends_it(monkeypatch):
    policy = PolicyModel(new_model("llama"))
    monkeypatch.setattr(packing, "segment_by_segment", partial(fail, torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        select_kernels(policy)


def fail(problem, *args, **kwargs):
    raise problem


@pytest.mark.parametrize("choice", ["flash_attention_2", "flex_attention"])
def test_a_chosen_attention_without_masks_refuses_a_model_that_makes_its_own(choice):
    policy = PolicyModel(new_model("doge"))
    policy.layout = replace(policy.layout, attention=choice)
    with pytest.raises(UserError, match=f"--attn_implementation {choice}: DogeAttention needs a mask.*use auto"):
        select_kernels(policy)


# On a GPU


def selected_on_a_gpu(attention: str = "auto", pack_on_gpu: bool = False, **changes) -> tuple[PolicyModel, str | None]:
    """A model in fp32, for which PyTorch has no FlashAttention."""
    with pretended_gpu():
        policy = moved(PolicyModel(new_model("llama", **changes)))
        policy.layout = replace(policy.layout, attention=attention)
        return policy, select_kernels(policy, pack_on_gpu)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_a_gpu_pads_rows_that_it_would_compute_segment_by_segment(attention, said):
    policy, reason = selected_on_a_gpu(attention)
    assert not policy.layout.packed and not policy.layout.shares
    assert reason == "no kernel computes the attention of all of them in one call on this GPU"
    assert [line for line in said if reason in line]
    policy, reason = selected_on_a_gpu(attention, pack_on_gpu=True)  # --packing
    assert reason is None and policy.layout.packed and not policy.layout.shares


def test_a_gpu_packs_and_shares_in_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(segment_attention, "_VARLEN", flash_by_hand(calls))
    monkeypatch.setattr(packing, "suits_varlen", lambda *_: True)
    policy, reason = selected_on_a_gpu()
    assert reason is None and policy.layout.packed and policy.layout.shares and calls
    policy, _ = selected_on_a_gpu("sdpa")  # not the kernel of auto
    assert not policy.layout.packed
    policy, _ = selected_on_a_gpu(attention_dropout=0.1)  # which the kernel does not have
    assert not policy.layout.packed
