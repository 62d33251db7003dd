"""Checks of a saved adapter, which comes from elsewhere: types, which peft does not test, and patterns without end."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

from dschat_ppo.common.time_limit import TimeIsUp, processor_time_limit
from dschat_ppo.errors import UserError, reading

PATTERN_SECONDS = 5.0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


def _texts(value: Any) -> bool:
    return _is_text(value) or _list_of(_is_text)(value)


def _by_pattern(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_item, value.values()))


# Setting -> (what it must be, whether a value is). null is as good as none, except where peft has another default.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "alpha_pattern": ("an object of numbers", _by_pattern(_is_number)),
    "base_model_name_or_path": ("text", _is_text),
    "bias": ("text", _is_text),
    "exclude_modules": ("text or a list of texts", _texts),
    "fan_in_fan_out": ("true or false", _is_flag),
    "init_lora_weights": ("true, false or text", lambda value: _is_flag(value) or _is_text(value)),
    "layers_pattern": ("text or a list of texts", _texts),
    "layers_to_transform": (
        "a number or a list of numbers", lambda value: _is_count(value) or _list_of(_is_count)(value),
    ),
    "lora_alpha": ("a finite number", _is_number),
    "lora_dropout": ("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1),
    "modules_to_save": ("a list of texts", _list_of(_is_text)),
    "r": ("an integer above 0", lambda value: _is_count(value) and value > 0),
    "rank_pattern": ("an object of integers above 0", _by_pattern(lambda value: _is_count(value) and value > 0)),
    "revision": ("text", _is_text),
    "target_modules": ("text or a list of texts", _texts),
    "task_type": ("text", _is_text),
    "use_dora": ("true or false", _is_flag),
    "use_rslora": ("true or false", _is_flag),
}  # fmt: skip
_NOT_NULL = (
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "lora_dropout", "r", "rank_pattern",
    "use_dora", "use_rslora",
)  # fmt: skip


def check_adapter_values(settings: dict[str, Any], file: str) -> None:
    """Refuse values in LoRA's `adapter_config.json` (`file`: flag and path) that peft accepts and then fails on."""
    for name, (kind, is_usable) in _KINDS.items():
        value = settings.get(name)
        if name in settings and not (is_usable(value) if value is not None else name not in _NOT_NULL):
            raise UserError(f"{file}: '{name}' must be {kind}; it is {repr(value)[:80]}")


def check_patterns(names: list[str], config: Any, folder: str) -> None:
    """Refuse regular expressions of a saved adapter that take too long on `names`, the model's modules, or are none."""
    texts = [text for text in (config.target_modules, config.exclude_modules) if isinstance(text, str)]
    texts += [rf"(.*\.)?({text})$" for text in (*config.rank_pattern, *config.alpha_pattern)]
    layers = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern or []
    texts += [rf".*\.{text}\.(\d+)\." for text in layers]
    left = PATTERN_SECONDS  # for all patterns together
    for text in texts:
        begun = time.process_time()
        refused = f"{folder}: the pattern {text!r} of its adapter_config.json"
        try:
            with reading(refused), processor_time_limit(left):
                for name in names:
                    re.match(text, name)
                    re.fullmatch(text, name)
        except UserError as problem:
            if isinstance(problem.__cause__, TimeIsUp):
                raise UserError(f"{refused} takes too long to match; name the layers instead") from None
            raise
        left = max(0.01, left - (time.process_time() - begun))
