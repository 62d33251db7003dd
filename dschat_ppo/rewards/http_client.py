"""Requests to services that score: retries, a time limit for each, and several at a time."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.errors import UserError, printable_line, reading, safe_text
from dschat_ppo.rewards.reward_source import RewardServiceError

try:  # whichever huggingface_hub requires, and so has imported
    import httpx2 as httpx
except ModuleNotFoundError:
    import httpx  # type: ignore[no-redef]

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
_SHOWN = 200  # characters of what a service sends
_READ = 10_000  # bytes of it in which credentials are hidden first: the cut may divide one
_HEARTBEAT_SECONDS = 1.0
_UNREADABLE = (
    400,
    413,
    422,
)  # status of a request that the service cannot read, or that is too long
# it logs addresses with their credentials
logging.getLogger(httpx.__name__).setLevel(logging.WARNING)

Result = TypeVar("Result")


class UnreadableRequestError(RewardServiceError):
    """The service replies, but cannot read this request, or finds it too long."""


@dataclass(frozen=True)
class Service:
    """One or several addresses that give the same replies.

    Attributes:
        flag: that names them, for messages.
        urls: the addresses.
        expected: what an address must be, for messages.
        timeout: most seconds of an attempt, which the flag `timeout_flag` sets.
        retries: further attempts of a request, each at the next address.
        headers: of each request.
        advice: what to do about a status, for messages.
        sources: data sources of the rows that are scored here; (): all rows.
    """

    flag: str
    urls: Sequence[str]
    expected: str
    timeout: float
    timeout_flag: str
    retries: int = 5
    headers: Mapping[str, str] = field(default_factory=dict)
    advice: Mapping[int, str] = field(default_factory=dict)
    sources: Sequence[str] = ()

    def check(self) -> None:
        """`UserError` if an address is none, or a proxy of the environment variables cannot be
        used. No request is sent."""
        for url in self.urls:
            parsed = httpx.URL("")
            with suppress(httpx.InvalidURL):
                parsed = httpx.URL(url)
            has_scheme = parsed.scheme in ("http", "https")
            # characters that no host has are percent-encoded; so is the zone of an IPv6 address
            has_host = parsed.host and ("%" not in parsed.host or ":" in parsed.host)
            if not has_scheme or not has_host or (parsed.port or 80) >= 2**16:
                # without credentials: a password with a slash makes it invalid
                raise UserError(f"{self.flag} {url.rpartition('@')[2]}: {self.expected}")
        self.client(ssl.create_default_context())

    def client(self, certificates: ssl.SSLContext) -> httpx.AsyncClient:
        """A client with these certificates. `UserError` if a proxy cannot be used."""
        with reading(f"{self.flag}: a proxy of the environment variables cannot be used"):
            return httpx.AsyncClient(verify=certificates, timeout=None, headers=dict(self.headers))

    async def request(
        self, client: httpx.AsyncClient, body: bytes | None, first: int = 0
    ) -> tuple[bytes, str]:
        """(the reply to a POST of JSON, or to a GET without a body; the address that gave it). The
        request goes to the address of number `first`, then to the next. The wait doubles from
        attempt to attempt. Each is shortened at random by up to a half, so that ranks do not retry
        at the same time. `RewardServiceError` if the service rejects the request (a status below
        500 other than 429), or does not reply in `1 + retries` attempts; the kind
        `UnreadableRequestError` if it cannot read the request (status 400, 413 or 422)."""
        for attempt in range(self.retries + 1):
            url = self.urls[(first + attempt) % len(self.urls)]
            if body is None:
                sending = client.get(url)
            else:
                json_type = {"Content-Type": "application/json"}
                sending = client.post(url, content=body, headers=json_type)
            # the library's own limits are for each read: a service that sends a byte now and then
            # exceeds none
            try:
                reply = await asyncio.wait_for(sending, self.timeout)
            except asyncio.TimeoutError:
                cause = f"no complete reply in {self.timeout:g} s ({self.timeout_flag})"
            except httpx.RequestError as problem:
                cause = (
                    f"{type(problem).__name__}: {printable_line(safe_text(str(problem))[:_SHOWN])}"
                )
            else:
                if reply.status_code == 200:
                    return reply.content, url
                cause = f"status {reply.status_code}: {beginning_of(reply.content)}"
                if reply.status_code != 429 and reply.status_code < 500:
                    raise self._refusal(url, reply.status_code, cause)
            if attempt < self.retries:
                longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**attempt)
                await asyncio.sleep(longest * random.uniform(0.5, 1.0))
        raise RewardServiceError(
            f"{self.flag} {url}: no reply in {self.retries + 1} attempts; the last: {cause}"
        )

    def _refusal(self, url: str, status: int, cause: str) -> RewardServiceError:
        """What a request that is rejected for good raises."""
        message = f"{self.flag} {url}: refused the request with {cause}"
        if status in _UNREADABLE:
            return UnreadableRequestError(message)
        if status in self.advice:
            message += f"; {self.advice[status]}"
        return RewardServiceError(message)


async def run_all(jobs: Sequence[Callable[[], Awaitable[Result]]], at_once: int) -> list[Result]:
    """The results of all jobs, of which at most `at_once` run at a time."""
    free = asyncio.Semaphore(at_once)

    async def run(job: Callable[[], Awaitable[Result]]) -> Result:
        async with free:
            return await job()

    running = asyncio.gather(*map(run, jobs))
    while not (await asyncio.wait([running], timeout=_HEARTBEAT_SECONDS))[0]:
        heartbeat()  # a service that hangs is found by the time limit of the request
    return list(await running)


def beginning_of(content: bytes) -> str:
    """The first characters of a reply, for a message."""
    return printable_line(safe_text(content[:_READ].decode(errors="replace"))[:_SHOWN])
