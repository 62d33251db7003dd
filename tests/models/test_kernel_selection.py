"""The probe that selects kernels: fused or plain heads, packed, shared or padded rows, the last MLP
for few tokens; architectures: positions, head formats, reward models without transformers' class,
and refused configurations."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from pretended_gpu import moved, pretended_gpu
from rows_alone import model_of, rollout, without_dropout
from test_attention import flash_by_hand
from tiny_models import HYBRIDS, new_model, plain_logprobs, prompts_of
from transformers import AutoTokenizer

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.errors import UserError
from dschat_ppo.models import backbone, packing, segment_attention
from dschat_ppo.models.activation_memory import last_mlp
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_sequence_classifier,
)
from dschat_ppo.models.micro_batches import Segments
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_logprobs
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria


@pytest.mark.parametrize("change", ["scale", "cap", "before", "class"])
def test_unknown_heads_are_not_fused_and_warned_about(change, said):
    lm = model_of("llama")
    inner = lm.forward

    def forward(*args, **kwargs):
        if change == "before":
            # the model runs its backbone differently
            kwargs["position_ids"] = kwargs["position_ids"] * 2
            return inner(*args, **kwargs)
        output = inner(*args, **kwargs)
        output.logits = (
            output.logits * 0.5 if change == "scale" else 2 * torch.tanh(output.logits / 2)
        )
        return output

    if change == "class":
        doubled = {"forward": lambda head, states: 2 * torch.nn.Linear.forward(head, states)}
        lm.lm_head.__class__ = type("Head", (torch.nn.Linear,), doubled)
    else:
        lm.forward = forward
    policy = PolicyModel(lm)
    assert policy.layout.fused is (change != "class")
    select_kernels(policy)
    assert not (policy.layout.fused or policy.layout.shares or policy.layout.reads_few)
    [line] = said
    assert "LlamaForCausalLM" in line
    rows = rollout()
    with torch.no_grad():
        found = response_logprobs(policy, rows, 1.0).logprobs
    assert not torch.equal(
        found, response_logprobs(PolicyModel(model_of("llama")), rows, 1.0).logprobs
    )


@pytest.mark.parametrize(("kind", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_layers_that_would_mix_packed_rows_are_found(kind, dtype):
    """A layer that carries a state along the row, as in Mamba: padded rows are right, packed rows
    are not."""
    model = model_of("llama", kind == 2).to(dtype)

    def add_previous(module, inputs, output):
        return output + torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    for mixes in (False, True):
        module = PolicyModel(model) if kind == 1 else ScalarModel(model)
        select_kernels(module)
        assert module.layout.packed is not mixes
        model.base_model.layers[0].register_forward_hook(add_previous)


@pytest.mark.parametrize("name", [*HYBRIDS, "nemotron-h", "mamba", "gpt-oss", "gemma2"])
def test_models_with_states_sinks_or_soft_caps_pack_rows_and_share_prompts(name, said):
    shares = name not in ("jamba", "mamba")  # their scan takes no state to start from
    for module in (PolicyModel(new_model(name)), ScalarModel(model_of(name, scalar=True))):
        assert select_kernels(module) is None
        assert (module.layout.packed, module.layout.shares) == (True, shares)
    assert (
        shares
        or len([line for line in said if "takes no state, so prompts are not shared" in line]) == 2
    )


def test_a_layer_with_a_state_that_mixes_packed_rows_is_named(said):
    lm = new_model("lfm2")
    lm.model.layers[0].conv.register_forward_hook(lambda layer, args, output: output.cumsum(dim=1))
    policy = PolicyModel(lm)
    assert "Lfm2ShortConv" in select_kernels(policy)
    assert not policy.layout.packed and [
        line for line in said if "Lfm2ShortConv does not keep rows apart" in line
    ]


@pytest.mark.parametrize(("name", "packed"), [("mistral-window", True), ("phimoe", False)])
def test_a_model_whose_window_is_only_in_its_mask_is_not_packed(name, packed):
    policy = PolicyModel(new_model(name))
    select_kernels(policy)
    assert policy.layout.packed is packed


@pytest.mark.parametrize(
    ("name", "said_of"),
    [
        ("rwkv", "a last MLP for some tokens"),
        ("electra", "output head"),
        ("doge", "a mask of its own"),
        ("bloom", "so rows are padded"),
    ],
)
def test_a_way_that_does_not_fit_a_model_is_not_taken_and_the_log_says_why(name, said_of, said):
    """RWKV's MLP takes a state, ELECTRA projects before its head; Doge adds a learned bias that is
    0 at first, so the numbers of packed rows would be the same."""
    policy = PolicyModel(new_model(name)).eval()
    plain = PolicyModel(policy.lm, Layout(fused=False)).eval()
    select_kernels(policy)
    assert [line for line in said if said_of in line]
    assert (policy.layout.fused, policy.layout.packed) == (name != "electra", name == "electra")
    ids, wanted = (
        torch.randint(2, 48, (3, 12), generator=torch.Generator().manual_seed(0)),
        torch.ones(3, 12).bool(),
    )
    wanted[1, 5:] = wanted[2, 8:] = False
    torch.testing.assert_close(policy(ids, wanted), plain(ids, wanted), rtol=0, atol=1e-5)


def test_a_way_that_fails_on_another_rank_is_taken_on_none(monkeypatch, said):
    monkeypatch.setattr(backbone, "all_reduce", lambda value, op: torch.ones_like(value))
    policy = PolicyModel(new_model("llama"))
    assert "another rank" in select_kernels(policy)
    assert not (
        policy.layout.fused
        or policy.layout.packed
        or policy.layout.shares
        or policy.layout.reads_few
    )
    assert [line for line in said if "another rank cannot run it" in line]


def test_memory_that_runs_out_in_a_probe_ends_it(monkeypatch):
    policy = PolicyModel(new_model("llama"))
    monkeypatch.setattr(
        packing, "blockwise_attention", partial(fail, torch.OutOfMemoryError("out of memory"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        select_kernels(policy)


def fail(problem, *args, **kwargs):
    raise problem


# Shared beginnings


@pytest.mark.parametrize("kind", ["module", "config", "router"])
def test_a_model_with_noise_in_training_runs_all_tokens_of_each_row(kind):
    model = without_dropout(new_model("mixtral" if kind == "router" else "llama"))
    if kind == "module":
        model.model.layers[0].mlp.register_module("noise", torch.nn.Dropout(0.1))
    elif kind == "config":
        model.config.attention_dropout = 0.1
    else:
        model.config.router_jitter_noise = 0.1
    policy = PolicyModel(model)
    select_kernels(policy)
    assert policy.layout.packed and not (policy.layout.shares or policy.layout.reads_few)
    select_kernels(policy.eval())
    assert policy.layout.reads_few is (kind != "router"), "a mixture of experts runs all tokens"
    assert policy.layout.shares, "a reference or a reward model runs without noise"


@pytest.mark.parametrize("by_blocks", [True, False])
def test_wrong_numbers_of_shared_rows_are_found(monkeypatch, by_blocks):
    """A kernel that hides what is shared, and one that hides nothing."""
    if not by_blocks:
        monkeypatch.setattr(operations, "kernels", lambda dtype: None)
    policy = PolicyModel(new_model("llama").to(torch.bfloat16))
    select_kernels(policy)
    assert policy.layout.shares
    blocks, grouped = packing.blockwise_attention, segment_attention._grouped_attention
    broken = {
        (packing, "blockwise_attention"): lambda q, k, v, parts, *o: blocks(
            q, k, v, Segments(parts.lengths), *o
        ),
        (segment_attention, "_grouped_attention"): lambda q, k, v, band, **o: grouped(
            q, k, v, None, **o
        ),
    }
    for (module, name), function in broken.items():
        monkeypatch.setattr(module, name, function)
    policy.layout = replace(policy.layout, shares=False)
    select_kernels(policy)
    assert policy.layout.packed and not policy.layout.shares


# The last MLP for few tokens


def tokens_of_products(backbone) -> list[int]:
    """How many tokens the first product of the last MLP gets, in each pass from now on."""
    sizes: list[int] = []
    first = next(module for module in last_mlp(backbone).modules() if not any(module.children()))
    first.register_forward_pre_hook(
        lambda module, inputs: sizes.append(inputs[0].shape[:-1].numel())
    )
    return sizes


def test_the_same_operations_are_recorded_however_many_tokens_are_read():
    """Under ZeRO-3 the ranks gather weights together, also while activation checkpointing runs
    layers again."""
    ids = torch.randint(2, 48, (2, 20), generator=torch.Generator().manual_seed(0))
    policy = PolicyModel(model_of("llama"), Layout(reads_few=True))
    sizes = tokens_of_products(policy.backbone)
    recorded = []
    for first_read in (0, 10):  # all tokens, and half of them
        seen: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, seen=seen: seen.append(x) or x, lambda x: x
        ):
            policy(ids, (torch.arange(20) >= first_read).expand(2, -1))
        recorded.append([x.dim() for x in seen])
    assert sizes == [38, 20]  # nothing reads the state of the last token
    assert recorded[0] == recorded[1]


def test_a_model_that_mixes_tokens_after_the_last_mlp_runs_all_tokens():
    lm = new_model("llama")
    lm.model.norm.forward = lambda states: states.cumsum(dim=1) / 10
    policy = PolicyModel(lm)
    select_kernels(policy)
    assert policy.layout.fused and not policy.layout.reads_few


# On a GPU


def selected_on_a_gpu(
    attention: str = "auto", pack_on_gpu: bool = False, **changes
) -> tuple[PolicyModel, str | None]:
    """A model in fp32, for which PyTorch has no FlashAttention."""
    with pretended_gpu():
        policy = moved(PolicyModel(new_model("llama", num_hidden_layers=1, **changes)))
        policy.layout = replace(policy.layout, attention=attention)
        return policy, select_kernels(policy, pack_on_gpu)


@pytest.mark.parametrize("attention", ["auto", "eager"])
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


VOCABULARY = 60
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
ROBERTA = {**SIZES, "is_decoder": True}
ROBERTAS = {
    "roberta": (hf.RobertaConfig(**ROBERTA), hf.RobertaForCausalLM),
    "xlm-roberta-xl": (hf.XLMRobertaXLConfig(**ROBERTA), hf.XLMRobertaXLForCausalLM),
}
MODELS = {
    **ROBERTAS,
    "codegen": (
        hf.CodeGenConfig(
            vocab_size=VOCABULARY,
            n_positions=40,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            initializer_range=0.3,
        ),
        hf.CodeGenForCausalLM,
    ),
    "llama4": (
        hf.Llama4TextConfig(**GROUPED, intermediate_size_mlp=48, num_local_experts=4),
        hf.Llama4ForCausalLM,
    ),
    "mamba": (
        hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
        hf.MambaForCausalLM,
    ),
    "olmoe": (hf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2), hf.OlmoeForCausalLM),
}
LENGTHS = torch.tensor([7, 12, 3])
IDS = torch.randint(2, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
REAL = torch.arange(12) < LENGTHS.unsqueeze(1)


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request, tmp_path_factory):
    """(language model in fp32, its folder)."""
    config, kind = MODELS[request.param]
    torch.manual_seed(1)
    lm, folder = kind(config).eval().float(), tmp_path_factory.mktemp("lm")
    lm.save_pretrained(folder)
    return lm, str(folder)


@torch.no_grad()
def test_logprobs_are_those_of_each_row_alone(saved):
    """The expected numbers come from a forward pass without positions or a mask."""
    lm, folder = saved
    alone = []
    for row, length in zip(IDS, LENGTHS, strict=True):
        ids = row[:length].unsqueeze(0)
        table = torch.log_softmax(
            lm(input_ids=ids, use_cache=False).logits[0, :-1].double(), dim=-1
        )
        alone.append(table.gather(1, ids[0, 1:, None]).squeeze(1))
    policy = PolicyModel(load_causal_lm(folder, "fp32", None)).eval()
    select_kernels(policy)
    torch.testing.assert_close(policy(IDS, REAL)[0].double(), torch.cat(alone), rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_reward_model_is_built_saved_and_loaded(saved, assets, tmp_path):
    """The backbone has the language model's weights, the score is head times last state, and both
    survive saving."""
    lm, folder = saved
    torch.manual_seed(2)
    model = ScalarModel(load_sequence_classifier(folder, "fp32", None, new_head=True)).eval()
    torch.nn.init.normal_(model.classifier.score.weight)
    select_kernels(model)
    scores = model(IDS, LENGTHS, last_only=True)
    expected = []
    for row, length in zip(IDS, LENGTHS, strict=True):
        backbone = lm.model if lm.base_model is lm else lm.base_model
        states = backbone(input_ids=row[:length].unsqueeze(0), use_cache=False).last_hidden_state
        expected.append(model.classifier.score(states[0, -1]))
    torch.testing.assert_close(scores, torch.cat(expected), rtol=1e-5, atol=1e-4)
    again = tmp_path / "again"
    save_model(SimpleNamespace(module=model), AutoTokenizer.from_pretrained(assets / "lm"), again)
    assert check_sequence_classifier(str(again), new_head=False) is False
    loaded = ScalarModel(
        load_sequence_classifier(str(again), "fp32", None, new_head=False), model.layout
    ).eval()
    torch.testing.assert_close(loaded(IDS, LENGTHS, last_only=True), scores, rtol=0, atol=1e-6)
    in_bf16 = ScalarModel(load_sequence_classifier(str(again), "bf16", None, new_head=False)).eval()
    select_kernels(in_bf16)
    assert torch.isfinite(in_bf16(IDS, LENGTHS, last_only=True)).all()


@pytest.mark.parametrize(
    ("name", "engine"), [("roberta", "continuous"), ("xlm-roberta-xl", "padded")]
)
def test_responses_are_generated_at_positions_after_padding(name, engine):
    """PAD ends a response, because the plain forward pass would not count it as a position."""
    config, kind = ROBERTAS[name]
    torch.manual_seed(1)
    model = kind(config).eval().float()
    how = GenerationConfig(
        SamplingParameters(temperature=0.8),
        StoppingCriteria(8, eos_ids=(1, 2)),
        rows=3,
        engine=engine,
    )
    prompts = prompts_of((1, 9, 20, 5))
    rollout = generate(model, RolloutRequest(prompts, torch.arange(4)), how)
    assert rollout.response_mask.sum() > 8
    torch.testing.assert_close(
        rollout.rollout_logprobs, plain_logprobs(model, rollout, 0.8), atol=1e-4, rtol=0
    )


def test_a_multimodal_configuration_gives_the_reward_model_of_its_text_part(tmp_path):
    config, kind = MODELS["llama4"]
    kind(config).save_pretrained(tmp_path)
    hf.Llama4Config(text_config=config.to_dict()).save_pretrained(tmp_path)
    model = load_sequence_classifier(str(tmp_path), "fp32", None, new_head=True)
    assert type(model).__name__ == "Llama4WithScalarHead"
    assert type(model.config) is hf.Llama4TextConfig
    assert model.config.num_labels == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.BertConfig(), "BertConfig without is_decoder is an encoder"),
        (hf.MllamaConfig(), "saved with MllamaTextConfig"),
        (hf.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (hf.XLNetConfig(), "XLNetConfig is not supported: its tokens see later tokens"),
        (
            hf.RobertaConfig(is_decoder=True, pad_token_id=None),
            "RobertaConfig counts positions from pad_token_id",
        ),
    ],
)
def test_models_that_are_not_decoders_are_refused_from_the_configuration_alone(
    tmp_path, config, reason
):
    config.save_pretrained(tmp_path)  # there are no weights
    for check in (check_causal_lm, lambda folder: check_sequence_classifier(folder, new_head=True)):
        with pytest.raises(UserError, match=reason) as raised:
            check(str(tmp_path))
        assert "\n" not in str(raised.value)
