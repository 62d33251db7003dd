"""Serve a reward model over HTTP, for `--remote_reward_url`.

    python -m dschat_ppo.tools.serve_reward --model M [--host 127.0.0.1] [--port 5000]

POST /get_reward takes `{"query": [text, ...]}` and replies `{"rewards": [number, ...]}`. As in
OpenRLHF's API, the request may also hold "prompts" and "labels"; they have no effect. Each text is
scored at its final token: the chat template's end-of-turn token if the text contains one, otherwise
EOS. GET /health replies `{"status": "ok"}`. Errors are FastAPI's: status 422 (invalid request, or a
text that the tokenizer does not take, such as one above 16 MiB), 400 (no JSON, or another
host or site), 404 (another path) or 500 (the model failed).

There is no authentication and no encryption: anyone who can reach the port can use the model. The
server therefore listens only on this machine unless `--host` names another address.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dschat_ppo.common.extras import require_extra
from dschat_ppo.common.http_server import LOCAL_NAMES, listen, reason_to_refuse, server_of
from dschat_ppo.common.logging import print_line
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.tools import exit_code_of


def reward_app(score: Callable[[Sequence[str]], list[float]], host: str = "127.0.0.1") -> Any:
    """The ASGI application of the server, which listens on `host`. `score` is called in one thread
    at a time. A `UserError` of it is status 422 with the message: a text that the tokenizer does
    not take. If it raises anything else, the reply is status 500, and the log has the traceback."""
    from fastapi import Body, FastAPI, HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse

    app = FastAPI(openapi_url=None)  # without its documentation, which loads scripts from the net
    one_request = asyncio.Lock()
    texts = Body(embed=True)

    @app.middleware("http")
    async def refuse_web_sites(request: Any, answer: Any) -> Any:
        problem = None
        if host in LOCAL_NAMES:
            problem = reason_to_refuse(request.headers.get("host"), request.headers.get("origin"))
        if problem is not None:
            return PlainTextResponse(problem, status_code=400)
        return await answer(request)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Any, problem: RequestValidationError) -> JSONResponse:
        # FastAPI would quote the input, which JSON cannot hold if it is NaN or half a surrogate
        faults = []
        for fault in problem.errors():
            faults.append({"type": fault["type"], "loc": fault["loc"], "msg": fault["msg"]})
        return JSONResponse({"detail": faults}, status_code=422)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/get_reward")
    async def get_reward(query: list[str] = texts) -> dict[str, list[float]]:
        if not query:
            return {"rewards": []}
        async with one_request:
            try:
                scores = await asyncio.to_thread(score, query)
            except UserError as problem:
                raise HTTPException(422, str(problem)) from None
        if not all(map(math.isfinite, scores)):
            raise HTTPException(500, "a score is not finite")
        return {"rewards": scores}

    return app


def text_scorer(
    folder: str, dtype: str, max_batch_tokens: int
) -> Callable[[Sequence[str]], list[float]]:
    """A function that scores whole texts, each at the final token of `encode_finished`; a text of
    more tokens than the model reads loses its start. `folder` holds a decoder with a one-label head
    named `score`, and its tokenizer. A forward pass has at most `max_batch_tokens`."""
    # after the flags are checked: these imports take seconds
    from dschat_ppo.common import dist
    from dschat_ppo.data.batches import right_padded
    from dschat_ppo.data.encode import encode_finished
    from dschat_ppo.models.loading import (
        check_sequence_classifier,
        load_config,
        load_sequence_classifier,
    )
    from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
    from dschat_ppo.models.vocabulary import check_vocabulary
    from dschat_ppo.models.wrapped_models import ScalarModel
    from dschat_ppo.planner.number_format import dtype_for_tool
    from dschat_ppo.rewards.learned_reward import most_tokens, scores_in_batches

    config = load_config(folder, "--model")
    for check in hooks("checks.check_served_model"):  # refuses one that scores no whole texts
        check(config, folder)
    tokenizer = load_tokenizer(folder, "--model")
    limit = most_tokens(config)
    check_vocabulary(tokenizer, config, "--model", folder)
    check_sequence_classifier(folder, new_head=False)
    dtype = dtype_for_tool(dtype, [folder])
    classifier = load_sequence_classifier(folder, dtype, None, new_head=False)
    device = dist.device()
    model = ScalarModel(classifier).to(device).eval()

    def score(texts: Sequence[str]) -> list[float]:
        rows = [encode_finished(tokenizer, text) for text in texts]
        too_long = sum(len(row) > limit for row in rows)
        if too_long:
            print_line(
                f"warning: {too_long} texts of more than {limit} tokens; their start was cut off"
            )
        input_ids, lengths = right_padded([row[-limit:] for row in rows], filler_id(tokenizer))
        scores = scores_in_batches(
            model, input_ids.to(device), lengths.to(device), max_batch_tokens
        )
        return scores.tolist()

    return score


def serve(argv: Sequence[str]) -> None:
    """Load the model and serve until SIGTERM or SIGINT; requests in progress are answered first."""
    parser = argparse.ArgumentParser(
        description=(
            "Serve a reward model over HTTP, for --remote_reward_url. Needs the extra serve."
        )
    )
    parser.add_argument(
        "--model",
        required=True,
        help="folder or hub name of a decoder with a one-label head `score`",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all interfaces"
    )
    parser.add_argument(
        "--port", type=int, default=5000, help="port; 0 selects a free one and prints it"
    )
    parser.add_argument(
        "--max_batch_tokens", type=int, default=16384, help="most tokens of a forward pass"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="number format of the weights; auto: bf16 on a GPU, the faster of bf16 and fp32 on a"
        " CPU (default: auto)",
    )
    args = parser.parse_args(argv)
    if args.max_batch_tokens < 1:
        raise UserError(f"--max_batch_tokens must be above 0, got {args.max_batch_tokens}")
    for module in ("fastapi", "uvicorn"):
        require_extra(module, "the reward server")
    host = args.host
    listening = listen(host, args.port, f"--host {host} --port {args.port}")
    # after the flags are checked: these imports take seconds
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.models.model_folders import model_folder

    quiet_libraries()
    folder = model_folder(args.model, "--model")
    scorer = text_scorer(folder, args.dtype, args.max_batch_tokens)
    print_line(f"serving {args.model} at http://{host}:{listening.getsockname()[1]}/get_reward")
    # uvicorn handles them, and raises them again at its end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server_of(reward_app(scorer, host)).run(sockets=[listening])
    print_line("all requests answered; stopped")


def main(argv: Sequence[str]) -> int:
    return exit_code_of(lambda: serve(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
