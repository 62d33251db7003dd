"""A form of one's own: a function that makes rows of a known form of each row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dschat_ppo.common.own_functions import cause_of, file_named, own_function
from dschat_ppo.data.examples import Example, Row, Use
from dschat_ppo.errors import UserError

Form = TypeVar("Form", bound=Any)  # `forms.Form`

_FLAG = "--data_format"


def made_of_first(function: str, name: str, rows: list[Row]) -> tuple[list[str], list[Row]]:
    """What `FILE.py:FUNCTION` makes of the first rows of a data set, and the columns."""
    own_function(_FLAG, function)  # a missing file is no bad row
    made, problem = list[Row](), f"it returns None for each of the first {len(rows)} rows, by which the form is found"
    for number, row in enumerate(rows):
        try:
            made += _made_by(function, row, f"{name}, row {number}")
        except UserError as raised:
            problem = str(raised)
    if not made:
        raise UserError(f"{_FLAG} {function}: makes no row: {problem}")
    return list(dict.fromkeys(column for row in made for column in row)), made


def made_by_own(form: Form, function: str) -> Form:
    """The form of a data set from that of the rows that the function makes of its rows. `UserError` for a form that
    groups rows before they are read, which is before they are made."""
    if form.regroup is not None:
        raise UserError(
            f"{_FLAG} {function}: makes rows of the form {form.name}, which are grouped by prompt before they are read;"
            " make pairs, or messages with a label"
        )
    sha = hashlib.sha256(Path(file_named(function)).read_bytes()).hexdigest()
    return replace(
        form, read=partial(_read, function, form.read), description=f"{function} makes {form.description}",
        identity=f"{function} {sha} {form.identity}",
    )  # fmt: skip


def _read(
    function: str, read: Callable[[Row, Use, str], list[Example]], row: Row, use: Use, where: str
) -> list[Example]:
    return [example for made in _made_by(function, row, where) for example in read(made, use, where)]


def _made_by(function: str, row: Row, where: str) -> list[Row]:
    try:
        made = own_function(_FLAG, function)(deepcopy(row))  # rewards get the row as it is
    except Exception as problem:  # noqa: BLE001  the function may raise anything; this row is then bad
        raise UserError(f"{where}: {function} raised {cause_of(problem, file_named(function))}") from None
    rows = [] if made is None else made if isinstance(made, list) else [made]
    if not all(isinstance(one, dict) for one in rows):
        raise UserError(f"{where}: {function} must return a dict, a list of dicts or None, not {type(made).__name__}")
    return rows
