"""Which kernel computes the attention of segments, and its numbers, by definitions in loops."""

import itertools
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from looping_flash_attn import install
from test_forward import model_of
from test_packing import states_of_rows
from test_shared_prompts import rollout

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.errors import UserError
from dschat_ppo.models import packing, segment_attention
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.packing import ReplacedAttention, token_states
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.segment_attention import Segments, flash_attention_2, segment_by_segment
from dschat_ppo.types import full_sequences


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
    expected = states_of_rows(model, ids, lengths)
    monkeypatch.setattr(segment_attention, "_VARLEN", flash_by_hand(calls))
    monkeypatch.setattr(packing, "suits_varlen", lambda *_: True)
    found = states_of_rows(model, ids, lengths)
    assert set(calls) == windows
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def suits(
    dtype=torch.bfloat16, head=64, value_head=64, capability=(8, 0), is_cuda=True, kernel=print, **options
) -> bool:  # fmt: skip
    """`suits_varlen` for tensors that claim to be on a GPU."""
    query, value = (
        SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="cuda", shape=(1, 4, 9, size))
        for size in (head, value_head)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        patch.setattr(segment_attention, "_VARLEN", kernel)
        return segment_attention.suits_varlen(query, query, value, options)


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
        {"value_head": 32}, {"dropout": 0.1}, {"softcap": 5.0}, {"s_aux": 1.0}, {"is_causal": False},
    ]  # fmt: skip
    assert not any(suits(**case) for case in refused)


def test_without_the_kernel_of_newer_versions_of_pytorch(monkeypatch):
    old = ModuleType("torch.nn.attention.varlen")
    old.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None
    for module in (old, None):  # without the arguments, and without the kernel
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert segment_attention.varlen_kernel() is None
    received = []

    def of_2_11(q, k, v, *, scale, window_size):
        received.append((scale, window_size))

    def of_2_13(q, k, v, *, scale, window_size, enable_gqa):
        received.append((scale, window_size, enable_gqa))

    for kernel in (of_2_11, of_2_13):  # the first takes fewer key heads without being asked
        old.varlen_attn = kernel
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", old)
        segment_attention.varlen_kernel()(1, 2, 3, scale=0.5, window_size=(-1, 0), enable_gqa=True)
    assert received == [(0.5, (-1, 0)), (0.5, (-1, 0), True)]
    assert suits() and not suits(kernel=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt2"])
def test_flash_attention_on_a_gpu(monkeypatch, name):
    """Forward and backward of the kernel, against attention segment by segment in the same dtype."""
    model = model_of(name, 1).base_model.to("cuda", torch.bfloat16)
    ids = torch.randint(0, 300, (3, 9), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for flash in (True, False):
        if not flash:
            monkeypatch.setattr(packing, "suits_varlen", lambda *_: False)
        model.zero_grad()
        states = states_of_rows(model, ids, torch.tensor([9, 1, 6]).cuda())
        states.float().square().sum().backward()
        gradients = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        found.append((states.float(), torch.stack(gradients)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("name", "windows"), [("llama", {-1}), ("mistral_window", {3}), ("gemma3", {3})])
def test_one_call_of_variable_length_attention_gives_the_same_states(monkeypatch, name, windows):
    model, calls = model_of(name, 1).base_model.double(), []  # fp64: processors differ in the order of fp32 sums
    ids, lengths = full_sequences(rollout())
    places = torch.arange(ids.numel()).view(ids.shape)
    expected, _ = token_states(model, Layout(shares=True), ids, lengths, places)
    assert len(expected) < lengths.sum()
    monkeypatch.setattr(segment_attention, "_VARLEN", flash_by_hand(calls))
    monkeypatch.setattr(packing, "suits_varlen", lambda *_: True)
    found, _ = token_states(model, Layout(shares=True), ids, lengths, places)
    assert set(calls) == windows and len(calls) == 2  # one for each layer
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(*(torch.autograd.grad((weights * x).sum(), parameters) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


# flash-attn and flex attention


def inputs(total, rows=1):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, count, total, 8, generator=generator, requires_grad=True) for count in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seen", [None, [(0, 0), (0, 6), (0, 6), (9, 9)]])
def test_flash_attn_gets_the_segments_and_the_keys_that_they_see(monkeypatch, seen, window):
    calls = install(monkeypatch)
    lengths, (query, key, value) = [9, 4, 3, 5], inputs(21)
    layout, options = Segments(lengths, seen), {"scaling": 0.4, "softcap": 1.5}
    found = flash_attention_2(query, key, value, layout, window, options)
    expected = segment_by_segment(torch.nn.Module().eval(), query, key, value, layout, window, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    [call] = calls
    assert call == {"segments": 4, "causal": True, "softmax_scale": 0.4, "softcap": 1.5, "dropout_p": 0.0,
                    "window_size": (-1, -1) if window is None else (2, 0), "deterministic": False}  # fmt: skip
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    gradients = [torch.autograd.grad((weights * x).sum(), (query, key, value)) for x in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("choice", ["flash_attention_2", "flex_attention"])
def test_padded_rows_are_segments_of_the_same_length(monkeypatch, choice):
    calls = install(monkeypatch)
    query, key, value = (x.detach() for x in inputs(7, rows=3))
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    with ReplacedAttention(model_of("llama", 1).config, None, choice=choice):
        found, _ = packing._segment_attention(layer, query, key, value, None, 4, scaling=0.4)
    expected = segment_by_segment(layer, query, key, value, None, 4, {"scaling": 0.4})
    assert found.shape == (3, 7, 4, 8)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [call["segments"] for call in calls] == ([3] if choice == "flash_attention_2" else [])


@pytest.mark.parametrize(("choice", "option", "reason"), [
    ("flash_attention_2", {"is_causal": False}, "is not causal"),
    ("flash_attention_2", {"s_aux": torch.ones(1)}, "has sinks"),
    ("flex_attention", {"is_causal": False}, "is not causal"),
])  # fmt: skip
def test_what_a_chosen_kernel_does_not_have_is_refused(choice, option, reason):
    refused = pytest.raises(
        UserError, match=rf"^--attn_implementation {choice}: the attention of this model .*{reason}"
    )
    with ReplacedAttention(model_of("llama", 1).config, None, choice=choice), refused:
        packing._segment_attention(torch.nn.Module(), *inputs(4), None, **option)


@pytest.mark.parametrize(
    ("dtype", "choice", "most_keys", "in_blocks"),
    [
        (torch.bfloat16, "auto", 9, True),
        (torch.bfloat16, "auto", 7, False),
        (torch.bfloat16, "sdpa", 9, False),
        (torch.float32, "auto", 9, False),
    ],
)
@pytest.mark.parametrize("lengths", [[9, 9, 9], [9, 1, 6]], ids=["padded", "packed"])
def test_bf16_on_a_cpu_is_computed_in_blocks(monkeypatch, lengths, dtype, choice, most_keys, in_blocks):
    monkeypatch.setattr(segment_attention, "MOST_KEYS", most_keys)
    """Rows of one length, which are not packed, and others."""
    policy, calls = PolicyModel(model_of("llama", 1).to(dtype), Layout(packed=True)), []
    policy.layout = replace(policy.layout, attention=choice)
    ids = torch.randint(0, 300, (3, 9), generator=torch.Generator().manual_seed(1))
    wanted = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    with monkeypatch.context() as patch:
        patch.setattr(operations, "kernels", lambda: None)
        expected = policy(ids, wanted)
    blocks = segment_attention.blockwise_attention
    monkeypatch.setattr(segment_attention, "blockwise_attention", lambda *a: calls.append(1) or blocks(*a))
    found = policy(ids, wanted)
    assert len(calls) == (policy.config.num_hidden_layers if in_blocks else 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 0)
