"""How the rows of a stream become the training rows of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from dschat_ppo.config.data_flags import LazyTraining, StepData
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.streaming.flags import StreamingFlags


def changed(config: StepConfig, data: StepData) -> StepData:
    """`data` with training rows that are streamed, if the flags ask for it."""
    rows = config.of(StreamingFlags).streaming_rows
    if rows is None:
        return data
    return replace(data, lazy=streamed(rows))


def streamed(rows: int) -> LazyTraining:
    """Training rows that are streamed, so many in an epoch."""
    words = ("--streaming=True", f"--streaming_rows={rows}")
    return LazyTraining(words, _prepare_stream_source, partial(_start_rows, rows))


# of modules that take seconds to import, when data are prepared


def _prepare_stream_source(*arguments: Any) -> Any:
    from dschat_ppo.features.streaming.stream_sources import prepare_source

    return prepare_source(*arguments)


def _start_rows(rows: int, sources: list[Any], step: StepData) -> tuple[Any, tuple[str, ...]]:
    from dschat_ppo.features.streaming.stream_sources import start_stream

    return start_stream(rows, sources, step)
