"""The page of the chat: requests that are refused, one answer at a time, and the page in headless Chromium."""

import http.client
import json
import socket
import threading
import time

import pytest
from headless_chromium import Chromium, needs_chromium

from dschat_ppo.errors import UserError
from dschat_ppo.tools import chat_server
from dschat_ppo.tools.chat_model import Token
from dschat_ppo.tools.chat_server import MOST_BYTES, ChatServer, read_question, serve
from dschat_ppo.tools.http_requests import RejectedError
from dschat_ppo.tools.sampling_settings import SamplingSettings


class Model:
    """Answers "NAME heard N: LAST" word by word; "forever" and "silent" (without text) never end; "fail" and "refuse"
    raise."""

    def __init__(self, name: str, has_template: bool = True):
        self.path = f"out/{name}"
        self.name, self.has_template, self.lock = name, has_template, threading.Lock()
        self.asked, self.tokens, self.stopped = [], 0, threading.Event()

    def answer(self, messages, settings, number):
        self.asked.append((messages, settings, number))
        last = messages[-1]["content"]
        if last == "refuse":
            raise UserError(f"{self.name} refuses")
        words = f"{self.name} heard {len(messages)}: {last} <b>&".split(" ")
        count, endless = 0, last in ("forever", "silent")
        try:
            while True:
                for word in words:
                    count += 1
                    self.tokens += 1
                    if last == "fail" and count == 3:
                        raise RuntimeError("out of memory")
                    if endless:
                        time.sleep(0.01)
                    done = count == len(words) and not endless
                    text = "" if last == "silent" else word if count == 1 else f" {word}"
                    yield Token(text, "eos" if done else "", count, 0.5, 0)
                if not endless:
                    return
        finally:
            self.stopped.set()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(chat_server, "_SECONDS_TO_WAIT", 0.2)
    with ChatServer(0, [Model("models/A"), Model("models/B")], SamplingSettings(), "be kind") as found:
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        found.shutdown()


def send(server, method="POST", path="/answer", body=None, **headers) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    given = {"Content-Type": "application/json"} if method == "POST" else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, {name: value for name, value in given.items() if value is not None})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply


def asked(text="hello", **others) -> dict:
    return {"messages": [{"role": "user", "content": text}], **others}


def test_an_answer_arrives_in_lines(server):
    status, text, _ = send(server, body=asked("hello", model=1, settings={"top_k": 3, "seed": "5"}, number=4))
    lines = [json.loads(line) for line in text.splitlines()]
    assert status == 200 and [line["text"] for line in lines[:-1]] == ["models/B", " heard", " 1:", " hello", " <b>&"]
    assert lines[-1] == {"end": "eos", "tokens": 5, "seconds": 0.5, "dropped": 0}
    [(messages, settings, number)] = server.models[1].asked
    assert (messages, settings, number) == (asked()["messages"], SamplingSettings(top_k=3, seed=5), 4)


def test_errors_of_an_answer(server):
    assert [json.loads(line) for line in send(server, body=asked("refuse"))[1].splitlines()] == [
        {"error": "models/A refuses"}
    ]
    lines = send(server, body=asked("fail"))[1].splitlines()
    assert json.loads(lines[-1]) == {"error": "the model failed; the terminal says why"}
    assert send(server, body=asked())[0] == 200, "the model answers again"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "localhost.x:1"]
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/info"), ("POST", "/answer")])
def test_a_rebound_name_is_refused(server, host, method, path):
    status, text, _ = send(server, method, path, asked() if method == "POST" else None, Host=host)
    assert status == 403 and "is not this machine" in text and not server.models[0].asked


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost:9", "LOCALHOST", "[::1]:9"])
def test_names_of_this_machine_are_accepted(server, host):
    assert send(server, body=asked(), Host=host)[0] == 200
    assert send(server, body=asked(), Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"},
    ],
)  # fmt: skip
def test_other_sites_are_refused(server, headers):
    status, text, _ = send(server, body=asked(), **headers)
    assert status == 403 and "other sites" in text and not server.models[0].asked


def test_forms_of_other_sites_are_refused(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        assert send(server, body=asked(), Content_Type=kind)[0] == 415


def test_bodies_are_limited(server):
    padding = b" " * (MOST_BYTES - 200)
    assert send(server, body=json.dumps(asked()).encode() + padding)[0] == 200
    assert send(server, body=json.dumps(asked()).encode() + b" " * MOST_BYTES)[0] == 413
    assert not server.models[0].lock.locked()


def test_a_slow_client_is_dropped(server, monkeypatch):
    monkeypatch.setattr(chat_server, "_SECONDS_FOR_A_REQUEST", 0.4)
    for sent in (b"GET / HT", b"POST /answer HTTP/1.1\r\nX: "):
        with socket.create_connection(("127.0.0.1", server.server_port), 10) as client:
            started = time.monotonic()
            client.sendall(sent)
            assert client.recv(100) == b"" and 0.2 < time.monotonic() - started < 5


def test_compressed_and_chunked_bodies_are_refused(server):
    assert send(server, body=asked(), Content_Encoding="gzip")[0] == 415
    assert send(server, body=asked(), Transfer_Encoding="chunked")[0] == 411
    assert server.budget.held == 0 and not server.models[0].asked


GOOD = SamplingSettings()
TURN = {"role": "user", "content": "a"}
REPLY = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "c"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"[" * 9000, "not JSON"), (b'{"messages": "\\ud800"}', "not JSON"),
        (b"[]", "must be an object"), (b"{}", '"messages" must'), (b'{"messages": []}', '"messages" must'),
        ({"messages": [{"role": "user"}]}, '"messages" must'), ({"messages": [{**TURN, "x": 1}]}, '"messages" must'),
        ({"messages": [{**TURN, "role": "tool"}]}, '"messages" must'), ({"messages": [REPLY]}, "must alternate"),
        ({"messages": [TURN, TURN]}, "must alternate"), ({"messages": [TURN, REPLY]}, "must alternate"),
        ({"messages": [SYSTEM]}, "must alternate"), ({"messages": [TURN, SYSTEM, TURN]}, "must alternate"),
        (asked(model=2), '"model" must be an integer from 0 to 1'), (asked(model="0"), '"model" must'),
        (asked(model=True), '"model" must'), (asked(number=-1), '"number" must'),
        (asked(settings=[]), '"settings" must'),
        (asked(settings={"top_p": 3}), "top_p must be a number"), (asked(settings={"x": 3}), "no setting 'x'"),
    ],
)  # fmt: skip
def test_invalid_questions(body, reason):
    with pytest.raises(RejectedError, match=reason) as refused:
        read_question(body if isinstance(body, bytes) else json.dumps(body).encode(), 2, GOOD)
    assert refused.value.status == 400


def test_valid_questions():
    for messages in ([TURN], [SYSTEM, TURN], [TURN, REPLY, TURN], [SYSTEM, TURN, REPLY, TURN]):
        assert read_question(json.dumps({"messages": messages}).encode(), 1, GOOD).messages == messages


def test_other_paths(server):
    assert send(server, "GET", "/chat.css")[0] == send(server, "GET", "/chat.js")[0] == 200
    for method, path in (("GET", "/../setup.py"), ("GET", "/answer"), ("POST", "/")):
        assert send(server, method, path, asked() if method == "POST" else None)[0] == 404


def test_the_page_may_load_nothing_else(server):
    _, page, reply = send(server, "GET", "/")
    policy = reply.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert "http:" not in page and "https:" not in page and reply.headers["X-Content-Type-Options"] == "nosniff"


def connect(server, text) -> socket.socket:
    """A connection on which an answer arrives."""
    body = json.dumps(asked(text)).encode()
    head = (
        f"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    found = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    found.sendall(head.encode() + b"\r\n" + body)
    assert b"200" in found.recv(2**12)
    return found


@pytest.mark.parametrize("text", ["forever", "silent"])
def test_one_answer_at_a_time_and_it_stops_when_the_page_leaves(server, text):
    first, second = server.models
    connection = connect(server, text)
    status, reason, _ = send(server, body=asked())
    assert status == 409 and "is answering another message" in reason
    assert send(server, body=asked(model=1))[0] == 200, "the other model is free"
    assert not first.stopped.is_set()
    connection.close()
    assert first.stopped.wait(10)
    assert send(server, body=asked())[0] == 200
    assert second.stopped.is_set()


def test_it_listens_on_the_loopback_interface_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(
        UserError, match=rf"^--port {server.server_port}: cannot listen on it \(.*use another one, or 0"
    ):
        serve(server.models, SamplingSettings(), "", server.server_port)


TYPE = "byId('message').value = {text}; byId('form').requestSubmit()"
HINT_HEIGHT = "byId('hint').getBoundingClientRect().height"
ANSWERS = "[...document.querySelectorAll('.answer .text')].map((each) => each.textContent)"


def ask(browser, text: str) -> None:
    browser.evaluate(TYPE.format(text=json.dumps(text)))


def colours(browser) -> list[int]:
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    return [int(part) for part in ground.strip("rgb()").split(",")]


@needs_chromium
def test_the_page(server, tmp_path):
    first, second = server.models
    address = f"http://127.0.0.1:{server.server_port}/"
    with Chromium(tmp_path / "profile") as browser:
        browser.size(1200, 800)
        browser.open(address)
        browser.wait("document.querySelectorAll('#settings input').length === 7")
        assert browser.evaluate("byId('names').textContent") == "models/A and models/B"
        assert browser.evaluate(HINT_HEIGHT) > 10
        browser.evaluate("document.querySelector('input[name=temperature]').value = '0.5'")
        ask(browser, "hello<i>")
        browser.wait("!running && turns.length === 1")
        assert browser.evaluate(HINT_HEIGHT) == 0, "the hint is for an empty page"
        assert browser.evaluate(ANSWERS) == [f"models/{name} heard 2: hello<i> <b>&" for name in "AB"]
        assert first.asked[0][0][0] == {"role": "system", "content": "be kind"}
        assert first.asked[0][1] == SamplingSettings(temperature=0.5)
        assert browser.evaluate("document.querySelector('.question').textContent") == "hello<i>"
        left, right = browser.evaluate(
            "[...document.querySelectorAll('.answer')].map((a) => a.getBoundingClientRect().x)"
        )
        assert left < right, "side by side"

        ask(browser, "forever")  # Stop keeps what has arrived, and the models stop
        browser.wait(f"{ANSWERS}.slice(2).every((text) => text.length > 40)")
        browser.evaluate("byId('stop').click()")
        browser.wait("!running")
        assert first.stopped.wait(10) and second.stopped.wait(10)
        browser.evaluate("byId('undo').click()")
        assert browser.evaluate("turns.length") == 1

        browser.evaluate("byId('retry').click()")
        browser.wait("!running && turns.length === 1")
        assert first.asked[-1][0][-1]["content"] == "hello<i>" and first.asked[-1][2] == 2 > first.asked[0][2]

        ask(browser, "refuse")  # no conversation has it, and the text can be edited
        browser.wait("!running")
        assert browser.evaluate("[turns.length, byId('message').value]") == [1, "refuse"]
        assert browser.evaluate("document.querySelectorAll('.error').length") == 2

        assert browser.problems() == []
        assert {url.split("?")[0] for url in browser.requested() if not url.startswith("data:")} == {
            address, f"{address}chat.css", f"{address}chat.js", f"{address}info", f"{address}answer",
        }  # fmt: skip


@needs_chromium
def test_the_page_on_a_phone_and_in_the_dark(server, tmp_path):
    with Chromium(tmp_path / "profile") as browser:
        browser.size(360, 700)
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.wait("document.querySelectorAll('#settings input').length === 7")
        browser.evaluate("byId('panel').open = true")
        ask(browser, "x" * 400)
        browser.wait("!running && turns.length === 1")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 360, "no sideways scrolling"
        places = browser.evaluate(
            "[...document.querySelectorAll('.answer')].map((a) => a.getBoundingClientRect().toJSON())"
        )
        assert places[0]["x"] == places[1]["x"] and places[0]["y"] < places[1]["y"], "one below the other"
        assert min(colours(browser)) > 200
        browser.size(360, 700, dark=True)
        assert max(colours(browser)) < 60
        browser.screenshot(tmp_path / "phone.png")
        assert (tmp_path / "phone.png").stat().st_size > 5000
