"""One answer token by token, as it is drawn, for a chat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from dschat_ppo.models.backbone import last_logits_argument, position_arguments
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout.padded_batches import new_cache
from dschat_ppo.rollout.sampling import SamplingParameters, row_uniforms, sample
from dschat_ppo.types import position_ids_of


@torch.no_grad()
def stream_tokens(
    model: PreTrainedModel, prompt: Sequence[int], seed: int, sampling: SamplingParameters, ends: Collection[int],
    max_new_tokens: int,
) -> Iterator[int]:  # fmt: skip
    """Draw one answer. Its tokens are those of `generate` for the same prompt and seed, up to rounding.

    The forward passes are those of the padded engine, so `choose_engine` with `engine="padded"` tells whether the
    architecture is supported. To stop early, abandon the iterator.

    Args:
        model: in eval mode.
        prompt: token ids, at least one.
        seed: as in the `seeds` of `generate`.
        sampling: how tokens are drawn.
        ends: ids that end the answer.
        max_new_tokens: at least 1.

    Yields:
        The ids of the answer, the one that ends it included.
    """
    device = next(model.parameters()).device
    uniforms = row_uniforms(torch.tensor([seed]), max_new_tokens).to(device)
    ids = torch.tensor([list(prompt)], device=device)
    mask, cache, seen = torch.ones_like(ids), new_cache(model), None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(1, vocabulary_size(model), dtype=torch.bool, device=device)
        seen[0, ids[0]] = True
    for count in range(max_new_tokens):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **position_arguments(model, position_ids_of(mask)[:, -ids.shape[1] :]),
            **last_logits_argument(model, 1),
        )
        tokens, _ = sample(output.logits[:, -1], sampling, uniforms[:, count], seen=seen)
        token = int(tokens)
        yield token
        if token in ends:
            return
        if seen is not None:
            seen[0, token] = True
        ids, mask = tokens.unsqueeze(1), torch.cat([mask, mask.new_ones(1, 1)], dim=1)
