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
from dataclasses import dataclass
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

_MIXING = re.compile(r"([:@])([-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|inf|nan))$", re.IGNORECASE)
_SPLIT = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]$")  # it may hold slices in brackets
_CONFIG = re.compile(r":([^:]+)$")


@dataclass(frozen=True)
class DataSource:
    """One data set that a flag names.

    Attributes:
        spec: as written on the command line, for messages; a path in the working directory is relative.
        location: a file, a folder or a hub name; `~` is expanded.
        split: its training split, perhaps with a slice such as `train[:10%]`, or None.
        name: short, unique among the sources of a run; for metrics.
        weight: its share of a mixture in units of the other weights, above 0; None if the flag gives none.
        samples: number of its rows in a mixture, above 0; None for all.
    """

    spec: str
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
        name = _short_name(location)
        names.add(name := next(word for word in chain([name], (f"{name}_{n}" for n in count(2))) if word not in names))
        sources.append(DataSource(shown_path(spec), flag, location, config, split, name, weight, samples))
    whole = [source for source in sources if source.samples is None]  # `@ROWS` needs no weight
    weighted, bare = ([source.spec for source in whole if (source.weight is None) == lacks] for lacks in (False, True))
    if weighted and bare:
        raise UserError(
            f"{flag}: '{weighted[0]}' has a weight and '{bare[0]}' has none; give each data set a weight (:WEIGHT) or "
            "a number of rows (@ROWS), or none of them a weight"
        )
    return sources


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
    rest, config, split, weight, samples = os.path.expanduser(spec), None, None, None, None
    if not os.path.lexists(rest) and (found := _MIXING.search(rest)):
        rest, number = rest[: found.start()], found[2]
        if found[1] == ":":
            weight = float(number)
            if not 0 < weight < math.inf:
                raise UserError(f"{flag} {spec}: the weight '{number}' must be a finite number above 0")
        else:
            samples = int(number) if number.isdigit() else 0
            if samples == 0:
                raise UserError(f"{flag} {spec}: the number of rows '{number}' must be a whole number above 0")
    if not os.path.lexists(rest) and (found := _SPLIT.search(rest)):
        rest, split = rest[: found.start()], found[1].strip()
    if not os.path.lexists(rest) and (found := _CONFIG.search(rest)):
        rest, config = rest[: found.start()], found[1].strip()
    if rest == "local/jsonfile":
        raise UserError(
            f"{flag} {spec}: DeepSpeed-Chat reads data/train.json and data/eval.json under this name; give the files "
            "themselves: data/train.json with --data_format local/jsonfile, and --eval_data_path data/eval.json"
        )
    if not os.path.lexists(rest) and ("://" in spec or not rest or re.search(r"[:@\[\]]", rest)):
        raise UserError(
            f"{flag} '{spec}': no such file or folder, and no name of a data set of the hub; expected "
            "LOCATION[:CONFIG][[SPLIT]][:WEIGHT|@ROWS]"
        )
    return rest, config, split, weight, samples


def _short_name(location: str) -> str:
    """The last part of a location without the endings of data files, fit for the name of a metric."""
    name = Path(location).name if Path(location).name not in ("", "..") else Path(location).resolve().name
    for ending in (*COMPRESSED, *_KINDS):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return re.sub(r"[^\w.-]+", "_", name).strip("_.") or "data"
