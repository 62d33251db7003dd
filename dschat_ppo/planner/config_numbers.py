"""Numbers that the planner reads from a model's configuration, and the error if it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dschat_ppo.errors import UserError, reading


class PlanError(UserError):
    """The planner cannot count a model: the message names the setting of `config.json` that is missing or no number, or
    what transformers says when it builds the model, or runs it without weights. A run continues without a plan."""


class NeedsDataError(PlanError):
    """The model cannot run on the meta device, because its forward pass reads numbers, as some routers of a mixture of
    experts do."""


def number_of(config: Any, *names: str) -> int | None:
    """The first of these settings that is there and not 0; None if none is. Of a setting that has a number for each
    layer, the largest.

    Args:
        config: of the language model.
        names: of the settings, by which transformers knows them in the configurations of all architectures.

    Raises:
        PlanError: a setting is no number.
    """
    for name in names:
        values = [value for value in _values(config, name) if value is not None]
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
            raise PlanError(f"{type(config).__name__}: '{name}' is {values[0]!r}, which is no number of the planner")
        if any(values):
            return int(max(values))
    return None


def required_number(config: Any, *names: str) -> int:
    """`number_of`, of a setting that every decoder has.

    Raises:
        PlanError: none of the settings is there, or one is no number.
    """
    found = number_of(config, *names)
    if found is None:
        raise PlanError(f"{type(config).__name__} has no '{names[0]}', which the planner needs")
    return found


def head_size(config: Any) -> int:
    """Numbers of an attention head: as the configuration says, or hidden size / heads.

    Raises:
        PlanError: a setting is missing.
    """
    return number_of(config, "head_dim") or (
        required_number(config, "hidden_size") // required_number(config, "num_attention_heads")
    )


def _values(config: Any, name: str) -> list[Any]:
    """The values of a setting: one, or one for each layer."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):  # transformers raises for these; from 5.21 on
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    value = getattr(config, name, None)
    return list(value) if isinstance(value, (list, tuple)) else [value]


@contextmanager
def counting(what: str) -> Iterator[None]:
    """Turn the exceptions of transformers, which builds or runs a model in the block, into `PlanError`.

    Args:
        what: that is done; the message of transformers follows.

    Raises:
        NeedsDataError: an operator in the block reads numbers.
        PlanError: the block raised something else.
    """
    try:
        with reading(what):
            yield
    except PlanError:
        raise
    except UserError as problem:
        kind = NeedsDataError if _reads_numbers(problem.__cause__) else PlanError
        raise kind(str(problem)) from problem.__cause__


def _reads_numbers(problem: BaseException | None) -> bool:
    """Whether an exception is that of an operator on the meta device whose result depends on data."""
    is_missing = isinstance(problem, NotImplementedError)
    return is_missing or (isinstance(problem, RuntimeError) and "meta tensor" in str(problem).lower())
