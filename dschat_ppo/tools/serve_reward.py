"""Serve a reward model over HTTP, for `--remote_reward_url`.

    python -m dschat_ppo.tools.serve_reward --model M [--host 127.0.0.1] [--port 5000]

POST /get_reward takes `{"query": [text, ...]}` and replies `{"rewards": [number, ...]}`. As in OpenRLHF's API, the
request may also hold "prompts" and "labels" of the same length; they have no effect. Each text is scored at its final
token: the chat template's end-of-turn token if the text contains one, otherwise EOS. GET /health replies
`{"status": "ok"}`. Errors are `{"error": reason}` with status 400 (invalid request), 403 (another host, or a web site
sends it), 404 (another path), 408 (too slow), 411 (no length), 413 (too many bytes), 415 (compressed, or no JSON), 422
(too many texts) or 503 (too many texts are waiting, or too many clients; the latter without a reason).

There is no authentication and no encryption: anyone who can reach the port can use the model. The server therefore
listens only on this machine unless `--host` names another address.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.logging import print_line
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.exit_codes import USER_ERROR
from dschat_ppo.tools.web_server import OWN_NAMES, RefusedError, check_origin, listen, serve_until_stopped

_WAITING_FACTOR = 8  # this many times --max_rows texts may wait


class Queue:
    """Scores the texts of one request after another. `score` is called in one thread at a time. Eight times the texts
    of a request may wait."""

    def __init__(self, score: Callable[[Sequence[str]], list[float]], max_rows: int):
        self.score, self.most, self.waiting = score, _WAITING_FACTOR * max_rows, 0
        self.turn = asyncio.Lock()

    async def __call__(self, texts: list[str]) -> list[float]:
        """Scores of the texts of one request; `RefusedError` if too many texts are waiting."""
        if self.waiting + len(texts) > self.most:
            raise RefusedError(503, "too many texts are waiting; try again later")
        self.waiting += len(texts)
        try:
            async with self.turn:
                return await asyncio.to_thread(self.score, texts)
        finally:
            self.waiting -= len(texts)


async def receive_json(request: Any, most: int, seconds: float) -> None:
    """Receive the body of starlette's `request`, which keeps it: at most `most` bytes, in `seconds`. `RefusedError` if
    it is compressed, of another type, incomplete, too long or late, or does not declare its length."""
    from starlette.requests import ClientDisconnect

    headers = request.headers
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RefusedError(415, "compressed bodies are refused; send the body without a Content-Encoding")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the Content-Type must be application/json")  # pages of other sites cannot send it
    if "content-length" not in headers or "transfer-encoding" in headers:  # with both, the length is another one
        raise RefusedError(411, "the request needs a Content-Length")
    length = int(headers["content-length"])  # uvicorn has checked it
    try:
        if length <= most:
            await asyncio.wait_for(request.body(), seconds)
        else:
            await asyncio.wait_for(drop(request), seconds)
    except asyncio.TimeoutError:
        raise RefusedError(408, f"the body of {length} bytes did not arrive in {seconds:g} s") from None
    except ClientDisconnect:
        raise RefusedError(400, "the body is incomplete") from None
    if length > most:
        raise RefusedError(413, f"{length} bytes exceed the limit of {most}")


async def drop(request: Any) -> None:
    """Read a body without keeping it: most clients read a reply only after they have sent everything."""
    async for _ in request.stream():
        pass


def reward_app(
    score: Callable[[Sequence[str]], list[float]], names: tuple[str, ...] | None = OWN_NAMES, max_rows: int = 1024,
    max_request_bytes: int = 2**24, max_request_seconds: float = 60.0,
) -> Any:  # fmt: skip
    """The ASGI application of the server; `names` are the hosts that a request may name, None for any."""
    from fastapi import Body, FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    app = FastAPI(openapi_url=None)  # without its pages of documentation, which load scripts from the network
    queue, texts, no_prompts, no_labels = Queue(score, max_rows), Body(), Body(None), Body(None)

    @app.middleware("http")
    async def checked(request: Any, call_next: Any) -> Any:
        try:
            check_origin(request.headers, names)
            if request.method == "POST":
                await receive_json(request, max_request_bytes, max_request_seconds)
            return await call_next(request)
        except RefusedError as problem:
            return JSONResponse({"error": str(problem)}, problem.status)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/get_reward")
    async def get_reward(
        query: list[str] = texts, prompts: list[Any] | None = no_prompts, labels: list[Any] | None = no_labels
    ) -> dict[str, list[float]]:
        for name, column in (("prompts", prompts), ("labels", labels)):
            if column is not None and len(column) != len(query):
                raise RefusedError(400, f'"{name}" must be a list of the same length as "query" ({len(query)})')
        try:
            "".join(query).encode()
        except UnicodeEncodeError:  # JSON can hold half a surrogate pair
            raise RefusedError(400, '"query" holds half a surrogate pair, which is not valid text') from None
        if len(query) > max_rows:
            raise RefusedError(422, f"{len(query)} texts exceed the limit of {max_rows}; send several requests")
        try:
            scores = await queue(query) if query else []
        except (RuntimeError, ValueError, IndexError) as problem:  # torch raises RuntimeError when out of memory
            print_line(f"a batch failed: {type(problem).__name__}: {problem}")
            raise RefusedError(500, f"the model failed: {type(problem).__name__}") from None
        if not all(map(math.isfinite, scores)):
            raise RefusedError(500, "a score is not finite")
        return {"rewards": scores}

    async def http_error(_: Any, problem: Any) -> Any:
        reason = problem.detail if problem.status_code == 400 else "GET /health or POST /get_reward"
        return JSONResponse({"error": reason}, problem.status_code)

    for status in (400, 404, 405):
        app.add_exception_handler(status, http_error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Any, problem: RequestValidationError) -> Any:
        first = problem.errors()[0]  # its place is "body", then the field or the position in the text
        return JSONResponse({"error": f'"{".".join(map(str, first["loc"][1:]))}": {first["msg"]}'}, 400)

    return app


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Serve a reward model over HTTP, for --remote_reward_url. Needs the extra serve."
    )
    parser.add_argument("--model", required=True, help="folder or hub name of a decoder with a one-label head `score`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all interfaces")
    parser.add_argument("--port", type=int, default=5000, help="port; 0 selects a free one and prints it")
    parser.add_argument("--max_batch_tokens", type=int, default=16384, help="most tokens of a forward pass")
    parser.add_argument("--max_request_bytes", type=int, default=2**24, help="larger requests are rejected (413)")
    parser.add_argument("--max_rows", type=int, default=1024, help="requests with more texts are rejected (422)")
    parser.add_argument("--max_clients", type=int, default=128, help="further connections at once are refused (503)")
    parser.add_argument("--max_request_seconds", type=float, default=60.0, help="a body must arrive in this time")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="format of the weights")
    arguments = parser.parse_args(argv)
    for name in ("max_batch_tokens", "max_request_bytes", "max_rows", "max_clients", "max_request_seconds"):
        if not 0 < vars(arguments)[name] < math.inf:
            raise UserError(f"--{name} must be above 0 and finite, got {vars(arguments)[name]}")
    return arguments


def serve(argv: Sequence[str]) -> None:
    """Load the model and serve until SIGTERM or SIGINT; requests in progress are answered first."""
    arguments = read_arguments(argv)
    for module in ("fastapi", "starlette", "uvicorn"):
        require_extra(module, "the reward server")
    host = arguments.host
    listening = listen(host, arguments.port, f"--host {host} --port {arguments.port}")
    # after the flags are checked: these imports take seconds
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.models.model_folders import model_folder
    from dschat_ppo.tools.text_scorer import TextScorer

    quiet_libraries()
    scorer = TextScorer(model_folder(arguments.model, "--model"), arguments.dtype, arguments.max_batch_tokens)
    names = OWN_NAMES if host in OWN_NAMES else None  # of another address, clients choose the name
    app = reward_app(scorer, names, arguments.max_rows, arguments.max_request_bytes, arguments.max_request_seconds)
    print_line(f"serving {arguments.model} at http://{host}:{listening.getsockname()[1]}/get_reward")
    serve_until_stopped(app, listening, limit_concurrency=arguments.max_clients + 1)
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
