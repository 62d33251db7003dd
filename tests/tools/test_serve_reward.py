"""The reward model server: its scores, whom it answers, and concurrent clients."""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dschat_ppo.common.http_server import listen, server_of
from dschat_ppo.rewards.remote_reward import RemoteReward
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.tools import serve_reward
from dschat_ppo.tools.serve_reward import reward_app, text_scorer


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of a server."""
    listening = listen("127.0.0.1", 0, "--port")
    server = server_of(app)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(60)


def send(url: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
    """Status and JSON of the reply; {} for a reply in another format. Names of headers have "_" for
    "-"."""
    named = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, named), timeout=20) as answer:
            return answer.status, json.loads(answer.read()) if "json" in answer.headers[
                "Content-Type"
            ] else {}
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read()) if "json" in refusal.headers[
            "Content-Type"
        ] else {}


TEXTS = ["a lamp in the hall", "", "red", "no thanks " * 12, "blue\n\x00é"]


@torch.no_grad()
def direct(folder: Path, texts: list[str], most: int = 128) -> list[float]:
    """Scores of the plain classifier, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [
        [*tokenizer.encode(text, add_special_tokens=True), tokenizer.eos_token_id][-most:]
        for text in texts
    ]
    hidden = [model.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
    return [float(model.score(state)) for state in hidden]


@pytest.fixture(scope="module")
def scorer(assets):
    return text_scorer(str(assets / "reward"), "fp32", 60)


@pytest.fixture(scope="module")
def address(scorer):
    with served(reward_app(scorer, "127.0.0.1")) as found:
        yield found


@torch.no_grad()
def test_a_rendered_chat_is_scored_at_its_end_of_turn(assets, tmp_path):
    folder = shutil.copytree(assets / "reward", tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|system|>{% endfor %}"
    tokenizer.save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [[*tokenizer.encode(text), end] for text, end in (("a<|system|>b", 4), ("a b", 1))]
    expected = [
        float(model.score(model.base_model(torch.tensor([row])).last_hidden_state[0, -1]))
        for row in rows
    ]
    assert text_scorer(str(folder), "fp32", 60)(["a<|system|>b", "a b"]) == pytest.approx(
        expected, abs=1e-5
    )


def ask(address: str, texts, **others) -> tuple[int, dict]:
    return send(f"{address}/get_reward", json.dumps({"query": texts, **others}).encode())


def serve_into(folder: Path, output: int) -> None:
    sys.stdout = os.fdopen(output, "w")
    sys.exit(serve_reward.main(["--model", str(folder), "--port", "0", "--dtype", "fp32"]))


def test_a_server_process_answers_a_request_in_progress_and_stops(assets):
    """Before any thread of this module runs, since it is forked."""
    gc.collect()  # what earlier tests left is not for the fork to collect
    read, write = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=serve_into, args=(assets / "reward", write)
    )
    process.start()
    os.close(write)
    with os.fdopen(read) as output, ThreadPoolExecutor(1) as threads:
        line = next(line for line in output if line.startswith("serving "))
        address = line.split(" at ")[1].strip().removesuffix("/get_reward")
        assert ask(address, TEXTS)[1]["rewards"] == pytest.approx(
            direct(assets / "reward", TEXTS), abs=1e-5
        )
        many = threads.submit(ask, address, ["a lamp in the hall " * 20] * 200)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        rest = output.read()
        process.join(60)
        status, answer = many.result()
    assert process.exitcode == 0 and status == 200 and len(answer["rewards"]) == 200
    assert "all requests answered" in rest


def test_scores_are_those_of_a_direct_forward_pass(assets, address):
    """A long text loses its start."""
    texts = [*TEXTS, "red blue here yes " * 60]
    expected = direct(assets / "reward", texts)
    assert len({round(score, 3) for score in expected}) == len(texts)
    status, answer = ask(address, texts, prompts=[""] * 6, labels=[None, 1, "a", [], {}, 0])
    assert status == 200
    assert answer["rewards"] == pytest.approx(expected, abs=1e-5)


def test_the_remote_reward_reads_it(assets, address):
    request = RewardRequest.of(["a lamp ", "b"], ["in the hall", ""], [{}, {}])
    scores = RemoteReward([f"{address}/get_reward"], 20.0, 0, 1)(request, None)
    assert scores.tolist() == pytest.approx(
        direct(assets / "reward", ["a lamp in the hall", "b"]), abs=1e-5
    )


def test_a_name_that_was_rebound_to_this_machine_is_refused(address):
    with served(reward_app(lambda texts: [], "::1")) as other:
        for path, body in (("/health", None), ("/get_reward", b'{"query": []}')):
            for host in ("evil.example", "127.0.0.1.evil.example"):
                assert [send(place + path, body, Host=host)[0] for place in (address, other)] == [
                    400,
                    400,
                ]
            assert send(address + path, body, Host="localhost:9")[0] == 200, "through a tunnel"
            assert send(other + path, body, Host="[::1]:9")[0] == 200
            assert send(address + path, body, Origin="http://evil.example")[0] == 400
    with served(reward_app(lambda texts: [], "0.0.0.0")) as other:
        assert send(other + "/health", Host="reward.example")[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"query": [NaN]}', "valid string"),
        (b'{"query": 1e999}', "valid list"),
        (b'{"query": [{"\\ud800": "\\udfff"}]}', "valid string"),
        (b'{"query": ["\\ud800"]}', "rejects this text"),
        (b'{"query": ["' + b"x" * 17_000_000 + b'"]}', "too long"),
    ],
    ids=["NaN", "infinity", "half pairs in an object", "half a pair", "17 MB"],
)
def test_what_cannot_be_scored_is_refused_with_its_reason(address, body, words):
    status, answer = send(f"{address}/get_reward", body)
    assert status == 422
    assert words in str(answer["detail"])


def test_a_request_that_a_browser_sends_for_any_page_is_invalid(address):
    """It asks the server before it sends JSON to another site."""
    assert send(f"{address}/get_reward", b'{"query": []}', Content_Type="text/plain")[0] == 422


def test_requests_are_scored_one_after_another_and_get_their_own_scores():
    running, most = [], []

    def score(texts):
        running.append(1)
        most.append(len(running))
        time.sleep(0.1)
        running.pop()
        return list(map(float, texts))

    with served(reward_app(score, "127.0.0.1")) as address, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda n: ask(address, [str(n), "7"]), range(4)))
    assert answers == [(200, {"rewards": [n, 7.0]}) for n in range(4)]
    assert most == [1] * 4
