"""The page of the chat in headless Chromium: two models, stop, undo, retry, settings, and no other address."""

import json
import threading
import time
import urllib.request
from dataclasses import asdict

import pytest
from headless_chromium import Chromium, needs_chromium
from served import send, served

from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat_interfaces import page
from dschat_ppo.tools.chat_model import Token
from dschat_ppo.tools.sampling_settings import SamplingSettings

MARKUP = "<b>&amp; <img src=http://evil.example/x.png>\n    ![x](http://evil.example/y.png)"


class Model:
    """Answers "NAME heard N: TEXT MARKUP" in pieces; "forever" never ends, and "refuse" raises."""

    def __init__(self, name: str):
        self.name, self.has_template, self.asked, self.stopped = name, True, [], threading.Event()

    def answer(self, messages, settings, number):
        self.asked.append((messages, settings, number))
        last = messages[-1]["content"]
        if last == "refuse":
            raise UserError(f"{self.name} refuses")
        try:
            yield Token(f"{self.name} heard {len(messages)}: ", "")
            while last == "forever":
                time.sleep(0.02)
                yield Token("more ", "")
            yield Token(f"{last} {MARKUP}", "cut after 2 tokens")
        finally:
            self.stopped.set()


@pytest.fixture
def page_of_two(tmp_path, monkeypatch):
    """(the models, address of the page)."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    models = [Model("step1"), Model("actor")]
    with served(page(models, SamplingSettings(top_k=3), "be kind")) as address:
        yield models, f"{address}/"


def test_web_sites_cannot_use_the_page_and_it_may_load_nothing_else(page_of_two, tmp_path):
    """`test_serve_reward.py` shows which headers are those of web sites. They may send uploads without asking."""
    _, address = page_of_two
    with urllib.request.urlopen(address, timeout=20) as page:
        policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'self' ") and "frame-ancestors 'none'" in policy and "http" not in policy
    for path in ("", "gradio_api/queue/join"):
        assert send(address + path, Host="evil.example")[0] == 400
    data = ["", 0, [[], []], "", *asdict(SamplingSettings()).values()]
    event = json.dumps({"data": data, "fn_index": 0, "session_hash": "abc"}).encode()
    form = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhello\r\n--x--\r\n'
    for path, body, kind in (("queue/join", event, "application/json"),
                             ("upload", form, "multipart/form-data; boundary=x")):  # fmt: skip
        url = f"{address}gradio_api/{path}"
        for headers in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
            assert send(url, body, Content_Type=kind, **headers)[0] == 403
        assert not list(tmp_path.rglob("a.txt"))
        assert send(url, body, Content_Type=kind, Origin=address.rstrip("/"), Sec_Fetch_Site="same-origin")[0] == 200
    assert list(tmp_path.rglob("a.txt"))


BOX = "document.querySelector('textarea[placeholder^=Message]')"
TEXTS = "[...document.querySelectorAll('.message-content')].map((each) => each.innerText.trim())"


def write(browser: Chromium, text: str) -> None:
    value = f"{BOX}.value = {json.dumps(text)}; {BOX}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    browser.evaluate(value)
    browser.wait(f"{BOX}.value === {json.dumps(text)}")


def ask(browser: Chromium, text: str) -> None:
    write(browser, text)
    browser.evaluate("document.querySelector('.submit-button').click()")


def click(browser: Chromium, selector: str) -> None:
    browser.wait(f"document.querySelector('{selector}')")
    browser.evaluate(f"document.querySelector('{selector}').click()")


@needs_chromium
def test_the_page(page_of_two, tmp_path):
    (first, second), address = page_of_two
    with Chromium(tmp_path / "profile") as browser:
        browser.size(1200, 800)
        browser.open(address)
        browser.wait(BOX)
        ask(browser, "hello<i>")
        browser.wait(f"{TEXTS}.filter((text) => text.endsWith('y.png)')).length === 2")
        answers = [f"{name} heard 2: hello<i> {MARKUP}" for name in ("step1", "actor")]
        assert browser.evaluate(TEXTS) == ["hello<i>", answers[0], "hello<i>", answers[1]]
        notes = "[...document.querySelectorAll('textarea')].map((each) => each.value)"
        assert "step1: cut after 2 tokens\nactor: cut after 2 tokens" in browser.evaluate(notes)
        assert first.asked[0][0][0] == {"role": "system", "content": "be kind"}
        assert first.asked[0][1:] == (SamplingSettings(top_k=3), 0) == second.asked[0][1:]
        places = "[...document.querySelectorAll('.chat')].map((each) => each.getBoundingClientRect().toJSON())"
        left, right = browser.evaluate(places)
        assert left["x"] < right["x"] and left["y"] == right["y"], "side by side"

        ask(browser, "forever")  # the answers appear while they are generated; Stop keeps what has arrived
        browser.wait(f"{TEXTS}.filter((text) => text.includes('more more more')).length === 2")
        write(browser, "next")
        browser.wait(f"{TEXTS}.filter((text) => text.includes('more '.repeat(20).trim())).length === 2")
        assert browser.evaluate(f"{BOX}.value") == "next", "the next message can be written meanwhile"
        first.stopped.clear(), second.stopped.clear()
        click(browser, ".stop-button")
        assert first.stopped.wait(10) and second.stopped.wait(10)
        click(browser, "button[aria-label=Undo]:enabled")
        browser.wait(f"{TEXTS}.length === 4 && {BOX}.value === 'forever'")

        click(browser, "button[aria-label=Retry]:enabled")
        browser.wait(f"{TEXTS}.filter((text) => text.endsWith('y.png)')).length === 2 && {BOX}.value === ''")
        assert [message["content"] for message in first.asked[-1][0]] == ["be kind", "hello<i>"]
        assert first.asked[-1][2] == 2, "other random numbers"

        ask(browser, "refuse")  # no conversation has it, and the text can be edited
        browser.wait("document.body.innerText.includes('step1 refuses')")
        browser.wait(f"{TEXTS}.length === 4 && {BOX}.value === 'refuse'")

        assert browser.problems() == []
        assert [url for url in browser.requested() if not url.startswith((address, "data:", "blob:"))] == []

        ask(browser, "forever")
        browser.wait(f"{TEXTS}.filter((text) => text.includes('more more more')).length === 2")
        first.stopped.clear(), second.stopped.clear()
    assert first.stopped.wait(20) and second.stopped.wait(20), "an answer stops when its page is closed"
