"""Bad rows and duplicates of one data set: counted, logged, and refused where there are too many."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from dschat_ppo.common.logging import logger
from dschat_ppo.data.bad_lines import too_many, way_out
from dschat_ppo.data.examples import Use
from dschat_ppo.data.lengths import Fitted
from dschat_ppo.data.rows import Origins, Rows, Splits
from dschat_ppo.data.tokenise import TokenTable
from dschat_ppo.errors import UserError

_SHOWN, _REASONS = 3, 5  # bad rows, and kinds of them, in the log


def report_unreadable(name: str, splits: Splits, policy: str) -> None:
    """Log the unreadable lines of files that `--bad_rows` left out; `UserError` if they are `too_many`."""
    count = splits.skipped.count
    if not count:
        return
    lines = count + len(splits.train) + (0 if splits.eval is None else len(splits.eval))
    counts = f"{count} of {lines} lines cannot be read"
    if too_many(count, lines, policy):
        raise UserError(f"{name}: {counts}{way_out(count, lines, policy)}. The first: {splits.skipped.first}")
    logger().warning(f"data: {name}: skipped: {counts}, the first: {splits.skipped.first}")


def report_bad_rows(name: str, table: TokenTable, rows: int, policy: str) -> None:
    """Log the rows that `--bad_rows` drops: how many of `rows` raw rows for each reason, and the first ones.
    `UserError` if they are `too_many`, or if `--truncation error` refuses the length of one."""
    if (too_long := np.flatnonzero(table.fitted == Fitted.TOO_LONG)).size:
        message = table.problem(int(too_long[0])).partition("\n")[0]
        more = f" ({len(too_long)} rows are too long)" if len(too_long) > 1 else ""
        raise UserError(f"{message}{more}")
    found = np.flatnonzero(table.fitted == Fitted.UNUSABLE)
    if not len(found):
        return
    messages, reasons = [], Counter[str]()
    for index in found:
        message, _, reason = table.problem(int(index)).partition("\n")
        messages.append(message)
        reasons[kind_of(reason)] += 1
    kinds = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(_REASONS))
    counts = f"{len(found)} of {rows} rows cannot be used: {kinds}"
    if too_many(len(found), rows, policy):
        shown = " | ".join(messages[:_SHOWN])
        raise UserError(f"{name}: {counts}{way_out(len(found), rows, policy)}. The first: {shown}")
    logger().warning(f"data: {name}: skipped: {counts}")
    for message in messages[:_SHOWN]:
        logger().warning(f"data: skipped: {message}")


def report_left_out(name: str, table: TokenTable, used: np.ndarray, form: str, use: Use) -> None:
    """Log what gives this step no sample although nothing is wrong with it: answers of KTO that are labelled bad in
    SFT, and rows of other forms without a pair."""
    if form == "kto" and use == "sft":
        good, way = int((table.fitted != Fitted.UNUSABLE).sum()), "--ignore_columns label trains all of them"
        logger().info(f"data: {name}: SFT uses the {good} answers that are labelled good, not the bad ones; {way}")
    elif left := len(used) - len(np.unique(table.number)):
        logger().info(f"data: {name}: {left} of {len(used)} rows have nothing for this step, as without a worse answer")


def report_duplicates(name: str, table: TokenTable, raw: Rows, origins: Origins, skips: bool) -> np.ndarray:
    """Log the rows that repeat an earlier row of the data set: the same prompt and answers, compared by hashes. Returns
    (N,) bool, True on the token rows to drop: all repetitions if `skips`, otherwise none."""
    usable = np.flatnonzero(table.usable)
    _, first = np.unique(table.key[usable], return_index=True)
    repeats = np.zeros(len(table.key), dtype=bool)
    repeats[usable] = True
    repeats[usable[first]] = False
    count = int(repeats.sum())
    if count:
        later = int(repeats.argmax())
        earlier = int(usable[(table.key[usable] == table.key[later]).argmax()])
        pair = " repeats ".join(origins.describe(raw.origin(int(table.number[place]))) for place in (later, earlier))
        done = "are dropped" if skips else "are kept (--bad_rows skip drops them)"
        logger().warning(f"data: {name}: {count} rows repeat an earlier row and {done}: {pair}")
    return repeats if skips else np.zeros_like(repeats)


def kind_of(reason: str) -> str:
    """A reason without the value that it quotes, so that equal faults are counted together."""
    text = re.sub(r" ?\(.*?\)", "", reason)
    return re.sub(r"\s+", " ", re.sub(r"\d+", "N", text)).strip()[:120]
