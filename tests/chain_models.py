"""A language model whose next token depends on the last one alone: the oracle of an answer that
another program generates."""

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def chain_model(vocabulary: int, path: Sequence[int], width: int) -> LlamaForCausalLM:
    """A model that writes the tokens of `path` one after the other: after a token the most likely
    one is that which follows it in `path`, in which no token but the last may occur twice. The
    state of a token is its row of the identity matrix, which neither attention nor MLP changes.
    `width`: of the states, at least the size of the vocabulary."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    block = model.model.layers[0]
    with torch.no_grad():
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, width))
        model.lm_head.weight.zero_()
        for token, following in zip(path[:-1], path[1:], strict=True):
            model.lm_head.weight[following, token] = 10.0
    return model
