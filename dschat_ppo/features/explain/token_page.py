"""Recorded answers in HTML: the tokens of an answer, coloured by one of their numbers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dschat_ppo.features.explain.explained_tokens import (
    QUANTITIES,
    ExplainedToken,
    explained_tokens,
    update_of,
)
from dschat_ppo.features.explain.record_files import RecordedRow, RecordedStep
from dschat_ppo.features.explain.sentences import advantage_sentence
from dschat_ppo.features.explain.terminal import PROMPT_TOKENS, title
from dschat_ppo.html_report.page import ASSETS as REPORT_ASSETS

ASSETS = Path(__file__).parent / "assets"
STYLE = "tokens.css"
SCRIPT = "tokens.js"
# classes of colours: 0 is the most negative, the middle one is 0
SHADES = 9
LABELS = {
    "advantage": "advantage",
    "value": "value",
    "return": "return",
    "log_ratio": "log ratio",
    "kl": "KL",
    "entropy": "entropy",
    "reward": "reward",
    "clipped": "clipped",
}


def style() -> str:
    """The style of `fold_out`."""
    return (ASSETS / STYLE).read_text(encoding="utf-8")


def script() -> str:
    """The script of `fold_out`: it works without, and then shows advantages alone."""
    return (ASSETS / SCRIPT).read_text(encoding="utf-8")


def page_of(step: RecordedStep, rows: Sequence[RecordedRow]) -> str:
    """A page of these rows, which needs no network."""
    content = "\n".join(
        f'<div class="card">{fold_out(row, step, is_open=True)}</div>' for row in rows
    )
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    styles = (REPORT_ASSETS / "report.css").read_text(encoding="utf-8") + style()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<title>PPO step {step.step}: what each token received</title>
<style>{styles}</style>
</head>
<body>
<h1>PPO step {step.step}: what each token received</h1>
{content}
<script>{script()}</script>
</body>
</html>
"""


def fold_out(row: RecordedRow, step: RecordedStep, is_open: bool = False) -> str:
    """The tokens of a row in a part that opens, in HTML; no text of the run is markup in it."""
    update = update_of(row)
    tokens = explained_tokens(row, step, update)
    scales = {name: _largest_size(tokens, name) for name in QUANTITIES}
    present = [name for name, scale in scales.items() if scale is not None]
    prompt = escape("".join(row.prompt[-PROMPT_TOKENS:]))
    if len(row.prompt) > PROMPT_TOKENS:
        folded = escape("".join(row.prompt[:-PROMPT_TOKENS]))
        prompt = f"<details><summary>the prompt's beginning</summary>{folded}</details>{prompt}"
    return (
        f'<details class="tokens" data-key="tokens {step.step} {row.index}"'
        f"{' open' if is_open else ''}><summary>Tokens</summary>"
        f'<p class="quiet">{escape(title(row, step, update))}</p>'
        f"{_settings(scales, present)}"
        f'<div class="text quiet">{prompt}</div>'
        f'<div class="text">{_spans(tokens, scales, present)}</div>'
        f'<p class="quiet">where A comes from: {escape(advantage_sentence(row, step))}</p>'
        "</details>"
    )


def _settings(scales: dict[str, float | None], present: Sequence[str]) -> str:
    """What chooses the quantity that the colours show; nothing for a row without numbers."""
    if not present:
        return ""
    options = ""
    limits = ""
    for name in present:
        options += f'<option value="{name}">{LABELS[name]}</option>'
        hidden = "" if name == present[0] else " hidden"
        limits += (
            f'<span class="scale" data-of="{name}"{hidden}>{LABELS[name]} from -{scales[name]:.3g}'
            f" (−) to +{scales[name]:.3g} (+), 0 has no colour</span>"
        )
    return (
        '<p class="quiet"><label>Colour'
        f' <select class="quantity">{options}</select></label> {limits}</p>'
    )


def _spans(
    tokens: Sequence[ExplainedToken], scales: dict[str, float | None], present: Sequence[str]
) -> str:
    """The tokens as elements; a thought is inside a part that opens."""
    elements = []
    for position, token in enumerate(tokens):
        begins = position == 0 or not tokens[position - 1].is_thought
        if token.is_thought and begins:
            elements.append('<details class="thought"><summary>thought</summary>')
        elements.append(_span(token, scales, present))
        ends = position + 1 == len(tokens) or not tokens[position + 1].is_thought
        if token.is_thought and ends:
            elements.append("</details>")
    return "".join(elements)


def _span(token: ExplainedToken, scales: dict[str, float | None], present: Sequence[str]) -> str:
    """A token, with its shade of each quantity and its numbers."""
    text = escape(token.piece)
    if not token.is_chosen:
        return f'<span class="observed" title="{escape(token.why)}">{text}</span>'
    shades = [_shade(token.numbers[name], scales[name]) for name in present]
    texts = []
    for name in present:
        value = token.numbers[name]
        if value is not None and name != "clipped":
            texts.append(f"{QUANTITIES[name]} {value:+.3f}")
    if token.ratio is not None:
        texts.append(f"ratio {token.ratio:.3f}")
    texts.append(token.why)
    classes = f"token s{shades[0]}"
    if token.numbers["clipped"]:
        classes += " clipped"
    if token.why.startswith("not "):
        classes += " masked"
    return (
        f'<span class="{classes}" tabindex="0" data-shades="{" ".join(map(str, shades))}"'
        f' data-numbers="{escape("; ".join(texts))}">{text}</span>'
    )


def _largest_size(tokens: Sequence[ExplainedToken], name: str) -> float | None:
    """The largest size of a quantity; None if the run does not have it."""
    sizes = []
    for token in tokens:
        value = token.numbers[name]
        if value is not None:
            sizes.append(abs(value))
    return max(sizes, default=None)


def _shade(value: float | None, largest: float | None) -> int:
    """The class of a number's colour."""
    middle = SHADES // 2
    if value is None or not largest:
        return middle
    return middle + round(value / largest * middle)
