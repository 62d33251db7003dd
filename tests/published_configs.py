"""Model folders with the published sizes of real models: `config.json` and a small tokenizer, without weights."""

from pathlib import Path

from transformers import LlamaConfig, OPTConfig, PretrainedConfig, Qwen2Config

from dschat_ppo.tools import toy


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
        max_position_embeddings=32768, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip


def _llama(hidden: int, inner: int, layers: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=tied, max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


# name -> (configuration, parameters in millions as published)
PUBLISHED: dict[str, tuple[PretrainedConfig, int]] = {
    "Qwen2.5-0.5B": (_qwen(896, 4864, 24, 14, 2, 151936, True), 494),
    "Llama-3.2-1B": (_llama(2048, 8192, 16, True), 1236),
    "opt-1.3b": (
        OPTConfig(
            vocab_size=50272, hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
            word_embed_proj_dim=2048, max_position_embeddings=2048, architectures=["OPTForCausalLM"],
        ),
        1316,
    ),
    "Qwen2.5-1.5B": (_qwen(1536, 8960, 28, 12, 2, 151936, True), 1544),
    "Qwen2.5-7B": (_qwen(3584, 18944, 28, 28, 4, 152064, False), 7616),
    "Llama-3.1-8B": (_llama(4096, 14336, 32, False), 8030),
}  # fmt: skip


def write_published(folder: Path) -> None:
    """A folder for each model, inside `folder`."""
    tokenizer = toy.make_tokenizer(["a few words to merge"])
    for name, (config, _) in PUBLISHED.items():
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
