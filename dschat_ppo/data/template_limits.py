"""Limits for chat templates, which come with model folders, and for what tokenizers get. Jinja's sandbox bounds neither
time nor memory, and the tokenizers library aborts the process if memory runs out."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from dschat_ppo.common.time_limit import TimeIsUp, processor_time_limit
from dschat_ppo.data.chat_templates import UNBOUNDED, has_unbounded_numbers
from dschat_ppo.errors import UserError, reading

SECONDS = 5.0  # of processor time; an ordinary rendering takes less than a millisecond
BYTES = 2**30
OWN_CHARACTERS = 2**18  # that a template may add to a conversation; those of published models add fewer than 20,000
REPEATS = 16  # times that a template may write the conversation's JSON, which `tojson(indent=4)` makes longer
MOST_BYTES = 2**24  # of a text to encode; the tokenizer needs up to 300 times as many
GROUP_BYTES = 2**22  # of texts that are encoded together
_QUOTED = 60  # characters of a template in a message
_PAGES = Path("/proc/self/statm")
_HAS_PAGES = _PAGES.exists()
_EXCEEDED: dict[tuple[str, ...], str] = {}  # texts of a tokenizer's templates -> message


def rendered_within_limits(template: str | Mapping[str, str], render: Callable[[], object], given: object) -> str:
    """The text of `render`, with its processor time, memory and length bounded.

    A template that needs too much time or memory is not rendered again, so a data set does not wait for each of its
    rows. Signals reach the main thread only: in other threads time and memory are not bounded.

    Args:
        template: Jinja text, or several by name, of which transformers chooses one.
        render: renders one conversation by it.
        given: the conversation, messages and tools; the permitted length depends on it.
    """
    texts = tuple(template.values()) if isinstance(template, Mapping) else (template,)
    if texts in _EXCEEDED:
        raise UserError(_EXCEEDED[texts])
    with reading("the chat template cannot be parsed"):
        if any(map(has_unbounded_numbers, texts)):
            raise UserError(f"the chat template {UNBOUNDED}")
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with processor_time_limit(SECONDS), _memory_limit() if in_main_thread else nullcontext():
            text = str(render())
    except TimeIsUp:
        exceeded = f"{SECONDS:g} s"
    except MemoryError:
        exceeded = f"{BYTES >> 30} GiB of memory"
    else:
        if len(text) > OWN_CHARACTERS:
            _check_length(texts[0], text, given)
        return text
    _EXCEEDED[texts] = (
        f"the chat template needs more than {exceeded} for one conversation; repair it, or take another one with "
        "--chat_template"
    )
    raise UserError(_EXCEEDED[texts])


def _check_length(template: str, text: str, given: object) -> None:
    """Refuse a long rendering that is mostly not from the conversation: the tokenizer needs some 250 bytes of memory
    for each of its characters."""
    own = len(json.dumps(given, ensure_ascii=False, default=str))
    if len(text) > OWN_CHARACTERS + REPEATS * own:
        start = " ".join(template.split())[:_QUOTED]
        raise UserError(
            f"the chat template, which starts with {start!r}, renders {len(text):,} characters for a conversation of "
            f"{own:,}; repair it, or take another one with --chat_template"
        )


def check_size(text: str) -> int:
    """The number of bytes of a text in UTF-8, at least: four for each character unless all are ASCII. `UserError` above
    `MOST_BYTES`."""
    size = len(text) if text.isascii() else 4 * len(text)
    if size > MOST_BYTES and len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise UserError(
            f"a text of {len(text):,} characters is too long for the tokenizer, which takes {MOST_BYTES >> 20} MiB at "
            "once; split it"
        )
    return size


def in_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in the same order, in lists to encode together."""
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += check_size(text)
        if size > GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


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
