"""Bad rows and repetitions of one data set: counted, logged, and refused where there are too many."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from dschat_ppo.common.logging import logger
from dschat_ppo.data.bad_lines import too_many, way_out
from dschat_ppo.data.lengths import Fitted
from dschat_ppo.data.rows import Splits
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
        more = f" ({len(too_long)} rows are too long)" if len(too_long) > 1 else ""
        raise UserError(f"{table.problem(int(too_long[0]))[0]}{more}")
    found = np.flatnonzero(table.fitted == Fitted.UNUSABLE)
    if not len(found):
        return
    messages, reasons = zip(*(table.problem(int(index)) for index in found), strict=True)
    kinds = "; ".join(f"{count} {kind}" for kind, count in Counter(map(kind_of, reasons)).most_common(_REASONS))
    counts = f"{len(found)} of {rows} rows cannot be used: {kinds}"
    if too_many(len(found), rows, policy):
        shown = " | ".join(messages[:_SHOWN])
        raise UserError(f"{name}: {counts}{way_out(len(found), rows, policy)}. The first: {shown}")
    logger().warning(f"data: {name}: skipped: {counts}")
    for message in messages[:_SHOWN]:
        logger().warning(f"data: skipped: {message}")


def repetitions(name: str, table: TokenTable, skips: bool) -> np.ndarray:
    """(N,) bool, True on the token rows whose digest is that of an earlier one; blocks of long texts are never. Logs
    them, and whether `skips` drops them."""
    usable = np.flatnonzero(table.usable & (table.fitted != Fitted.BLOCK))
    digests = np.array(table.rows.data.column("digest"))[usable]
    _, first = np.unique(digests, return_index=True)
    repeats = np.zeros(len(table.number), dtype=bool)
    repeats[np.delete(usable, first)] = True
    if count := int(repeats.sum()):
        later = int(repeats.argmax())
        earlier = int(usable[(digests == digests[np.searchsorted(usable, later)]).argmax()])
        done = "are dropped" if skips else "are kept (--bad_rows skip drops them)"
        pair = f"{table.place(later)} repeats {table.place(earlier)}"
        logger().warning(f"data: {name}: {count} rows repeat an earlier row and {done}: {pair}")
    return repeats


def kind_of(reason: str) -> str:
    """A reason without the value that it quotes, so that equal faults are counted together."""
    text = re.sub(r" ?\(.*?\)", "", reason)
    return re.sub(r"\s+", " ", re.sub(r"\d+", "N", text)).strip()[:120]
