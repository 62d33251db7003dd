"""Recorded answers as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dschat_ppo.common.paths import SAMPLES
from dschat_ppo.errors import counted
from dschat_ppo.features.explain.explained_tokens import (
    ExplainedToken,
    explained_tokens,
    update_of,
)
from dschat_ppo.features.explain.record_files import RecordedRow, RecordedStep
from dschat_ppo.features.explain.sentences import advantage_sentence

# by the number of `types.FinishReason`, whose module imports torch
ENDS = ("EOS", "a stop string", "the length limit")
PROMPT_TOKENS = 16  # that are left of a prompt
WIDEST_PIECE = 14


def step_lines(step: RecordedStep) -> list[str]:
    """A line for each recorded row of a PPO step."""
    lines = [f"PPO step {step.step}: {len(step.rows)} of {step.row_count} rows are recorded"]
    for row in step.rows:
        answer = one_line("".join(row.pieces))
        mark = f" (in {SAMPLES})" if row.index in step.samples and step.is_whole else ""
        lines.append(f"  row {row.index}: score {score_text(row)}, {answer[:60]}{mark}")
    return lines


def row_lines(
    row: RecordedRow,
    step: RecordedStep,
    positions: slice,
    shows_thoughts: bool,
    update_number: int | None = None,
) -> list[str]:
    """What each token of a row received, as a table."""
    update = update_of(row, update_number)
    tokens = explained_tokens(row, step, update)
    prompt = "".join(row.prompt[-PROMPT_TOKENS:])
    folded = "... " if len(row.prompt) > PROMPT_TOKENS else ""
    lines = [
        title(row, step, update),
        f"prompt    {folded}{one_line(prompt)}",
        f"answer    {'|'.join(one_line(token.piece) for token in tokens)}",
        "",
        f"{'token':>18}{'A':>9}{'V':>9}{'R':>9}{'ratio':>8}  clip{'KL':>9}{'H':>7}{'reward':>9}"
        "   why",
    ]
    left = list(enumerate(tokens))[positions]
    while left:
        position, token = left[0]
        run = _run_of(left, shows_thoughts)
        if not token.is_chosen:
            text = one_line("".join(tokens[at].piece for at, _ in run))
            length = counted(len(run), "token")
            observed = f"observation of {length}"
            if token.begun_context is not None:
                observed = f"prompt of context {token.begun_context}, {length}"
            lines.append(f"{position:>4} {_piece(text)}   {observed}: not trained")
        elif token.is_thought and not shows_thoughts:
            lines.append(f"{position:>4} {_piece('<think>')}   {_folded_thought(run)}")
        else:
            lines.append(_token_line(position, token))
        left = left[len(run) :]
    lines.append(f"where A comes from: {advantage_sentence(row, step)}")
    if update is not None and len(row.updates) == 1 and step.flags["ppo_epochs"] == 1:
        lines.append("the step makes one update, so every ratio is that of a policy not yet moved")
    return lines


def title(row: RecordedRow, step: RecordedStep, update: int | None) -> str:
    """Step, row, score and end of an answer, in a line."""
    ended = ENDS[row.of_row["finish_reason"]]
    text = (
        f"PPO step {step.step}, row {row.index} of {step.row_count}      score {score_text(row)}"
        f"{_source_scores(row, step)}   ended by {ended}"
    )
    if update is not None:
        return f"{text}   update {update + 1} of {len(row.updates)}"
    return text


def score_text(row: RecordedRow) -> str:
    """The score of a row; "none" where it has none."""
    if not row.of_row["has_score"]:
        return "none"
    return f"{row.of_row['scores']:.3f}"


def one_line(text: str) -> str:
    """The text without characters that move a cursor; a line break is left as ⏎."""
    characters = []
    for character in text:
        if character == "\n":
            characters.append("⏎")
        elif character.isprintable():
            characters.append(character)
        else:
            characters.append("\N{REPLACEMENT CHARACTER}")
    return "".join(characters)


def _run_of(
    left: Sequence[tuple[int, ExplainedToken]], shows_thoughts: bool
) -> Sequence[tuple[int, ExplainedToken]]:
    """The first tokens that are left in one line: one observation or prompt, a thought, or a
    token."""
    _, first = left[0]
    count = 1
    if not first.is_chosen:
        while count < len(left) and _is_same_observation(first, left[count][1]):
            count += 1
    elif first.is_thought and not shows_thoughts:
        while count < len(left) and left[count][1].is_thought and left[count][1].is_chosen:
            count += 1
    return left[:count]


def _is_same_observation(first: ExplainedToken, token: ExplainedToken) -> bool:
    """Whether neither is chosen, and both are or are not in the prompt of the same context."""
    return not token.is_chosen and token.begun_context == first.begun_context


def _token_line(position: int, token: ExplainedToken) -> str:
    """The line of one token."""
    quantities = token.numbers
    clipped = "C" if quantities["clipped"] else "."
    cells = [
        f"{position:>4} {_piece(one_line(token.piece))}",
        _number(quantities["advantage"], 9, "+.3f"),
        _number(quantities["value"], 9, "+.3f"),
        _number(quantities["return"], 9, "+.3f"),
        _number(token.ratio, 8, ".3f"),
        f"{clipped:>6}",
        _number(quantities["kl"], 9, ".4f"),
        _number(quantities["entropy"], 7, ".2f"),
        _number(quantities["reward"], 9, "+.3f"),
        f"   {token.why}",
    ]
    return "".join(cells)


def _folded_thought(run: Sequence[tuple[int, ExplainedToken]]) -> str:
    """A folded thought, in words."""
    advantages = [token.numbers["advantage"] for _, token in run]
    known = [advantage for advantage in advantages if advantage is not None]
    if not known:
        return f"thought of {counted(len(run), 'token')} (--thoughts shows them)"
    mean = sum(known) / len(known)
    largest = max(known, key=abs)
    return (
        f"thought of {counted(len(run), 'token')}: A {mean:+.3f} in the mean,"
        f" {largest:+.3f} the largest (--thoughts shows them)"
    )


def _piece(text: str) -> str:
    return f"{text[:WIDEST_PIECE]:>{WIDEST_PIECE - 1}}"


def _number(value: float | None, width: int, form: str) -> str:
    """A number, or a dash."""
    if value is None:
        return f"{'-':>{width}}"
    return f"{value:{form}}".rjust(width)


def _source_scores(row: RecordedRow, step: RecordedStep) -> str:
    """The scores by source, where there are several."""
    texts = []
    for name, score in zip(step.sources, row.of_row["source_scores"], strict=True):
        if not math.isnan(score):
            texts.append(f"{name} {score:.3f}")
    if len(step.sources) < 2:
        return ""
    return f" ({', '.join(texts)})"
