"""A reward service of OpenRLHF's form: POST `{"query", "prompts", "labels"}`, answered by `{"rewards"}`."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor
from urllib3.exceptions import HTTPError, ReadTimeoutError

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.errors import UserError
from dschat_ppo.rewards.reward_source import RewardRequest, RewardServiceError
from dschat_ppo.types import Rollout

FLAG = "--remote_reward_url"
LABELS = ("label", "answer")
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
_MOST_BYTES, _PIECE_BYTES = 2**26, 2**16
_BEAT_SECONDS = 1.0


class _NotNowError(Exception):
    """The service may answer later; the message says what happened."""


def check_url(url: str) -> None:
    """Raise `UserError` unless `url` is `http://host...` or `https://host...`."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UserError(f"{FLAG} {url}: must be an address such as http://host:5000/get_reward")


class RemoteReward:
    """Scores text by one or several services that give the same scores.

    Args:
        urls: addresses. Batches go to them in turn, as many at once as there are addresses.
        timeout: seconds for each request (waiting for the last bytes may exceed it once).
        retries: further attempts of a request, each at the next address.
        batch_size: most rows of a request.
    """

    name = "remote"

    def __init__(self, urls: list[str], timeout: float, retries: int, batch_size: int):
        for url in urls:
            check_url(url)
        self.urls = urls
        self.timeout = timeout
        self.retries = retries
        self.batch_size = batch_size

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32 on the CPU.

        Raises:
            RewardServiceError: a request was refused (a status below 500 other than 429), was answered by what is not
                one finite number for each row, or was not answered in `1 + retries` attempts.
        """
        starts = range(0, len(request), self.batch_size)
        threads, scores = ThreadPoolExecutor(len(self.urls), thread_name_prefix="remote"), list[float]()
        try:
            for part in [threads.submit(self._batch, request, start) for start in starts]:
                while not wait([part], _BEAT_SECONDS).done:
                    heartbeat()  # the request's own limits tell a service that hangs
                scores += part.result()
        finally:  # who interrupts does not wait for a service that hangs
            threads.shutdown(wait=False, cancel_futures=True)
        return torch.tensor(scores, dtype=torch.float32)

    def _batch(self, request: RewardRequest, start: int) -> list[float]:
        rows = slice(start, start + self.batch_size)
        prompts, responses = request.prompts[rows], request.responses[rows]
        body = {
            "query": [prompt + response for prompt, response in zip(prompts, responses, strict=True)],
            "prompts": prompts,
            "labels": [label_of(row) for row in request.rows[rows]],
        }
        return self._ask(json.dumps(body, default=str).encode(), len(prompts), dist.rank() + start // self.batch_size)

    def _ask(self, body: bytes, rows: int, first: int) -> list[float]:
        """Scores of one batch. Waits double from attempt to attempt, each shortened at random by up to a half, so that
        ranks do not come back together."""
        for attempt in range(self.retries + 1):
            url = self.urls[(first + attempt) % len(self.urls)]
            try:
                return read_rewards(post(url, body, self.timeout), rows, url)
            except _NotNowError as problem:
                cause = str(problem)
            if attempt < self.retries:
                longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**attempt)
                time.sleep(longest * random.uniform(0.5, 1.0))
        raise RewardServiceError(f"{FLAG} {url}: no answer in {self.retries + 1} attempts; the last: {cause}")


def label_of(row: dict[str, Any]) -> Any:
    """The row's `label` column, or its `answer` column, or None."""
    return next((row[name] for name in LABELS if row.get(name) is not None), None)


def post(url: str, body: bytes, timeout: float) -> bytes:
    """The body of the service's answer of status 200.

    Raises:
        _NotNowError: no connection, no whole answer in time, status 429 or 5xx.
        RewardServiceError: another status, or an answer of more than 64 MiB.
    """
    deadline = time.monotonic() + timeout
    late = f"no whole answer in {timeout:g} s (--remote_reward_timeout)"
    headers = {"Content-Type": "application/json"}
    try:
        with requests.post(
            url, data=body, headers=headers, timeout=timeout, stream=True, allow_redirects=False
        ) as answer:
            status, content = answer.status_code, _body(answer, deadline)
    except (requests.Timeout, ReadTimeoutError):
        raise _NotNowError(late) from None
    except (requests.RequestException, HTTPError, OSError) as problem:
        raise _NotNowError(f"{type(problem).__name__}: {problem}") from None
    if content is None:
        raise _NotNowError(late)
    said = content[:200].decode(errors="replace")
    if status == 429 or status >= 500:
        raise _NotNowError(f"status {status}: {said}")
    if status != 200:
        raise RewardServiceError(f"{FLAG} {url}: refused the request with status {status}: {said}")
    if len(content) > _MOST_BYTES:
        raise RewardServiceError(f"{FLAG} {url}: its answer is longer than {_MOST_BYTES} bytes")
    return content


def _body(answer: requests.Response, deadline: float) -> bytes | None:
    """All of the answer, or a little more than `_MOST_BYTES` of it; None if the deadline passes before its end.

    The time limit of `requests` is for each piece; a service that sends byte after byte would never exceed it.
    """
    content = b""
    while len(content) <= _MOST_BYTES:
        piece = answer.raw.read1(_PIECE_BYTES, decode_content=True)
        if not piece:
            return content
        content += piece
        if time.monotonic() > deadline:
            return None
    return content


def read_rewards(content: bytes, rows: int, url: str) -> list[float]:
    """`{"rewards": [number, ...]}` -> the numbers.

    Raises:
        RewardServiceError: another form, another count than `rows`, or a number that is not finite in fp32.
    """
    problem = None
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer, problem = None, "is not JSON"
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if problem is None and not isinstance(rewards, list):
        problem = "has no list 'rewards'"
    elif isinstance(rewards, list) and len(rewards) != rows:
        problem = f"has {len(rewards)} rewards for {rows} rows"
    elif isinstance(rewards, list):
        bad = [value for value in rewards if not is_finite_number(value)]
        problem = f"has {bad[0]!r} for a reward" if bad else None
    if problem is not None:
        start = content[:200].decode(errors="replace")
        raise RewardServiceError(f"{FLAG} {url}: its answer {problem} (it begins with {start!r})")
    assert rewards is not None
    return [float(value) for value in rewards]


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a number that is finite in fp32."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= torch.finfo(torch.float32).max
