"""The form of a data set, detected once from its columns and first rows: which form fits, and
whether its prompts are text or chat."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dschat_ppo.common.own_functions import file_named, own_function
from dschat_ppo.config.data_flags import DataFlags, Use
from dschat_ppo.config.schema import is_own_function
from dschat_ppo.data.advice import Choice, as_known_set
from dschat_ppo.data.content import CONTENT, is_of_rewards
from dschat_ppo.data.examples import Example, Row, field_at, has_value, json_value
from dschat_ppo.data.form_columns import (
    description_of,
    side_columns,
    watched_columns,
)
from dschat_ppo.data.form_kind import Kind
from dschat_ppo.data.form_kinds import FORMS, KINDS, set_named
from dschat_ppo.data.form_readers import is_transcript
from dschat_ppo.data.form_rendering import Candidate, rendering_of
from dschat_ppo.data.form_sample import DataSample, exists, quoted_names, sample_of
from dschat_ppo.data.forms import Form, RowReader, rows_made
from dschat_ppo.data.messages import ROLES, turns_in
from dschat_ppo.data.readings import Trial
from dschat_ppo.data.unread import UnreadError, WatchedColumns
from dschat_ppo.data.uses import further_uses
from dschat_ppo.data.verdicts import OWN_FUNCTION, Scale, UnclearVerdictError, scale_of
from dschat_ppo.errors import UserError

FIRST_ROWS = 20
# Columns of rows that are one message each
_TEXTS_OF_MESSAGES = ("text", "content", "message", "value", "body", "utterance")
_ROLES_OF_MESSAGES = ("role", "author", "speaker", "sender", "from")


def detect_form(
    name: str,
    columns: list[str],
    rows: list[Row],
    has_template: bool,
    flags: DataFlags,
    is_only: bool = True,
    use: Use | None = None,
) -> Form:
    """The form of a data set with these columns and first rows. The step does not change it.
    `UserError` if no form fits, the form does not serve `use`, the first rows have content that the
    form does not use for it (None: for any use), or a flag names no column and `is_only`: there is
    no other data set, to which the flag may apply. The message names flags that have been tried."""
    rows = rows[:FIRST_ROWS]
    function = None
    if is_own_function(flags.data_format):
        function = flags.data_format
        rows = _first_rows_made(name, rows, function)
        columns = list(dict.fromkeys(column for row in rows for column in row))
        rows = rows[:FIRST_ROWS]
        name = f"{name} through {function}"
        flags = replace(flags, data_format="auto")

    def detect(flags_to_try: DataFlags, made_by: str | None = None) -> Form:
        """The form by some flags; `made_by`: the function that makes its rows."""
        form = _detected(
            sample_of(name, columns, rows, has_template, flags_to_try, is_only, made_by)
        )
        form.watched.check(rows, use)
        if use is not None:
            form.require(use)
        if use == "sft":
            form.require_answers(rows)
        return form

    try:
        return detect(flags, function)
    except UnreadError as problem:
        ways = _tried_ways(Trial(detect, columns, rows, flags), problem, use)
        where = f"{name}: " if problem.lost else ""
        raise UserError(f"{where}{problem.what}; {'; '.join(ways)}") from None


def _tried_ways(trial: Trial, problem: UnreadError, use: Use | None) -> list[str]:
    """The ways out of a problem that have been tried: its choices if they are sure, or else flags
    that read the rows, or else its choices; if none of them reads the rows, its advice."""
    choices = problem.choices
    if use in further_uses():  # they are for pairs and single answers
        choices = ()
    ways = list[str]()
    if problem.is_sure or use not in ("sft", "prompt"):
        ways = trial.choices(choices, use)
    if not problem.is_sure and (problem.lost or use is not None):
        uses: tuple[Use, ...] = ("sft", "prompt")
        if use is not None:
            uses = (use,)
        for each_use in uses:
            ways = ways or trial.ways(each_use, problem.lost)
    return ways or trial.choices(choices, use) or [problem.way]


def _detected(sample: DataSample) -> Form:
    """The first form that reads the rows. If it would lose the content of some columns, a later one
    counts that uses these and loses nothing: the prompt of a row, with its system message, holds
    the question beside it."""
    _check_rows_are_no_messages(sample)
    first: Form | None = None
    lost = set[str]()
    for candidate in _candidates(sample):
        if first is None:
            first = _form_of(sample, candidate)
            lost = _lost_columns(first, sample.rows)
            if not lost:
                break
            continue
        lost_by_candidate = lost
        if candidate.reader.uses == ("prompt",):
            lost_by_candidate = {column for column in lost if not is_of_rewards(column)}
        if lost_by_candidate and lost_by_candidate <= candidate.reader.used_columns:
            with suppress(UserError):
                form = _form_of(sample, candidate)
                if not _lost_columns(form, sample.rows):
                    return form
    assert first is not None  # for mypy: without candidates an error is raised
    return first


def _check_rows_are_no_messages(sample: DataSample) -> None:
    """Refuse rows each of which is one message of a conversation: a text beside the role of who
    says it."""
    if {"text", "role", "parent_id"} <= set(sample.columns):
        raise UnreadError(
            f"{sample.name}: 'text' is one message of a tree ('role', 'parent_id'), and no text by"
            " itself",
            "best_paths.py in docs/data.md makes conversations of the best replies;"
            " --ignore_columns role reads each message as a text",
            is_sure=True,
        )
    if sample.of_content or sample.flags.data_format != "auto":
        return
    texts = [column for column in _TEXTS_OF_MESSAGES if column in sample.columns]
    if not texts or CONTENT.intersection(sample.columns) - {texts[0]}:
        return
    for role in _ROLES_OF_MESSAGES:
        names = [str(row.get(role)).strip().lower() for row in sample.rows]
        if role in sample.columns and names and all(name in ROLES for name in names):
            raise UnreadError(
                f"{sample.name}: '{texts[0]}' is one message, which '{role}' says, and no text by"
                " itself",
                "make a row of each conversation, whose column 'messages' is the list of its"
                " messages, as best_paths.py in docs/data.md does; --data_format text"
                f" --response_column {texts[0]} --ignore_columns {role} reads each message as a"
                " text",
                is_sure=True,
            )


def _lost_columns(form: Form, rows: list[Row]) -> set[str]:
    """The columns whose content a form would lose."""
    lost = set[str]()
    for row in rows:
        lost |= set(form.watched.lost_in(row))
    return lost


def _form_of(sample: DataSample, candidate: Candidate) -> Form:
    """The form of a candidate, with its rendering and the columns besides prompt and answers."""
    name = sample.name
    flags = sample.flags
    advice = sample.advice
    reader = candidate.reader
    kind = reader.kind
    quoted_columns = quoted_names(sample.columns)
    rendering, about_prompts, warning = rendering_of(
        name, candidate, sample.has_template, flags, advice
    )
    if not candidate.fits:
        if advice.sets and not sample.of_content:
            raise UserError(
                f"{name}: has the columns {quoted_columns}, which do not fit the form"
                f" {kind.name}; {as_known_set(advice.sets)}"
            )
        if _holds_no_transcript(sample, reader):
            raise UnreadError(
                f"{name}: has the columns {quoted_columns}, of which '{reader.columns['messages']}'"
                " is no text with messages that start with '\\n\\nHuman:' and '\\n\\nAssistant:'",
                advice.for_any,
                choices=advice.all_choices,
            )
        way = "--prompt_column, ... name other columns"
        warning = f"most of the first rows do not fit the form {kind.name}; {way}"
    side = side_columns(sample, reader, rendering)
    if kind.name == "problem_solution" and side.truth != reader.columns.get("truth"):
        columns = {role: column for role, column in reader.columns.items() if role != "truth"}
        reader = replace(reader, columns=columns)

    input_template = flags.input_template
    system_message = flags.system_message
    unused_flags = list[str]()
    if input_template and (kind.inside or candidate.is_chat):
        input_template = None
        unused_flags.append("--input_template")
    if system_message and rendering == "text":
        system_message = None
        unused_flags.append("--system_message")

    file_sha = ""
    if sample.function is not None:
        file_sha = hashlib.sha256(Path(file_named(sample.function)).read_bytes()).hexdigest()
    watched = watched_columns(sample, reader, side, rendering)
    return Form(
        reader,
        side,
        rendering,
        input_template,
        system_message,
        WatchedColumns(tuple(sorted(watched)), reader.columns, kind.name, advice),
        sample.function,
        file_sha,
        about=f"{name}: has the columns {quoted_columns}, read as form {kind.name}",
        description=description_of(sample, reader, side, about_prompts, unused_flags),
        warning=warning,
        names=sample.names,
        advice=advice,
        is_unscored=kind.name == "ranked" and not candidate.fits and bool(advice.pairs),
    )


def _holds_no_transcript(sample: DataSample, reader: RowReader) -> bool:
    """Whether a column is taken for a conversation in one text by its name alone, but holds
    something else."""
    column = reader.columns.get("messages")
    if sample.of_content or sample.flags.data_format != "auto" or column is None:
        return False
    values = [json_value(row.get(column)) for row in sample.rows]
    are_other_texts = all(isinstance(value, str) and not is_transcript(value) for value in values)
    return are_other_texts or all(turns_in(value) for value in values)


def _first_rows_made(name: str, rows: list[Row], function: str) -> list[Row]:
    """The rows that `FILE.py:FUNCTION` makes of the first rows."""
    own_function("--data_format", function)  # a missing file is no bad row
    form_rows = list[Row]()
    for row_number, row in enumerate(rows, start=1):
        try:
            form_rows += rows_made(function, row)
        except UserError as problem:
            raise UserError(f"{name}, row {row_number}: {problem}") from None
    if not form_rows:
        raise UserError(
            f"--data_format {function}: makes no row of the first {len(rows)}, by which the form is"
            " found"
        )
    return form_rows


def _located(
    kind: Kind, columns: list[str], rows: list[Row], by_flag: dict[str, str]
) -> dict[str, str]:
    """Role -> column of a form: the one that a flag names, or else the first of its names that
    exists."""
    located = dict[str, str]()
    for role, names in kind.roles.items():
        taken = {*by_flag.values(), *located.values()}
        free = [path for path in names.split() if path not in taken and exists(path, columns, rows)]
        if role in by_flag:
            located[role] = by_flag[role]
        elif free:
            located[role] = free[0]
    # of several choices of columns the one that flags name counts, or the first one; a column that
    # only the others have, or whose partner is missing, as chosen without rejected, has no role
    choices = sorted(kind.choices(), key=lambda choice: -len(choice[1] & set(by_flag)))
    roles_of_uses = dict[Use, set[str]]()
    needed = set[str]()
    for use, roles in choices:
        needed |= roles
        if roles <= set(located):
            roles_of_uses.setdefault(use, roles)
    served = set[str]().union(*roles_of_uses.values())
    return {
        role: column for role, column in located.items() if role in served or role not in needed
    }


def _candidates(sample: DataSample) -> Iterator[Candidate]:
    """The forms that read the rows: by a flag or the name of the data set, or else those of the
    table in their order. A form of text or messages may have the columns that flags name in any
    place, another one if its prompt has the name that the form gives it. If no form reads most of
    the rows, the closest one. `UserError` if no form has the columns."""
    rows = sample.rows
    flags = sample.flags
    by_flag = sample.of_content
    known = None
    asked = flags.data_format
    if flags.data_format == "auto":
        if not by_flag:
            known = set_named(sample.name)
        asked = known or ""
    kinds = [FORMS[asked]] if asked else list(KINDS.values())
    left = list[Candidate]()
    is_read = False
    for kind in kinds:
        located = _located(kind, sample.columns, rows, by_flag)
        is_open = (
            asked
            or not by_flag
            or kind.by_flag
            or located.get("prompt") in kind.roles.get("prompt", "").split()
        )
        if not (is_open and kind.uses(located) and set(by_flag) <= set(located)):
            continue
        candidate = _candidate(sample, kind, located)
        if candidate.fits and (kind.by_flag or not by_flag):
            is_read = True
            yield candidate
        else:
            left.append(candidate)
    if is_read:
        return
    if not left:
        raise _no_form(sample, asked, is_known=known is not None)
    # whose reader says what is wrong with each row
    closest = max(reversed(left), key=_closeness)
    yield next((candidate for candidate in left if candidate.fits), closest)


def _no_form(sample: DataSample, asked: str, is_known: bool) -> UnreadError:
    """The error of columns that no form has, or not the one that is `asked` for: by a flag, or if
    it `is_known` by the name of the data set."""
    what = "fit no known form"
    if asked:
        names = ", ".join(names.replace(" ", "/") for names in FORMS[asked].roles.values())
        what = f"do not fit the form {asked} ({names})"
    way = sample.advice.for_any
    choices = sample.advice.all_choices
    if is_known:
        way += "; --data_format FORM reads it in another way than DeepSpeed-Chat"
        choices = ()
    return UnreadError(
        f"{sample.name}: has the columns {quoted_names(sample.columns)}, which {what}",
        way,
        is_sure=bool(sample.advice.sets),
        choices=choices,
    )


def _closeness(candidate: Candidate) -> tuple[int, bool]:
    """The larger, the likelier a form that does not fit is the one that is meant."""
    reader = candidate.reader
    return len(reader.columns), reader.kind.rendering == "chat"


def _candidate(sample: DataSample, kind: Kind, located: dict[str, str]) -> Candidate:
    """A reader of these columns, and what it reads in the first rows."""
    rows = sample.rows
    scale = _scale(sample.name, located, rows, sample.of_content)
    reader = RowReader(kind, located, sample.flags.roles, scale)
    as_chat = kind.rendering in ("chat", "chat if possible")
    read = dict[Use, list[list[Example]]]()
    has_messages = False
    fits = False
    for use in reader.uses:
        read[use] = []
        for row in rows:
            with suppress(UserError):
                read[use].append(reader.examples_of(row, use, as_chat))
        if use != "prompt" or kind.alone:
            fits = fits or 2 * len(read[use]) >= len(rows)
        for examples in read[use]:
            has_messages = has_messages or any(isinstance(one.prompt, list) for one in examples)
    is_chat = kind.rendering == "chat" or (kind.rendering == "as given" and has_messages)
    return Candidate(reader, read, is_chat, fits)


def _scale(name: str, located: dict[str, str], rows: list[Row], by_flag: dict[str, str]) -> Scale:
    """What the numbers of a verdict on two answers mean, if these columns have one."""
    if not {"first", "second", "better"} <= set(located):
        return "words"
    column = located["better"]
    values = [field_at(row, column) for row in rows if has_value(row, column)]
    try:
        answers = located["first"], located["second"]
        return scale_of(values, column, answers, is_named="better" in by_flag)
    except UnclearVerdictError as problem:
        names = ("chosen_column", "rejected_column", "better_column")
        choices = [
            Choice(condition, dict(zip(names, paths, strict=True)))
            for condition, paths in problem.readings
        ]
        way = f"{OWN_FUNCTION} can read it"
        raise UnreadError(f"{name}: {problem}", way, is_sure=True, choices=choices) from None
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None
