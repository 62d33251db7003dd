"""What a model gets for some tokens in place of the embeddings of their ids, such as the features
of an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.types import PromptBatch, Rollout


class GivenEmbeddings(Protocol):
    """Of rows of token ids (B, T), right-padded."""

    @property
    def offsets(self) -> Tensor | None:
        """(B,) int64: the position of a token after all that is given in a row is its column plus
        this; None: its column."""
        ...

    def to(self, device: torch.device) -> GivenEmbeddings:
        """The same on another device."""
        ...

    def of_rows(self, rows: Tensor, width: int) -> GivenEmbeddings:
        """That of the rows with the indices `rows` (b,), in this order, and of their first `width`
        columns."""
        ...

    def keys(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 in place of the ids, equal where the model gets the same for a token: two
        images of one size have the same ids."""
        ...

    def arguments(self, slots: Tensor) -> dict[str, Any]:
        """Arguments of the backbone, besides the ids, for tokens that run in an order of their own.

        Args:
            slots: (b, n) int64, where the tokens are in the rows, flattened to (B x T).
        """
        ...


# (indices (n,) of prompts of a batch, width) -> what is given for these prompts, laid out from
# column 0 on, in the first `width` columns; None: nothing
GivenPrompts = Callable[[Sequence[int], int], GivenEmbeddings | None]


class GivenSource(Protocol):
    """Where what is given comes from."""

    # columns of token rows that, beside the ids, say what is given
    columns: tuple[str, ...]
    # why rows cannot lie end to end, nor share their beginnings; None: they can
    reason_not_to_pack: str | None

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that stand for what is given, which a policy that samples never draws."""
        ...

    def for_rows(
        self, records: Sequence[dict[str, Any]], input_ids: Tensor
    ) -> GivenEmbeddings | None:
        """What is given for token rows `records`, whose ids are `input_ids` (B, T), on the device
        of the model; None: nothing."""
        ...

    def number_prompts(self, prompts: Dataset) -> None:
        """Give the rows of a data set of prompts their numbers, which follow those of the data sets
        before it. All ranks do so in one order, the data set of training first: its numbers are in
        checkpoints. A data set that has numbers keeps them."""
        ...

    def prompt_columns(self, prompts: Dataset, indices: Sequence[int]) -> dict[str, Tensor]:
        """Columns of features (`FEATURE_COLUMNS`) of the prompts at `indices`, in which the
        methods below find what is given for them; `number_prompts` numbers the data set."""
        ...

    def for_prompts(self, prompts: PromptBatch) -> GivenPrompts:
        """What is given for prompts that have these columns. It is made when it is asked for."""
        ...

    def for_rollout(self, rows: Rollout) -> GivenEmbeddings | None:
        """What is given for the `full_sequences` of rows that have these columns, on the device of
        the model; of the contexts of a row, for the first alone. None: nothing."""
        ...

    def for_probe(self, input_ids: Tensor) -> tuple[Tensor, GivenEmbeddings]:
        """Ids (B, T) with some tokens replaced, and noise that is given for these, equal in all
        rows: with them `select_kernels` compares ways of running rows."""
        ...

    def for_probe_prompts(self, prompts: PromptBatch) -> tuple[PromptBatch, GivenPrompts]:
        """Prompts with some tokens replaced, and noise that is given for these: in one place, in
        two, or nowhere in short ones. With them generation is checked."""
        ...


def of_prompts(given: GivenPrompts, chosen: Sequence[int]) -> GivenPrompts:
    """What is given for the `chosen` prompts of a batch, as for a batch of these."""

    def given_for(indices: Sequence[int], width: int) -> GivenEmbeddings | None:
        return given([chosen[index] for index in indices], width)

    return given_for


def compared_keys(input_ids: Tensor, given: GivenEmbeddings | None) -> Tensor:
    """(B, T) int64, by which rows are compared: two tokens are the same if these are."""
    if given is None:
        return input_ids
    return given.keys(input_ids)


def given_arguments(
    given: GivenEmbeddings | None, slots: Tensor, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The `arguments` of a backbone, and in their place what is given for the tokens at `slots`
    (b, n)."""
    if given is None:
        return arguments
    return {**arguments, **given.arguments(slots)}
