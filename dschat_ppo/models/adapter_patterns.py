"""The regular expressions of a saved adapter, which comes from elsewhere: some expressions take forever to match."""

from __future__ import annotations

import re
from typing import Any

from dschat_ppo.common.time_limit import TimeIsUp, processor_time_limit
from dschat_ppo.errors import UserError, reading

PATTERN_SECONDS = 5.0


def check_patterns(names: list[str], config: Any, folder: str) -> None:
    """Try the regular expressions of a saved adapter on the names that peft will compare.

    Args:
        names: of the model's modules.
        config: peft's `LoraConfig`.
        folder: of the adapter.

    Raises:
        UserError: one takes too long, or has a syntax error.
    """
    texts = [text for text in (config.target_modules, config.exclude_modules) if isinstance(text, str)]
    texts += [rf"(.*\.)?({text})$" for text in (*config.rank_pattern, *config.alpha_pattern)]
    layers = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern or []
    texts += [rf".*\.{text}\.(\d+)\." for text in layers]
    for text in texts:
        refused = f"{folder}: the pattern {text!r} of its adapter_config.json"
        try:
            with reading(refused), processor_time_limit(PATTERN_SECONDS):
                for name in names:
                    re.match(text, name)
                    re.fullmatch(text, name)
        except UserError as problem:
            if isinstance(problem.__cause__, TimeIsUp):
                raise UserError(f"{refused} takes too long to match; name the layers instead") from None
            raise
