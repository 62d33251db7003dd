"""Data sets as flags name them: `LOCATION[:CONFIG][[SPLIT]][:WEIGHT|@ROWS]`.

    openai/gsm8k:main[train]     a configuration and a split of a hub data set
    data.jsonl:0.3               a file with its weight in a mixture
    folder@5000                  5,000 rows of a folder
    org/name:cfg[train[:10%]]:0.5

What exists on disk exactly as it is written is that file or folder, whatever characters its name holds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from dschat_ppo.common.paths import shown_path
from dschat_ppo.errors import UserError

_KINDS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
SUPPORTED = f"{', '.join(_KINDS)} (also with {' or '.join(COMPRESSED)})"

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(inf|nan)", re.IGNORECASE)
_SYNTAX = "expected LOCATION[:CONFIG][[SPLIT]][:WEIGHT|@ROWS]"


@dataclass(frozen=True)
class DataSource:
    """One data set that a flag names.

    Attributes:
        spec: as written on the command line, for errors; a path in the working directory is relative.
        label: `spec` for lines of the log: a path outside of the working directory is cut to the end that no other
            data set of the run has.
        location: a file, a folder or a hub name; `~` is expanded.
        split: its training split, perhaps with a slice such as `train[:10%]`, or None.
        name: short, unique among the sources of a run; for metrics.
        weight: its share of a mixture in units of the other weights, above 0; None if the flag gives none.
        samples: number of its rows in a mixture, above 0; None for all.
    """

    spec: str
    label: str
    flag: str
    location: str
    config: str | None
    split: str | None
    name: str
    weight: float | None
    samples: int | None


def parse_sources(specs: Sequence[str], flag: str, taken: Collection[str] = ()) -> list[DataSource]:
    """The data sets that `flag` names. Their names differ from those of other flags, `taken`."""
    sources: list[DataSource] = []
    names = set(taken)
    for spec in specs:
        location, config, split, weight, samples = _parse(spec, flag)
        name, shown = _short_name(location), shown_path(spec)
        candidates = chain([name], (f"{name}_{number}" for number in count(2)))
        names.add(unique := next(word for word in candidates if word not in names))
        sources.append(DataSource(shown, shown, flag, location, config, split, unique, weight, samples))
    _check_weights(sources)
    return labelled(sources)


def labelled(sources: Sequence[DataSource]) -> list[DataSource]:
    """The data sets of a run with labels that distinguish them."""
    paths = {source.location: Path(os.path.abspath(source.location)).parts for source in sources}
    found = []
    for source in sources:
        label, path = source.spec, paths[source.location]
        if label.startswith(("/", "~")):
            others = [other for other in paths.values() if other != path]
            lengths = range(1, len(path))
            length = next((n for n in lengths if path[-n:] not in [other[-n:] for other in others]), len(path))
            label = "/".join(path[-length:]) + os.path.expanduser(source.spec)[len(source.location) :]
        found.append(replace(source, label=label))
    return found


def kind_of(path: str | Path) -> str | None:
    """How a data file is read, by its name such as `a.csv.gz`; None if it is not one."""
    name = Path(path).name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return _KINDS.get(Path(name).suffix)


def is_hub_name(location: str) -> bool:
    """Whether `location` is a hub name rather than a path; a path need not exist."""
    return not (
        os.path.lexists(location)
        or location.startswith((".", "/", "~"))
        or location.count("/") > 1
        or kind_of(location) is not None
    )


def _parse(spec: str, flag: str) -> tuple[str, str | None, str | None, float | None, int | None]:
    """(location, config, split, weight, samples) of one data set."""
    whole = os.path.expanduser(spec)
    if os.path.lexists(whole):
        return whole, None, None, None, None
    if "://" in spec:
        raise UserError(f"{flag} {spec}: is an address; download the file and give its path, or give the hub name")
    rest, weight, samples = _without_mixing(whole, spec, flag)
    if os.path.lexists(rest):
        return rest, None, None, weight, samples
    if rest == "local/jsonfile":
        raise UserError(
            f"{flag} {spec}: DeepSpeed-Chat reads data/train.json and data/eval.json under this name; give the files "
            "themselves: data/train.json with --data_format local/jsonfile, and --eval_data_path data/eval.json"
        )
    split = None
    if rest.endswith("]"):
        depth, start = 0, len(rest)
        while start > 0:  # the bracket that the last one closes: a split may hold a slice in brackets
            start -= 1
            depth += {"]": 1, "[": -1}.get(rest[start], 0)
            if depth == 0:
                break
        split = rest[start + 1 : -1].strip()
        if depth != 0 or not split or start == 0:
            raise UserError(f"{flag} {spec}: no such file or folder, and its brackets name no split; {_SYNTAX}")
        rest = rest[:start]
        if os.path.lexists(rest):
            return rest, None, split, weight, samples
    colons = [place for place, letter in enumerate(rest) if letter == ":"]
    for place in [*reversed(colons), *colons[:1]]:
        if os.path.lexists(rest[:place]) or place == colons[0]:
            location, config = rest[:place], rest[place + 1 :].strip()
            if not location or not config:
                raise UserError(f"{flag} {spec}: no such file or folder, and no name of a data set; {_SYNTAX}")
            return location, config, split, weight, samples
    if not rest:
        raise UserError(f"{flag} '{spec}': names no data set; {_SYNTAX}")
    return rest, None, split, weight, samples


def _without_mixing(text: str, spec: str, flag: str) -> tuple[str, float | None, int | None]:
    """`text` without `:WEIGHT` or `@ROWS` at its end, the weight and the number of rows."""
    before, _, number = text.rpartition(":")
    if before and _NUMBER.fullmatch(number):
        weight = float(number)
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"{flag} {spec}: the weight '{number}' must be a finite number above 0")
        return before, weight, None
    before, _, number = text.rpartition("@")
    if before and _NUMBER.fullmatch(number):
        if not number.isascii() or not number.isdigit() or int(number) == 0:
            raise UserError(f"{flag} {spec}: the number of rows '{number}' must be a whole number above 0")
        return before, None, int(number)
    if before and is_hub_name(before) and kind_of(number) is None:
        raise UserError(f"{flag} {spec}: no such file or folder; after '@' comes a number of rows, as in {before}@5000")
    return text, None, None


def _check_weights(sources: list[DataSource]) -> None:
    """Refuse weights at only some of the data sets; those with a number of rows need none."""
    whole = [source for source in sources if source.samples is None]
    weighted = [source for source in whole if source.weight is not None]
    if weighted and len(weighted) < len(whole):
        bare = next(source for source in whole if source.weight is None)
        raise UserError(
            f"{bare.flag}: '{weighted[0].spec}' has a weight and '{bare.spec}' has none; give each data set a weight "
            "(:WEIGHT) or a number of rows (@ROWS), or none of them a weight"
        )


def _short_name(location: str) -> str:
    """The last part of a location without the endings of data files, fit for the name of a metric."""
    name = Path(location).name if Path(location).name not in ("", "..") else Path(location).resolve().name
    for ending in (*COMPRESSED, *_KINDS):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return re.sub(r"[^\w.-]+", "_", name).strip("_.") or "data"
