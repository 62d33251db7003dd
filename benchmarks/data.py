"""Preparing a large data set: speed beside the tokenizer's own, memory of each rank, and the second
start.

    python benchmarks/data.py [--rows 1000000] [--ranks 2] [--work DIR] [--json FILE]
        [--docs docs/benchmarks.md]

Writes a JSONL file of preference pairs (some 200 tokens a row, invented words of Zipf's law),
trains a byte-level BPE tokenizer on it, and starts two ranks that call `prepare` and fingerprint
the rows as a training run does. The baseline is `tokenizer(texts)` on the same texts in as many
processes. The table compares rows per CPU second of all processes, which other work on the machine
hardly changes. Nothing is downloaded. `--work` keeps the files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measure import free_port, markdown, publish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dschat_ppo.common.dataset_workers import worker_count

VOCABULARY, WORDS, LIMIT = 32_000, 60_000, 512
BASELINE_ROWS = 100_000
MARKS = ("<!-- data -->", "<!-- /data -->")
BLOCK = 10_000  # rows that are generated at once


def pairs(rows: int) -> Iterator[dict[str, str]]:
    """Preference pairs, always the same: words of one to five syllables, drawn by Zipf's law."""
    rng = np.random.default_rng(0)
    syllables = [
        first + vowel + last
        for first in "bcdfghklmnprstvw"
        for vowel in "aeiou"
        for last in ("", "n", "r", "st")
    ]
    drawn = rng.integers(len(syllables), size=(WORDS, 5))
    counts = rng.integers(1, 6, WORDS)
    words = np.array(
        [
            "".join(syllables[n] for n in row[:count])
            for row, count in zip(drawn, counts, strict=True)
        ]
    )
    chances = 1 / np.arange(3, WORDS + 3)
    chances /= chances.sum()
    for start in range(0, rows, BLOCK):
        count = min(BLOCK, rows - start)
        # words of prompt and two answers
        lengths = np.clip(rng.lognormal(3.8, 0.5, (count, 3)), 4, 160).astype(int)
        drawn, place = words[rng.choice(WORDS, lengths.sum(), p=chances)], 0
        for row in lengths:
            texts = []
            for length in row:
                texts.append(" ".join(drawn[place : place + length]).capitalize() + ".")
                place += length
            prompt, chosen, rejected = texts
            yield {
                "prompt": f"\n\nHuman: {prompt}\n\nAssistant:",
                "chosen": f" {chosen}",
                "rejected": f" {rejected}",
            }


def make_files(work: Path, rows: int) -> None:
    """Write `pairs.jsonl` and the folder `tokenizer`, unless an earlier run left them."""
    path = work / f"pairs_{rows}.jsonl"
    if not path.exists():
        with path.with_suffix(".partial").open("w", encoding="utf-8") as file:
            for row in pairs(rows):
                file.write(json.dumps(row) + "\n")
        path.with_suffix(".partial").rename(path)
    if not (work / "tokenizer").exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer, bpe.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        special = ["<|pad|>", "<|end|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator((text for row in pairs(20_000) for text in row.values()), trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe, pad_token=special[0], eos_token=special[1]
        )
        tokenizer.save_pretrained(work / "tokenizer")


def tokenise_texts(folder: str, texts: list[str]) -> tuple[int, float]:
    """A process of the baseline: (tokens, CPU seconds)."""
    tokenizer, cpu, tokens = AutoTokenizer.from_pretrained(folder), time.process_time(), 0
    for place in range(0, len(texts), 1000):
        tokens += sum(map(len, tokenizer(texts[place : place + 1000])["input_ids"]))
    return tokens, time.process_time() - cpu


def tokenizer_speed(work: Path, path: Path, rows: int, processes: int) -> tuple[float, float]:
    """(tokens per row, rows per CPU second) of the tokenizer alone, on the first rows."""
    count = min(rows, BASELINE_ROWS)
    with path.open(encoding="utf-8") as lines:
        texts = [
            text
            for line, _ in zip(lines, range(count), strict=False)
            for text in json.loads(line).values()
        ]
    parts = [texts[number::processes] for number in range(processes)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        tokens, seconds = zip(
            *pool.map(partial(tokenise_texts, str(work / "tokenizer")), parts), strict=True
        )
    return sum(tokens) / count, count / sum(seconds)


def rank(number: int, ranks: int, port: int, work: Path, path: Path, cache: Path) -> dict[str, Any]:
    """One rank: prepare the rows as step 2 does, fingerprint them on rank 0, read some at random;
    its figures."""
    import torch.distributed

    from dschat_ppo.checkpoint.identity import rows_fingerprint
    from dschat_ppo.common.dist import barrier, is_main
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.config.data_flags import DataFlags, StepData
    from dschat_ppo.data.prepare import prepare
    from dschat_ppo.data.rows import read_splits
    from dschat_ppo.data.sources import open_set, parse_sources
    from dschat_ppo.data.supervised_batches import collate_pairs
    from dschat_ppo.supervised import supervised_run  # noqa: F401  (a rank has imported all of it)

    there = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in there.items()})
    quiet_libraries()
    torch.distributed.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    flags = DataFlags(data_path=[str(path)], data_split="0,1,0", data_output_path=str(cache))
    barrier()
    before, start = psutil.Process().memory_info().rss / 2**30, time.perf_counter()
    # measured apart: the conversion of the file to Arrow is not tokenising
    if is_main() and not any(cache.iterdir()):
        found = open_set(parse_sources(flags.data_path, "--data_path")[0], flags.data_output_path)
        read_splits(found, found.chosen()[0], flags.data_output_path)
    barrier()
    # of this process and of its children that have ended
    read, cpu = time.perf_counter(), sum(os.times()[:4])
    rows = prepare(StepData("preference", flags, LIMIT), tokenizer).train
    cpu = sum(os.times()[:4]) - cpu
    fingerprint = rows_fingerprint(rows) if is_main() else ""
    total = time.perf_counter() - start
    order = np.random.default_rng(number).permutation(len(rows))[:20_000].tolist()
    for place in range(0, len(order), 16):
        collate_pairs(rows, order[place : place + 16], tokenizer.pad_token_id)
    barrier()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "read_s": read - start,
        "cpu_s": cpu,
        "total_s": total,
        "fingerprint": fingerprint,
        "before_gib": before,
        "peak_gib": peak,
    }


def launch(ranks: int, work: Path, path: Path, cache: Path) -> list[dict[str, Any]]:
    """Start the ranks and return their results in rank order."""
    port = free_port()
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        started = [
            pool.submit(rank, number, ranks, port, work, path, cache) for number in range(ranks)
        ]
        return [one.result() for one in started]


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    make_files(work, arguments.rows)
    path, processes = work / f"pairs_{arguments.rows}.jsonl", worker_count(None, arguments.rows)
    speeds = [tokenizer_speed(work, path, arguments.rows, processes)]
    with tempfile.TemporaryDirectory(dir=work) as cache:
        first = launch(arguments.ranks, work, path, Path(cache))
        # again, since other work may disturb one
        speeds.append(tokenizer_speed(work, path, arguments.rows, processes))
        second = launch(arguments.ranks, work, path, Path(cache))
        stored = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
    if first[0]["fingerprint"] != second[0]["fingerprint"]:
        sys.exit("the second start has another fingerprint")
    ours = arguments.rows / sum(rank["cpu_s"] for rank in first)
    alone = sum(speed for _, speed in speeds) / len(speeds)
    return {
        "rows": arguments.rows,
        "tokens_per_row": speeds[0][0],
        "processes": processes,
        "file_gib": path.stat().st_size / 2**30,
        "cache_gib": stored / 2**30,
        "read_s": first[0]["read_s"],
        "rows_per_cpu_s": ours,
        "tokenizer_rows_per_cpu_s": alone,
        "cpu_ratio": ours / alone,
        "second_start_s": max(rank["total_s"] for rank in second),
        "peak_gib": max(rank["peak_gib"] for rank in first + second),
        "before_gib": max(rank["before_gib"] for rank in first + second),
    }


# column of the table of docs/benchmarks.md -> its figure
COLUMNS = {
    "rows": "{rows}",
    "tokens a row": "{tokens_per_row:.0f}",
    "file, GiB": "{file_gib:.2f}",
    "cache, GiB": "{cache_gib:.2f}",
    "processes": "{processes}",
    "read, s": "{read_s:.0f}",
    "rows per CPU second": "{rows_per_cpu_s:.0f}",
    "tokenizer alone": "{tokenizer_rows_per_cpu_s:.0f}",
    "ratio": "{cpu_ratio:.2f}",
    "second start, s": "{second_start_s:.1f}",
    "peak memory of a rank, GiB": "{peak_gib:.2f} ({before_gib:.2f} before)",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="preference pairs")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the node")
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for the file and the tokenizer, kept; not given: temporary",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data_") as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        found = measure(arguments, work)
    table = markdown(list(COLUMNS), [[cell.format(**found) for cell in COLUMNS.values()]])
    publish(found, table, MARKS, arguments.json, arguments.docs)


if __name__ == "__main__":
    main()
