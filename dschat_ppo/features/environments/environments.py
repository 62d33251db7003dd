"""What episodes ask: `Environment`, its turns, and what values of the user's code become in them.

The processes of episodes import this module, so it imports no large library.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, SupportsFloat

from dschat_ppo.rewards.call_forms import LARGEST, clean_name

Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What an environment answers to an action; all of it is JSON."""

    messages: list[Message] = field(default_factory=list)  # what the model reads next
    text: str | None = None  # in place of messages: text without the chat template (OpenRLHF)
    reward: float = 0.0  # of the action
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)  # to be logged
    failed_calls: int = 0  # tool calls that raised, or named no tool

    def __post_init__(self) -> None:
        for message in self.messages:
            texts = [message.get(name, "") for name in ("role", "content", "name", "tool_call_id")]
            if not message.get("role") or not all(isinstance(text, str) for text in texts):
                raise TypeError(
                    f"it answered with the message {str(message)[:80]}, not with one whose 'role'"
                    " and 'content' are texts"
                )
        if not isinstance(self.text, str | None) or not isinstance(self.done, bool):
            raise TypeError("its text must be a text, and whether it is done true or false")
        if not abs(self.reward) <= LARGEST:
            raise ValueError(f"its reward is {self.reward}, which is not a finite fp32 number")


class Environment(Protocol):
    """One episode. A method may raise anything; the episode then ends."""

    def reset(self, row: Row, seed: int, prompt: str, messages: list[Message] | None) -> Turn:
        """Begin the episode of a data row with this prompt, which the chat template makes of
        `messages` if there are any. Messages and text of the turn come after it."""

    def step(self, action: Message) -> Turn:
        """Answer the model's message; its tool calls are under `tool_calls`, as in transformers'
        chats. If it has thoughts, `content` is what follows them, and `text` all of it."""

    def finish(self) -> Turn:
        """End the episode, whose last turn came or which a limit ended: a reward of the end, and
        metrics."""


@dataclass(frozen=True)
class EnvironmentForm:
    """How to make an environment for each episode."""

    make: Callable[[], Environment]
    describe_tools: Callable[[], list[dict[str, Any]]] = list

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas for the chat template. Those of functions import transformers, which slows
        later forks."""
        return self.describe_tools()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process; forks of one loop would take each other's wake-ups."""
    return asyncio.new_event_loop()


def awaited(value: Any) -> Any:
    """A value, or what a coroutine returns."""
    if inspect.isawaitable(value):
        return _loop().run_until_complete(value)
    return value


# keys of a part of a message that hold an image, or say where it is
_KEYS_OF_IMAGES = frozenset({"image", "image_url", "url", "path", "base64", "bytes", "data"})


def message_content(value: Any) -> str:
    """What a tool returned, as the content of a message. `TypeError` for an image."""
    if _holds_image(value):
        raise TypeError("it answered with an image, but models read text alone in their turns")
    text = value
    if not isinstance(value, str):
        text = str(value)
        with suppress(TypeError, ValueError):
            text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # without halves of surrogates


def _holds_image(value: Any) -> bool:
    """Whether a value is an image of Pillow or a part of a message with one, or holds such."""
    if isinstance(value, Mapping):
        is_part = value.get("type") in ("image", "image_url", "input_image")
        if is_part and not _KEYS_OF_IMAGES.isdisjoint(value):
            return True
        return _holds_image(value.get("content"))
    if isinstance(value, list | tuple):
        return any(map(_holds_image, value))
    return type(value).__module__.startswith("PIL.")


def reward_number(value: Any) -> float:
    """A number, also of NumPy or PyTorch; `TypeError` for anything else."""
    if value is None:
        return 0.0
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"its reward is {type(value).__name__}, not a number")
    return float(value)


def finite_metrics(values: Any) -> dict[str, float]:
    """The numbers of a mapping that are finite in fp32, by names for metrics; {} of anything
    else."""
    metrics = dict[str, float]()
    if not isinstance(values, Mapping):
        return metrics
    for key, value in values.items():
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # of arrays
            if isinstance(value, SupportsFloat) and abs(float(value)) <= LARGEST:
                metrics[clean_name(key)] = float(value)
    return metrics
