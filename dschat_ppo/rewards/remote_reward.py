"""A remote reward service with the API of OpenRLHF: POST `{"query", "prompts", "labels"}`, reply
`{"rewards"}`."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.config.ppo_flags import ADDRESS_NEEDED
from dschat_ppo.data.examples import TRUTH
from dschat_ppo.errors import (
    HIDDEN,
    UserError,
    remember_credentials,
    without_credentials,
)
from dschat_ppo.rewards.call_forms import LARGEST
from dschat_ppo.rewards.http_client import Service, beginning_of, httpx, run_all
from dschat_ppo.rewards.reward_source import RewardRequest, RewardServiceError, is_routed_to
from dschat_ppo.types import Rollout

FLAG = "--remote_reward_url"
VARIABLE = "DSCHAT_PPO_REMOTE_REWARD_URL"  # addresses with their credentials
LABELS = (TRUTH, "label", "answer")


def whole_urls(urls: Sequence[str]) -> list[str]:
    """The addresses; those with `***` in place of credentials must be in the variable
    `VARIABLE`, and are taken from it. Later messages hide the credentials."""
    known = {
        without_credentials(url): url
        for url in map(str.strip, os.environ.get(VARIABLE, "").split(","))
    }
    addresses = [known.get(url, url) for url in urls]
    for url in addresses:
        if HIDDEN in url and url == without_credentials(url):
            raise UserError(
                f"{FLAG} {url}: *** stands for credentials, which are not saved: give the flag with"
                f" them, or set {VARIABLE} to the whole address"
            )
        remember_credentials(url)
    return addresses


def remote_service(
    urls: Sequence[str], timeout: float, retries: int = 5, sources: Sequence[str] = ()
) -> Service:
    """The service at these addresses; `UserError` if it cannot be asked."""
    service = Service(
        flag=FLAG,
        urls=whole_urls(urls),
        expected=ADDRESS_NEEDED,
        timeout=timeout,
        timeout_flag="--remote_reward_timeout",
        retries=retries,
        sources=sources,
    )
    service.check()
    return service


class RemoteReward:
    """Scores text with one or several services that return the same scores. Batches go to them in
    turn, with one request at a time to each, of at most `timeout` seconds; a failed one is repeated
    `retries` times, each time at the next address. Rows of other data sources than `sources` are
    not sent, unless that is ()."""

    name = "remote"
    scores_elsewhere = True

    def __init__(
        self,
        urls: list[str],
        timeout: float,
        retries: int = 5,
        batch_size: int = 64,
        sources: Sequence[str] = (),
    ):
        self.service = remote_service(urls, timeout, retries, sources)
        self.batch_size = batch_size
        self.certificates = ssl.create_default_context()  # of the system, or of SSL_CERT_FILE

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32 on the CPU; NaN for rows of other data sources, which are not sent.
        `RewardServiceError` if the service rejects a request (a status below 500 other than 429),
        replies with anything but one finite number per response, or does not reply in `1 + retries`
        attempts."""
        sources = self.service.sources
        rows = [index for index, row in enumerate(request.rows) if is_routed_to(sources, row)]
        scores = torch.full((len(request),), torch.nan)
        routed = asyncio.run(self._score(request.select(rows)))
        scores[rows] = torch.tensor(routed, dtype=torch.float32)
        return scores

    async def _score(self, request: RewardRequest) -> list[float]:
        """Scores of all batches. Connections are closed at the end: a service may restart before
        the next call."""
        client = self.service.client(self.certificates)
        jobs = []
        for start in range(0, len(request), self.batch_size):
            batch = request.select(range(start, min(start + self.batch_size, len(request))))
            first = dist.rank() + start // self.batch_size
            jobs.append(partial(self._score_batch, client, batch, first))
        async with client:
            scores_of_batches = await run_all(jobs, len(self.service.urls))
        return [score for scores in scores_of_batches for score in scores]

    async def _score_batch(
        self, client: httpx.AsyncClient, batch: RewardRequest, first: int
    ) -> list[float]:
        """Scores of one batch, which goes to the address of number `first`, then to the next."""
        query = {
            "query": [
                prompt + response
                for prompt, response in zip(batch.prompts, batch.responses, strict=True)
            ],
            "prompts": batch.prompts,
            "labels": [label_of(row) for row in batch.rows],
        }
        body = json.dumps(query, default=str).encode()
        content, url = await self.service.request(client, body, first)
        return read_rewards(content, len(batch), url)


def label_of(row: dict[str, Any]) -> Any:
    """The row's correct answer, which a flag or its form names, or its `label` or `answer` column,
    or None."""
    return next((row[name] for name in LABELS if row.get(name) is not None), None)


def read_rewards(content: bytes, rows: int, url: str) -> list[float]:
    """`{"rewards": [number, ...]}` -> the numbers; `RewardServiceError` unless `rows` of them are
    finite in fp32."""
    try:
        rewards = json.loads(content)["rewards"]
        scores = [
            float(value)
            for value in rewards
            if type(value) in (int, float) and abs(value) <= LARGEST
        ]
        if len(scores) == len(rewards) == rows:
            return scores
        problem = (
            f"has {len(rewards)} rewards, of which {len(scores)} are finite numbers, for {rows}"
            " responses"
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        problem = "is not JSON with a list 'rewards'"
    raise RewardServiceError(
        f"{FLAG} {url}: its reply {problem} (it starts with '{beginning_of(content)}')"
    )
