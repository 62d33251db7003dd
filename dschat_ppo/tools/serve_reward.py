"""Serve a reward model over HTTP, for `--remote_reward_url`.

    python -m dschat_ppo.tools.serve_reward --model M [--host 127.0.0.1] [--port 5000]

POST /get_reward takes `{"query": [text, ...]}` and replies `{"rewards": [number, ...]}`. As in OpenRLHF's API, the
request may also hold "prompts" and "labels" of the same length; they have no effect. Each text is scored at its final
token: the chat template's end-of-turn token if the text contains one, otherwise EOS. GET /health replies
`{"status": "ok"}`. Errors are `{"error": reason}` with status 400 (invalid request), 403 (another host, or a web site
sends it), 404 (another path) or 500 (the model failed).

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
from dschat_ppo.runtime.exit_codes import exit_code_of
from dschat_ppo.tools.web_server import OWN_NAMES, RefusedError, check_origin, listen, serve_until_stopped


def reward_app(score: Callable[[Sequence[str]], list[float]], names: tuple[str, ...] | None = OWN_NAMES) -> Any:
    """The ASGI application of the server; `names` are the hosts that a request may name, None for any. `score` is
    called in one thread at a time."""
    from fastapi import Body, FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    app = FastAPI(openapi_url=None)  # without its pages of documentation, which load scripts from the network
    turn, texts, no_prompts, no_labels = asyncio.Lock(), Body(), Body(None), Body(None)

    @app.middleware("http")
    async def checked(request: Any, call_next: Any) -> Any:
        try:
            check_origin(request.headers, names)
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
        try:
            async with turn:
                scores = await asyncio.to_thread(score, query) if query else []
        except (RuntimeError, ValueError, IndexError) as problem:  # torch raises RuntimeError when out of memory
            print_line(f"a batch failed: {type(problem).__name__}: {problem}")
            raise RefusedError(500, f"the model failed: {type(problem).__name__}") from None
        if not all(map(math.isfinite, scores)):
            raise RefusedError(500, "a score is not finite")
        return {"rewards": scores}

    @app.exception_handler(HTTPException)
    async def refused(_: Any, problem: HTTPException) -> Any:
        return JSONResponse({"error": problem.detail}, problem.status_code)

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
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="format of the weights")
    arguments = parser.parse_args(argv)
    if arguments.max_batch_tokens < 1:
        raise UserError(f"--max_batch_tokens must be above 0, got {arguments.max_batch_tokens}")
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
    print_line(f"serving {arguments.model} at http://{host}:{listening.getsockname()[1]}/get_reward")
    serve_until_stopped(reward_app(scorer, names), listening)
    print_line("all requests answered; stopped")


def main(argv: Sequence[str]) -> int:
    """Serve; returns the exit code."""
    return exit_code_of(lambda: serve(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
