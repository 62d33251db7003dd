"""Small files, their rows as they are read (`load`) and their token rows (`prepare` with
`flags_for`)."""

import json
from pathlib import Path
from typing import NamedTuple

from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset

from dschat_ppo.common.paths import shown_path
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.lazy_rows import TrainingRows
from dschat_ppo.data.rows import ORIGIN, RawRows, read_splits
from dschat_ppo.data.sources import DataSource, open_set, parse_sources
from dschat_ppo.tools.toy import make_tokenizer

TOKENIZER = make_tokenizer(["a b c d"])
WHOLE = {
    "sft": "1,0,0",
    "preference": "0,1,0",
    "unpaired": "0,1,0",
    "steps": "0,1,0",
    "prompt": "0,0,1",
}
PAIRS = [
    {"prompt": f"prompt {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(20)
]
ROWS = [{"prompt": f"prompt {i}", "response": f"answer {i}"} for i in range(8)]


def write_jsonl(path: Path, rows: list) -> str:
    """The path of a file, perhaps in a new folder, with a line for each row; a text is a line as it
    is."""
    path.parent.mkdir(exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def flags_for(tmp_path: Path, *paths: str, use: str = "sft", **settings) -> DataFlags:
    """Flags by which a step uses all rows of the paths as text."""
    settings = {"data_split": WHOLE[use], "apply_chat_template": False, **settings}
    return DataFlags(data_path=list(paths), data_output_path=str(tmp_path / "cache"), **settings)


def prompts_of(rows: Dataset) -> list[str]:
    return [TOKENIZER.decode(ids) for ids in rows["prompt_ids"]]


def listed(rows: TrainingRows) -> list[dict]:
    """Token rows in a fixed order, without the digest, which lazy rows may lack."""
    found = [
        {name: value for name, value in rows[i].items() if name != "digest"}
        for i in range(len(rows))
    ]
    return sorted(found, key=lambda row: row["prompt_ids"])


def source_of(path: Path | str, flag: str = "--data_path") -> DataSource:
    (source,) = parse_sources([str(path)], flag)
    return source


class Read(NamedTuple):
    """The rows of a data set that can be read, and what the others say."""

    train: RawRows
    eval: RawRows | None
    bad: list[str]


def load(tmp_path: Path, path: Path | str) -> Read:
    bad = []

    def good(rows: RawRows) -> RawRows:
        bad.extend(
            f"{shown_path(rows.table[n][ORIGIN])} {row}"
            for n, row in enumerate(rows)
            if isinstance(row, str)
        )
        return rows.select([n for n, row in enumerate(rows) if isinstance(row, dict)])

    cache = str(tmp_path / "cache")
    found = open_set(source_of(path), cache)
    groups, for_eval = found.chosen()
    train = good(read_splits(found, groups, cache))
    return Read(train, good(read_splits(found, [(for_eval, "")], cache)) if for_eval else None, bad)


def whole_set(tmp_path: Path, path: Path | str) -> RawRows:
    """The rows of a data set that `--eval_data_path` names."""
    found = open_set(source_of(path, "--eval_data_path"), str(tmp_path / "cache"))
    return read_splits(found, found.chosen(only_evaluates=True)[0], str(tmp_path / "cache"))


def origins_of(rows: RawRows) -> list[str]:
    return list(rows.table[ORIGIN])


def column(rows: RawRows, name: str) -> list:
    return [row[name] for row in rows]
