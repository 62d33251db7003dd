"""The teachers of step 3: what they read, and how the actor is compared with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.models.router_recorder import recorded_router
from dschat_ppo.models.wrapped_models import ResponseLogprobs, Teaching, response_logprobs
from dschat_ppo.types import ForwardedRollout, MinimumLength, Model, select_rows


@dataclass(frozen=True)
class Teachers:
    """Models whose distributions the actor learns, each on its own rows (`rows.teachers`; None: the
    first on all)."""

    engines: Sequence[Model]
    divergence: Divergence
    temperature: float  # of both sides
    minimum_length: MinimumLength | None = None

    @torch.no_grad()
    def teachings(self, rows: ForwardedRollout) -> list[Teaching]:
        """What each teacher says of the response tokens of its rows. Every teacher runs on every
        rank, on one row without a response where it has none, because its layers may be
        gathered."""
        found = []
        for index, answers in self._answers(rows, keeps_layer=True):
            assert answers.layer is not None
            counts = rows.response_mask.sum(dim=1)  # (b,) response tokens, which lie row after row
            of_row = torch.repeat_interleave(
                torch.arange(len(counts), device=counts.device), counts
            )  # (N,)
            tokens = torch.isin(of_row, index).nonzero().squeeze(1)
            found.append(
                Teaching(answers.layer, self.divergence, None if rows.teachers is None else tokens)
            )
        return found

    @torch.no_grad()
    def logprobs(self, rows: ForwardedRollout) -> Tensor:
        """Log-probs of the response tokens under the teachers, (b, R) fp32; 0 in rows that have
        none."""
        whole = torch.zeros(rows.response_mask.shape, device=rows.response_mask.device)
        for index, answers in self._answers(rows, keeps_layer=False):
            whole[index, : answers.logprobs.shape[1]] = answers.logprobs[: len(index)]
        return whole

    def _answers(
        self, rows: ForwardedRollout, keeps_layer: bool
    ) -> Iterator[tuple[Tensor, ResponseLogprobs]]:
        """For each teacher the numbers of its rows, and its forward pass over them."""
        seen = rows
        if rows.teacher_prompt_ids is not None and rows.teacher_prompt_mask is not None:
            seen = replace(
                rows, prompt_ids=rows.teacher_prompt_ids, prompt_mask=rows.teacher_prompt_mask
            )
        everywhere = torch.zeros(
            len(rows.response_ids), dtype=torch.int64, device=rows.response_ids.device
        )
        for number, engine in enumerate(self.engines):
            index = (
                ((everywhere if rows.teachers is None else rows.teachers) == number)
                .nonzero()
                .squeeze(1)
            )
            part = select_rows(seen, index if len(index) else everywhere[:1])
            if not len(index):
                part = replace(part, response_mask=torch.zeros_like(part.response_mask))
            engine.eval()
            with recorded_router(None):  # the router loss is the actor's
                yield (
                    index,
                    response_logprobs(
                        engine,
                        part,
                        self.temperature,
                        minimum_length=self.minimum_length,
                        keeps_layer=keeps_layer,
                    ),
                )


def teachers_of(
    config: PPOConfig,
    engines: Sequence[Model],
    reference: Model | None,
    minimum_length: MinimumLength | None,
) -> Teachers:
    """The teachers of a run that distils; the reference, where the flags name no other."""
    flags = config.teacher
    divergence = Divergence(flags.kind, flags.distill_beta, flags.distill_topk)
    models = engines if reference is None else engines or [reference]
    return Teachers(models, divergence, config.ppo.temperature, minimum_length)


def full_kl_reference(
    config: PPOConfig, reference: Model | None, minimum_length: MinimumLength | None
) -> Teachers | None:
    """The reference, if the loss has its exact KL."""
    if reference is None or not config.algorithm.full_kl_loss:
        return None
    return Teachers([reference], Divergence("reverse_kl"), config.ppo.temperature, minimum_length)
