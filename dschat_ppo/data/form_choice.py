"""Choice among the forms that fit the columns of a data set, by what they read in its first rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from dschat_ppo.data.examples import Row, Use
from dschat_ppo.data.form_kinds import Kind
from dschat_ppo.data.form_rows import Draft, Reading
from dschat_ppo.data.messages import Message, Messages
from dschat_ppo.errors import UserError

_SENTENCE_ENDS = ".!?…。！？｡．;；,，、)）]】\"'”’»」』*"
_WITHOUT_ANSWER = ("prompt_response", "messages", "sharegpt", "verl")  # they also hold prompts alone

_SPECIAL = ("verl", "kto", "ranked", "hh", "stepwise", "prm800k", "math_shepherd")


@dataclass(frozen=True)
class Candidate:
    """A form with its columns (role -> column), and what it reads in the first rows.

    Attributes:
        drafts: use -> for each row its drafts, or None where it cannot be read.
        is_chat: whether the form finds chat messages, not text.
        fits: whether it reads at least half of the rows.
        problem: with the first row that it cannot read, or "".
    """

    kind: Kind
    columns: dict[str, str]
    drafts: dict[Use, list[list[Draft] | None]]
    is_chat: bool
    fits: bool
    problem: str


def try_kind(kind: Kind, columns: dict[str, str], rows: list[Row]) -> Candidate:
    """Read the first rows in one form."""
    rendering = "chat" if kind.rendering in ("chat", "content") else "text"
    reading = Reading(kind.name, tuple(columns.items()), rendering)  # type: ignore[arg-type]
    uses = [use for use in kind.uses(columns) if use != "unpaired" and not (kind.name == "kto" and use == "preference")]
    drafts: dict[Use, list[list[Draft] | None]] = {}
    first_problem = ""
    for use in uses:
        found: list[list[Draft] | None] = []
        for row in rows:
            try:
                found.append(kind.read(row, reading, use))
            except UserError as problem:
                found.append(None)
                first_problem = first_problem or str(problem)
        drafts[use] = found
    is_chat = kind.rendering == "chat" or (
        kind.rendering == "as given"
        and any(isinstance(d.prompt, list) for found in drafts.values() for some in found for d in some or [])
    )
    telling = [use for use in uses if use != "prompt" or kind.name in _WITHOUT_ANSWER]
    fits = any(2 * sum(some is not None for some in drafts[use]) >= len(rows) for use in telling)
    return Candidate(kind, columns, drafts, is_chat, fits, first_problem)


def choose(name: str, found: list[Candidate]) -> Candidate:
    """The form of a data set among those that fit its columns: chat first, then the one that serves most. `UserError`
    if two forms read the rows differently, or no form reads them."""
    fitting = [candidate for candidate in found if candidate.fits]
    shadowed = {
        other for candidate in fitting for other in candidate.kind.shadows
        if other != "text" or "messages" in candidate.columns  # pairs of transcripts say nothing of `text`
    }  # fmt: skip
    if any(one.kind.name == "prompt_response" and one.columns.get("response") == "text" for one in fitting):
        shadowed.add("text")  # the answer to a prompt
    fitting = [candidate for candidate in fitting if candidate.kind.name not in shadowed]
    if not fitting:
        likely = min(found, key=lambda one: one.kind.name in _SPECIAL)
        if likely.kind.name not in _SPECIAL:
            return likely  # its reader says what is wrong with each row
        raise UserError(
            f"{name}: its columns are those of the form {likely.kind.name}, but its first rows are not: "
            f"{likely.problem}; name the columns to use (--prompt_column, --response_column, ...) or correct the rows"
        )
    for first, second in combinations(fitting, 2):
        _require_same(name, first, second)
    chosen = max(
        fitting, key=lambda candidate: (candidate.is_chat, candidate.kind.name != "text", len(candidate.drafts))
    )
    if chosen.kind.name == "preference":
        _require_prompt_outside(name, chosen)
    return chosen


def _require_same(name: str, first: Candidate, second: Candidate) -> None:
    for use in (use for use in first.drafts if use in second.drafts):
        for one, other in zip(first.drafts[use], second.drafts[use], strict=True):
            if one is None or other is None:
                continue
            if len(one) != len(other) or not all(map(_says_the_same, one, other)):
                raise UserError(
                    f"{name}: its rows can be read in two ways: {_shown_as(first, one)}, or "
                    f"{_shown_as(second, other)}; choose with --data_format {first.kind.name} or --data_format "
                    f"{second.kind.name}, or name the columns (--prompt_column, --messages_column, ...)"
                )


def _shown_as(candidate: Candidate, drafts: list[Draft]) -> str:
    return f"as {candidate.kind.name}, {shown(drafts[0]) if drafts else 'nothing'}"


def _require_prompt_outside(name: str, chosen: Candidate) -> None:
    """Refuse text answers that repeat the prompt: either the prompt is read twice, or it belongs to the answers."""
    pairs = [some[0] for some in chosen.drafts.get("preference", []) if some]
    repeated = [
        draft for draft in pairs
        if isinstance(draft.prompt, str) and draft.prompt
        and all(isinstance(answer, str) and answer.startswith(draft.prompt) for answer in draft.answers)
    ]  # fmt: skip
    if 2 * len(repeated) > len(pairs):
        raise UserError(
            f"{name}: its rows can be read in two ways, because chosen and rejected repeat the prompt "
            f"{str(repeated[0].prompt)[:40]!r}: as preference, the prompt occurs twice (--data_format preference); as "
            "implicit_preference, once (--data_format implicit_preference)"
        )


def _says_the_same(one: Draft, other: Draft) -> bool:
    if one.prompt == "" or other.prompt == "":  # plain text, which may repeat what the other columns say
        plain, parts = (one, other) if one.prompt == "" else (other, one)
        pieces = [_last_user(parts.prompt), *map(_words, parts.answers)]
        lines = [line.strip() for piece in pieces for line in piece.splitlines()]
        return parts.prompt == "" or all(line in _words(plain.answers[0]) for line in lines)
    same_answers = list(map(_words, one.answers)) == list(map(_words, other.answers))
    for text, messages in ((one.prompt, other.prompt), (other.prompt, one.prompt)):
        if isinstance(text, str) and isinstance(messages, list):
            asked = [turn["content"].strip() for turn in messages if turn["role"] == "user"]
            return text.strip() in asked and same_answers
    return one.prompt == other.prompt and same_answers


def _last_user(prompt: str | Messages) -> str:
    if isinstance(prompt, str):
        return prompt
    return next((turn["content"] for turn in reversed(prompt) if turn["role"] == "user"), "")


def _words(answer: str | Message) -> str:
    return answer if isinstance(answer, str) else answer["content"]


def glued_row(chosen: Candidate) -> Draft | None:
    """A row whose text prompt and answer run into each other, if more than half of the first rows are such."""
    read = chosen.drafts.get("sft") or chosen.drafts.get("steps") or []
    drafts = [some[0] for some in read if some]
    glued = [draft for draft in drafts if draft.answers and _is_glued(draft.prompt, draft.answers[0])]
    return glued[0] if 2 * len(glued) > len(drafts) else None


def _is_glued(prompt: str | Messages, answer: str | Message) -> bool:
    """Whether a word or sentence ends the prompt, and a word starts the answer, without a space between them."""
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
        return False
    return (prompt[-1].isalnum() or prompt[-1] in _SENTENCE_ENDS) and answer[0].isalnum()


def shown(draft: Draft, as_chat: bool = False) -> str:
    """A draft for a message: the end of its prompt, and the start of its answers."""
    if isinstance(draft.prompt, list):
        text = "; ".join(f"{turn['role']}: {_end(turn['content'])}" for turn in draft.prompt[-2:])
    else:
        role = "user:" if as_chat else "prompt"
        text = f"{role} {_end(draft.prompt)}" if draft.prompt else "text without a prompt"
    return text + "".join(f", answer {_words(answer)[:40]!r}" for answer in draft.answers)


def _end(text: str) -> str:
    return repr(text if len(text) <= 40 else f"...{text[-40:]}")
