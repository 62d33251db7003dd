"""Token-by-token generation with a key-value cache, on whatever model `HybridEngine.generating` lends."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.models.forward import last_logits_argument, position_arguments
from dschat_ppo.rollout.sampling import Sampling, sample
from dschat_ppo.types import PromptBatch, Rollout


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: PromptBatch,
    sampling: Sampling,
    max_new_tokens: int,
    eos_id: int,
    generator: torch.Generator,
) -> Rollout:
    """Sample one response for each prompt.

    Args:
        model: whole weights, eval mode.
        prompts: B left-padded prompts on the model's device.
        sampling: how tokens are drawn.
        max_new_tokens: limit R of the response length.
        eos_id: the token that ends a response; it belongs to the response.
        generator: random stream on the model's device.

    Returns:
        Responses as long as the longest one. Makes no collective call.
    """
    attention_mask = prompts.prompt_mask.long()
    step_ids, cache = prompts.prompt_ids, None
    active = torch.ones(step_ids.shape[0], dtype=torch.bool, device=step_ids.device)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(max_new_tokens):
        positions = position_arguments(model, attention_mask)
        output = model(
            input_ids=step_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
            **{name: value[:, -step_ids.shape[1] :] for name, value in positions.items()},
            **last_logits_argument(model, 1),
        )
        cache = output.past_key_values
        tokens, logprobs = sample(output.logits[:, -1], sampling, generator)
        tokens = torch.where(active, tokens, eos_id)
        columns.append((tokens, active, logprobs))
        active = active & (tokens != eos_id)
        if not active.any():
            break
        step_ids = tokens.unsqueeze(1)
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(tokens), 1)], dim=1)
    ids, mask, logprobs = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return Rollout(prompts.prompt_ids, prompts.prompt_mask, ids, mask, logprobs * mask, ended=~active)
