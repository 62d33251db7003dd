"""What a model gets for some tokens in place of the embeddings of their ids, such as the features
of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class GivenEmbeddings(Protocol):
    """Of rows of token ids (B, T), right-padded."""

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


class GivenSource(Protocol):
    """Where what is given comes from."""

    # columns of token rows that, beside the ids, say what is given
    columns: tuple[str, ...]

    def for_rows(
        self, records: Sequence[dict[str, Any]], input_ids: Tensor
    ) -> GivenEmbeddings | None:
        """What is given for token rows `records`, whose ids are `input_ids` (B, T), on the device
        of the model; None: nothing."""
        ...

    def for_probe(self, input_ids: Tensor) -> tuple[Tensor, GivenEmbeddings]:
        """Ids (B, T) with some tokens replaced, and noise that is given for these, equal in all
        rows: with them `select_kernels` compares ways of running rows."""
        ...


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
