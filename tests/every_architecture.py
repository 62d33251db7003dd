"""A tiny configuration of each common architecture: two layers, with its own peculiarities switched
on."""

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

POSITIONS = 128
WINDOW = 8
VOCABULARY = 320  # more than the tokens of the tests' tokenizer; some classes of tokenizers add one

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_TIED = {**_GROUPED, "tie_word_embeddings": True}
_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (configuration class, settings)
ARCHITECTURES = {
    "Llama 2": ("LlamaConfig", _SIZES),
    "Llama 3": ("LlamaConfig", {**_GROUPED, "rope_parameters": _LLAMA3_ROPE}),
    "Llama 4 (text)": (
        "Llama4TextConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "Mistral": ("MistralConfig", {**_GROUPED, "sliding_window": WINDOW}),
    "Qwen 2": ("Qwen2Config", _TIED),
    "Qwen 2.5": (
        "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "Qwen 3": ("Qwen3Config", {**_TIED, "head_dim": 8}),
    "Gemma 2": (
        "Gemma2Config",
        {
            **_TIED,
            **_LAYERS,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma 3 (text)": (
        "Gemma3TextConfig",
        {**_TIED, **_LAYERS, "head_dim": 8, "query_pre_attn_scalar": 8},
    ),
    "Phi-3": ("Phi3Config", {**_SIZES, "sliding_window": WINDOW}),
    "Phi-4": (
        "Phi3Config",
        {**_GROUPED, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "OPT": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "init_std": 0.2,
            "max_position_embeddings": POSITIONS,
            "word_embed_proj_dim": 32,
        },
    ),
    "GPT-2": (
        "GPT2Config",
        {
            "n_positions": POSITIONS,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "initializer_range": 0.2,
        },
    ),
    "GPT-NeoX": ("GPTNeoXConfig", _SIZES),
    "BLOOM": (
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    ),
    "Falcon": (
        "FalconConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.2,
        },
    ),
    "SmolLM3": ("SmolLM3Config", {**_TIED, "no_rope_layers": [1, 0], "no_rope_layer_interval": 2}),
    "GPT-OSS": (
        "GptOssConfig",
        {**_GROUPED, **_LAYERS, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "Qwen2-MoE": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4, "head_dim": 8}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            **_SIZES,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "LFM2": ("Lfm2Config", {**_GROUPED, "layer_types": ["conv", "full_attention"]}),
    "Granite 4 (hybrid)": (
        "GraniteMoeHybridConfig",
        {
            **_GROUPED,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
        },
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {**_EXPERTS, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "Qwen3.5 (text)": ("Qwen3_5TextConfig", {**_TIED, **_DELTA}),
    "Falcon-H1": (
        "FalconH1Config",
        {
            **_GROUPED,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_ssm": 64,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
    ),
    "Doge": ("DogeConfig", _GROUPED),
    "ELECTRA (decoder)": ("ElectraConfig", {**_SIZES, "embedding_size": 16, "is_decoder": True}),
}


def config_of(name: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The tiny configuration of an architecture, for a tokenizer."""
    kind, settings = ARCHITECTURES[name]
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return getattr(transformers, kind)(**settings, **ids, vocab_size=VOCABULARY)


def save_model_of(name: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A random fp32 model, its biases too, and its tokenizer; weights have the names of checkpoints
    on the hub."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, tokenizer), dtype=torch.float32)
    with torch.no_grad():
        for weight in [
            *model.parameters(),
            *(b for name, b in model.named_buffers() if "correction_bias" in name),
        ]:
            # biases, which begin at 0, and weights of norms, which begin at 1
            if weight.dim() == 1:
                weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
