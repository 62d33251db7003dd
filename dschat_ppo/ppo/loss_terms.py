"""Terms of the actor's loss beside the policy loss.

The loss of the actor in an optimizer step is

    mean(policy loss) - c_H mean(entropy) + c_KL mean(KL to the reference)
        + the sum of c_i mean(token losses) over the terms of features
        + the terms of the whole optimizer step (`engine/step_loss.py`),

where a mean is taken over the response tokens of the step (`--loss_aggregation`). This module has
the terms that are means of a loss of each token; `ActorLoss` adds them up. A run logs its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.algorithms.kl import kl_loss
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features import hooks
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.wrapped_models import Teaching, response_logprobs
from dschat_ppo.types import Experience, ForbiddenTokens, Model


def _nothing(rows: Experience) -> list[Teaching]:
    """No other distribution."""
    return []


@dataclass(frozen=True)
class ActorPass:
    """What the actor's forward pass gives for a micro-batch, (b, R) fp32 each."""

    logprobs: Tensor  # with gradient
    # without gradient: of the policy before the updates; those of this pass in the only update of a
    # PPO step
    old_logprobs: Tensor
    entropy: Tensor
    divergences: Sequence[Tensor] = ()  # from the `distributions` of a term, with gradient


@dataclass(frozen=True)
class LossTerm:
    """A term of the actor's loss, averaged over the tokens of the optimizer step."""

    name: str  # as a run prints it
    coef: float  # its weight
    metric: str  # under which its mean is recorded
    # (micro-batch, what the pass gives for it) -> losses (b, R) with gradient
    token_losses: Callable[[Experience, ActorPass], Tensor]
    # (micro-batch) -> distributions that the actor's forward pass is compared with, from which it
    # gives as many divergences
    distributions: Callable[[Experience], list[Teaching]] = _nothing


def loss_terms(
    config: PPOConfig, frozen: Callable[[str], Model], forbidden_tokens: ForbiddenTokens | None
) -> list[LossTerm]:
    """The terms that the flags ask for: the KL to the reference, and those of the features, which
    offer them as `loss_terms.loss_term_of` with these arguments, a `LossTerm` or None.

    Args:
        config: the flags.
        frozen: role -> the model of that role, which does not train.
        forbidden_tokens: of sampling.
    """
    terms = []
    if config.algorithm.kl_loss_coef > 0:
        terms.append(kl_term(config, frozen, forbidden_tokens))
    for loss_term_of in hooks("loss_terms.loss_term_of"):
        term = loss_term_of(config, frozen, forbidden_tokens)
        if term is not None:
            terms.append(term)
    return terms


def kl_term(
    config: PPOConfig, frozen: Callable[[str], Model], forbidden_tokens: ForbiddenTokens | None
) -> LossTerm:
    """The KL of the actor to the reference: over the whole vocabulary with `--kl_loss_estimator
    full`, else estimated from the sampled token. Arguments as `loss_terms`."""
    flags = config.algorithm
    name = f"KL ({flags.kl_loss_estimator})"
    if not flags.full_kl_loss:
        return LossTerm(name, flags.kl_loss_coef, "policy/kl_loss", sampled_kl(flags))
    return full_kl_term(
        frozen("reference"), flags.kl_loss_coef, config.ppo.temperature, forbidden_tokens, name
    )


def sampled_kl(flags: AlgorithmFlags) -> Callable[[Experience, ActorPass], Tensor]:
    """The estimate of the KL from the sampled tokens."""

    def token_losses(rows: Experience, actor: ActorPass) -> Tensor:
        assert rows.ref_logprobs is not None
        return kl_loss(
            actor.logprobs,
            rows.ref_logprobs,
            flags.kl_loss_estimator,
            flags.kl_straight_through,
        )

    return token_losses


def full_kl_term(
    reference: Model,
    coef: float,
    temperature: float,
    forbidden_tokens: ForbiddenTokens | None = None,
    name: str = "KL (full)",
) -> LossTerm:
    """The KL to the whole distributions of the `reference`, which reads what the actor reads."""

    @torch.no_grad()
    def distributions(rows: Experience) -> list[Teaching]:
        reference.eval()
        with observed(None):  # observers read the actor's passes
            outputs = response_logprobs(
                reference, rows, temperature, forbidden_tokens=forbidden_tokens, keeps_layer=True
            )
        assert outputs.layer is not None
        return [Teaching(outputs.layer, Divergence("reverse_kl"))]

    def token_losses(rows: Experience, actor: ActorPass) -> Tensor:
        return actor.divergences[0]

    return LossTerm(name, coef, "policy/kl_loss", token_losses, distributions)
