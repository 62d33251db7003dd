"""The remote reward against a real server on this machine, with every fault."""

import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from dschat_ppo.errors import UserError
from dschat_ppo.rewards import remote_reward
from dschat_ppo.rewards.remote_reward import RemoteReward
from dschat_ppo.rewards.reward_source import RewardRequest, RewardServiceError

REQUEST = RewardRequest(
    ["p", "two", ""], ["r", "", "three"], [{"label": "L", "answer": "A"}, {"answer": 5}, {"label": None, "other": 1}]
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(remote_reward, "FIRST_WAIT_SECONDS", 0.02)


class Service:
    """A server whose n-th answer is the n-th of `script`, the last one ever after; it keeps what it was asked.

    An entry is (status, body) or a function of the handler.
    """

    def __init__(self, script):
        self.script, self.asked = list(script), []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):  # noqa: N802
                self.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.asked.append((self.path, self.asked))
                entry = service.script.pop(0) if len(service.script) > 1 else service.script[0]
                entry(self) if callable(entry) else self.answer(*entry)

            def answer(self, status, answer):
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def serve():
    running = []

    def start(*script):
        running.append(Service(script))
        return running[-1]

    yield start
    for service in running:
        service.server.shutdown()
        service.server.server_close()


def ok(*rewards):
    return 200, json.dumps({"rewards": list(rewards)}).encode()


def ask(*urls, timeout=5.0, retries=2, batch_size=64):
    return RemoteReward(list(urls), timeout, retries, batch_size)(REQUEST, None)


def test_the_form_of_a_request(serve):
    service = serve(ok(1, -2.5, 3))
    scores = ask(service.url)
    assert scores.tolist() == [1, -2.5, 3]
    assert scores.dtype == torch.float32
    asked = {"query": ["pr", "two", "three"], "prompts": ["p", "two", ""], "labels": ["L", 5, None]}
    assert service.asked == [("/get_reward", asked)]


def lengths(handler):
    """The length of each query of the last request, after a while: a longer one for the longer text."""
    texts = handler.asked["query"]
    time.sleep(0.02 * len(texts[0]))
    handler.answer(*ok(*map(len, texts)))


def test_batches_keep_the_order_and_take_turns(serve):
    one, two = serve(lengths), serve(lengths)
    assert ask(one.url, two.url, batch_size=1).tolist() == [2, 3, 5]
    assert [body["query"] for _, body in one.asked] == [["pr"], ["three"]]
    assert [body["query"] for _, body in two.asked] == [["two"]]


def test_the_last_batch_may_be_short(serve):
    service = serve(ok(1, 2), ok(3))
    assert ask(service.url, batch_size=2).tolist() == [1, 2, 3]
    assert [len(body["query"]) for _, body in service.asked] == [2, 1]
    assert service.asked[1][1] == {"query": ["three"], "prompts": [""], "labels": [None]}


@pytest.mark.parametrize("status", [500, 503, 429])
def test_an_error_that_passes(serve, status):
    service = serve((status, b"busy"), (status, b"busy"), ok(1, 2, 3))
    assert ask(service.url).tolist() == [1, 2, 3]
    assert len(service.asked) == 3


def test_an_error_that_stays(serve):
    service = serve((500, b"no memory"))
    with pytest.raises(RewardServiceError) as failure:
        ask(service.url)
    for part in (f"--remote_reward_url {service.url}", "3 attempts", "status 500: no memory"):
        assert part in str(failure.value)
    assert len(service.asked) == 3


def test_retries_go_to_the_next_address(serve):
    bad, good = serve((500, b"")), serve(ok(1, 2, 3))
    assert ask(bad.url, good.url).tolist() == [1, 2, 3]
    assert (len(bad.asked), len(good.asked)) == (1, 1)


def test_waits_double_up_to_the_longest(serve, monkeypatch):
    waits = []
    monkeypatch.setattr(remote_reward.time, "sleep", waits.append)
    monkeypatch.setattr(remote_reward, "LONGEST_WAIT_SECONDS", 0.1)
    with pytest.raises(RewardServiceError, match="6 attempts"):
        ask(serve((500, b"")).url, retries=5)
    for wait, longest in zip(waits, [0.02, 0.04, 0.08, 0.1, 0.1], strict=True):
        assert longest / 2 <= wait <= longest
    assert len({wait / longest for wait, longest in zip(waits, [0.02, 0.04, 0.08, 0.1, 0.1], strict=True)}) == 5


def test_no_service():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(RewardServiceError, match=f"127.0.0.1:{port}.*2 attempts.*ConnectionError"):
        ask(f"http://127.0.0.1:{port}/", retries=1)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 301])
def test_a_refusal_is_not_repeated(serve, status):
    service = serve((status, b"a reason"))
    with pytest.raises(RewardServiceError, match=f"status {status}: a reason"):
        ask(service.url)
    assert len(service.asked) == 1


def elsewhere(handler):
    handler.send_response(307)
    handler.send_header("Location", "/other")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def test_a_redirection_is_not_followed(serve):
    service = serve(elsewhere, ok(1, 2, 3))
    with pytest.raises(RewardServiceError, match="status 307"):
        ask(service.url)
    assert len(service.asked) == 1


GARBAGE = {
    b"hello": "not JSON", b"": "not JSON", b"[1, 2, 3]": "no list 'rewards'", b'{"reward": [1, 2, 3]}': "no list",
    b'{"rewards": 3}': "no list", b'{"rewards": [1, 2]}': "2 rewards for 3 rows",
    b'{"rewards": [1, NaN, 3]}': "has nan", b'{"rewards": [1, 1e999, 3]}': "has inf",
    b'{"rewards": [1, 1e39, 3]}': "has 1e\\+39", b'{"rewards": [1, "2", 3]}': "has '2'",
    b'{"rewards": [1, true, 3]}': "has True", b'{"rewards": [1, null, 3]}': "has None",
    b'{"rewards": [[1], [2], [3]]}': r"has \[1\]", b'{"rewards": [[1, 2, 3]]}': "1 rewards for 3 rows",
    b'{"rewards": [1, 1' + b"0" * 400 + b", 3]}": "has 10000", b"[" * 100_000: "not JSON", b"\xff": "not JSON",
}  # fmt: skip


@pytest.mark.parametrize(("body", "problem"), GARBAGE.items(), ids=[str(n) for n in range(len(GARBAGE))])
def test_garbage_is_an_error_at_once(serve, body, problem):
    service = serve((200, body))
    with pytest.raises(RewardServiceError, match=problem):
        ask(service.url)
    assert len(service.asked) == 1


def test_an_answer_that_is_too_long(serve, monkeypatch):
    monkeypatch.setattr(remote_reward, "_MOST_BYTES", 50)
    with pytest.raises(RewardServiceError, match="longer than 50 bytes"):
        ask(serve((200, b'{"rewards": [1, 2, 3]}' + b" " * 1000)).url)


def test_a_slow_service(serve):
    service = serve(lambda handler: time.sleep(4.0), ok(1, 2, 3))
    started = time.monotonic()
    assert ask(service.url, timeout=0.2).tolist() == [1, 2, 3]
    assert time.monotonic() - started < 3.0


def test_who_interrupts_does_not_wait_for_it(serve):
    service = serve(lambda handler: time.sleep(5.0))
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(service.url, timeout=4.0, retries=0)
    assert time.monotonic() - started < 2.5


def test_a_request_within_its_limit_is_no_hang(serve, monkeypatch):
    def late(handler):
        time.sleep(0.4)
        handler.answer(*ok(1, 2, 3))

    beats = []
    monkeypatch.setattr(remote_reward, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(remote_reward, "heartbeat", lambda: beats.append(1))
    assert ask(serve(late).url).tolist() == [1, 2, 3]
    assert len(beats) > 2


def drip(handler):
    """One byte after another, each well within the limit."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        return


def test_a_service_that_sends_byte_after_byte(serve):
    started = time.monotonic()
    with pytest.raises(RewardServiceError, match="no whole answer in 0.2 s"):
        ask(serve(drip).url, timeout=0.2, retries=1)
    assert 0.4 < time.monotonic() - started < 4.0


def cut_short(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"rewards": [1, 2, 3]}')


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("fault", [cut_short, hang_up])
def test_a_connection_that_breaks(serve, fault):
    service = serve(fault, ok(1, 2, 3))
    assert ask(service.url).tolist() == [1, 2, 3]
    assert len(service.asked) == 2


def test_text_of_all_kinds(serve):
    service = serve(ok(1))
    request = RewardRequest(["é\n\x00"], ["\ud800\N{SNOWMAN}"], [{"label": {1}}])
    assert RemoteReward([service.url], 5.0, 0, 8)(request, None).tolist() == [1]
    assert service.asked[0][1] == {"query": ["é\n\x00\ud800\N{SNOWMAN}"], "prompts": ["é\n\x00"], "labels": ["{1}"]}


@pytest.mark.parametrize("url", ["localhost:5000", "ftp://a/b", "http://", "", "http://a:99999/", "http://[::1"])
def test_addresses_that_are_refused(url):
    with pytest.raises(UserError, match="^--remote_reward_url"):
        RemoteReward([url], 1.0, 0, 1)


@pytest.mark.parametrize("url", ["http://localhost:5000/get_reward", "https://a.b", "http://[::1]:80/x"])
def test_addresses_that_are_taken(url):
    remote_reward.check_url(url)
