"""Judges at an address with the API of OpenAI (`/v1/chat/completions`), as servers of models and
providers have it. What they said is kept, so that a resumed run asks nothing again."""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.errors import UserError, remember_secret
from dschat_ppo.features.judges.spec import TEXT, JudgeSpec
from dschat_ppo.features.judges.written import CERTAIN, written_logprobs
from dschat_ppo.rewards.http_client import (
    Service,
    UnreadableRequestError,
    beginning_of,
    httpx,
    run_all,
)
from dschat_ppo.rewards.reward_source import RewardServiceError

KEY = "DSCHAT_PPO_JUDGE_KEY"  # variable of the environment
_LEAST_SHARE = 0.5  # of the probability that labels must have


def service_of(spec: JudgeSpec, timeout: float) -> Service:
    """The address of a judge, with its key. `timeout`: seconds of a request."""
    headers = {}
    key = os.environ.get(KEY, "").strip()
    if key:
        remember_secret(key)
        if not key.isascii() or not key.isprintable():
            raise UserError(f"the variable {KEY} holds characters that a header cannot have")
        headers["Authorization"] = f"Bearer {key}"
    advice_on_key = f"set {KEY} to the key of the address"
    return Service(
        flag=spec.flag,
        urls=[spec.model],
        expected="must be an address such as http://host:8000/v1",
        timeout=timeout,
        timeout_flag="--judge_timeout",
        headers=headers,
        advice={
            401: advice_on_key,
            403: advice_on_key,
            404: "correct the address, or name one of its models with ?model=NAME",
        },
        sources=spec.sources,
    )


@dataclass(frozen=True)
class JudgeReply:
    """What a judge at an address said."""

    logprobs: list[float] | None = None  # of the labels; None without a verdict
    text: str = ""  # that it wrote


class AddressReader:
    """Asks a judge for log-probs of its labels, or for a text with a verdict.

    Args:
        spec: the judge.
        service: its address.
        at_once: requests at a time.
        seed: of the run.
        journal: what judges said in this PPO step before a crash; None: nothing is kept.
    """

    def __init__(
        self, spec: JudgeSpec, service: Service, at_once: int, seed: int, journal: Journal | None
    ):
        self.spec = spec
        self.at_once = at_once
        self.seed = seed
        self.journal = journal
        self.asked = 0
        self.tokens_in = 0
        self.tokens_out = 0
        self.unread = ""  # the beginning of the first reply without a verdict
        self.written = list[str]()  # the texts of the last call
        self._chat = replace(service, urls=[f"{spec.model}/chat/completions"])
        self._models = replace(service, urls=[f"{spec.model}/models"])
        self._model = spec.served_model
        self._certificates = ssl.create_default_context()

    def begin(self, step: int) -> None:
        """Read what judges said in PPO step `step` before a crash."""
        self.unread = ""
        if self.journal is not None:
            self.journal.begin(step)

    def logprobs(self, questions: Sequence[str]) -> Tensor:
        """Log-probs of the labels, (n, L) fp64; NaN for a reply without a verdict. A verdict that
        was written has nearly all of the probability. `RewardServiceError` if the address does not
        reply, `StorageError` if the journal cannot be written."""
        if questions and not self._model:
            self._model = asyncio.run(self._only_model())
        replies = asyncio.run(self._ask_all(questions))
        self.written = [reply.text for reply in replies]
        if self.journal is not None and self.journal.problem is not None:
            raise self.journal.problem
        unread = [math.nan] * len(self.spec.labels)
        rows = [reply.logprobs or unread for reply in replies]
        return torch.tensor(rows, dtype=torch.float64).view(len(rows), len(self.spec.labels))

    async def _ask_all(self, questions: Sequence[str]) -> list[JudgeReply]:
        async with self._chat.client(self._certificates) as client:
            jobs = [partial(self._known_or_asked, client, question) for question in questions]
            return await run_all(jobs, self.at_once)

    async def _known_or_asked(self, client: httpx.AsyncClient, question: str) -> JudgeReply:
        """The reply to a question, from the journal if it has it. A reply without a verdict is not
        kept: a later start may find a judge that can be read."""
        digest = self._digest(question)
        if self.journal is not None and digest in self.journal.known:
            return JudgeReply(**self.journal.known[digest])
        reply = await self._ask(client, question)
        if self.journal is not None and reply.logprobs is not None:
            self.journal.add(digest, asdict(reply))
            self.journal.write()
        return reply

    async def _only_model(self) -> str:
        """The name of the only model at the address."""
        async with self._models.client(self._certificates) as client:
            content, url = await self._models.request(client, None)
        names: list[str] = []
        with suppress(ValueError, TypeError, LookupError):
            names = [str(model["id"]) for model in json.loads(content)["data"]]
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none that it lists"
            raise RewardServiceError(
                f"{self.spec.flag} {url}: its models are {listed}; name one with ?model=NAME"
            )
        return names[0]

    async def _ask(self, client: httpx.AsyncClient, question: str) -> JudgeReply:
        """The reply to a question; without a verdict also if the judge says that it cannot read the
        question, such as one that is too long for it."""
        query: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
        }
        if self.spec.reads == TEXT:
            query |= {"max_tokens": self.spec.max_tokens, "temperature": self.spec.temperature}
            query["seed"] = self.seed
        else:
            query |= {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
        self.asked += 1
        try:
            content, url = await self._chat.request(client, json.dumps(query).encode())
        except UnreadableRequestError as problem:
            self.unread = self.unread or str(problem)
            return JudgeReply()
        try:
            reply = json.loads(content)
            choice = reply["choices"][0]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise RewardServiceError(
                f"{self.spec.flag} {url}: its reply is not JSON with 'choices' (it starts with"
                f" '{beginning_of(content)}')"
            ) from None
        with suppress(TypeError, LookupError, ValueError):  # a server may count nothing
            self.tokens_in += int(reply["usage"]["prompt_tokens"])
            self.tokens_out += int(reply["usage"]["completion_tokens"])
        if self.spec.reads == TEXT:
            text = message_text(choice)
            judged = JudgeReply(written_logprobs(text, self.spec.labels), text)
        else:
            judged = JudgeReply(logprobs_of_tokens(choice, self.spec.labels))
        if judged.logprobs is None:
            self.unread = self.unread or beginning_of(json.dumps(choice).encode())
        return judged

    def _digest(self, question: str) -> str:
        """What a question is known by."""
        spec = self.spec
        told: list[Any] = [spec.model, self._model, spec.reads, spec.labels, question]
        if spec.reads == TEXT:
            told += [spec.max_tokens, spec.temperature, self.seed]
        return sha256(json.dumps(told).encode()).hexdigest()[:32]


def logprobs_of_tokens(choice: Any, labels: Sequence[str]) -> list[float] | None:
    """Log-probs of labels, of the most likely first tokens: a token counts for the only label that
    begins with it. A label that is not listed has at most the probability of the last token that
    is, and at most what the listed ones leave, and gets that. None if log-probs are missing, or if
    labels have less than half of the probability."""
    shares = [0.0] * len(labels)
    listed = []
    try:
        tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        for token in tokens:
            logprob = min(0.0, float(token["logprob"]))
            if math.isnan(float(token["logprob"])):
                return None
            listed.append(logprob)
            text = str(token["token"]).strip()
            matches = [index for index, label in enumerate(labels) if label.startswith(text)]
            if text and len(matches) == 1:
                shares[matches[0]] += math.exp(logprob)
    except (TypeError, LookupError, ValueError):
        return None
    if not sum(shares) >= _LEAST_SHARE:
        return None
    left = max(0.0, 1.0 - math.fsum(map(math.exp, listed)))
    not_listed = -CERTAIN
    if left > 0:
        not_listed = min(*listed, math.log(left))
    return [math.log(share) if share > 0 else not_listed for share in shares]


def message_text(choice: Any) -> str:
    """What a judge wrote; "" if that is missing."""
    with suppress(TypeError, LookupError):
        text = choice["message"]["content"]
        if isinstance(text, str):
            return text
    return ""
