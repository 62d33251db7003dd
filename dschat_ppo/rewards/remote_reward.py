"""A remote reward service with the API of OpenRLHF: POST `{"query", "prompts", "labels"}`, reply `{"rewards"}`."""

from __future__ import annotations

import base64
import json
import os
import queue
import random
import string
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, UnknownHandler

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.data.examples import TRUTH
from dschat_ppo.errors import HIDDEN, UserError, printable_line, without_credentials
from dschat_ppo.rewards.call_forms import LARGEST
from dschat_ppo.rewards.reward_source import RewardRequest, RewardServiceError, is_routed_to
from dschat_ppo.types import Rollout

FLAG = "--remote_reward_url"
VARIABLE = "DSCHAT_PPO_REMOTE_REWARD_URL"  # addresses with their credentials
LABELS = (TRUTH, "label", "answer")
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
_MOST_BYTES = 2**24  # of a reply
_SHOWN = 200  # characters of what a service sends
_HEARTBEAT_SECONDS = 1.0


class _RetryableError(Exception):
    """The request failed, but a later attempt may succeed; the message is the cause."""


def usable_urls(urls: list[str]) -> list[str]:
    """The addresses, each `http://host...` or `https://host...`. Those whose credentials are hidden by `***` must be in
    the environment and are taken from it."""
    known = {without_credentials(url): url for url in map(str.strip, os.environ.get(VARIABLE, "").split(","))}
    for url in urls:
        if HIDDEN in url and url == without_credentials(url) and url not in known:
            raise UserError(
                f"{FLAG} {url}: *** stands for credentials, which are not saved: give the flag with them, or set "
                f"{VARIABLE} to the whole address"
            )
    found = [known.get(url, url) for url in urls]
    for url in found:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:  # a password with a slash makes it so
            raise UserError(
                f"{FLAG} {url.rpartition('@')[2]}: must be an address such as http://host:5000/get_reward (a Python "
                "file: --reward_function FILE.py:FUNCTION)"
            )
    return found


class RemoteReward:
    """Scores text with one or several services that return the same scores. Batches go to them in turn, with one
    request at a time to each. Rows of other data sources than `sources` are not sent, unless that is ().

    `timeout`: seconds from the start of each request to the end of its reply. A failed request is repeated `retries`
    times, each time at the next address.
    """

    name = "remote"

    def __init__(
        self, urls: list[str], timeout: float, retries: int = 5, batch_size: int = 64, sources: Sequence[str] = ()
    ):
        self.urls, self.timeout, self.retries = usable_urls(urls), timeout, retries
        self.batch_size, self.sources = batch_size, sources

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32 on the CPU; NaN for rows of other data sources, which are not sent. `RewardServiceError` if the
        service rejects a request (a status below 500 other than 429), replies with anything but one finite number per
        response, or does not reply in `1 + retries` attempts."""
        rows = [number for number, row in enumerate(request.rows) if is_routed_to(self.sources, row)]
        request, every = request.select(rows), torch.full((len(request),), torch.nan)
        starts = range(0, len(request), self.batch_size)
        threads, scores = ThreadPoolExecutor(len(self.urls), thread_name_prefix="remote"), list[float]()
        try:
            for batch in [threads.submit(self._score_batch, request, start) for start in starts]:
                while not wait([batch], _HEARTBEAT_SECONDS).done:
                    heartbeat()  # a service that hangs is found by the time limit of the request
                scores += batch.result()
        finally:  # after an interrupt, do not wait for a service that hangs
            threads.shutdown(wait=False, cancel_futures=True)
        every[rows] = torch.tensor(scores, dtype=torch.float32)
        return every

    def _score_batch(self, request: RewardRequest, start: int) -> list[float]:
        """Scores of one batch. The wait doubles from attempt to attempt. Each is shortened at random by up to a half,
        so that ranks do not retry at the same time."""
        rows = slice(start, start + self.batch_size)
        prompts, responses = request.prompts[rows], request.responses[rows]
        query = {
            "query": [prompt + response for prompt, response in zip(prompts, responses, strict=True)],
            "prompts": prompts,
            "labels": [label_of(row) for row in request.rows[rows]],
        }
        body = json.dumps(query, default=str).encode()
        first = dist.rank() + start // self.batch_size
        for attempt in range(self.retries + 1):
            url = self.urls[(first + attempt) % len(self.urls)]
            try:
                return read_rewards(post(url, body, self.timeout), len(prompts), url)
            except _RetryableError as problem:
                cause = str(problem)
            if attempt < self.retries:
                longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**attempt)
                time.sleep(longest * random.uniform(0.5, 1.0))
        raise RewardServiceError(f"{FLAG} {url}: no reply in {self.retries + 1} attempts; the last: {cause}")


def label_of(row: dict[str, Any]) -> Any:
    """The row's correct answer, which a flag or its form names, or its `label` or `answer` column, or None."""
    return next((row[name] for name in LABELS if row.get(name) is not None), None)


def post(url: str, body: bytes, timeout: float) -> bytes:
    """Send JSON and return the body of a reply with status 200.

    Proxies are those of the environment variables. Redirections are not followed. A user name and a password in the
    address become an `Authorization` header. `_RetryableError`: no connection, no complete reply in time, status 429 or
    5xx. `RewardServiceError`: another status, or a reply of more than 16 MiB.
    """
    parts = urlsplit(quote(url, safe=string.punctuation))
    user, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json"}
    if user:
        headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
    request = Request(urlunsplit(parts._replace(netloc=host)), body, headers)
    # The timeout of a socket applies to each read: a service that sends a byte now and then would never exceed it.
    found = queue.SimpleQueue[tuple[int, bytes] | Exception]()
    threading.Thread(target=lambda: found.put(_exchange(request, timeout)), daemon=True).start()
    try:
        reply = found.get(timeout=timeout)
    except queue.Empty:
        reply = TimeoutError()
    if isinstance(reply, TimeoutError):
        raise _RetryableError(f"no complete reply in {timeout:g} s (--remote_reward_timeout)")
    if isinstance(reply, Exception):
        raise _RetryableError(f"{type(reply).__name__}: {printable_line(str(reply)[:_SHOWN])}")
    status, content = reply
    start = printable_line(content[:_SHOWN].decode(errors="replace"))
    if status == 429 or status >= 500:
        raise _RetryableError(f"status {status}: {start}")
    if status != 200:
        raise RewardServiceError(f"{FLAG} {url}: refused the request with status {status}: {start}")
    if len(content) > _MOST_BYTES:
        raise RewardServiceError(f"{FLAG} {url}: its reply is longer than {_MOST_BYTES} bytes")
    return content


def _exchange(request: Request, timeout: float) -> tuple[int, bytes] | Exception:
    """Status and body of the reply, cut at the limit, or why there is none."""
    client = OpenerDirector()  # without the handlers that follow redirections and turn a status into an exception
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler(), UnknownHandler()):
        client.add_handler(handler)
    try:
        with client.open(request, timeout=timeout) as reply:
            content = reply.read(_MOST_BYTES + 1)
            if len(content) <= _MOST_BYTES and reply.length:
                raise ConnectionError(f"the connection ended {reply.length} bytes before the end of the reply")
            return reply.status, content
    except (OSError, HTTPException, ValueError) as found:  # ValueError: a chunk of negative length, an odd host name
        return found.reason if isinstance(found, URLError) and isinstance(found.reason, OSError) else found


def read_rewards(content: bytes, rows: int, url: str) -> list[float]:
    """`{"rewards": [number, ...]}` -> the numbers; `RewardServiceError` unless `rows` of them are finite in fp32."""
    try:
        rewards = json.loads(content)["rewards"]
        scores = [float(value) for value in rewards if type(value) in (int, float) and abs(value) <= LARGEST]
        if len(scores) == len(rewards) == rows:
            return scores
        problem = f"has {len(rewards)} rewards, of which {len(scores)} are finite numbers, for {rows} responses"
    except (ValueError, TypeError, LookupError, RecursionError):
        problem = "is not JSON with a list 'rewards'"
    start = content[:_SHOWN].decode(errors="replace")
    raise RewardServiceError(f"{FLAG} {url}: its reply {problem} (it starts with {start!r})")
