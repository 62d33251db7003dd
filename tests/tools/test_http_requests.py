"""The limits of the servers against hostile clients: slow, many, large, compressed and malformed requests."""

import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dschat_ppo.tools import http_requests, serve_reward
from dschat_ppo.tools.http_requests import BodyBudget, RejectedError
from dschat_ppo.tools.serve_reward import RewardServer

MOST_BYTES = 20_000
SECONDS = 0.6
JSON = b"Content-Type: application/json\r\n"
HEAD = b"POST /get_reward HTTP/1.1\r\n" + JSON


@pytest.fixture
def start():
    """Starts a server; its scores are the lengths of the texts."""
    running = []

    def begin(score=lambda texts: [float(len(text)) for text in texts], clients=8, seconds=SECONDS, most=MOST_BYTES):
        server = RewardServer(("127.0.0.1", 0), score, most, 12, clients, seconds)
        running.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    yield begin
    for server in running:
        server.shutdown()
        server.server_close()


def connect(server) -> socket.socket:
    return socket.create_connection(server.server_address[:2], 10)


def reply_to(server, data: bytes) -> bytes:
    """The whole reply to bytes, after which the client keeps its side of the connection open."""
    with connect(server) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(4096), b""))


def request_of(body: bytes, headers: bytes = b"") -> bytes:
    return HEAD + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def status_of(reply: bytes) -> int:
    return int(reply.split()[1])


def drip(client: socket.socket, data: bytes, seconds: float) -> float:
    """Send byte after byte, each well within any timeout of the socket; the seconds until the server ends it."""
    started = time.monotonic()
    client.settimeout(0.02)
    for number in range(int(seconds / 0.02)):
        try:
            client.send(data[number : number + 1] or b"x")
            if client.recv(4096) is not None:
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - started


@pytest.mark.parametrize(
    "sent", [b"", b"POST /get", HEAD, HEAD + b"X-Long: ", HEAD + b"Content-Length: 9000\r\n\r\n"],
    ids=["nothing", "request line", "headers", "header", "body"],
)  # fmt: skip
@pytest.mark.parametrize("drips", [True, False], ids=["byte by byte", "silent"])
def test_a_slow_client_is_dropped(start, sent, drips):
    server = start()
    with connect(server) as client:
        client.sendall(sent)
        if drips:
            assert SECONDS / 2 < drip(client, b"", 6.0) < 3.0
        else:
            started = time.monotonic()
            reply = b"".join(iter(lambda: client.recv(4096), b""))
            assert SECONDS / 2 < time.monotonic() - started < 3.0
            assert b"received 0 of 9000 bytes in time" in reply if b"9000" in sent else reply == b""
    assert status_of(reply_to(server, b"GET /health HTTP/1.0\r\n\r\n")) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Length: 13\r\nContent-Length: 13\r\n", 400),
        (b"Content-Length: 13\r\nContent-Length: 5\r\n", 400),
        (b"Content-Length: 13, 13\r\n", 411),
        (b"Content-Length: 0x0d\r\n", 411),
        (b"Content-Length: 1_3\r\n", 411),
        (b"Content-Length: \xb2\r\n", 411),
        (b"Content-Length: " + b"9" * 5000 + b"\r\n", 413),
        (b"Content-Length: 13\r\nTransfer-Encoding: chunked\r\n", 411),
        (b"Transfer-Encoding: chunked\r\n", 411),
        (b"Content-Length: 13\r\nContent-Encoding: gzip\r\n", 415),
        (b"Content-Length: 13\r\nContent-Encoding: identity\r\n", 200),
        (b"X: y\r\n" * 200, 431),
        (b"X: " + b"y" * 70_000 + b"\r\n", 431),
        ((b"X: " + b"y" * 60_000 + b"\r\n") * 3, 431),
    ],
    ids=range(14),
)
def test_lengths_and_encodings(start, headers, status):
    assert status_of(reply_to(start(seconds=5.0), HEAD + headers + b'\r\n{"query": []}')) == status


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (b"application/json", 200), (b"Application/JSON; charset=utf-8", 200), (b"text/plain", 415),
        (b"application/x-www-form-urlencoded", 415), (b"multipart/form-data", 415), (b"", 415),
    ],
)  # fmt: skip
def test_bodies_of_other_types_are_refused(start, kind, status):
    request = b"POST /get_reward HTTP/1.1\r\nContent-Type: " + kind + b'\r\nContent-Length: 13\r\n\r\n{"query": []}'
    assert status_of(reply_to(start(), request)) == status


def test_a_compressed_body_is_not_decompressed(start):
    body = gzip.compress(json.dumps({"query": ["a" * 10_000_000]}).encode())
    assert len(body) < MOST_BYTES
    reply = reply_to(start(), request_of(body, b"Content-Encoding: gzip\r\n"))
    assert status_of(reply) == 415 and b"compressed bodies are refused" in reply
    assert b"not JSON" in reply_to(start(), request_of(body))


@pytest.mark.parametrize(
    "body",
    [b"[" * 2**22, b'{"a":' * 2**20, b'{"query": ["a"], "labels": [' + b"1" * 2**20 + b"]}", b"-" * 2**20, b"1e" * 9],
    ids=["lists", "objects", "digits", "minus", "garbage"],
)
def test_json_that_is_deep_or_has_many_digits(start, body):
    server = start(most=2**23, seconds=20.0)
    assert status_of(reply_to(server, request_of(body))) == 400
    assert server.budget.held == 0


def test_connections_over_the_limit_are_refused_and_slots_become_free(start):
    server = start(clients=3, seconds=1.0)
    before = threading.active_count()
    clients = [connect(server) for _ in range(10)]
    replies = [client.recv(4096) for client in clients[3:]]
    assert [status_of(reply) for reply in replies] == [503] * 7 and b"too many clients" in replies[0]
    assert threading.active_count() <= before + 3
    assert [client.recv(4096) for client in clients[:3]] == [b""] * 3  # silent clients, dropped in time
    for client in clients:
        client.close()
    deadline = time.monotonic() + 10
    while server.slots._value < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status_of(reply_to(server, request_of(b'{"query": []}'))) == 200


def test_fifty_clients_at_once_get_their_own_scores(start):
    server = start(clients=64, seconds=20.0)
    ready = threading.Barrier(50)

    def ask(number: int) -> bytes:
        ready.wait(20)
        return reply_to(server, request_of(json.dumps({"query": ["a" * number]}).encode()))

    with ThreadPoolExecutor(50) as threads:
        replies = list(threads.map(ask, range(50)))
    assert [json.loads(reply.split(b"\r\n\r\n")[1]) for reply in replies] == [{"rewards": [n]} for n in range(50)]
    assert server.budget.held == 0


def test_bodies_of_all_requests_together_are_limited(start):
    server = start(clients=32, seconds=5.0)
    body = b" " * (MOST_BYTES - 1)
    clients = [connect(server) for _ in range(12)]
    for client in clients:  # all but the last byte, so that none is answered
        client.sendall(request_of(body + b" ")[:-1])
    for client in clients[:4]:  # a client that gets a reply is one over the limit
        client.settimeout(20.0)
    deadline, refused = time.monotonic() + 4, []
    while len(refused) < 4 and time.monotonic() < deadline:
        for client in set(clients) - set(refused):
            client.settimeout(0.05)
            try:
                assert status_of(client.recv(4096)) == 503
                refused.append(client)
            except TimeoutError:
                continue
        assert server.budget.held <= 8 * MOST_BYTES
    assert len(refused) == 4
    for client in clients:
        client.close()
    while server.budget.held and time.monotonic() < deadline + 10:
        time.sleep(0.01)
    assert server.budget.held == 0


def test_the_budget_counts_bytes_that_arrived():
    budget = BodyBudget(10)
    budget.take(80)
    with pytest.raises(RejectedError, match="server's memory"):
        budget.take(1)
    budget.give_back(5)
    budget.take(5)
    assert budget.held == 80


def test_a_client_that_never_reads_its_reply(start, monkeypatch):
    """It holds its thread for the seconds of a reply, not for ever, and no other client."""
    monkeypatch.setattr(serve_reward, "_SECONDS_FOR_A_REPLY", 0.3)
    answer = serve_reward.Handler._reply
    monkeypatch.setattr(
        serve_reward.Handler, "_reply", lambda self, status, content: answer(self, status, content | {"x": "y" * 2**24})
    )
    monkeypatch.setattr(http_requests, "_LINGER_SECONDS", 0.2)
    server = start(clients=1)
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request_of(b'{"query": []}'))
        started = time.monotonic()
        while server.slots._value == 1:
            time.sleep(0.005)
        while server.slots._value == 0 and time.monotonic() < started + 10:
            time.sleep(0.01)
        assert time.monotonic() - started < 5.0 and server.slots._value == 1


def test_a_client_that_ignores_its_refusal_is_closed(start, monkeypatch):
    monkeypatch.setattr(http_requests, "_LINGER_SECONDS", 0.3)
    with connect(start(seconds=30.0)) as client:
        client.sendall(HEAD + b"Content-Length: 99999999\r\n\r\n")
        started = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011 - a reset or a broken pipe
            while time.monotonic() < started + 10:
                client.sendall(b" " * 1000)
                time.sleep(0.01)
        assert time.monotonic() - started < 5.0
