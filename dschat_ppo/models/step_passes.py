"""The forward passes over the micro-batches of a step: all laid out before the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from dschat_ppo.models.backbone import Layout, unwrap
from dschat_ppo.models.pass_rows import PassRows
from dschat_ppo.models.wrapped_models import PolicyModel, given_for
from dschat_ppo.types import (
    FEATURE_COLUMNS,
    Model,
    Rollout,
    chosen_columns,
    full_sequences,
    to_device,
)


def on_host(rows: Rollout) -> Rollout:
    """A copy on the host of what passes are laid out from: ids, masks and lengths."""
    columns = {f.name: getattr(rows, f.name) for f in fields(Rollout)}
    # of the columns of features, these may say what is given for a row
    per_row = {name: rows.extra[name] for name in rows.extra if FEATURE_COLUMNS[name] == "row"}
    return to_device(Rollout(**{**columns, "extra": per_row}), "cpu")


@dataclass(frozen=True)
class StepPasses:
    """The passes of models over the micro-batches of a step. The first call for a model lays out
    those of all micro-batches, from their copies on the host, so that no later pass waits for a
    GPU."""

    micro_batches: Sequence[Rollout] = ()
    host_copies: Sequence[Rollout] = ()  # `on_host`, one of each
    # by the kind of a model and its layout: the identity of a micro-batch -> its rows
    _laid_out: dict[tuple[type, Layout], dict[int, PassRows]] = field(
        default_factory=dict, repr=False
    )

    def pass_rows(self, engine: Model, rows: Rollout) -> PassRows | None:
        """The micro-batch `rows` as laid out for `response_logprobs` or `response_values` of this
        model. None: it is none of the micro-batches, or the model runs its rows in another way."""
        if not self.micro_batches:
            return None
        model: Any = unwrap(engine)
        layout = model.layout
        reads_logits = isinstance(model, PolicyModel) and not layout.fused
        if layout.runner is not None or reads_logits:
            return None
        key = (type(model), layout)
        if key not in self._laid_out:
            passes = {}
            for micro_batch, host_copy in zip(self.micro_batches, self.host_copies, strict=True):
                device = micro_batch.response_ids.device
                # what is given is made again for the pass: a step does not hold that of all rows
                laid_out_rows = replace(_laid_out(model, host_copy), given=None)
                passes[id(micro_batch)] = laid_out_rows.to(device)
            self._laid_out[key] = passes
        laid_out = self._laid_out[key].get(id(rows))
        given_embeddings = None
        if laid_out is not None:
            given_embeddings = given_for(engine, rows)
        if laid_out is None or given_embeddings is None:
            return laid_out
        return replace(laid_out, given=given_embeddings)


def _laid_out(model: Any, host_copy: Rollout) -> PassRows:
    """Rows on the host, laid out for `response_logprobs` or `response_values` of `model`."""
    input_ids, lengths = full_sequences(host_copy)
    width = input_ids.shape[1]
    given_embeddings = given_for(model, host_copy)
    if isinstance(model, PolicyModel):
        targets = chosen_columns(host_copy, width)
        return PassRows.of_targets(input_ids, targets, model.layout, given_embeddings)
    before_responses = chosen_columns(host_copy, width, shift=1)
    slots = torch.arange(input_ids.numel()).view(input_ids.shape)[before_responses]
    return PassRows.of(input_ids, lengths, slots, model.layout, given_embeddings)
