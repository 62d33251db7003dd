"""The benchmark of data preparation: its texts, its baseline and its table."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import data as benchmark


def test_pairs_are_always_the_same_and_of_realistic_length():
    rows = list(benchmark.pairs(50))
    assert rows == list(benchmark.pairs(50)) and len({row["prompt"] for row in rows}) == 50
    words = [len(text.split()) for row in rows for text in row.values()]
    assert 40 < sum(words) / len(words) < 70 and all(row["prompt"].endswith("Assistant:") for row in rows)


def test_the_tokenizer_is_measured_on_the_first_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "VOCABULARY", 400)
    monkeypatch.setattr(benchmark, "pairs", lambda rows: ({"prompt": "ab", "chosen": "a", "rejected": "b"},) * rows)
    benchmark.make_files(tmp_path, 30)
    path = tmp_path / "pairs_30.jsonl"
    assert [json.loads(line)["chosen"] for line in path.read_text().splitlines()] == ["a"] * 30
    monkeypatch.setattr(benchmark, "BASELINE_ROWS", 20)
    speed, tokens, per_cpu = benchmark.tokenizer_speed(tmp_path, path, 30, 2)
    assert speed > 0 and per_cpu > 0 and tokens == 3, "'ab' is one token of the trained vocabulary"


def test_the_table_has_a_cell_for_each_column():
    names = "file_gib cache_gib read_s rows_per_cpu_s tokenizer_rows_per_cpu_s cpu_ratio second_start_s peak_gib"
    found = {"rows": 7, "tokens_per_row": 9.6, "processes": 2, **dict.fromkeys([*names.split(), "before_gib"], 1.25)}
    header, _, cells = benchmark.table(found).splitlines()
    assert header.count("|") == cells.count("|") and cells.startswith("| 7 | 10 | 1.25 | 1.25 | 2 | 1 | 1 | 1 | 1.25 |")
