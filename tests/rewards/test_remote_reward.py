"""The remote reward against a local server with every kind of fault."""

import base64
import json
import math
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat

import pytest
import torch

from dschat_ppo import errors
from dschat_ppo.errors import UserError
from dschat_ppo.rewards import http_client, remote_reward
from dschat_ppo.rewards.remote_reward import RemoteReward, label_of
from dschat_ppo.rewards.reward_source import RewardRequest, RewardServiceError

REQUEST = RewardRequest.of(
    ["p", "two", ""],
    ["r", "", "three"],
    [{"label": "L", "answer": "A"}, {"answer": 5}, {"label": None, "other": 1}],
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_WAIT_SECONDS", 0.02)


class Service:
    """A server that replies with the entries of `script` in turn, then always with the last:
    (status, body), or a function of the handler. It keeps the requests."""

    def __init__(self, script):
        self.script, self.requests, self.headers = list(script), [], []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):  # noqa: N802
                self.query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append((self.path, self.query))
                service.headers.append(dict(self.headers))
                entry = service.script.pop(0) if len(service.script) > 1 else service.script[0]
                entry(self) if callable(entry) else self.reply(*entry)

            def reply(self, status, body, length=None):
                self.send_response(status)
                self.send_header("Content-Length", str(length or len(body)))
                self.end_headers()
                self.wfile.write(body)

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


def test_hidden_credentials_come_from_the_environment(monkeypatch):
    """`***` stands for them in a saved configuration."""
    for url in ("http://***@host/a", "http://host/a?key=***"):
        monkeypatch.delenv(remote_reward.VARIABLE, raising=False)
        with pytest.raises(
            UserError, match=r"--remote_reward_url http://.*\*\*\*.* DSCHAT_PPO_REMOTE_REWARD_URL"
        ):
            RemoteReward([url], 1.0, 0, 1)
        whole = url.replace("***", "me:s3cret")
        monkeypatch.setenv(remote_reward.VARIABLE, f"http://other/, {whole}")
        assert RemoteReward([url, "http://b/"], 1.0, 0, 1).service.urls == [whole, "http://b/"]


def test_the_form_of_a_request(serve):
    service = serve(ok(1, -2.5, 3))
    scores = ask(service.url)
    assert scores.tolist() == [1, -2.5, 3]
    assert scores.dtype == torch.float32
    query = {"query": ["pr", "two", "three"], "prompts": ["p", "two", ""], "labels": ["L", 5, None]}
    assert service.requests == [("/get_reward", query)]


def lengths(handler):
    """The length of each query of the last request, after a delay that grows with the length."""
    texts = handler.query["query"]
    time.sleep(0.02 * len(texts[0]))
    handler.reply(*ok(*map(len, texts)))


def test_batches_keep_their_order_and_alternate_between_addresses(serve):
    one, two = serve(lengths), serve(lengths)
    assert ask(one.url, two.url, batch_size=1).tolist() == [2, 3, 5]
    assert [body["query"] for _, body in one.requests] == [["pr"], ["three"]]
    assert [body["query"] for _, body in two.requests] == [["two"]]


def test_a_service_that_echoes_credentials_shows_none(serve, monkeypatch):
    monkeypatch.setattr(errors, "_KNOWN", {})

    def echo(handler):
        basic = handler.headers["Authorization"].removeprefix("Basic ").encode()
        handler.reply(401, b"x" * 190 + b" " + basic + b" " + base64.b64decode(basic))

    service = serve(echo)
    with pytest.raises(RewardServiceError, match="status 401: xxx") as refused:
        ask(service.url.replace("http://", "http://me:s3cret@"))
    assert not any(word in str(refused.value) for word in ("s3", "bWU"))


FAULTS = {
    "500": (500, b"busy"),
    "429": (429, b"busy"),
    "slow": lambda _: time.sleep(12.0),
    "cut short": lambda handler: handler.reply(*ok(1, 2, 3), length=100),
    "hangs up": lambda handler: handler.connection.shutdown(socket.SHUT_RDWR),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_temporary_fault_is_retried(serve, fault):
    service, started = serve(FAULTS[fault], FAULTS[fault], ok(1, 2, 3)), time.monotonic()
    assert ask(service.url, timeout=0.4 if fault == "slow" else 5.0).tolist() == [1, 2, 3]
    assert len(service.requests) == 3 and time.monotonic() - started < 10


def test_an_error_of_all_attempts_is_one_line_without_commands_to_a_terminal(serve):
    bad, worse = serve((500, b"\x1b[2Jno\r\nmemory")), serve((503, b"long " * 10_000))
    for services, said in (
        ([bad, worse], "status 500: \\x1b[2Jno memory"),
        ([worse], "status 503: long long"),
    ):
        with pytest.raises(RewardServiceError) as failure:
            ask(*(service.url for service in services))
        for part in (f"--remote_reward_url {services[0].url}", "3 attempts", said):
            assert part in str(failure.value)
        assert str(failure.value).isprintable() and len(str(failure.value)) < 900
    assert (len(bad.requests), len(worse.requests)) == (2, 1 + 3), (
        "the next attempt goes to the next address"
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@pytest.mark.parametrize(
    ("host", "known", "cause"),
    [
        ("IP:127.0.0.1", True, None),
        ("IP:127.0.0.1", False, "self-signed certificate"),
        ("DNS:elsewhere.invalid", True, "IP address mismatch"),
    ],
)
def test_certificates_are_verified(serve, tmp_path, monkeypatch, host, known, cause):
    """The second is of an authority that the system does not know, the third of another host."""
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=x",
        "-keyout",
        "key",
    ]
    subprocess.run(
        [*words, "-out", "pem", "-addext", f"subjectAltName={host}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem", tmp_path / "key")
    service = serve(ok(1, 2, 3))
    service.server.socket = context.wrap_socket(service.server.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / ("pem" if known else "none")))
    url = service.url.replace("http:", "https:")
    if cause is None:
        assert ask(url).tolist() == [1, 2, 3]
        return
    with pytest.raises(RewardServiceError, match=f"1 attempts; the last: .*{cause}"):
        ask(url, retries=0)
    assert service.requests == [], "no text went to it"


def test_waits_double_up_to_the_longest(serve, monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(http_client.asyncio, "sleep", sleep)
    monkeypatch.setattr(http_client, "LONGEST_WAIT_SECONDS", 0.1)
    with pytest.raises(RewardServiceError, match="6 attempts"):
        ask(serve((500, b"")).url, retries=5)
    shares = [
        wait / longest for wait, longest in zip(waits, [0.02, 0.04, 0.08, 0.1, 0.1], strict=True)
    ]
    assert all(0.5 <= share <= 1 for share in shares) and len(set(shares)) == 5


REFUSALS = [
    ((400, b"a reason"), "status 400: a reason"),
    ((301, b"a reason"), "status 301: a reason"),
    ((200, b"hello"), "not JSON"),
    ((200, b"[1, 2, 3]"), "list 'rewards'"),
    ((200, b"[" * 100_000), "not JSON"),
    ((200, b'{"rewards": 3}'), "list 'rewards'"),
    (ok(1, 2), "has 2 rewards, of which 2 .* for 3 responses"),
    *(
        (ok(1, value, 3), "has 3 rewards, of which 2 are finite")
        for value in (math.nan, 1e39, "2", True, None)
    ),
]


@pytest.mark.parametrize(("reply", "problem"), REFUSALS, ids=range(len(REFUSALS)))
def test_what_no_other_attempt_would_change_is_not_retried(serve, reply, problem):
    service = serve(reply)
    with pytest.raises(RewardServiceError, match=problem):
        ask(service.url)
    assert len(service.requests) == 1


def test_an_interrupt_does_not_wait_for_a_slow_service(serve):
    service = serve(lambda handler: time.sleep(20.0))
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(service.url, timeout=15.0, retries=0)
    assert time.monotonic() - started < 10


def test_heartbeats_are_sent_while_a_request_waits(serve, monkeypatch):
    def late(handler):
        time.sleep(0.4)
        handler.reply(*ok(1, 2, 3))

    beats = []
    monkeypatch.setattr(http_client, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(http_client, "heartbeat", lambda: beats.append(1))
    assert ask(serve(late).url).tolist() == [1, 2, 3]
    assert len(beats) > 2


@pytest.mark.parametrize("head", [b"2", b"200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n"])
def test_a_reply_that_never_ends_is_given_up(serve, head):
    """Each byte comes well within the timeout."""

    def send(handler):
        with suppress(OSError):
            for part in chain([b"HTTP/1.1 " + head], repeat(b"0")):
                handler.connection.sendall(part)
                time.sleep(0.02)

    started = time.monotonic()
    with pytest.raises(RewardServiceError, match="no complete reply in 0.5 s"):
        ask(serve(send).url, timeout=0.5, retries=0)
    assert time.monotonic() - started < 10


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch):
    monkeypatch.setenv("all_proxy", "gopher://127.0.0.1:1")
    with pytest.raises(UserError, match="--remote_reward_url: a proxy of the environment .*gopher"):
        ask("http://127.0.0.1:1/")


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://rewards..invalid:5000/get", ""),
        ("http://127.0.0.1:1/", "ConnectError: All"),
        ("https", ".*SSL"),
    ],
)
def test_an_address_without_a_service_is_an_error_of_the_connection(serve, url, cause, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    url = serve(ok(1, 2, 3)).url.replace("http:", "https:") if url == "https" else url
    with pytest.raises(RewardServiceError, match=f"1 attempts; the last: {cause}"):
        ask(url, retries=0)


def test_unusual_text_is_sent_unchanged(serve):
    service = serve(ok(1))
    request = RewardRequest.of(["é\n\x00"], ["\ud800\N{SNOWMAN}"], [{"label": {1}}])
    assert RemoteReward([service.url], 5.0, 0, 8)(request, None).tolist() == [1]
    assert service.requests[0][1] == {
        "query": ["é\n\x00\ud800\N{SNOWMAN}"],
        "prompts": ["é\n\x00"],
        "labels": ["{1}"],
    }


def test_the_label_is_the_correct_answer_that_rules_read():
    """... of `--label_key`, verl's rows and question/answer rows, whatever the row's other columns
    are called."""
    assert label_of({"label": True, "answer": "2 + 2 = 4\n#### 4", "_truth": "4"}) == "4"
    assert label_of({"label": "L", "answer": "A"}) == "L"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:5000",
        "ftp://me:s3cret@host",
        "http://",
        "http://host:99999/",
        "http://me:s3/cret@host/",
        "me:s3cret@host:5000/a",
    ],
)
def test_invalid_addresses_are_rejected_without_their_credentials(url):
    with pytest.raises(UserError, match="^--remote_reward_url") as refused:
        RemoteReward([url], 1.0, 0, 1)
    assert "s3" not in str(refused.value)
