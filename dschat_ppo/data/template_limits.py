"""Limits for chat templates: they come with model folders, and Jinja's sandbox bounds neither time nor memory."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from dschat_ppo.common.time_limit import TimeIsUp, processor_time_limit
from dschat_ppo.data.chat_templates import POWER, has_power
from dschat_ppo.errors import UserError, reading

SECONDS = 5.0  # of processor time; an ordinary rendering takes less than a millisecond
BYTES = 2**30
MOST_CHARACTERS = 2**24  # of a rendered conversation
_PAGES = Path("/proc/self/statm")
_HAS_PAGES = _PAGES.exists()
_EXCEEDED: dict[tuple[str, ...], str] = {}  # texts of a tokenizer's templates -> message


def rendered_within_limits(template: str | Mapping[str, str], render: Callable[[], object]) -> str:
    """The text of `render`, with its processor time, memory and length bounded.

    A template that exceeded a limit is not rendered again, so a data set does not wait for each of its rows. Signals
    reach the main thread only: in other threads, which serve a chat, time and memory are not bounded.

    Args:
        template: Jinja text, or several by name, of which transformers chooses one.
        render: renders one conversation by it.

    Raises:
        UserError: a limit is exceeded, or the template computes a power or is nested too deeply.
    """
    texts = tuple(template.values()) if isinstance(template, Mapping) else (template,)
    if texts in _EXCEEDED:
        raise UserError(_EXCEEDED[texts])
    with reading("the chat template cannot be parsed"):
        if any(map(has_power, texts)):
            raise UserError(f"the chat template {POWER}")
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with processor_time_limit(SECONDS), _memory_limit() if in_main_thread else nullcontext():
            text = str(render())
    except TimeIsUp:
        exceeded = f"{SECONDS:g} s"
    except MemoryError:
        exceeded = f"{BYTES >> 30} GiB of memory"
    else:
        if len(text) <= MOST_CHARACTERS:
            return text
        exceeded = f"{MOST_CHARACTERS:,} characters"
    _EXCEEDED[texts] = (
        f"the chat template needs more than {exceeded} for one conversation; repair it, or take another one with "
        "--chat_template"
    )
    raise UserError(_EXCEEDED[texts])


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Allow `BYTES` more than this process has mapped. Not where there is no /proc."""
    if not _HAS_PAGES:
        yield
        return
    kept = resource.getrlimit(resource.RLIMIT_AS)
    # opened each time: in a forked worker, a descriptor of its parent shows the parent's memory
    mapped = int(_PAGES.read_bytes().split(maxsplit=1)[0]) * resource.getpagesize()
    limits = [limit for limit in (mapped + BYTES, *kept) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, kept)
