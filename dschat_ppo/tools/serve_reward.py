"""Serve a reward model over HTTP, for `--remote_reward_url`.

    python -m dschat_ppo.tools.serve_reward --model M [--host 127.0.0.1] [--port 5000]

POST /get_reward takes `{"query": [text, ...]}` and replies `{"rewards": [number, ...]}`. As in OpenRLHF's API, the
request may also hold "prompts" and "labels" of the same length; they have no effect. Each text is scored at its final
token: the chat template's end-of-turn token if the text contains one, otherwise EOS. GET /health replies
`{"status": "ok"}`. Errors are `{"error": reason}` with status 400 (invalid request), 403 (another host, or a web site
sends it), 408 (too slow), 411 (no length), 413 (too many bytes), 415 (compressed, or no JSON), 422 (too many texts) or
503 (too many clients, or too many texts or bytes are waiting).

There is no authentication and no encryption: anyone who can reach the port can use the model. The server therefore
listens only on this machine unless `--host` names another address.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line, quiet_libraries
from dschat_ppo.data.collators import right_padded
from dschat_ppo.data.templates import encode_finished, turn_end
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import DTYPES, check_vocabulary, load_config, load_sequence_classifier
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
from dschat_ppo.rewards.learned_reward import SEPARATOR, scores_in_batches
from dschat_ppo.runtime.exit_codes import USER_ERROR
from dschat_ppo.tools.http_requests import (
    OWN_NAMES,
    BodyBudget,
    LimitedServer,
    RejectedError,
    check_origin,
    limit_request,
    received_body,
)

COLUMNS = ("prompts", "labels")
_SECONDS_FOR_A_REPLY = 60.0
_LONGEST_TOKEN = 32  # characters; only their mean over a text matters
_WAITING_FACTOR = 8  # this many times --max_rows texts may wait


class Scorer:
    """A reward model with its tokenizer: texts to scores.

    Args:
        folder: holds a decoder with a one-label head named `score`, and its tokenizer.
        dtype: "bf16", "fp16" or "fp32".
        max_batch_tokens: most tokens of a forward pass.

    Raises:
        UserError: the folder does not hold such a model, or it holds a process reward model.
    """

    def __init__(self, folder: str, dtype: str, max_batch_tokens: int):
        config = load_config(folder, "--model")
        if SEPARATOR in config.to_dict():
            raise UserError(
                f"--model {folder}: is a process reward model (its config.json has {SEPARATOR}), but this server "
                "scores whole texts; give it to --reward_model_name_or_path of step 3, with --process_reward"
            )
        self.tokenizer = load_tokenizer(folder, "--model")
        turn_end(self.tokenizer)  # renders the chat template once, here in the main thread, where its limits hold
        check_vocabulary(self.tokenizer, config, "--model", folder)
        self.max_length = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.max_batch_tokens = max_batch_tokens
        self.device = dist.device()
        self.model = ScalarModel(load_sequence_classifier(folder, dtype, None, new_head=False)).to(self.device).eval()

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Score each text at the final token of `encode_finished`.

        Texts of more tokens than the model reads lose their start. So do texts of more than 32 characters for each of
        these tokens, before they are encoded.
        """
        most, rows, too_long = _LONGEST_TOKEN * self.max_length, list[list[int]](), 0
        for text in texts:  # a tokenizer would need gigabytes and minutes for a text of 16 MiB
            row = encode_finished(self.tokenizer, text[-most:])
            too_long += len(row) > self.max_length or len(text) > most
            rows.append(row[-self.max_length :])
        if too_long:
            print_line(f"warning: {too_long} texts of more than {self.max_length} tokens; their start was cut off")
        input_ids, lengths = right_padded(rows, filler_id(self.tokenizer))
        input_ids, lengths = input_ids.to(self.device), lengths.to(self.device)
        return scores_in_batches(self.model, input_ids, lengths, self.max_batch_tokens).tolist()


@dataclass(eq=False)
class _Job:
    """The texts of one request, and their scores once they exist."""

    texts: list[str]
    scores: list[float] | None = None


class Batcher:
    """Scores the texts of several requests together: requests that wait while the model is busy share its next batch.

    Args:
        score: texts -> scores; always called by the same thread.
        max_rows: most texts of a batch (a request is never split); eight times as many may wait.
    """

    def __init__(self, score: Callable[[Sequence[str]], list[float]], max_rows: int):
        self.score = score
        self.max_rows = max_rows
        self.waiting: list[_Job] = []
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def __call__(self, texts: list[str]) -> list[float]:
        """Scores of the texts of one request. Blocks until they exist.

        Raises:
            RejectedError: too many texts are waiting. An exception of `score` is raised in the request that started the
                batch.
        """
        job = _Job(texts)
        with self.lock:
            if sum(len(other.texts) for other in self.waiting) + len(texts) > _WAITING_FACTOR * self.max_rows:
                raise RejectedError(503, "too many texts are waiting; try again later")
            self.waiting.append(job)
            turn = self.thread.submit(self._score_batch, job)  # under the lock: turns come in the order of `waiting`
        turn.result()
        assert job.scores is not None
        return job.scores

    def _score_batch(self, job: _Job) -> None:
        """Score `job`, unless an earlier batch has, together with the waiting jobs that fit into the batch.

        If the batch fails, only `job` fails; the others are scored again in their own turn.
        """
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
        """End the thread after all waiting requests have their scores."""
        self.thread.shutdown(wait=True)


def read_request(body: bytes | bytearray, max_rows: int) -> list[str]:
    """The texts to score.

    Raises:
        RejectedError: the body is not a valid request, or has more than `max_rows` texts.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise RejectedError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(request, dict):
        raise RejectedError(400, 'the body must be an object: {"query": [text, ...]}')
    texts = request.get("query")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RejectedError(400, '"query" must be a list of texts')
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:  # JSON can hold half a surrogate pair
        raise RejectedError(400, '"query" holds half a surrogate pair, which is not valid text') from None
    for name in COLUMNS:
        column = request.get(name)
        if column is not None and (not isinstance(column, list) or len(column) != len(texts)):
            raise RejectedError(400, f'"{name}" must be a list of the same length as "query" ({len(texts)})')
    if len(texts) > max_rows:
        raise RejectedError(422, f"{len(texts)} texts exceed the limit of {max_rows}; send several requests")
    return texts


class RewardServer(LimitedServer):
    """One thread for each connection and one for the model. Closing waits for requests in progress.

    Args:
        address: host and port.
        score: as of `Batcher`.
        max_request_bytes: of a body.
        max_rows: most texts of a request and of a batch.
        max_clients: most connections at once.
        max_request_seconds: for a request to arrive.
    """

    daemon_threads = False

    def __init__(
        self, address: tuple[str, int], score: Callable[[Sequence[str]], list[float]], max_request_bytes: int,
        max_rows: int, max_clients: int = 128, max_request_seconds: float = 60.0,
    ):  # fmt: skip
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.batcher = Batcher(score, max_rows)  # before `__init__`, which calls `server_close` if the port is taken
        super().__init__(address, Handler, max_clients)
        self.budget = BodyBudget(max_request_bytes)
        self.parsing = threading.Lock()
        self.names = OWN_NAMES if address[0] in OWN_NAMES else None  # of another address, clients choose the name
        self.max_rows = max_rows
        self.max_request_seconds = max_request_seconds

    def parse(self, body: bytearray) -> list[str]:
        """`read_request` for one body at a time: parsed JSON can need 30 times the memory of its text.

        Raises:
            RejectedError: as `read_request`. It is a new exception because the first one holds the parsed body.
        """
        with self.parsing:
            gc.disable()  # otherwise millions of new lists start it again and again; JSON has no cycles
            try:
                return read_request(body, self.max_rows)
            except RejectedError as problem:
                refusal = RejectedError(problem.status, str(problem))
            finally:
                gc.enable()
        raise refusal

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection in one line, without a traceback."""
        print_line(f"a request of {client_address[0]} failed: {sys.exc_info()[1]!r}")

    def server_close(self) -> None:
        """Answer the requests in progress, then end the model's thread."""
        super().server_close()
        self.batcher.close()


class Handler(BaseHTTPRequestHandler):
    """The HTTP interface of `Batcher`; one request for each connection."""

    server: RewardServer

    def setup(self) -> None:
        """Limit the time in which the request must arrive."""
        super().setup()
        self.reader = limit_request(self, self.server.max_request_seconds)

    def do_GET(self) -> None:  # noqa: N802
        """GET /health."""
        try:
            check_origin(self.headers, self.server.names)
            if self.path != "/health":
                raise RejectedError(404, f"there is no {self.path}; GET /health or POST /get_reward")
        except RejectedError as problem:
            self._reply(problem.status, {"error": str(problem)})
        else:
            self._reply(200, {"status": "ok"})

    def do_POST(self) -> None:  # noqa: N802
        """POST /get_reward."""
        try:
            check_origin(self.headers, self.server.names)
            if self.path != "/get_reward":
                raise RejectedError(404, f"there is no {self.path}; POST /get_reward")
            with received_body(self.headers, self.rfile, self.reader, self.server.budget) as body:
                texts = self.server.parse(body)
                scores = self.server.batcher(texts) if texts else []
        except RejectedError as problem:
            self._reply(problem.status, {"error": str(problem)})
        except (RuntimeError, ValueError, IndexError) as problem:  # torch raises RuntimeError when out of memory
            print_line(f"a batch failed: {type(problem).__name__}: {problem}")
            self._reply(500, {"error": f"the model failed: {type(problem).__name__}"})
        else:
            finite = all(map(math.isfinite, scores))
            self._reply(*((200, {"rewards": scores}) if finite else (500, {"error": "a score is not finite"})))

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.connection.settimeout(_SECONDS_FOR_A_REPLY)  # for a client that does not read it
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Requests are not logged."""


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Serve a reward model over HTTP, for --remote_reward_url.")
    parser.add_argument("--model", required=True, help="folder or hub name of a decoder with a one-label head `score`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all interfaces")
    parser.add_argument("--port", type=int, default=5000, help="port; 0 selects a free one and prints it")
    parser.add_argument("--max_batch_tokens", type=int, default=16384, help="most tokens of a forward pass")
    parser.add_argument("--max_request_bytes", type=int, default=2**24, help="larger requests are rejected (413)")
    parser.add_argument("--max_rows", type=int, default=1024, help="requests with more texts are rejected (422)")
    parser.add_argument("--max_clients", type=int, default=128, help="further connections at once are refused (503)")
    parser.add_argument("--max_request_seconds", type=float, default=60.0, help="a request must arrive in this time")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="number format of the weights")
    arguments = parser.parse_args(argv)
    for name in ("max_batch_tokens", "max_request_bytes", "max_rows", "max_clients", "max_request_seconds"):
        if not 0 < vars(arguments)[name] < math.inf:
            raise UserError(f"--{name} must be above 0 and finite, got {vars(arguments)[name]}")
    return arguments


def serve(argv: Sequence[str]) -> None:
    """Load the model and serve until SIGTERM or SIGINT; requests in progress are answered first."""
    arguments = read_arguments(argv)
    quiet_libraries()
    scorer = Scorer(model_folder(arguments.model, "--model"), arguments.dtype, arguments.max_batch_tokens)
    try:
        server = RewardServer(
            (arguments.host, arguments.port), scorer, arguments.max_request_bytes, arguments.max_rows,
            arguments.max_clients, arguments.max_request_seconds,
        )  # fmt: skip
    except (OSError, OverflowError) as problem:
        raise UserError(
            f"--host {arguments.host} --port {arguments.port}: cannot listen on this address: {problem}"
        ) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    with server:
        print_line(f"serving {arguments.model} at http://{arguments.host}:{server.server_port}/get_reward")
        server.serve_forever()
    print_line("all requests answered; stopped")


def main(argv: Sequence[str]) -> int:
    """Serve; returns the exit code."""
    try:
        serve(argv)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
