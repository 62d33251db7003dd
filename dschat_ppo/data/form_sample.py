"""What is known of a data set when its form is looked for: its columns and first rows, and what the
flags say of them."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.advice import Advice, advice_for
from dschat_ppo.data.examples import Row, has_value
from dschat_ppo.data.verdicts import TWO_ANSWERS, VERDICT_ROLES
from dschat_ppo.errors import UserError

# Roles that flags name and forms have
_ROLES = ("prompt", "response", "chosen", "rejected", "messages", "label", *VERDICT_ROLES)


@dataclass(frozen=True)
class DataSample:
    """The columns and first rows of a data set, without those that flags ignore, and the flags."""

    name: str
    names: tuple[str, ...]  # all columns
    columns: list[str]
    rows: list[Row]
    has_template: bool
    flags: DataFlags
    by_flag: dict[str, str]  # role -> the column that a flag names, of those that exist
    of_content: dict[str, str]  # those of the prompt and the answers
    missing: list[str]  # flags whose columns do not exist
    function: str | None  # the `FILE.py:FUNCTION` that made the rows
    advice: Advice


def sample_of(
    name: str,
    columns: list[str],
    rows: list[Row],
    has_template: bool,
    flags: DataFlags,
    is_only: bool,
    function: str | None = None,
) -> DataSample:
    """What is known of a data set from its columns and first rows.

    Args:
        name: of the data set, in messages.
        columns: all of them; `flags` may leave out some.
        rows: the first ones.
        has_template: whether the model's tokenizer has a chat template.
        flags: say how rows are read.
        is_only: whether the flags are for no other data set.
        function: the `FILE.py:FUNCTION` that made the rows; None: they are as in the file.

    Raises:
        UserError: a flag names a column that does not exist, and this is the only data set. Beside
            other data sets, such flags are in `missing`.
    """
    columns_left = [column for column in columns if column not in flags.ignore_columns]
    rows_left = list[Row]()
    for row in rows:
        rows_left.append({column: row[column] for column in row if column in columns_left})
    by_flag = {
        role: column
        for role, column in flags.columns.items()
        if column and exists(column, columns_left, rows_left)
    }
    missing = [
        f"{flags.name_of(role)} {column}"
        for role, column in flags.columns.items()
        if column and role not in by_flag
    ]
    if missing and is_only:
        raise UserError(
            f"{', '.join(missing)}: {name} has no such column; it has {quoted_names(columns_left)}"
        )
    of_content = {role: column for role, column in by_flag.items() if role in _ROLES}
    # A verdict says which answer is better, so --chosen_column and --rejected_column only name the
    # first and the second one.
    if set(VERDICT_ROLES) & set(of_content):
        in_any_order = {"chosen": "first", "rejected": "second"}
        of_content = {in_any_order.get(role, role): path for role, path in of_content.items()}
        # answers that are named chosen and rejected need no flags, if there are no others
        pairs = [pair for pair in TWO_ANSWERS if set(pair) <= set(columns_left)]
        has_names = {"chosen", "rejected"} <= set(columns_left) and not pairs
        if has_names and not {"first", "second"} & set(of_content):
            of_content |= {"first": "chosen", "second": "rejected"}
    return DataSample(
        name=name,
        names=tuple(columns),
        columns=columns_left,
        rows=rows_left,
        has_template=has_template,
        flags=flags,
        by_flag=by_flag,
        of_content=of_content,
        missing=missing,
        function=function,
        advice=advice_for(columns_left, rows_left),
    )


def exists(path: str, columns: list[str], rows: list[Row]) -> bool:
    """Whether rows have a column, or a field inside one."""
    return path in columns or (
        path.split(".")[0] in columns and any(has_value(row, path) for row in rows)
    )


def quoted_names(columns: list[str]) -> str:
    return ", ".join(map(repr, columns))
