"""Models run rows whose columns the ranks divide."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat_ppo.algorithms.fused_logprobs import Forbidden, forbid_
from dschat_ppo.common.dist import ranks_of_row
from dschat_ppo.errors import UserError
from dschat_ppo.features.sequence_parallel.divided_rows import DividedRows
from dschat_ppo.models.backbone import hidden_window
from dschat_ppo.models.kernel_selection import compare_ways, is_close
from dschat_ppo.models.packing import recorded_attention
from dschat_ppo.models.wrapped_models import (
    PolicyModel,
    ScalarModel,
    lengths_read,
    scores_of_logits,
)
from dschat_ppo.types import Model


@dataclass(frozen=True)
class DividedRunner:
    """Every rank that shares rows runs its columns, and receives the numbers of all
    (`RowRunner`)."""

    def token_scores(
        self,
        policy: PolicyModel,
        input_ids: Tensor,
        target_mask: Tensor,
        temperature: float,
        entropy_grad: bool,
        forbidden: Forbidden | None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N,) of the targets on every rank that shares the rows, each of
        which runs its columns. Collective."""

        def of_next_token(values: Tensor) -> Tensor:
            """(B, T), at each token what the next one has; 0 or False at the last."""
            return torch.nn.functional.pad(values[:, 1:], (0, 1))

        predicts = of_next_token(target_mask)  # (B, T): tokens whose next one is a target
        rows = DividedRows.of(input_ids, lengths_read(target_mask), policy.layout.packed)
        rank_predicts = rows.columns_of_rank(predicts)  # (b, n)
        tokens = rows.columns_of_rank(of_next_token(input_ids))[rank_predicts]
        if forbidden is not None:
            of_next = rows.columns_of_rank(of_next_token(forbidden.positions))
            forbidden = replace(forbidden, positions=of_next[rank_predicts])
        if policy.layout.fused:
            output = rows.run(policy.backbone, input_ids, policy.layout.attention)
            states = output.last_hidden_state[rank_predicts]
            scores = policy.head_scores(states, tokens, temperature, entropy_grad, forbidden)
        else:
            output = rows.run(policy.lm, input_ids, policy.layout.attention)
            logits = output.logits[rank_predicts].float()
            forbid_(logits, forbidden)
            scores = scores_of_logits(logits, tokens, temperature, entropy_grad)
        rank_scores = torch.stack(scores, dim=-1)  # (targets of this rank, 2)
        in_columns = rank_scores.new_zeros((*rank_predicts.shape, 2))
        in_columns = in_columns.masked_scatter(rank_predicts.unsqueeze(-1), rank_scores)
        all_scores = rows.gathered(in_columns)[rows.laid_out(predicts)]  # (N, 2)
        logprobs, entropy = all_scores.unbind(dim=-1)
        if not entropy_grad:
            entropy = entropy.detach()
        return logprobs, entropy

    def token_values(self, scalar: ScalarModel, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """The value of each token, (B, T) fp32. Collective."""
        rows = DividedRows.of(input_ids, lengths, scalar.layout.packed)
        output = rows.run(scalar.backbone, input_ids, scalar.layout.attention)
        return rows.values(scalar.head_values(output.last_hidden_state))


DIVIDED = DividedRunner()


def select(engine: Model, module: PolicyModel | ScalarModel, ids: Tensor) -> bool:
    """Let the ranks that share rows divide their columns; returns whether there are such ranks.
    Arguments as in `select_kernels`. Collective.

    Raises:
        UserError: that does not give the numbers of whole rows.
    """
    if ranks_of_row() == 1:
        return False
    with recorded_attention() as recorded:
        divided, undivided, error = compare_ways(engine, module, ids, runner=DIVIDED)
    close = is_close(divided, undivided, module.backbone.dtype)
    reason = None
    if error:
        reason = f"with divided rows {error}"
    elif hidden_window(module.config, recorded.windows):
        reason = "its sliding window is in its mask, which divided rows do not have"
    elif not close:
        reason = "divided rows do not give the numbers of whole rows"
    if reason is not None:
        name = type(module.backbone).__name__
        raise UserError(
            f"--sequence_parallel_size: {name} cannot be divided, because {reason}; use 1"
        )
    return True
