"""Actor, reference and SFT model: log-probs and entropies of the wanted tokens only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.algorithms.fused_logprobs import Head, fused_token_scores
from dschat_ppo.algorithms.logprobs import token_entropy, token_logprobs
from dschat_ppo.models.backbone import backbone_of, last_logits_argument, slot_arguments
from dschat_ppo.models.packing import CHECKPOINTING, last_states


class PolicyModel(nn.Module):
    """A causal language model that is asked for tokens' log-probs instead of logits.

    The fused way runs the backbone, picks the hidden states from which wanted tokens are predicted, and goes through
    the vocabulary in blocks. The plain way makes the logits from the first wanted position on; it is for heads that
    are more than a matrix product with the known scale and soft cap after it.

    Args:
        lm: causal language model.
        fused: False for the plain way.
        packed: run rows end to end as one, in the fused way.
    """

    def __init__(self, lm: PreTrainedModel, fused: bool = True, packed: bool = False):
        super().__init__()
        self.lm: Any = lm
        self.packed = packed
        self.fused = fused and type(lm.get_output_embeddings()).forward is nn.Linear.forward
        self._head = _head_of(lm.config)

    @property
    def config(self) -> PretrainedConfig:
        """The language model's configuration (DeepSpeed and transformers look for it)."""
        return self.lm.config

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return backbone_of(self.lm)

    @property
    def device(self) -> torch.device:
        """Where the model is (a DeepSpeed engine has the same attribute)."""
        return self.lm.device

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass."""
        self.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)

    def forward(
        self, input_ids: Tensor, wanted: Tensor, temperature: float = 1.0, entropy_grad: bool = False,
        distributions: bool = False, router: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Log-probs of the wanted tokens, and entropies of the distributions that they are drawn from.

        Args:
            input_ids: (B, T) int64, right-padded.
            wanted: (B, T) bool, True on tokens whose log-prob is asked for; the first column is not looked at.
            temperature: of sampling.
            entropy_grad: whether gradient goes through the entropies.
            distributions: give the whole distributions too; they are made by the plain way.
            router: give the load-balancing loss of a mixture-of-experts model too; made by the plain way.

        Returns:
            Two tensors (N) fp32: the N wanted tokens, row after row. Then, if asked for, log-probs of every token
            (N, V) fp32, and the scalar loss of the router.
        """
        places, tokens = wanted[:, 1:], input_ids[:, 1:][wanted[:, 1:]]
        if self.fused and not distributions and not router:
            states = self._states(input_ids, wanted)[:, :-1][places]
            return self._through_head(states, tokens, temperature, entropy_grad)
        logits, balance = self._logits(input_ids, wanted, router)
        entropy = token_entropy(logits if entropy_grad else logits.detach(), temperature)
        extras = [torch.log_softmax(logits.float() / temperature, dim=-1)] if distributions else []
        extras += [balance] if balance is not None else []
        return token_logprobs(logits, tokens, temperature), entropy, *extras

    def _states(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        slots = torch.arange(wanted.shape[1], device=wanted.device)
        lengths = torch.where(wanted, slots, 0).amax(dim=1).clamp_min(1)  # up to where the last token is predicted
        return last_states(self.backbone, input_ids, lengths, self.packed)

    def _through_head(
        self, states: Tensor, tokens: Tensor, temperature: float, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Calls the head as a module, so that ZeRO-3 gathers its weight, with another function inside."""
        head = self.lm.get_output_embeddings()

        def scores(hidden: Tensor) -> tuple[Tensor, Tensor]:
            return fused_token_scores(hidden, head.weight, head.bias, tokens, temperature, self._head, entropy_grad)

        with _forward_of(head, scores):
            return head(states.to(head.weight.dtype))  # Mamba's are in fp32

    def _logits(self, input_ids: Tensor, wanted: Tensor, router: bool) -> tuple[Tensor, Tensor | None]:
        """(N, V) in the model's dtype, by the language model's own forward, and the loss of its router."""
        places = wanted[:, 1:]
        first = int(places.any(dim=0).int().argmax()) if places.numel() else 0
        count = input_ids.shape[1] - first
        kept: dict[str, Any] = {**last_logits_argument(self.lm, count)}
        mask = None
        if router:
            kept["output_router_logits"] = True
            mask = (wanted.flip(1).cumsum(dim=1).flip(1) > 0).long()  # the router's loss is over real tokens
            mask[:, 0] = 1  # over none at all it would be 0/0
        output = self.lm(
            input_ids=input_ids, attention_mask=mask, use_cache=False, **slot_arguments(self.lm, input_ids), **kept
        )
        return output.logits[:, -count:-1][places[:, first:]], output.aux_loss if router else None


def _head_of(config: PretrainedConfig) -> Head:
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    divisor = getattr(text, "logits_scaling", None) or 1.0
    return Head(scale / divisor, getattr(text, "final_logit_softcapping", None))


@contextmanager
def _forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling `module` runs its hooks around `function`."""
    own = module.__dict__.get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
