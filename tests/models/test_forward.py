"""Log-probs, entropies and values of right-padded rows, compared with each row alone in plain transformers."""

from dataclasses import replace

import pytest
import torch
import transformers as hf

from dschat_ppo.algorithms.kl import kl_full
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.forward import response_logprobs, response_values
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.types import LateEnds, Rollout

VOCABULARY = 300
PROMPT_LENGTHS, LENGTHS = (2, 9, 1, 6, 4), (8, 3, 5, 0, 1)
TEMPERATURE = 0.8
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None,
    "num_labels": 1,
}  # fmt: skip
GQA = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
# name -> (config, causal model, classifier or None)
FAMILIES = {
    "llama": (hf.LlamaConfig(**GQA), hf.LlamaForCausalLM, hf.LlamaForSequenceClassification),
    "llama_tied": (hf.LlamaConfig(**GQA, tie_word_embeddings=True), hf.LlamaForCausalLM, None),
    "mistral_window": (
        hf.MistralConfig(**GQA, sliding_window=4), hf.MistralForCausalLM, hf.MistralForSequenceClassification,
    ),
    "qwen2": (hf.Qwen2Config(**GQA), hf.Qwen2ForCausalLM, hf.Qwen2ForSequenceClassification),
    "gpt2": (
        hf.GPT2Config(**GPT, pad_token_id=None, num_labels=1), hf.GPT2LMHeadModel, hf.GPT2ForSequenceClassification,
    ),
    "gptj": (hf.GPTJConfig(**GPT, rotary_dim=4), hf.GPTJForCausalLM, None),
    "opt": (
        hf.OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=16, init_std=0.2, dropout=0.0),
        hf.OPTForCausalLM, hf.OPTForSequenceClassification,
    ),
    "gpt_neox": (hf.GPTNeoXConfig(**COMMON), hf.GPTNeoXForCausalLM, hf.GPTNeoXForSequenceClassification),
    "bloom": (
        hf.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, num_labels=1,
            pad_token_id=None,
        ),
        hf.BloomForCausalLM, hf.BloomForSequenceClassification,
    ),
    "falcon": (hf.FalconConfig(**COMMON, new_decoder_architecture=False), hf.FalconForCausalLM, None),
    "falcon_alibi": (hf.FalconConfig(**COMMON, alibi=True), hf.FalconForCausalLM, hf.FalconForSequenceClassification),
    "gpt_neo": (
        hf.GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4,
            attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=64,
            initializer_range=0.2, num_labels=1, pad_token_id=None,
        ),
        hf.GPTNeoForCausalLM, hf.GPTNeoForSequenceClassification,
    ),
    "phi": (hf.PhiConfig(**COMMON), hf.PhiForCausalLM, hf.PhiForSequenceClassification),
    "gemma2": (
        hf.Gemma2Config(**GQA, sliding_window=4, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
        hf.Gemma2ForCausalLM, hf.Gemma2ForSequenceClassification,
    ),
    "gemma3": (
        hf.Gemma3TextConfig(**GQA, sliding_window=4, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
        hf.Gemma3ForCausalLM, None,
    ),
    "cohere": (hf.CohereConfig(**{**COMMON, "logit_scale": 0.25}), hf.CohereForCausalLM, None),
    "granite": (hf.GraniteConfig(**{**GQA, "logits_scaling": 4.0}), hf.GraniteForCausalLM, None),
}  # fmt: skip
PACKED = [
    "llama",
    "llama_tied",
    "mistral_window",
    "qwen2",
    "gpt2",
    "opt",
    "gpt_neox",
    "phi",
    "gemma3",
    "cohere",
    "granite",
]
WAYS = [(name, way) for name in FAMILIES for way in ("fused", "plain", "packed") if way != "packed" or name in PACKED]
WITH_CLASSIFIER = [name for name, (_, _, classifier) in FAMILIES.items() if classifier]


def model_of(name: str, kind: int):
    torch.manual_seed(0)
    config = FAMILIES[name][0]
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # as in load_config
    model = FAMILIES[name][kind](config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # they are initialised to 0, where no test would notice them
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def rollout(padding_seed: int = 0) -> Rollout:
    """Five rows of uneven prompts and responses, one response empty; random ids in padding."""
    generator, padding = torch.Generator().manual_seed(1), torch.Generator().manual_seed(padding_seed)
    prompt_mask = torch.arange(9) >= 9 - torch.tensor(PROMPT_LENGTHS).unsqueeze(1)
    response_mask = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)

    def ids(mask):
        real = torch.randint(0, VOCABULARY, mask.shape, generator=generator)
        return torch.where(mask, real, torch.randint(0, VOCABULARY, mask.shape, generator=padding))

    zeros = torch.zeros(response_mask.shape)
    return Rollout(ids(prompt_mask), prompt_mask, ids(response_mask), response_mask, zeros, zeros[:, 0].bool())


def rows_alone(rows: Rollout):
    """(prompt length, real tokens (1, n)) of each row."""
    for prompt, p_mask, response, r_mask in zip(
        rows.prompt_ids, rows.prompt_mask, rows.response_ids, rows.response_mask, strict=True
    ):
        yield int(p_mask.sum()), torch.cat([prompt[p_mask], response[r_mask]]).unsqueeze(0)


def both(scores) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.logprobs, scores.entropy


def scores_alone(lm, rows: Rollout, ends: LateEnds | None = None):
    """Log-probs and entropies, (total response tokens), row by row without padding."""
    logprobs, entropies = [], []
    for start, ids in rows_alone(rows):
        logits = lm(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / TEMPERATURE
        kept = torch.ones_like(logits, dtype=torch.bool)
        if ends is not None:
            kept[: ends.minimum, list(ends.ids)] = False
        table = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), dim=-1)
        logprobs.append(table.gather(1, ids[0, start:].unsqueeze(1)).squeeze(1))
        entropies.append(-(table.exp() * table.masked_fill(~kept, 0.0)).sum(dim=1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_scores_are_those_of_each_row_alone(name, way):
    lm, rows = model_of(name, 1), rollout()
    policy = PolicyModel(lm, Layout(fused=way != "plain", packed=way == "packed"))
    assert policy.layout.fused is (way != "plain")
    with torch.no_grad():
        found = both(response_logprobs(policy, rows, TEMPERATURE))
        expected = scores_alone(lm, rows)
    assert expected[0].std() > 0.3, "all tokens have the same score, so the test shows nothing"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[rows.response_mask], b, rtol=0, atol=1e-5)
        assert not a[~rows.response_mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", ["fused", "packed", "plain"])
def test_ends_that_could_not_be_drawn_have_no_probability(way, dtype):
    lm, rows, ends = model_of("llama", 1).to(dtype), rollout(), LateEnds((3, 250), 2)
    rows = replace(rows, response_ids=torch.where(rows.response_ids == 3, 4, rows.response_ids))
    with torch.no_grad():
        lm.lm_head.weight[250] *= 8
    policy = PolicyModel(lm, Layout(fused=way != "plain", packed=way == "packed"))
    found = response_logprobs(policy, rows, TEMPERATURE, True, late_ends=ends)
    expected, free = scores_alone(lm.float(), rows, ends), scores_alone(lm, rows)
    for a, b in zip(both(found), expected, strict=True):
        torch.testing.assert_close(a[rows.response_mask], b, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert (expected[0] - free[0]).abs().max() > 0.5
    if way == "plain":
        whole = response_logprobs(policy, rows, TEMPERATURE, distributions=True, late_ends=ends).distributions
        early = torch.arange(rows.response_mask.shape[1]) < torch.tensor(2)
        early = early.expand_as(rows.response_mask)[rows.response_mask]  # (response tokens,)
        assert not whole.exp()[early][:, list(ends.ids)].any() and whole.exp()[~early][:, list(ends.ids)].all()
        assert kl_full(whole, whole.detach()).abs().max() < 1e-6


@pytest.mark.parametrize(("name", "way", "ends"), [
    *((name, way, None) for name, way in WAYS), *((name, way, LateEnds((3, 250), 2)) for name, way in WAYS[:6]),
])  # fmt: skip
def test_gradients_are_those_of_rows_alone(name, way, ends):
    lm, rows = model_of(name, 1), rollout()
    if ends is not None:
        rows = replace(rows, response_ids=torch.where(rows.response_ids == 250, 4, rows.response_ids.clamp_min(4)))
    weights = torch.linspace(-1, 1, int(rows.response_mask.sum()))
    parameters = dict(lm.named_parameters())

    def gradients(logprobs, entropies):
        return torch.autograd.grad((weights * logprobs + 0.1 * entropies).sum(), parameters.values(), allow_unused=True)

    policy = PolicyModel(lm, Layout(fused=way != "plain", packed=way == "packed"))
    found = both(response_logprobs(policy, rows, TEMPERATURE, entropy_grad=True, late_ends=ends))
    found = gradients(*(part[rows.response_mask] for part in found))
    for key, a, b in zip(parameters, found, gradients(*scores_alone(lm, rows, ends)), strict=True):
        if b is None:
            assert a is None, key
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("name", "packed"), [(n, p) for n in WITH_CLASSIFIER for p in {False, n in PACKED}])
def test_values_are_those_of_each_row_alone(name, packed):
    classifier, rows = model_of(name, 2), rollout()
    with torch.no_grad():
        found = response_values(ScalarModel(classifier, Layout(packed=packed)), rows)
        expected = [
            classifier.score(classifier.base_model(input_ids=ids).last_hidden_state)[0, start - 1 : -1, 0]
            for start, ids in rows_alone(rows)
        ]
    torch.testing.assert_close(found[rows.response_mask], torch.cat(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_in_padding_change_nothing(name):
    policy, (one, other) = PolicyModel(model_of(name, 1)), (rollout(0), rollout(7))
    assert not torch.equal(one.response_ids, other.response_ids)
    with torch.no_grad():
        pairs = zip(both(response_logprobs(policy, one, 1.0)), both(response_logprobs(policy, other, 1.0)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_rows_without_a_response_give_zero_gradients():
    rows = rollout()
    rows = Rollout(*[rows.prompt_ids, rows.prompt_mask, rows.response_ids, torch.zeros_like(rows.response_mask)],
                   rows.rollout_logprobs, rows.finish_reason)  # fmt: skip
    policy = PolicyModel(model_of("llama", 1))
    logprobs, entropy = both(response_logprobs(policy, rows, 1.0, entropy_grad=True))
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_hooks_of_the_head_run_around_the_fused_function():
    """ZeRO-3 gathers the head's weight in such hooks. The head gets the states of the response tokens only."""
    lm, rows, seen = model_of("llama", 1), rollout(), []
    lm.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    lm.lm_head.register_forward_hook(lambda module, inputs, output: seen.append([o.shape for o in output]))
    response_logprobs(PolicyModel(lm), rows, 1.0)
    count = sum(LENGTHS)
    assert seen == [(count, 32), [(count,), (count,)]]
    assert "forward" not in vars(lm.lm_head)
