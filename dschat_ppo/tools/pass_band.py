"""The band of `--keep`: the data rows that are neither too hard nor too easy for a model."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat_ppo.errors import UserError

if TYPE_CHECKING:  # it needs torch, for which wrong flags do not wait
    from dschat_ppo.tools.evaluation_results import Evaluated


@dataclass(frozen=True)
class PassBand:
    """The pass rates from `low` to `high`, both included."""

    low: float
    high: float

    @classmethod
    def of(cls, text: str) -> PassBand:
        """Read `LOW:HIGH`."""
        low, _, high = text.partition(":")
        with suppress(ValueError):
            band = cls(float(low), float(high))
            if 0 <= band.low <= band.high <= 1:
                return band
        raise UserError(f"--keep {text}: expected LOW:HIGH from 0 to 1")

    def place_of(self, rate: float | None) -> str:
        """Where a pass rate is."""
        if rate is None:
            return "unknown"
        if rate < self.low:
            return "below"
        if rate > self.high:
            return "above"
        return "inside"


def pass_rate(scores: Sequence[float], pass_score: float) -> float | None:
    """The share of the scored responses to a prompt that pass; None for fewer than two."""
    scored = [score for score in scores if not math.isnan(score)]
    if len(scored) < 2:
        return None
    return sum(score >= pass_score for score in scored) / len(scored)


def pass_rates(evaluated: Evaluated) -> list[float | None]:
    """Of each prompt, over the sampled responses of the first model."""
    pass_score = float(evaluated.flags["pass_score"])
    sampled = [result for result in evaluated.results if result.decoding == "sampled"]
    return [pass_rate(prompt.scores, pass_score) for prompt in sampled[0].prompts]


def rows_in_band(evaluated: Evaluated) -> str:
    """JSON lines: the rows of the data whose pass rate is in the band, with `pass_rate`; those of
    several data sources with `data_source`."""
    # after the flags are checked: this import takes seconds
    from dschat_ppo.data.tokenise import row_of_file

    band = PassBand.of(evaluated.flags["keep"])
    data_sources = [json.loads(text)["data_source"] for text in evaluated.rows]
    is_mixture = len(set(map(str, data_sources))) > 1
    lines = []
    rates = pass_rates(evaluated)
    for text, rate, data_source in zip(evaluated.rows, rates, data_sources, strict=True):
        if band.place_of(rate) == "inside":
            row = row_of_file(text) | {"pass_rate": rate}
            if is_mixture:  # the name of the data set, by which rewards are routed, is lost else
                row["data_source"] = data_source
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)


def band_line(evaluated: Evaluated) -> str:
    """How many rows are below, inside and above the band, and of how many that is not known."""
    keep = evaluated.flags["keep"]
    counts = Counter(map(PassBand.of(keep).place_of, pass_rates(evaluated)))
    return (
        f"--keep {keep}: prompts below: {counts['below']}, inside: {counts['inside']}, above:"
        f" {counts['above']}; with fewer than two scored answers: {counts['unknown']}"
    )
