"""How much host memory and how many bytes from the disk it takes to load a model on 1 rank and on 4 ranks.

    python benchmarks/loading.py [--json F] [--docs docs/benchmarks.md]

Each setting loads the same random Llama into a ZeRO engine that only runs forward, so that what remains in memory is
the model alone, one copy over all ranks with ZeRO-3. The peak is the largest sum, over the ranks, of their proportional
set sizes (a page of a mapped file counts once). What the ranks hold after a tiny model was loaded in the same way
(libraries, buffers of the collectives) is subtracted. The files are dropped from the page cache before each launch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from measure import markdown, publish
from models import config_of, language_model

MARKS = ("<!-- loading -->", "<!-- /loading -->")
FILES = ("bf16", "fp32")  # number format of the files; the engine is in bf16
PAUSE = 0.05  # seconds between two samples of memory
MIB = 2**20
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}


def make_folders(work: Path, layers: int, hidden: int) -> float:
    """The model in bf16 in one file and in fp32 in several files; returns its size in bf16, MiB."""
    language_model(config_of(512, 2, 128)).save_pretrained(work / "tiny")
    model = language_model(config_of(8192, layers, hidden))
    model.save_pretrained(work / "bf16")
    model.float().save_pretrained(work / "fp32", max_shard_size="300MB")
    return sum(weight.numel() for weight in model.parameters()) * 2 / MIB


def rank(folder: Path, ready: Path) -> None:
    """Load the model on this rank. Files in `ready` tell the parent when loading begins and ends."""
    import deepspeed

    from dschat_ppo.common.dist import barrier, shutdown
    from dschat_ppo.engine.build_engine import eval_engine
    from dschat_ppo.engine.ds_config import eval_config
    from dschat_ppo.models.loading import load_causal_lm
    from dschat_ppo.models.policy_model import PolicyModel

    deepspeed.init_distributed("gloo", verbose=False)
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = eval_config(3, "bf16", False, ranks)
    model = load_causal_lm(str(folder.with_name("tiny")), "bf16", config)
    del model
    barrier()
    (ready / f"begin_{number}").touch()
    while not (ready / "go").exists():
        time.sleep(0.01)
    engine = eval_engine(PolicyModel(load_causal_lm(str(folder), "bf16", config)), config)
    barrier()
    (ready / f"end_{number}").touch()
    while not (ready / "leave").exists():
        time.sleep(0.01)
    assert engine is not None
    shutdown()


def evict(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def memory(processes: list[subprocess.Popen[bytes]]) -> float:
    """Sum of the proportional set sizes, MiB."""
    return sum(psutil.Process(process.pid).memory_full_info().pss for process in processes) / MIB


def disk(processes: list[subprocess.Popen[bytes]]) -> float:
    """MiB that the processes caused to be read from the disk."""
    return sum(psutil.Process(process.pid).io_counters().read_bytes for process in processes) / MIB


def load(folder: Path, ranks: int, port: int) -> dict[str, float]:
    """Load on `ranks` ranks: MiB of memory at the peak and at the end, and MiB read from the disk."""
    with tempfile.TemporaryDirectory() as name:
        ready, words = Path(name), [sys.executable, __file__, "--rank_of", str(folder), name]
        processes = []
        for number in range(ranks):
            there = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks,
                     "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            processes.append(subprocess.Popen(words, env=os.environ | {n: str(v) for n, v in there.items()} | QUIET))

        def wait_for(kind: str) -> float:
            peak = 0.0
            while len(list(ready.glob(f"{kind}_*"))) < ranks:
                if any(process.poll() for process in processes):
                    sys.exit(f"a rank failed while loading {folder}")
                peak = max(peak, memory(processes)) if kind == "end" else 0.0
                time.sleep(PAUSE)
            return peak

        wait_for("begin")
        evict(folder)
        before, read_before = memory(processes), disk(processes)
        (ready / "go").touch()
        peak, after, read = wait_for("end"), memory(processes), disk(processes)
        (ready / "leave").touch()
        for process in processes:
            process.wait()
    return {"peak": max(peak, after) - before, "after": after - before, "read": read - read_before}


def table(found: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md."""
    header = ["files", "peak on 1 rank, MiB", "peak of 4 ranks together", "ratio",
              "kept by 1 / 4 ranks", "read from the disk by 1 / 4 ranks"]  # fmt: skip
    rows = []
    for setting in found["settings"]:
        one, four = setting["ranks"]["1"], setting["ranks"]["4"]
        rows.append([
            setting["files"], f"{one['peak']:.0f}", f"{four['peak']:.0f}",
            f"{four['peak'] / one['peak']:.2f}", f"{one['after']:.0f} / {four['after']:.0f}",
            f"{one['read']:.0f} / {four['read']:.0f}",
        ])  # fmt: skip
    return markdown(header, rows)


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--port", type=int, default=29631, help="port of the ranks, and the three after it")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    parser.add_argument("--rank_of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank(*map(Path, arguments.rank_of))
        return
    with tempfile.TemporaryDirectory(prefix="loading_") as temporary:
        work, ports = Path(temporary), iter(range(arguments.port, arguments.port + 4))
        found: dict[str, Any] = {"model_mib": make_folders(work, arguments.layers, arguments.hidden), "settings": []}
        for files in FILES:
            of_ranks = {str(ranks): load(work / files, ranks, next(ports)) for ranks in (1, 4)}
            found["settings"].append({"files": files, "ranks": of_ranks})
            print(json.dumps(found["settings"][-1]), file=sys.stderr, flush=True)
    publish(found, table(found), MARKS, arguments.json, arguments.docs)


if __name__ == "__main__":
    main()
