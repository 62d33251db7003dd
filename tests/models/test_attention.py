"""Which kernel computes the attention of segments, its numbers, and `--attn_implementation`."""

import itertools
import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from command_lines import config_of
from rows_alone import model_of, rollout
from tiny_models import KINDS, new_model
from torch.nn.functional import scaled_dot_product_attention

from dschat_ppo.config.run_flags import MemoryFlags
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.errors import UserError
from dschat_ppo.models import packing, segment_attention
from dschat_ppo.models.architectures import backbone_of
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.kernel_selection import (
    apply_memory_flags,
    check_attention,
    reason_against,
    select_kernels,
)
from dschat_ppo.models.micro_batches import Segments
from dschat_ppo.models.packing import token_states
from dschat_ppo.models.pass_rows import PassRows
from dschat_ppo.models.segment_attention import _eager_attention, blockwise_attention
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.types import full_sequences

# PyTorch's variable-length FlashAttention


def flash_by_hand(calls):
    """PyTorch's `varlen_attn` as its documentation defines it, by a loop over sequences."""

    def varlen_attn(q, k, v, starts_q, starts_k, max_q, max_k, *, scale, window_size, enable_gqa):  # noqa: PLR0913
        assert starts_q.dtype == starts_k.dtype == torch.int32
        assert all(x.is_contiguous() for x in (q, k, v))
        assert (max_q, max_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
        assert enable_gqa == (q.shape[1] != k.shape[1]) and window_size[1] == 0
        calls.append(window_size[0])
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        rows = []
        of_queries, of_keys = (
            itertools.pairwise(starts.tolist()) for starts in (starts_q, starts_k)
        )
        for (start, end), (first, stop) in zip(of_queries, of_keys, strict=True):
            # from query to key
            back = torch.arange(stop - (end - start), stop).unsqueeze(1) - torch.arange(first, stop)
            hidden = (back < 0) | ((back > window_size[0]) & (window_size[0] >= 0))
            weights = torch.einsum("qhd,khd->hqk", q[start:end], k[first:stop]) * (
                scale or q.shape[-1] ** -0.5
            )
            shares = weights.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            rows.append(torch.einsum("hqk,khd->qhd", shares, v[first:stop]))
        return torch.cat(rows)

    return varlen_attn


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("name", "windows"), [("llama", {-1}), ("mistral-window", {4}), ("gemma3", {4, -1})]
)
def test_one_call_of_variable_length_attention_gives_the_same_states(
    monkeypatch, name, windows, shares
):
    """Its definition stands for the kernel, which `benchmarks/gpu.sh` runs."""
    # fp64: processors differ in the order of fp32 sums
    model, calls = model_of(name).base_model.double(), []
    ids, lengths = full_sequences(rollout())
    places, layout = torch.arange(ids.numel()).view(ids.shape), Layout(packed=True, shares=shares)
    rows = PassRows.of(ids, lengths, places, layout)
    expected, _ = token_states(model, layout, rows)
    assert (len(expected) < int(lengths.sum())) is shares
    monkeypatch.setattr(segment_attention, "_VARLEN", flash_by_hand(calls))
    monkeypatch.setattr(packing, "suits_varlen", lambda *_: True)
    found, _ = token_states(model, layout, rows)
    assert set(calls) == windows and len(calls) == 2  # one for each layer
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(
        *(torch.autograd.grad((weights * x).sum(), parameters) for x in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def suits(
    dtype=torch.bfloat16,
    head=64,
    value_head=64,
    capability=(8, 0),
    is_cuda=True,
    kernel=print,
    **options,
) -> bool:
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
    assert suits() and suits(
        dtype=torch.float16, scaling=0.3, head=256, value_head=256, dropout=0.0
    )
    assert suits(softcap=None, is_causal=True, capability=(9, 0))
    refused = [
        {"dtype": torch.float32},
        {"head": 100, "value_head": 100},
        {"head": 264, "value_head": 264},
        {"capability": (7, 5)},
        {"is_cuda": False},
        {"value_head": 32},
        {"dropout": 0.1},
        {"softcap": 5.0},
        {"s_aux": 1.0},
        {"is_causal": False},
    ]
    assert not any(suits(**case) for case in refused)


def test_versions_of_pytorch_without_the_kernel_or_with_fewer_arguments(monkeypatch):
    old, received = ModuleType("torch.nn.attention.varlen"), []
    old.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: (
        None
    )
    for module in (old, None):  # without the arguments, and without the kernel
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert segment_attention.varlen_flash_kernel() is None
    # PyTorch 2.11 takes fewer key heads without being asked
    old.varlen_attn = lambda q, k, v, *, scale, window_size: received.append((scale, window_size))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", old)
    segment_attention.varlen_flash_kernel()(
        1, 2, 3, scale=0.5, window_size=(-1, 0), enable_gqa=True
    )
    assert received == [(0.5, (-1, 0))] and not suits(kernel=None)


# Kernels for a CPU


@pytest.mark.parametrize(
    ("dtype", "choice", "most_keys", "in_blocks"),
    [
        (torch.bfloat16, "auto", 9, True),
        (torch.bfloat16, "auto", 7, False),
        (torch.bfloat16, "sdpa", 9, False),
        (torch.float32, "auto", 9, True),
    ],
)
@pytest.mark.parametrize("lengths", [[9, 9, 9], [9, 1, 6]], ids=["padded", "packed"])
def test_a_cpu_computes_in_blocks(monkeypatch, lengths, dtype, choice, most_keys, in_blocks):
    """Rows of one length, which are not packed, and others."""
    monkeypatch.setattr(segment_attention, "MOST_KEYS", dict.fromkeys(operations.DTYPES, most_keys))
    policy, calls = PolicyModel(model_of("llama").to(dtype), Layout(packed=True)), []
    policy.layout = replace(policy.layout, attention=choice)
    ids = torch.randint(0, 48, (3, 9), generator=torch.Generator().manual_seed(1))
    wanted = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    with monkeypatch.context() as patch:
        patch.setattr(operations, "kernels", lambda dtype: None)
        expected = policy(ids, wanted)
    blocks = packing.blockwise_attention
    monkeypatch.setattr(packing, "blockwise_attention", lambda *a: calls.append(1) or blocks(*a))
    found = policy(ids, wanted)
    assert len(calls) == (policy.config.num_hidden_layers if in_blocks else 0)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 1e-5
    )


PARTS = {
    "one part": Segments([40]),
    "uneven parts": Segments([1, 33, 17]),
    "parts that see others": Segments([20, 9, 31], ((0, 0), (3, 17), (0, 20))),
    "two groups": Segments(
        [20, 9, 31, 12, 8, 5], ((0, 0), (3, 17), (0, 20), (0, 0), (60, 72), (0, 0))
    ),
    "a later part sees less": Segments([20, 9, 7, 6], ((0, 0), (0, 0), (20, 29), (0, 20))),
    "several blocks of queries": Segments([300, 200], ((0, 0), (100, 171))),
}
# Results are rounded to bf16, within 2 ** -9 of their size; between them all is fp32, but for the
# output, which the backward pass reads rounded.
MEAN_ERROR, LARGEST_ERROR = 2e-3, 5e-2


def inputs(rows, columns, heads=4, key_heads=2, width=16, value_width=16):
    generator = torch.Generator().manual_seed(columns)

    def drawn(count, width):
        # as projections make them: heads after columns in memory
        shape = rows, columns, count, width
        return torch.randn(shape, generator=generator).to(torch.bfloat16).transpose(1, 2)

    tensors = drawn(heads, width), drawn(key_heads, width), drawn(key_heads, value_width)
    return [x.detach().requires_grad_() for x in tensors], drawn(heads, value_width)


def visible(parts, window):
    """(columns, columns) bool."""
    columns, start = sum(parts.lengths), 0
    found = torch.zeros(columns, columns, dtype=torch.bool)
    for length, seen in zip(
        parts.lengths, parts.seen or [(0, 0)] * len(parts.lengths), strict=True
    ):
        before = list(range(*seen))
        order = [*before, *range(start, start + length)]
        for place in range(len(before), len(order)):
            found[
                order[place], order[0 if window is None else max(0, place + 1 - window) : place + 1]
            ] = True
        start += length
    return found


def test_a_group_holds_the_parts_that_see_one_another():
    assert PARTS["uneven parts"].groups.tolist() == [0, 1, 2, 3]
    assert PARTS["two groups"].groups.tolist() == [0, 3, 5, 6]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("layout", list(PARTS))
def test_output_and_gradients_are_those_of_whole_attention(layout, window):
    parts = PARTS[layout]
    columns = sum(parts.lengths)
    given, gradient = inputs(2, columns, width=24, value_width=40)
    exact = [x.detach().double().requires_grad_() for x in given]
    mask = visible(parts, window)
    expected = scaled_dot_product_attention(*exact, mask, scale=0.3, enable_gqa=True)
    found = blockwise_attention(*given, parts, window, 0.3)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    pairs = zip(
        (found, *torch.autograd.grad(found, given, gradient)),
        (expected, *torch.autograd.grad(expected, exact, gradient.double())),
        strict=True,
    )
    for ours, whole in pairs:
        error = (ours - whole).abs()
        assert error.mean() < MEAN_ERROR and error.max() < LARGEST_ERROR


@pytest.mark.parametrize(
    "parts", [Segments([20, 20]), Segments([40])], ids=["another part", "later in the part"]
)
def test_a_large_logit_of_a_hidden_key_changes_nothing(parts):
    """The weight of a hidden key is 0 and not a small number."""
    given, gradient = inputs(1, 40)
    before = blockwise_attention(*given, parts)
    changed = [x.detach().clone() for x in given]
    changed[1][:, :, 20:] *= 1000
    changed[2][:, :, 20:] *= 1000
    after = blockwise_attention(*[x.requires_grad_() for x in changed], parts)
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    own = torch.autograd.grad(after[:, :, :20], changed, gradient[:, :, :20])
    assert all(bool((x[:, :, 20:] == 0).all()) for x in own)


# Products and a softmax


def test_eager_attention_by_hand():
    """Two keys with logits 0 and ln 3, so shares of 1/4 and 3/4; with a sink of ln 4: 1/8 and
    3/8."""
    query, key = (
        torch.ones(1, 1, 1, 1),
        torch.tensor([0.0, torch.log(torch.tensor(3.0))]).view(1, 1, 2, 1),
    )
    value = torch.tensor([8.0, 16.0]).view(1, 1, 2, 1)
    module = torch.nn.Module().eval()
    for sink, expected in ((None, 14.0), (torch.log(torch.tensor([4.0])), 7.0)):
        options = {"scaling": 1.0, "s_aux": sink}
        found = _eager_attention(module, query, key, value, None, options)
        torch.testing.assert_close(found, torch.full((1, 1, 1, 1), expected))


# `--attn_implementation`


@pytest.mark.parametrize(
    ("choice", "layout", "expected"),
    [
        ("auto", "packed", {"blocks": 2}),
        ("sdpa", "padded", {"sdpa": 2}),
        ("sdpa", "shared", {"sdpa": 2 * 9}),
        ("eager", "padded", {"eager of transformers": 2}),
        ("eager", "shared", {"softmax": 2 * 9}),
    ],
)
def test_each_choice_calls_its_kernel_and_no_other_also_in_the_backward_pass(
    monkeypatch, choice, layout, expected
):
    """Two layers of nine segments; checkpointed layers run again."""
    layout = Layout(packed=layout != "padded", shares=layout == "shared", attention=choice)
    policy = PolicyModel(new_model("llama"), layout).train()
    policy.gradient_checkpointing_enable()
    kernels = {
        "sdpa": (torch.nn.functional, "scaled_dot_product_attention"),
        "eager of transformers": (
            sys.modules["transformers.models.llama.modeling_llama"],
            "eager_attention_forward",
        ),
        "softmax": (segment_attention, "_eager_attention"),
        "blocks": (packing, "blockwise_attention"),
    }
    for name, (module, function) in kernels.items():
        kernels[name] = Mock(wraps=getattr(module, function))
        monkeypatch.setattr(module, function, kernels[name])
    logprobs = response_logprobs(policy, rollout(), 1.0).logprobs
    assert {
        name: kernel.call_count for name, kernel in kernels.items() if kernel.called
    } == expected
    logprobs.sum().backward()
    assert all(kernels[name].call_count == 2 * number for name, number in expected.items())


@pytest.mark.parametrize("choice", ["sdpa", "eager"])
def test_kernels_are_selected_and_saved_models_do_not_name_the_choice(tmp_path, choice):
    policy = PolicyModel(new_model("llama"))
    apply_memory_flags(
        policy, MemoryFlags(attn_implementation=choice, offload_activations=choice == "sdpa")
    )
    assert select_kernels(policy) is None
    of_probe = Layout(packed=True, shares=True, reads_few=True)
    assert policy.layout == replace(
        of_probe, attention=choice, offload_activations=choice == "sdpa"
    )
    policy.lm.save_pretrained(tmp_path)
    assert not [key for key in json.loads((tmp_path / "config.json").read_text()) if "attn" in key]


@pytest.mark.parametrize(
    ("kind", "choice", "reason"),
    [
        ("bloom", "sdpa", "its attention, 'eager', be replaced"),
        ("gptj", "sdpa", "be replaced"),
        ("gemma2", "sdpa", "soft cap"),
        ("gpt-oss", "sdpa", "sinks"),
    ],
)
def test_models_that_a_choice_does_not_suit_are_refused_by_name(tmp_path, kind, choice, reason):
    _, config, settings = KINDS[kind]
    getattr(transformers, config)(**settings).save_pretrained(tmp_path)
    name = type(backbone_of(new_model(kind))).__name__
    begins = (
        rf"^--attn_implementation {choice}: --model {tmp_path}: {name} cannot use it, because"
        rf" .*{reason}"
    )
    with pytest.raises(UserError, match=begins):
        config = config_of("sft", "--attn_implementation", choice)
        check_attention(config, "--model", str(tmp_path), False)


def test_the_models_own_attention_is_always_allowed():
    for kind, choice in (("bloom", "eager"), ("falcon", "sdpa")):
        assert (
            reason_against(choice, PolicyModel(new_model(kind), Layout(attention=choice)).backbone)
            is None
        )
