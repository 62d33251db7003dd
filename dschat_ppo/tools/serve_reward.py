"""Serves a reward model over HTTP, for `--remote_reward_url`.

    python -m dschat_ppo.tools.serve_reward --model M [--host 127.0.0.1] [--port 5000]

POST /get_reward takes `{"query": [text, ...]}` (OpenRLHF's form; "prompts" and "labels" may be there and must then have
as many entries, but change nothing) and answers `{"rewards": [number, ...]}`: the score at the token that is put
after each query to end it: EOS, or the chat template's end-of-turn token where the query holds one already. GET /health
answers `{"status": "ok"}`. Refusals are `{"error": reason}`: 400 for what is no such request, 413 for too many bytes,
422 for too many rows, 503 while too many rows wait.

There is no password and no encryption: whoever reaches the port can use the model, so it listens on this machine alone
unless `--host` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from dschat_ppo.common.logging import print_line, quiet_libraries
from dschat_ppo.data.collators import right_padded
from dschat_ppo.data.templates import encode_finished
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import (
    DTYPES,
    check_vocabulary,
    filler_id,
    load_config,
    load_sequence_classifier,
    load_tokenizer,
    model_folder,
)
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.rewards.learned_reward import scores_in_batches
from dschat_ppo.runtime.exit_codes import USER_ERROR

COLUMNS = ("prompts", "labels")
_SECONDS_FOR_A_REQUEST = 60.0
_WAITING_REQUESTS = 8  # as many times --max_rows may wait
_PIECE_BYTES = 2**16


class RefusedError(Exception):
    """A request that is answered with `status` and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class Scorer:
    """A reward model and its tokenizer: texts -> scores.

    Args:
        folder: of a one-label sequence classifier with its tokenizer.
        dtype: "bf16", "fp16" or "fp32".
        max_batch_tokens: most tokens of a forward pass.

    Raises:
        UserError: the folder does not hold such a model.
    """

    def __init__(self, folder: str, dtype: str, max_batch_tokens: int):
        config = load_config(folder, "--model")
        self.tokenizer = load_tokenizer(folder, "--model")
        check_vocabulary(self.tokenizer, config, "--model", folder)
        self.max_length = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.max_batch_tokens = max_batch_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = ScalarModel(load_sequence_classifier(folder, dtype, None, new_head=False)).to(self.device).eval()

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Score at the token that `encode_finished` ends each text with; texts that are too long for the model lose
        their start."""
        rows = [encode_finished(self.tokenizer, text) for text in texts]
        too_long = sum(len(row) > self.max_length for row in rows)
        if too_long:
            print_line(f"warning: {too_long} texts of more than {self.max_length} tokens; their start was cut off")
        input_ids, lengths = right_padded([row[-self.max_length :] for row in rows], filler_id(self.tokenizer))
        input_ids, lengths = input_ids.to(self.device), lengths.to(self.device)
        return scores_in_batches(self.model, input_ids, lengths, self.max_batch_tokens).tolist()


@dataclass(eq=False)
class _Job:
    texts: list[str]
    scores: list[float] | None = None


class Batcher:
    """Scores the texts of several threads together: what waits while the model is busy goes into its next batch.

    Args:
        score: called by one thread alone.
        max_rows: jobs are put together up to this many texts (a job is never divided); eight times as many may wait.
    """

    def __init__(self, score: Callable[[Sequence[str]], list[float]], max_rows: int):
        self.score = score
        self.max_rows = max_rows
        self.waiting: list[_Job] = []
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def __call__(self, texts: list[str]) -> list[float]:
        """Scores of the texts. Waits for its turn.

        Raises:
            RefusedError: too many wait already. Whatever `score` raises for a batch that begins with these texts.
        """
        job = _Job(texts)
        with self.lock:
            if sum(len(other.texts) for other in self.waiting) + len(texts) > _WAITING_REQUESTS * self.max_rows:
                raise RefusedError(503, "too many texts wait; try again later")
            self.waiting.append(job)
        self.thread.submit(self._serve, job).result()
        assert job.scores is not None
        return job.scores

    def _serve(self, job: _Job) -> None:
        """Score `job`, if no batch before has, and what fits beside it. A batch that fails fails for `job` alone: the
        others have a turn of their own."""
        if job.scores is not None:
            return
        with self.lock:
            batch, rows = [job], len(job.texts)
            for other in self.waiting:
                if other is not job and rows + len(other.texts) <= self.max_rows:
                    batch.append(other)
                    rows += len(other.texts)
        done = [job]
        try:
            scores = self.score([text for member in batch for text in member.texts])
            for member in batch:
                member.scores, scores = scores[: len(member.texts)], scores[len(member.texts) :]
            done = batch
        finally:
            with self.lock:
                self.waiting = [other for other in self.waiting if other not in done]

    def close(self) -> None:
        """End the thread once all that wait have their scores."""
        self.thread.shutdown(wait=True)


def read_request(body: bytes, max_rows: int) -> list[str]:
    """The texts to score.

    Raises:
        RefusedError: the body is not a request, or has more than `max_rows` texts.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise RefusedError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(request, dict):
        raise RefusedError(400, 'the body must be an object: {"query": [text, ...]}')
    texts = request.get("query")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RefusedError(400, '"query" must be a list of texts')
    if not all(is_text(text) for text in texts):
        raise RefusedError(400, '"query" holds half a surrogate pair, which is no text')
    for name in COLUMNS:
        column = request.get(name)
        if column is not None and (not isinstance(column, list) or len(column) != len(texts)):
            raise RefusedError(400, f'"{name}" must be a list of as many entries as "query" ({len(texts)})')
    if len(texts) > max_rows:
        raise RefusedError(422, f"{len(texts)} texts are more than {max_rows}; send several requests")
    return texts


def is_text(text: str) -> bool:
    """Whether a string can be encoded (JSON may hold half a surrogate pair)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class RewardServer(ThreadingHTTPServer):
    """One thread for each request, one for the model. Closing it waits for the requests at work."""

    daemon_threads = False

    def __init__(
        self, address: tuple[str, int], score: Callable[[Sequence[str]], list[float]], max_request_bytes: int,
        max_rows: int,
    ):  # fmt: skip
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.batcher = Batcher(score, max_rows)  # first, because a port that is taken closes the server at once
        super().__init__(address, Handler)
        self.max_request_bytes = max_request_bytes
        self.max_rows = max_rows

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is one line, not a traceback."""
        print_line(f"a request of {client_address[0]} failed: {sys.exc_info()[1]!r}")

    def server_close(self) -> None:
        """Answer what is at work, then end the model's thread."""
        super().server_close()
        self.batcher.close()


class Handler(BaseHTTPRequestHandler):
    """HTTP around `Batcher`; a connection is for one request."""

    server: RewardServer
    timeout = _SECONDS_FOR_A_REQUEST

    def do_GET(self) -> None:  # noqa: N802
        """GET /health."""
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._answer(404, {"error": f"there is no {self.path}; GET /health or POST /get_reward"})

    def do_POST(self) -> None:  # noqa: N802
        """POST /get_reward."""
        try:
            body = self._body()
            if self.path != "/get_reward":
                raise RefusedError(404, f"there is no {self.path}; POST /get_reward")
            texts = read_request(body, self.server.max_rows)
            scores = self.server.batcher(texts) if texts else []
        except RefusedError as problem:
            self._answer(problem.status, {"error": str(problem)})
        except (RuntimeError, ValueError, IndexError) as problem:  # out of memory is a RuntimeError of torch
            print_line(f"a batch failed: {type(problem).__name__}: {problem}")
            self._answer(500, {"error": f"the model failed: {type(problem).__name__}"})
        else:
            finite = all(map(math.isfinite, scores))
            self._answer(*((200, {"rewards": scores}) if finite else (500, {"error": "a score is not finite"})))

    def _body(self) -> bytes:
        """The request's body.

        Raises:
            RefusedError: it has no length, is too long, or does not come whole.
        """
        given = self.headers.get("Content-Length", "")
        if not (given.isascii() and given.isdigit()):
            raise RefusedError(411, "the request needs a Content-Length")
        length, most = int(given), self.server.max_request_bytes
        if length > most:
            self._throw_away(length)
            raise RefusedError(413, f"{length} bytes are more than {most}; send fewer texts at a time")
        body = self.rfile.read(length)
        if len(body) < length:
            raise RefusedError(400, f"{len(body)} of {length} bytes came")
        return body

    def _throw_away(self, length: int) -> None:
        """Read a body that is refused, up to a limit: most clients look for an answer only when they have sent all."""
        left = min(length, 16 * self.server.max_request_bytes)
        while left > 0 and (piece := self.rfile.read(min(left, _PIECE_BYTES))):
            left -= len(piece)

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Requests are not logged."""


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serve a reward model over HTTP, for --remote_reward_url.")
    parser.add_argument("--model", required=True, help="one-label sequence classifier: a folder or a hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every network")
    parser.add_argument("--port", type=int, default=5000, help="port; 0: a free one, which is printed")
    parser.add_argument("--max_batch_tokens", type=int, default=16384, help="most tokens of a forward pass")
    parser.add_argument("--max_request_bytes", type=int, default=2**24, help="longer requests are refused (413)")
    parser.add_argument("--max_rows", type=int, default=1024, help="requests of more texts are refused (422)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="number format of the weights")
    arguments = parser.parse_args(words)
    for name in ("max_batch_tokens", "max_request_bytes", "max_rows"):
        if vars(arguments)[name] <= 0:
            raise UserError(f"--{name} must be above 0, got {vars(arguments)[name]}")
    return arguments


def serve(words: Sequence[str]) -> None:
    """Load the model and serve until SIGTERM or SIGINT; requests at work are answered before the end."""
    arguments = read_arguments(words)
    quiet_libraries()
    scorer = Scorer(model_folder(arguments.model, "--model"), arguments.dtype, arguments.max_batch_tokens)
    try:
        server = RewardServer((arguments.host, arguments.port), scorer, arguments.max_request_bytes, arguments.max_rows)
    except (OSError, OverflowError) as problem:
        raise UserError(f"--host {arguments.host} --port {arguments.port}: cannot listen there: {problem}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    with server:
        print_line(f"serving {arguments.model} at http://{arguments.host}:{server.server_port}/get_reward")
        server.serve_forever()
    print_line("all requests answered; stopped")


def main(words: Sequence[str]) -> int:
    """Serve; returns the exit code."""
    try:
        serve(words)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
