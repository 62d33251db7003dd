"""Tiny random models of many architectures, prompts for them, and slow plain oracles for
generation."""

from functools import cache

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.types import PromptBatch, Rollout

VOCABULARY = 48
LENGTHS = (1, 9, 40, 5, 2, 17, 1, 30)
NEW_TOKENS = 12
POSITIONS = 96

# With tied embeddings such models always repeat their last token.
_COMMON = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
_SIZES = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_OPT = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "word_embed_proj_dim": 32,
    "init_std": 0.3,
    "pad_token_id": 1,
}
_GPT2 = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.3,
}
_WINDOW_AND_FULL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_GEMMA2 = {
    "head_dim": 8,
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
_FALCON = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
_GPT_NEO = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "window_size": 5,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
}
_BLOOM = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_MAMBA = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    "pad_token_id": None,
}

_RWKV = {
    **_COMMON,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "attention_hidden_size": 32,
    "num_hidden_layers": 2,
    "context_length": POSITIONS,
    "rescale_every": 0,
}
_GRANITE_HYBRID = {
    **_GROUPED,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 24,
}
_DELTA = {
    **_GROUPED,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_QWEN_NEXT = {
    **_DELTA,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_FALCON_H1 = {
    **_GROUPED,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 64,
}
_JAMBA = {
    **_GROUPED,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": 4,
}
_NEMOTRON = {
    **_GROUPED,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "factor": 3.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}

# name -> (model class, config class, settings)
KINDS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "phimoe": (
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {**_GROUPED, "sliding_window": 60, "num_local_experts": 4},
    ),
    "phi3-longrope": ("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "rope_parameters": _LONGROPE}),
    "qwen2-window": ("Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, **_QWEN_WINDOW}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 5}),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "opt-350m": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, **_GEMMA2}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GROUPED, **_WINDOW_AND_FULL, "head_dim": 8},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", _SIZES),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "bloom": ("BloomForCausalLM", "BloomConfig", _BLOOM),
    "falcon": ("FalconForCausalLM", "FalconConfig", _FALCON),
    "gpt-neo": ("GPTNeoForCausalLM", "GPTNeoConfig", _GPT_NEO),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_GROUPED, **_WINDOW_AND_FULL, "head_dim": 8, "num_local_experts": 4},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", _MAMBA),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", _RWKV),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_GROUPED, "layer_types": ["conv", "full_attention"]},
    ),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", _GRANITE_HYBRID),
    "qwen3-next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", _QWEN_NEXT),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _DELTA),
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", _FALCON_H1),
    "jamba": ("JambaForCausalLM", "JambaConfig", _JAMBA),
    "nemotron-h": ("NemotronHForCausalLM", "NemotronHConfig", _NEMOTRON),
    "olmo-hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {key: value for key, value in _DELTA.items() if key != "head_dim"},
    ),
    "doge": ("DogeForCausalLM", "DogeConfig", _GROUPED),
    "electra": (
        "ElectraForCausalLM",
        "ElectraConfig",
        {**_SIZES, "embedding_size": 16, "is_decoder": True},
    ),
}
# attention beside layers that carry a state from token to token
HYBRIDS = "lfm2", "granite-hybrid", "qwen3-next", "qwen3.5", "falcon-h1", "jamba", "olmo-hybrid"
PADDED_ONLY = ("gptj", "bloom", "falcon", "gpt-neo", "doge")
RECOMPUTED = ("mamba", "rwkv")
# in transformers, its steps with a cache differ from its whole rows, by 1e-4
UNFIT = "phimoe", "phi3-longrope", "nemotron-h"
CONTINUOUS = tuple(
    name for name in KINDS if name not in (*PADDED_ONLY, *RECOMPUTED, *UNFIT, *HYBRIDS)
)


def new_model(name: str, **changes) -> PreTrainedModel:
    """A new model in eval mode and fp32, with the same weights each time."""
    kind, config, settings = KINDS[name]
    torch.manual_seed(1)
    made = getattr(transformers, config)(**{**settings, **changes})
    if getattr(made, "attn_logit_softcapping", None):
        made._attn_implementation = "eager"  # as in load_config
    return getattr(transformers, kind)(made).eval().float()


@cache
def model_of(name: str) -> PreTrainedModel:
    """The model of that name that tests share; they must not change it."""
    return new_model(name)


def prompts_of(lengths=LENGTHS, seed: int = 0, padding_id: int = 0) -> PromptBatch:
    """Left-padded random prompts."""
    width = max(lengths)
    ids = torch.randint(
        2, VOCABULARY, (len(lengths), width), generator=torch.Generator().manual_seed(seed)
    )
    mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)
    return PromptBatch(torch.where(mask, ids, padding_id), mask)


def tokens_of(rollout: Rollout) -> list[list[int]]:
    """The real tokens of each answer."""
    return [
        ids[mask].tolist()
        for ids, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)
    ]


@torch.no_grad()
def transformers_greedy(
    model: PreTrainedModel, prompts: PromptBatch, count: int, **others
) -> list[list[int]]:
    """`count` greedy tokens of each prompt by transformers' own `generate`, with its cache and left
    padding."""
    answers = model.generate(
        input_ids=prompts.prompt_ids,
        attention_mask=prompts.prompt_mask.long(),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
        use_cache=True,
        **others,
    )
    return answers[:, prompts.prompt_ids.shape[1] :].tolist()


@cache
def shared_greedy(name: str) -> list[list[int]]:
    """`NEW_TOKENS` greedy tokens of `prompts_of()` by the shared model of that name."""
    return transformers_greedy(model_of(name), prompts_of(), NEW_TOKENS)


def cut_at(answers: list[list[int]], ends) -> list[list[int]]:
    """Each answer up to and including its first token that is in `ends`."""

    def cut(row: list[int]) -> list[int]:
        return row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1]

    return [cut(row) for row in answers]


def eos_of(answers: list[list[int]]) -> int:
    """A token that ends some answers early, at different places, but not all answers."""
    some = [token for token in range(VOCABULARY) if not all(token in row for row in answers)]
    return max(some, key=lambda token: len({len(row) for row in cut_at(answers, (token,))}))


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probs of the response by one forward pass of each row alone: no padding, mask, cache or
    position ids. 0 after the end. fp64 softmax."""
    result = torch.zeros(rollout.response_ids.shape)
    for row, (prompt, response) in enumerate(
        zip(rollout.prompt_ids, rollout.response_ids, strict=True)
    ):
        real, answer = prompt[rollout.prompt_mask[row]], response[: rollout.response_lengths[row]]
        ids = torch.cat([real, answer]).unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(real) - 1 : -1]
        table = torch.log_softmax(logits.double() / temperature, dim=-1)
        result[row, : len(answer)] = table.gather(1, answer.unsqueeze(1)).squeeze(1).float()
    return result
