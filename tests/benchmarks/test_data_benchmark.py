"""The baseline of the benchmark of data preparation."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import data as benchmark


def test_the_tokenizer_is_measured_on_the_first_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "VOCABULARY", 400)
    monkeypatch.setattr(benchmark, "pairs", lambda rows: ({"prompt": "ab", "chosen": "a", "rejected": "b"},) * rows)
    benchmark.make_files(tmp_path, 30)
    path = tmp_path / "pairs_30.jsonl"
    assert [json.loads(line)["chosen"] for line in path.read_text().splitlines()] == ["a"] * 30
    monkeypatch.setattr(benchmark, "BASELINE_ROWS", 20)
    tokens, per_cpu = benchmark.tokenizer_speed(tmp_path, path, 30, 2)
    assert per_cpu > 0 and tokens == 3, "'ab' is one token of the trained vocabulary"
