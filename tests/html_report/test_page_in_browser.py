"""The page in headless Chromium: what its script draws, its controls, and answers with HTML that must not run."""

import json
import math
import re
import shutil
import subprocess

import pytest
from report_runs import ppo_lines, write_run

from dschat_ppo.html_report.page import page
from dschat_ppo.html_report.run_folder import read_runs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = '</script><script>document.title="run"</script><img src=x onerror="document.title=1">'
ASSERT = """
<script>
const found = [];
addEventListener("error", (event) => found.push(`error: ${event.message}`));
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const figure = (title) => all("figure").find((one) => one.querySelector("h3").textContent.startsWith(title));
const wait = () => new Promise((done) => setTimeout(done, 300));
addEventListener("load", async () => {
  try { await wait(); await (async () => { CODE })(); } catch (problem) { found.push(`error: ${problem}`); }
  document.body.replaceChildren(JSON.stringify(found));
});
</script>
"""

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")


def dump(tmp_path, text: str, width: int = 900) -> str:
    """The document after its scripts ran."""
    (tmp_path / "r.html").write_text(text)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--hide-scrollbars",
        "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000",
        f"file://{tmp_path / 'r.html'}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def run_in(tmp_path, text: str, code: str, width: int = 900) -> list:
    """What `code` adds to `found` in the page. The policy of the page is removed, as it forbids other scripts."""
    open_page = re.sub(r"<meta http-equiv=[^>]*>", "", text)
    head = ASSERT.replace("CODE", code)
    body = dump(tmp_path, open_page.replace("<title>", head + "<title>", 1), width).partition("<body>")[2]
    found = json.loads(body.partition("</body>")[0])
    assert not [one for one in found if str(one).startswith("error")], found
    return found


def made_page(tmp_path, *runs: dict) -> str:
    folders = [write_run(tmp_path / f"run{number}", **run) for number, run in enumerate(runs)]
    return page(read_runs(folders), 0.0, tmp_path)


@needs_browser
def test_html_in_answers_is_shown_and_does_not_run(tmp_path):
    samples = [{"step": 1, "prompt": EVIL, "answer": EVIL, "score": 1.0, "ended": "eos"}]
    document = dump(tmp_path, made_page(tmp_path, {"lines": ppo_lines(3), "samples": samples}))
    assert "<title>Training report: run0</title>" in document
    assert "<img" not in document
    assert document.count('&lt;/script&gt;&lt;script&gt;document.title="run"') == 2, (
        "the prompt and the answer are text"
    )
    assert document.count('<div class="chart"') >= 6, "the policy of the page allows its own script"


@needs_browser
def test_curves_are_where_the_numbers_are(tmp_path):
    code = """
      const path = figure("Reward").querySelector(".line.c0").getAttribute("d");
      found.push(path.match(/[ML][^ML]+/g).map((point) => point.slice(1).split(" ").map(Number)));
      found.push(figure("Explained").querySelector(".line.c0").getAttribute("d").split("M").length - 1);
      found.push(all(".gap", figure("Explained")).length);
    """
    points, pieces, gaps = run_in(tmp_path, made_page(tmp_path, {"lines": ppo_lines(4)}), code)
    xs, ys = zip(*points, strict=True)
    assert xs[0] == 54, "the left end of the axis"
    assert all(abs(right - left - (xs[-1] - xs[0]) / 3) < 0.2 for left, right in zip(xs, xs[1:], strict=False))
    assert all(abs(low - high - (ys[0] - ys[-1]) / 3) < 0.2 for low, high in zip(ys, ys[1:], strict=False))
    assert ys[0] - ys[-1] > 100, "the score rises over most of the height"
    assert (pieces, gaps) == (2, 1), "NaN at step 2 interrupts the line"


@needs_browser
def test_smoothing_arrow_keys_and_hidden_runs(tmp_path):
    code = """
      const chart = () => figure("Reward").querySelector(".chart");
      const press = (key) => chart().dispatchEvent(new KeyboardEvent("keydown", { key }));
      const read = () => figure("Reward").querySelector(".readout").textContent;
      press("ArrowRight"); press("ArrowRight"); found.push(read());
      const slider = document.getElementById("smoothing");
      slider.value = 50; slider.dispatchEvent(new Event("input")); await wait();
      press("End"); found.push(read());
      found.push(all(".raw", figure("Reward").querySelector(".chart")).length);
      const box = document.querySelector("[data-run='1']");
      box.checked = false; box.dispatchEvent(new Event("change")); await wait();
      press("End"); found.push(read(), all(".line.c1, .raw.c1", figure("Reward").querySelector(".chart")).length);
    """
    health = [{"step": 2, "name": "kl_jump"}]
    text = made_page(tmp_path, {"lines": ppo_lines(2), "health": health}, {"lines": ppo_lines(1)})
    second, smoothed, raw, hidden, lines = run_in(tmp_path, text, code)
    assert second == "step 2: run0 0.2; health: kl_jump"
    expected = (0.25 * 0.1 + 0.5 * 0.2) / 0.75
    assert smoothed == f"step 2: run0 0.2 ({expected:.4g}); health: kl_jump"
    assert math.isclose(expected, 0.16667, abs_tol=1e-5)
    assert raw == 2
    assert (hidden, lines) == (smoothed, 0)


@needs_browser
def test_answers_are_compared_searched_and_sorted(tmp_path):
    code = """
      const cards = () => all("#answers .answer-card").map((card) => all(".text", card).map((one) => one.textContent));
      found.push(cards());
      const [left, , search] = all("#answers select, #answers input");
      left.value = "0:5"; left.dispatchEvent(new Event("input", { bubbles: true }));
      search.value = "TEA"; search.dispatchEvent(new Event("input", { bubbles: true }));
      found.push(cards().slice(0, 1), cards().length);
      const order = all("#answers select")[3];
      order.value = "high"; order.dispatchEvent(new Event("input", { bubbles: true }));
      found.push(cards().slice(1));
    """

    def evaluation(step):
        return [{"prompt": prompt, "answers": [f"{prompt} at {step}"], "scores": [1.0], "lengths": [3], "ended": [True]}
                for prompt in ("tea", "cake")]  # fmt: skip

    samples = [{"step": 1, "prompt": "p", "answer": f"a{score}", "score": score} for score in (1, 3, 2)]
    text = made_page(tmp_path, {
        "lines": ppo_lines(3), "step_000000": evaluation(0), "step_000005": evaluation(5), "samples": samples,
    })  # fmt: skip
    first, matching, count, sorted_cards = run_in(tmp_path, text, code)
    training = [["p", "a1"], ["p", "a3"], ["p", "a2"]]
    assert first == [["tea", "tea at 0", "tea at 5"], ["cake", "cake at 0", "cake at 5"], *training]
    assert (matching, count) == ([["tea", "tea at 5", "tea at 5"]], 4)
    assert sorted_cards == [["p", "a3"], ["p", "a2"], ["p", "a1"]]


@needs_browser
@pytest.mark.parametrize("steps", [1, 20_000])
def test_a_phone_shows_any_number_of_steps_without_scrolling_sideways(tmp_path, steps):
    code = """
      const root = document.documentElement;
      found.push(root.scrollWidth <= root.clientWidth, root.clientWidth, all("figure .chart svg").length > 5);
      found.push(all("svg path").some((path) => /NaN|Infinity/.test(path.getAttribute("d"))));
    """
    fits, width, drawn, broken = run_in(tmp_path, made_page(tmp_path, {"lines": ppo_lines(steps)}), code, width=500)
    assert (fits, width, drawn, broken) == (True, 500, steps > 1, False), "one step is shown as numbers"


@needs_browser
def test_a_phone_folds_all_but_the_overview_and_a_link_unfolds_its_section(tmp_path):
    code = """
      const parts = all("details.part"), height = () => document.documentElement.scrollHeight;
      found.push(parts.filter((part) => part.open).length, all("#overview .chart").length);
      const folded = height();
      document.querySelector("nav a[href='#policy']").click(); await wait();
      found.push(parts.filter((part) => part.open).map((part) => part.parentElement.id));
      for (const part of parts) part.open = true;
      await wait();
      found.push(folded < height() / 2);
    """
    text = made_page(tmp_path, {"lines": ppo_lines(4)})
    assert run_in(tmp_path, text, code, width=500) == [0, 2, ["policy"], True]
    assert run_in(tmp_path, text, code)[0] > 5, "nothing is folded on a wide screen"


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours `#rrggbb` (WCAG 2.1, relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_and_curves_contrast_with_the_page_in_every_scheme():
    from dschat_ppo.html_report.page import ASSETS

    schemes = re.findall(r":root \{(.*?)\}", (ASSETS / "page.css").read_text(), re.DOTALL)
    assert len(schemes) == 3, "light, dark and print"
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        assert contrast("#ffffff", "#000000") == pytest.approx(21)
        for name in ("ink", "quiet", "link", "mark"):
            assert contrast(colours[name], colours["page"]) >= 4.5, name
        assert contrast(colours["quiet"], colours["panel"]) >= 4.5
        for number in range(8):
            assert contrast(colours[f"c{number}"], colours["page"]) >= 4, number


@needs_browser
def test_one_evaluation_is_a_number_and_not_a_curve(tmp_path):
    code = """
      found.push(figure("Held-out evaluation").querySelector(".plot").innerText.split(/\\s*\\n\\s*/));
      found.push(all(".chart", figure("Held-out evaluation")).length);
      found.push(all("#answers select").length, all("#answers .columns > div").length);
    """
    answers = [{"prompt": "p", "answers": ["a"], "scores": [0.5], "lengths": [2], "ended": ["eos"]}]
    run = {"lines": [{"step": 0, "time": 1.0, "eval/score": 7.497, "eval/pass@1": 0.5}], "step_000000": answers}
    words, charts, selects, columns = run_in(tmp_path, made_page(tmp_path, run), code)
    assert " ".join(words) == "One point, at step 0: eval/score 7.497 eval/pass@1 0.5"
    assert (charts, selects, columns) == (0, 0, 1), "nothing to choose, and the answer once"


@needs_browser
def test_few_points_are_marked_and_name_their_steps(tmp_path):
    code = """
      const evaluation = figure("Held-out evaluation"), reward = figure("Reward");
      found.push(all("circle.point", evaluation).length, all("circle.point", reward).length);
      const ticks = (one) => all("text[text-anchor=middle]", one).map((text) => text.textContent);
      found.push(ticks(evaluation));
      found.push(all(".legend li", figure("Time")).map((entry) => entry.title));
    """
    lines = ppo_lines(40)
    for line in (lines[4], lines[39]):
        line["eval/score"] = line["reward/score_mean"]
    evaluated, trained, ticks, titles = run_in(tmp_path, made_page(tmp_path, {"lines": lines}), code)
    assert (evaluated, trained) == (2, 0)
    assert ticks == ["5", "40", "step"]
    assert titles == ["forward and backward passes and the optimizer", "generation of the responses"]
