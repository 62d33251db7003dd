"""The page in headless Chromium: what its script draws, and answers with HTML that must not run."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from report_runs import SAMPLE, ppo_lines, write_run

from dschat_ppo.html_report.page import page
from dschat_ppo.html_report.run_folder import read_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
_SECONDS = 60.0


class Chromium:
    """One page. As a context manager it ends the browser.

    Args:
        folder: an empty folder for its profile.
    """

    def __init__(self, folder: Path):
        read_commands, self.commands = os.pipe()
        self.replies, write_replies = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--remote-debugging-pipe",
                 "--no-first-run", f"--user-data-dir={folder}", "about:blank"]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_replies}', "bash", str(CHROMIUM), *flags],
            pass_fds=(read_commands, write_replies), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands), os.close(write_replies)
        self.buffer, self.count, self.session, self.events = b"", 0, None, list[dict[str, Any]]()
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands), os.close(self.replies)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command and its result; events that arrive meanwhile are kept in `events`."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        os.write(
            self.commands, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        while True:
            found = self._next()
            if found.get("id") == self.count:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self.buffer:
            assert select.select([self.replies], [], [], max(0, until - time.monotonic()))[0], "Chromium does not reply"
            self.buffer += os.read(self.replies, 2**16)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def size(self, width: int, height: int) -> None:
        """Show the page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, address: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression holds."""
        until = time.monotonic() + _SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

    def problems(self) -> list[str]:
        """Exceptions of scripts, and errors and warnings of the console so far."""
        found = [str(event["params"]) for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        entries = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        return found + [str(entry) for entry in entries if entry["level"] in ("error", "warning")]

    def requested(self) -> list[str]:
        """The addresses that the page has requested."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]


pytestmark = needs_chromium
EVIL = '</script><script>document.title="run"</script><img src=x onerror="document.title=1">'
TOOLS = """
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const figure = (title) => all("figure").find((one) => one.querySelector("h3").textContent.startsWith(title));
const chart = (title) => figure(title).querySelector(".plot").drawn[0].chart;
const legend = (title) => all(".u-series", figure(title)).map(({ children: [name, value] }) =>
  `${name.textContent}: ${value.textContent}`);
const press = (title, key) =>
  figure(title).querySelector(".plot > div").dispatchEvent(new KeyboardEvent("keydown", { key }));
const set = (one, name, value) => {
  one[name] = value;
  for (const kind of ["input", "change"]) one.dispatchEvent(new Event(kind, { bubbles: true }));
};
const settled = () => new Promise((done) => setTimeout(done, 100));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def opened(browser: Chromium, tmp_path: Path, *runs: dict) -> Chromium:
    """The page of these runs, drawn."""
    folders = [write_run(tmp_path / f"run{number}", **run) for number, run in enumerate(runs)]
    (tmp_path / "r.html").write_text(page(read_runs(folders), 0.0))
    browser.size(900, 900)
    browser.open(f"file://{tmp_path / 'r.html'}")
    browser.evaluate("window.on = new Promise((done) => setTimeout(done, 200))")
    return browser


def run_in(browser: Chromium, code: str):
    """What `code` returns in the page."""
    return browser.evaluate(f"(async () => {{ {TOOLS} {code} }})()")


def test_html_of_a_run_is_shown_and_does_not_run_and_nothing_is_loaded(browser, tmp_path):
    samples = [SAMPLE | {"prompt": EVIL, "answer": EVIL}]
    lines = [line | {f"reward/{EVIL}_mean": 1.0} for line in ppo_lines(3)]
    health = [{"step": 2, "name": EVIL, "seen": EVIL}]
    opened(browser, tmp_path, {"lines": lines, "samples": samples, "health": health})
    press = "press('Reward by source', 'ArrowRight'); press('Reward by source', 'ArrowRight'); await settled();"
    words = run_in(browser, press + "return [document.title, all('img').length, legend('Reward by source')]")
    assert words[:2] == ["Training report: run0", 0]
    assert words[2] == [f"step: 2; health: {EVIL}", f"reward/{EVIL}_mean: 1"], "uPlot shows texts as texts"
    answers = run_in(browser, "return all('#answers .card .text').map((one) => one.textContent)")
    assert answers == [EVIL, EVIL]
    assert run_in(browser, "return all('canvas').length") >= 6, "the policy of the page allows its own script"
    assert not browser.problems() and all(address.startswith("file:") for address in browser.requested())


def test_an_episode_is_shown_turn_by_turn(browser, tmp_path):
    turns = [{"role": "model", "text": EVIL, "reward": 0.5}, {"role": "call", "text": "f()", "reward": 1.0},
             {"role": "environment", "text": EVIL}]  # fmt: skip
    opened(browser, tmp_path, {"lines": ppo_lines(3), "samples": [SAMPLE | {"answer": "whole", "turns": turns}]})
    shown = run_in(
        browser,
        """
      const look = (one) => { const style = getComputedStyle(one); return style.borderLeftColor + style.marginLeft; };
      const turns = all(".turn");
      return [turns.map((one) => [...one.querySelectorAll("p")].map((p) => p.textContent)),
              new Set(turns.map(look)).size, document.body.textContent.includes("whole"), document.title];
    """,
    )
    blocks = [["model, reward 0.5", EVIL], ["call, reward 1", "f()"], ["environment", EVIL]]
    assert shown == [blocks, 3, False, "Training report: run0"]


def test_curves_are_where_the_numbers_are_and_nan_interrupts_them(browser, tmp_path):
    opened(browser, tmp_path, {"lines": ppo_lines(4)})
    data, place, gaps, smoothed = run_in(
        browser,
        """
      const [reward, explained] = [chart("Reward"), chart("Explained")];
      const { width, height } = reward.bbox, { left, top } = reward.bbox;
      const place = [1, 4].map((step) => (reward.valToPos(step, "x", true) - left) / width);
      const pixels = (name, step, value) => {
        const u = chart(name), x = u.valToPos(step, "x", true), y = u.valToPos(value, "y", true);
        const { data } = u.ctx.getImageData(Math.round(x) - 2, Math.round(y) - 2, 5, 5);
        return [...data].some((one, n) => n % 4 === 3 && one > 0);
      };
      const drawn = [["Reward", 3, 0.3], ["Reward", 2.5, 0.125], ["Explained", 3.5, 0.5], ["Explained", 1.5, 0.5]];
      const found = [reward.data, place, drawn.map((one) => pixels(...one))];
      set(document.getElementById("smoothing"), "value", 50);
      return [...found, explained.data[1]];
    """,
    )
    assert data == [[1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4], [0.05, 0.1, 0.15, 0.2]]
    assert place == [0, 1]
    assert gaps == [True, True, True, False], "a line to the next step, and none to the step that is NaN"
    assert smoothed == [0.5, None, 0.5, 0.5]
