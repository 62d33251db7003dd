"""Packed rows. test_forward.py compares their numbers with those of rows alone, for each family."""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_forward import FAMILIES, model_of, rollout

from dschat_ppo.models import packing
from dschat_ppo.models.forward import response_scores, response_values
from dschat_ppo.models.packing import NAME, packed_states, reason_not_to_pack, segments
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.shared_prompts import lay_out


def seen_by_the_backbone(module) -> list[tuple[torch.Size, str]]:
    seen = []

    def hook(backbone, args, kwargs):
        seen.append((kwargs["input_ids"].shape, backbone.config._attn_implementation))

    module.backbone.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


def test_no_padding_and_nothing_after_the_last_wanted_token_is_run():
    policy = PolicyModel(model_of("llama", 1), packed=True)
    seen = seen_by_the_backbone(policy)
    response_scores(policy, rollout(), 1.0)
    # Prompts of 2, 9, 1, 6, 4 and responses of 8, 3, 5, 0, 1 tokens. The last token predicts nothing; of the row
    # without a response one token remains.
    assert seen == [(torch.Size([1, 9 + 11 + 5 + 1 + 4]), NAME)]
    assert policy.config._attn_implementation == "sdpa"


def test_a_reward_model_runs_the_real_tokens():
    model = ScalarModel(model_of("llama", 2), packed=True)
    seen = seen_by_the_backbone(model)
    response_values(model, rollout())
    assert seen == [(torch.Size([1, 10 + 12 + 6 + 6 + 5]), NAME)]


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt2", "opt"])
def test_checkpointed_layers_are_packed_again_in_the_backward_pass(name):
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(model_of(name, 1), packed=True).train()
        for module in policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if name == "gpt2":
            policy.lm.config.attn_pdrop = 0.0
            for block in policy.lm.transformer.h:
                block.attn.attn_dropout.p = 0.0
        if checkpointing:
            policy.gradient_checkpointing_enable()
        response_scores(policy, rollout(), 1.0).logprobs.sum().backward()
        gradients.append({key: p.grad for key, p in policy.named_parameters() if p.grad is not None})
        assert policy.config._attn_implementation == "sdpa"
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=0, atol=1e-5, msg=key)


def test_the_models_own_attention_is_restored_after_an_error_in_packed_rows():
    config = FAMILIES["llama"][0]
    before = config._attn_implementation
    with pytest.raises(RuntimeError, match="mine"), segments(config, [1]):
        raise RuntimeError("mine")
    assert config._attn_implementation == before


def token_states(model, ids, lengths):
    """The hidden states of the real tokens, row after row."""
    rows = lay_out(ids, lengths, packs=True, shares=False)
    real = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    return packed_states(model, ids, lengths, rows)[rows.places[real]]


def test_states_are_those_of_each_row_alone():
    model, lengths = model_of("llama", 1).base_model, torch.tensor([4, 1, 3])
    ids = torch.arange(12).view(3, 4)
    states = token_states(model, ids, lengths)
    assert states.shape == (8, 32)
    alone = model(input_ids=ids[2:, :3]).last_hidden_state[0]
    torch.testing.assert_close(states[5:], alone, rtol=0, atol=1e-5)


def test_a_policy_needs_no_memory_for_padding_beside_a_long_row():
    """Nothing of (rows, longest row, hidden size) is made where one row is long and many are short."""
    policy, rows, longest = PolicyModel(model_of("llama", 1), packed=True), 20, 50
    lengths = torch.tensor([longest] + [2] * (rows - 1))
    wanted = (torch.arange(longest) < lengths.unsqueeze(1)) & (torch.arange(longest) > 0)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        policy(torch.ones(rows, longest, dtype=torch.int64), wanted)[0].sum().backward()
    assert max(sizes) < rows * longest * 32


def flash_by_hand(calls):
    """PyTorch's `varlen_attn` as its documentation defines it, by loops over queries."""

    def varlen_attn(q, k, v, starts_q, starts_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert starts_q.dtype == starts_k.dtype == torch.int32
        assert all(x.is_contiguous() for x in (q, k, v))
        assert (max_q, max_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
        assert enable_gqa == (q.shape[1] != k.shape[1]) and window_size[1] == 0
        calls.append(window_size[0])
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        rows = []
        of_queries, of_keys = (itertools.pairwise(starts.tolist()) for starts in (starts_q, starts_k))
        for (start, end), (first, stop) in zip(of_queries, of_keys, strict=True):
            for token in range(start, end):
                own = stop - (end - token)  # the last query's key is the last one
                seen = slice(first if window_size[0] < 0 else max(first, own - window_size[0]), own + 1)
                weights = torch.einsum("hd,thd->ht", q[token], k[seen]) * (scale or q.shape[-1] ** -0.5)
                rows.append(torch.einsum("ht,thd->hd", weights.softmax(dim=-1), v[seen]))
        return torch.stack(rows)

    return varlen_attn


@pytest.mark.parametrize(("name", "windows"), [("llama", {-1}), ("mistral_window", {3}), ("gpt2", {-1}), ("opt", {-1}),
                                               ("gemma3", {3})])  # fmt: skip
def test_variable_length_flash_attention_is_called_with_the_segments(monkeypatch, name, windows):
    """On a GPU the kernel itself runs (`test_flash_attention_on_a_gpu`); here its definition stands for it."""
    model, calls = model_of(name, 1).base_model, []
    ids = torch.randint(0, 300, (3, 9), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([9, 1, 6])
    expected = token_states(model, ids, lengths)
    monkeypatch.setattr(packing, "_VARLEN", flash_by_hand(calls))
    monkeypatch.setattr(packing, "_suits_flash", lambda *_: True)
    found = token_states(model, ids, lengths)
    assert set(calls) == windows
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def suits(
    dtype=torch.bfloat16, head=64, value_head=64, capability=(8, 0), is_cuda=True, kernel=print, **options
) -> bool:  # fmt: skip
    """`_suits_flash` for tensors that claim to be on a GPU."""
    query, value = (
        SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="cuda", shape=(1, 4, 9, size))
        for size in (head, value_head)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        patch.setattr(packing, "_VARLEN", kernel)
        return packing._suits_flash(query, query, value, options)


def test_only_attention_that_the_kernel_computes_is_given_to_it():
    assert (
        suits()
        and suits(dtype=torch.float16)
        and suits(scaling=0.3)
        and suits(head=256, value_head=256)
        and suits(dropout=0.0)
    )
    assert suits(softcap=None, is_causal=True) and suits(capability=(9, 0))
    refused = [
        {"dtype": torch.float32},
        {"head": 100, "value_head": 100}, {"head": 264, "value_head": 264}, {"capability": (7, 5)}, {"is_cuda": False},
        {"value_head": 32}, {"dropout": 0.1}, {"softcap": 5.0}, {"s_aux": 1.0}, {"position_bias": 1.0},
        {"is_causal": False},
    ]  # fmt: skip
    assert not any(suits(**case) for case in refused)


@pytest.mark.gpu
def test_without_the_kernel_of_newer_versions_of_pytorch(monkeypatch):
    old = ModuleType("torch.nn.attention.varlen")
    old.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None
    for module in (old, None):  # without the arguments, and without the kernel
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert packing.varlen_kernel() is None
    assert suits() and not suits(kernel=None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt2"])
def test_flash_attention_on_a_gpu(monkeypatch, name):
    """Forward and backward of the kernel, against attention segment by segment in the same dtype."""
    model = model_of(name, 1).base_model.to("cuda", torch.bfloat16)
    ids = torch.randint(0, 300, (3, 9), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for flash in (True, False):
        if not flash:
            monkeypatch.setattr(packing, "_suits_flash", lambda *_: False)
        model.zero_grad()
        states = token_states(model, ids, torch.tensor([9, 1, 6]).cuda())
        states.float().square().sum().backward()
        gradients = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        found.append((states.float(), torch.stack(gradients)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.05, atol=0.05)


def test_the_reason_not_to_pack_is_named(monkeypatch):
    assert reason_not_to_pack(model_of("llama", 1)) is None
    assert reason_not_to_pack(model_of("bloom", 1)) == "transformers does not let its attention be replaced"
    eager = model_of("llama", 1)
    monkeypatch.setattr(eager.config, "_attn_implementation", "eager")  # the other tests have the same configuration
    assert reason_not_to_pack(eager) == "its attention is 'eager' and not 'sdpa'"
