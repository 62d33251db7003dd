"""The teachers of step 3: what they read, and how the actor is compared with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.distillation.flags import DistillationFlags
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.wrapped_models import ResponseLogprobs, Teaching, response_logprobs
from dschat_ppo.types import ForbiddenTokens, ForwardedRollout, Model, select_rows


@dataclass(frozen=True)
class Teachers:
    """Models whose distributions the actor learns, each from the rows that the column
    `teachers` assigns to it; without the column the first one from all rows."""

    engines: Sequence[Model]
    divergence: Divergence
    temperature: float  # of both sides
    forbidden_tokens: ForbiddenTokens | None = None

    @torch.no_grad()
    def teachings(self, rows: ForwardedRollout) -> list[Teaching]:
        """What each teacher says of the response tokens of its rows."""
        lengths = rows.response_mask.sum(dim=1)  # (b,)
        row_indices = torch.arange(len(lengths), device=lengths.device)
        row_of_token = torch.repeat_interleave(row_indices, lengths)  # (N,), row after row
        teachings = []
        for taught_rows, outputs in self._outputs(rows, keeps_layer=True):
            assert outputs.layer is not None
            tokens = None  # all
            if "teachers" in rows.extra:
                tokens = torch.isin(row_of_token, taught_rows).nonzero().squeeze(1)
            teachings.append(Teaching(outputs.layer, self.divergence, tokens))
        return teachings

    @torch.no_grad()
    def logprobs(self, rows: ForwardedRollout) -> Tensor:
        """Log-probs of the response tokens under the teachers, (b, R) fp32; 0 in rows that have
        none."""
        logprobs = torch.zeros(rows.response_mask.shape, device=rows.response_mask.device)
        for taught_rows, outputs in self._outputs(rows, keeps_layer=False):
            width = outputs.logprobs.shape[1]
            logprobs[taught_rows, :width] = outputs.logprobs[: len(taught_rows)]
        return logprobs

    def _outputs(
        self, rows: ForwardedRollout, keeps_layer: bool
    ) -> Iterator[tuple[Tensor, ResponseLogprobs]]:
        """For each teacher the indices of its rows, (n,) int64, and its forward pass over them;
        with `keeps_layer` also what its whole distributions are computed from.

        Every teacher runs on every rank, because its layers may be gathered: where it has no row,
        on the first one without its response.
        """
        read_rows = rows
        if "teacher_prompt_ids" in rows.extra:
            read_rows = replace(
                rows,
                prompt_ids=rows.extra["teacher_prompt_ids"],
                prompt_mask=rows.extra["teacher_prompt_mask"],
            )
        device = rows.response_ids.device
        teacher_of_row = rows.extra.get("teachers")
        if teacher_of_row is None:
            teacher_of_row = torch.zeros(len(rows.response_ids), dtype=torch.int64, device=device)
        for teacher, engine in enumerate(self.engines):
            taught_rows = (teacher_of_row == teacher).nonzero().squeeze(1)
            if len(taught_rows):
                input_rows = select_rows(read_rows, taught_rows)
            else:
                first_row = torch.zeros(1, dtype=torch.int64, device=device)
                input_rows = select_rows(read_rows, first_row)
                no_response = torch.zeros_like(input_rows.response_mask)
                input_rows = replace(input_rows, response_mask=no_response)
            engine.eval()
            with observed(None):  # observers read the actor's passes
                outputs = response_logprobs(
                    engine,
                    input_rows,
                    self.temperature,
                    forbidden_tokens=self.forbidden_tokens,
                    keeps_layer=keeps_layer,
                )
                yield taught_rows, outputs


def teachers_of(
    config: PPOConfig, frozen: Callable[[str], Model], forbidden_tokens: ForbiddenTokens | None
) -> Teachers:
    """The teachers of a run that distils; the reference, where the flags name no other. `frozen`:
    role -> the model of that role."""
    flags = config.of(DistillationFlags)
    roles = flags.roles or ["reference"]
    divergence = Divergence(flags.kind, flags.distill_beta, flags.distill_topk)
    engines = [frozen(role) for role in roles]
    return Teachers(engines, divergence, config.ppo.temperature, forbidden_tokens)
