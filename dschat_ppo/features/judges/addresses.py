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
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder, storage_errors
from dschat_ppo.errors import UserError, remember_secret
from dschat_ppo.features.judges.spec import TEXT, JudgeSpec
from dschat_ppo.features.judges.written import CERTAIN, written_logprobs
from dschat_ppo.rewards.http_client import Service, beginning_of, httpx, run_all
from dschat_ppo.rewards.reward_source import RewardServiceError

KEY = "DSCHAT_PPO_JUDGE_KEY"  # variable of the environment
_LEAST_SHARE = 0.5  # of the probability that labels must have


class AddressReader:
    """Asks a judge for log-probs of its labels, or for a text with a verdict.

    Args:
        spec: the judge.
        timeout: seconds of a request.
        at_once: requests at a time.
        seed: of the run.
        journal: folder of what judges said; None: it is not kept.
    """

    scores_elsewhere = True

    def __init__(
        self, spec: JudgeSpec, timeout: float, at_once: int, seed: int, journal: Path | None
    ):
        self.spec = spec
        self.at_once = at_once
        self.seed = seed
        self.asked = 0
        self.tokens_in = 0
        self.tokens_out = 0
        self.unread = ""  # the beginning of the first reply without a verdict
        headers = {}
        key = os.environ.get(KEY, "").strip()
        if key:
            remember_secret(key)
            if not key.isascii() or not key.isprintable():
                raise UserError(f"{KEY}: holds characters that a header cannot have")
            headers["Authorization"] = f"Bearer {key}"
        make_service = partial(
            Service,
            flag=spec.flag,
            timeout=timeout,
            timeout_flag="--judge_timeout",
            headers=headers,
        )
        self._chat = make_service(urls=[f"{spec.model}/chat/completions"])
        self._models = make_service(urls=[f"{spec.model}/models"])
        self._model = spec.served_model
        self._certificates = ssl.create_default_context()
        self._known = dict[str, list[float]]()  # digest of a question -> log-probs of labels
        self._file: Path | None = None
        if journal is not None:
            self._file = journal / f"rank_{dist.rank()}.jsonl"
            self._read_journal(journal)

    def logprobs(self, questions: Sequence[str]) -> Tensor:
        """Log-probs of the labels, (n, L) fp64; NaN for a reply without a verdict. A verdict that
        was written has nearly all of the probability. `RewardServiceError` if the address does not
        reply."""
        if questions and not self._model:
            self._model = asyncio.run(self._only_model())
        digests = [self._digest(question) for question in questions]
        new = {
            digest: question
            for digest, question in zip(digests, questions, strict=True)
            if digest not in self._known
        }
        if new:
            asyncio.run(self._ask_all(new))
        unread = [math.nan] * len(self.spec.labels)
        rows = [self._known.get(digest, unread) for digest in digests]
        return torch.tensor(rows, dtype=torch.float64).view(len(rows), len(self.spec.labels))

    async def _ask_all(self, questions: dict[str, str]) -> None:
        async with self._chat.client(self._certificates) as client:
            jobs = [partial(self._ask, client, *item) for item in questions.items()]
            await run_all(jobs, self.at_once)

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

    async def _ask(self, client: httpx.AsyncClient, digest: str, question: str) -> None:
        """Ask a question, and keep the reply."""
        query: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
        }
        if self.spec.reads == TEXT:
            query |= {"max_tokens": self.spec.max_tokens, "temperature": self.spec.temperature}
            query["seed"] = self.seed
        else:
            query |= {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
        content, url = await self._chat.request(client, json.dumps(query).encode())
        try:
            reply = json.loads(content)
            choice = reply["choices"][0]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise RewardServiceError(
                f"{self.spec.flag} {url}: its reply is not JSON with 'choices' (it starts with"
                f" '{beginning_of(content)}')"
            ) from None
        if self.spec.reads == TEXT:
            logprobs = logprobs_of_text(choice, self.spec.labels)
        else:
            logprobs = logprobs_of_tokens(choice, self.spec.labels)
        self.asked += 1
        usage = reply.get("usage")
        if isinstance(usage, dict):
            self.tokens_in += int(usage.get("prompt_tokens") or 0)
            self.tokens_out += int(usage.get("completion_tokens") or 0)
        if logprobs is None:  # not kept: a later run may find a judge that can be read
            self.unread = self.unread or beginning_of(json.dumps(choice).encode())
            return
        self._known[digest] = logprobs
        self._write_journal(digest, logprobs)

    def _digest(self, question: str) -> str:
        """What a question is known by."""
        spec = self.spec
        told: list[Any] = [spec.model, self._model, spec.reads, spec.labels, question]
        if spec.reads == TEXT:
            told += [spec.max_tokens, spec.temperature, self.seed]
        return sha256(json.dumps(told).encode()).hexdigest()[:32]

    def _read_journal(self, folder: Path) -> None:
        """Read what judges said to any rank before this start. A line that a crash has cut is
        skipped."""
        with storage_errors(folder):
            make_folder(folder)
            for file in sorted(folder.glob("rank_*.jsonl")):
                for line in file.read_bytes().split(b"\n"):
                    try:
                        self._known |= json.loads(line)
                    except ValueError:
                        continue

    def _write_journal(self, digest: str, logprobs: list[float]) -> None:
        """Keep a reply on the disk."""
        if self._file is None:
            return
        with storage_errors(self._file), self._file.open("ab") as opened:
            # the line break first: a crash may have cut the last line
            opened.write(b"\n" + json.dumps({digest: logprobs}).encode())


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


def logprobs_of_text(choice: Any, labels: Sequence[str]) -> list[float] | None:
    """Those of the verdict that was written; None without one."""
    try:
        text = choice["message"]["content"]
    except (TypeError, LookupError):
        return None
    if not isinstance(text, str):
        return None
    return written_logprobs(text, labels)
