"""Where in a model, and in which rows, numbers stop being finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.data.collators import PairBatch, PreferenceBatch
from dschat_ppo.nonfinite.find import bad_places
from dschat_ppo.types import Rollout, select_rows, tensors_of

SHOWN_TOKENS = 12


class FirstBadOutput:
    """Inside, watches what the modules of a model give; `first` describes the first output that is not finite."""

    def __init__(self, model: nn.Module):
        self.first: str | None = None
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> FirstBadOutput:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_hook(self._watch(name)))
        return self

    def _watch(self, name: str) -> Any:
        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.first is None and not _finite(output):
                before = "its inputs are finite" if _finite(inputs) else "so are its inputs"
                self.first = f"{name or 'the model'} ({type(module).__name__}; {before})"

        return see

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()


def _finite(value: Any) -> bool:
    """Whether every number of a tensor, or of the tensors in tuples, lists and mappings, is finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, tuple | list):
        return all(_finite(part) for part in value)
    return all(_finite(part) for part in value.values()) if isinstance(value, dict) else True


def bad_weights(model: nn.Module) -> list[str]:
    """Names of the parameters that are not finite."""
    return [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]


def bad_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient is not finite."""
    pairs = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [name for name, gradient in pairs if gradient is not None and not bool(gradient.isfinite().all())]


def single_rows(record: Any) -> Iterator[Any]:
    """A record for each row of a record (each pair of a batch of pairs)."""
    values: dict[str, Any] = tensors_of(record)
    if type(record) in (PairBatch, PreferenceBatch):
        pairs = len(record.pair_mask)
        for number in range(pairs):
            yield replace(record, **{name: _of_pair(value, number, pairs) for name, value in values.items()})
        return
    for number in range(len(next(iter(values.values())))):
        if isinstance(record, Rollout):
            yield select_rows(record, torch.tensor([number], device=record.response_ids.device))
        else:
            yield replace(record, **{name: value[number : number + 1] for name, value in values.items()})


def _of_pair(value: Tensor, number: int, pairs: int) -> Tensor:
    """What a tensor with one line for each pair, or all chosen answers and then all rejected, says of one pair."""
    return value[[number]] if len(value) == pairs else value[[number, number + pairs]]


def shown_row(alone: Any, tokenizer: Any) -> list[str]:
    """Lines about a record of one row (or pair): its tokens as text, and which of its numbers are not finite."""
    if isinstance(alone, Rollout):
        texts = {
            "prompt": alone.prompt_ids[0][alone.prompt_mask[0]],
            "answer": alone.response_ids[0][alone.response_mask[0]],
        }
    else:
        names = ("chosen", "rejected") if len(alone.input_ids) == 2 else ("row",)
        texts = dict(zip(names, alone.input_ids, strict=True))
    lines = [f"{name}: {tokenizer.decode(ids.tolist())!r}" for name, ids in texts.items()]
    for name, places in bad_places(alone).items():
        tokens = [place[1] for place in places if len(place) == 2]
        shown = ", ".join(map(str, tokens[:SHOWN_TOKENS])) + (", ..." if len(tokens) > SHOWN_TOKENS else "")
        lines.append(f"{name}: not finite" + (f" at tokens {shown} of the answer" if tokens else ""))
    return lines
