"""The front against hostile clients: a process that listens, a rank that replies by a script."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from dschat_ppo.features.agents.front import CHAT, MODELS, MOST_OPEN, PLAIN
from dschat_ppo.features.agents.front_link import Front

BODY = {"model": "policy", "messages": [{"role": "user", "content": "Hi."}]}


class ScriptedRank:
    """Answers each call with what it asked, once the script lets it: a body that holds `wait` waits
    for `release`. Notes all events."""

    def __init__(self):
        self.front = Front()
        self.events = []
        self.held = []
        self.releases = False
        self.stops = False
        self.commands = []  # functions that the thread of the front runs
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stops:
            for event in self.front.poll(0.01):
                self.events.append(event)
                if event.kind == "call":
                    self.held.append(event)
            for event in list(self.held):
                if self.releases or b"wait" not in event.body:
                    self.held.remove(event)
                    self.front.reply(event.call, 200, event.body)
            while self.commands:
                self.commands.pop()()

    def key(self, episode) -> str:
        return self.do(lambda: self.front.admit(episode))

    def do(self, function):
        """What a function returns in the thread of the front."""
        results = []
        self.commands.append(lambda: results.append(function()))
        wait_for(lambda: results)
        return results[0]

    def kinds(self, *kinds):
        return [event for event in self.events if event.kind in kinds]

    def close(self):
        self.stops = True
        self.thread.join()
        self.front.close()


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def rank():
    made = ScriptedRank()
    yield made
    made.close()


def ask(rank, key, path=CHAT, body=BODY, **headers):
    """(status, body) of a request."""
    data = body
    if isinstance(body, dict):
        data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **headers}
    url = rank.front.base_url.removesuffix("/v1") + path
    request = Request(url, data, {name: text for name, text in headers.items() if text})
    try:
        with urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except HTTPError as problem:
        return problem.code, json.loads(problem.read())


def raw(rank, data=b""):
    """A connection to the front, over which bytes have gone."""
    host, _, port = rank.front.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(data)
    return connection


def head(key, length, path=CHAT):
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_a_call_reaches_the_rank_and_its_reply_the_program(rank):
    keys = [rank.key(episode) for episode in (3, 4)]
    assert len(set(keys)) == 2 and all(len(key) == 32 for key in keys)
    assert ask(rank, keys[1], PLAIN, {"prompt": "a\x00é"}, **{"x-stainless-retry-count": "2"}) == (
        200,
        {"prompt": "a\x00é"},
    )
    wait_for(lambda: rank.kinds("taken"))
    [call] = rank.kinds("call")
    assert (call.episode, call.path, call.retries) == (4, PLAIN, 2)
    assert [event.call for event in rank.kinds("taken")] == [call.call]
    status, models = ask(rank, keys[0], MODELS, None)
    assert status == 200 and [model["id"] for model in models["data"]] == [
        "policy",
        "policy-untrained",
    ]


def test_keys_that_are_wrong_missing_ended_or_foreign(rank):
    key, ended = rank.key(0), rank.key(1)
    other = ScriptedRank()
    foreign = other.key(0)
    rank.do(lambda: rank.front.dismiss(ended, 1))
    for wrong in ("", "EMPTY", key[:-1], key.upper() + "x", foreign, ended):
        authorization = f"Bearer {wrong}" if wrong else ""
        status, body = ask(rank, "", Authorization=authorization)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert "has ended" in body["error"]["message"]
    assert ask(rank, "", Authorization=f"Basic {key}")[0] == 401
    assert ask(rank, key)[0] == 200
    assert [event.episode for event in rank.kinds("call")] == [0]
    other.close()


def test_requests_for_other_hosts_sites_and_paths(rank):
    key = rank.key(0)
    for headers in ({"Host": "example.com"}, {"Origin": "http://example.com"}):
        status, body = ask(rank, key, **headers)
        assert (status, body["error"]["code"]) == (400, "wrong_host")
    for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/", "/chat/completions"):
        status, body = ask(rank, key, path)
        assert status == 404 and CHAT in body["error"]["message"]
    assert "LiteLLM" in ask(rank, key, "/v1/responses")[1]["error"]["message"]
    assert ask(rank, key, CHAT, None)[0] == 405
    assert rank.kinds("call") == []


def test_a_body_has_a_most_of_bytes(rank):
    key = rank.key(0)
    largest = b'"' + b"a" * (2**24 - 2) + b'"'
    assert ask(rank, key, CHAT, largest)[0] == 200
    with closing(raw(rank, head(key, 17 * 2**20))) as connection:
        connection.settimeout(20)
        received = b""
        try:
            for _ in range(17):
                connection.sendall(b"a" * 2**20)
            received = connection.recv(2**12)
        except (BrokenPipeError, ConnectionResetError):
            received = received or b" 413 "  # it closed the connection while we wrote
        assert b" 413 " in received
    assert ask(rank, key)[0] == 200
    assert len(rank.kinds("call")) == 2


def test_slow_and_broken_bodies_reach_no_rank_and_hinder_nobody(rank):
    key = rank.key(0)
    connections = [
        raw(rank),  # says nothing
        raw(rank, b"POST /v1/chat"),
        raw(rank, head(key, 100) + b'{"mess'),
        raw(rank, head(key, 10**30)),
        raw(rank, b"\x00\xff\x16\x03 nonsense\r\n\r\n"),
        raw(
            rank,
            head(key, 5).replace(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"zz\r\n",
        ),
    ]
    assert ask(rank, key)[0] == 200
    for connection in connections:
        connection.close()
    assert ask(rank, key)[0] == 200
    assert len(rank.kinds("call")) == 2


def test_a_body_that_does_not_come_is_refused(rank, monkeypatch, tmp_path):
    code = (
        "import sys; from dschat_ppo.features.agents import front; front.BODY_SECONDS = 0.2;"
        " front.main(int(sys.argv[1]))"
    )
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
    )
    theirs.close()
    with closing(ours), ours.makefile("rb") as frames:
        port = json.loads(frames.readline())["port"]
        line = {"kind": "admit", "key": "k", "episode": 0, "length": 0}
        ours.sendall(json.dumps(line).encode() + b"\n")
        connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        connection.sendall(head("k", 100) + b"{")
        assert b" 408 " in connection.recv(2**12)
        connection.close()
    assert process.wait(20) == 0, "the front ends with its rank"


def test_an_episode_has_a_most_of_open_calls(rank):
    key, other = rank.key(0), rank.key(1)
    with ThreadPoolExecutor(200) as pool:
        waiting = {**BODY, "user": "wait"}
        replies = [pool.submit(ask, rank, key, CHAT, waiting) for _ in range(200)]
        wait_for(lambda: sum(reply.done() for reply in replies) == 200 - MOST_OPEN)
        refused = [reply.result() for reply in replies if reply.done()]
        assert {status for status, _ in refused} == {429}
        assert {body["error"]["code"] for _, body in refused} == {"too_many_open_calls"}
        assert ask(rank, other)[0] == 200, "other episodes go on"
        rank.releases = True
        answered = [reply.result() for reply in replies if reply.result()[0] == 200]
    assert len(answered) == MOST_OPEN
    wait_for(lambda: len(rank.kinds("taken")) == MOST_OPEN + 1)
    assert ask(rank, key)[0] == 200


def test_a_client_that_leaves_has_not_taken_its_reply(rank):
    key = rank.key(0)
    body = json.dumps({**BODY, "user": "wait"}).encode()
    stays = raw(rank, head(key, len(body)) + body)
    leaves = raw(rank, head(key, len(body)) + body)
    wait_for(lambda: len(rank.kinds("call")) == 2)
    leaves.close()
    wait_for(lambda: rank.kinds("left"))
    rank.releases = True
    wait_for(lambda: rank.kinds("taken"))
    assert b" 200 " in stays.recv(2**12)
    stays.close()
    [left], [taken] = rank.kinds("left"), rank.kinds("taken")
    assert {left.call, taken.call} == {event.call for event in rank.kinds("call")}


def test_a_reply_that_meets_a_closed_connection_is_not_taken(rank):
    """The program leaves and the rank replies at the same time."""
    key = rank.key(0)
    body = json.dumps({**BODY, "user": "wait"}).encode()
    for number in range(20):
        connection = raw(rank, head(key, len(body)) + body)
        wait_for(lambda number=number: len(rank.kinds("call")) == number + 1)

        def leave_and_reply(connection=connection):
            connection.close()
            [event] = rank.held
            rank.held.clear()
            rank.front.reply(event.call, 200, event.body)

        rank.do(leave_and_reply)
        wait_for(lambda number=number: len(rank.kinds("left", "taken")) == number + 1)
    assert rank.kinds("taken") == []


def test_the_front_imports_no_large_library():
    code = (
        "import sys; import dschat_ppo.features.agents.front;"
        " print([name for name in ('torch', 'transformers', 'numpy', 'datasets') if name in"
        " sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_end_of_the_front_is_said(rank):
    rank.stops = True
    rank.thread.join()
    rank.front._process.kill()
    rank.front._process.wait()
    with pytest.raises(RuntimeError, match=r"listens for the agents.*exit code -9"):
        for _ in range(100):
            rank.front.poll(0.1)
