"""Generating with an actor whose ZeRO-3 weights are gathered once, divided over the ranks, or gathered layer by layer.

    python benchmarks/tp_generation.py [--ranks 2] [--tokens 16] [--json FILE] [--docs docs/memory.md]

A random Llama of 109 M parameters in bf16; each rank answers 8 prompts of 32 tokens. "Layer by layer" is
`--unpin_actor_parameters`, "divided" `--inference_tp_size` with all ranks in one group. Seconds are those of a decode
step of the rows of all ranks, on each rank, without the gathering before the first one; the peak is what a rank needs
for the weights beyond its ZeRO-3 partition, measured with one short row.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import markdown, peak_memory, wait, write_docs
from memory import RETURNED
from models import config_of, language_model

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.engine.build_engine import eval_engine
from dschat_ppo.engine.ds_config import eval_config
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.engine.tensor_parallel import tensor_parallel
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import PromptBatch

PROMPTS, LENGTH, HIDDEN = 8, 32, 1024
MARKS = ("<!-- tp -->", "<!-- /tp -->")
WAYS = ("whole", "divided", "layer by layer")


def measure_here(work: Path, tokens: int) -> None:
    """Measure all ways in this rank; rank 0 writes the largest numbers of all ranks."""
    quiet_libraries()
    init_process_group()
    ranks, found = dist.world_size(), {}
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    config = eval_config(3, "bf16", False, ranks)
    engine: Any = eval_engine(PolicyModel(load_causal_lm(str(work / "lm"), "bf16", config)), config)
    group = tensor_parallel(ranks, layers=2)
    hybrids = {
        "whole": HybridEngine(engine),
        "divided": HybridEngine(engine, parallel=group),
        "layer by layer": HybridEngine(engine, pinned=False),
    }
    for name in WAYS:
        hybrid = hybrids[name]

        def run(
            count: int, prompts: int = PROMPTS, length: int = LENGTH, hybrid: Any = hybrid, name: str = name
        ) -> tuple[float, float]:
            """CPU and wall seconds of `count` tokens for `prompts` of each rank."""
            every = torch.randint(2, 8000, (prompts * ranks, length), generator=torch.Generator().manual_seed(1))
            # the ranks of a group answer all prompts together
            mine = (every if name == "divided" else every[dist.rank() * prompts :][:prompts]).to(dist.device())
            batch, how = PromptBatch(mine, torch.ones_like(mine, dtype=torch.bool)), GenerationConfig(
                SamplingParameters(top_k=1), StoppingCriteria(count), rows=len(mine), prepack=False, static=False
            )  # fmt: skip
            with hybrid.generating() as model:
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                generate(model, batch, torch.arange(len(mine)), how, hybrid.max_over_ranks)
                wait()
                return time.process_time() - cpu, time.perf_counter() - wall

        run(1)
        prefill, whole = [min(part) for part in zip(*(run(1) for _ in range(3)), strict=True)], [
            min(part) for part in zip(*(run(tokens + 1) for _ in range(3)), strict=True)
        ]  # fmt: skip
        found[name] = {
            "cpu_seconds_per_token": (whole[0] - prefill[0]) / tokens,
            "seconds_per_token": (whole[1] - prefill[1]) / tokens,
            "peak_mib": 1024 * peak_memory(lambda run=run: run(1, prompts=1, length=1)),
        }
    everywhere = dist.gather_objects(found)
    if dist.is_main():
        largest = {name: {key: max(rank[name][key] for rank in everywhere) for key in found[name]} for name in found}
        (work / "found.json").write_text(json.dumps(largest | {"ranks": ranks, "device": dist.device().type}))
    dist.shutdown()
    leave(0)


def table(found: dict[str, Any]) -> str:
    """The table of docs/memory.md."""
    rows = [
        [name, f"{1000 * found[name]['cpu_seconds_per_token']:.0f}", f"{1000 * found[name]['seconds_per_token']:.0f}",
         f"{found[name]['peak_mib']:.0f}"] for name in WAYS
    ]  # fmt: skip
    return markdown(["weights while generating", "CPU ms per token", "ms per token", "peak, MiB"], rows)


def main() -> None:
    """Start the ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks, all in one group")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(arguments.measure, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        language_model(config_of(hidden=HIDDEN)).save_pretrained(Path(folder) / "lm")
        probe.bind(("127.0.0.1", 0))
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(arguments.ranks)]
        command += ["--master_port", str(probe.getsockname()[1]), str(Path(__file__).resolve())]
        probe.close()
        command += ["--measure", folder, "--tokens", str(arguments.tokens)]
        ended = subprocess.run(command, text=True, capture_output=True, check=False, env={**os.environ, **RETURNED})
        if ended.returncode:
            sys.exit(f"exit code {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
        found = json.loads((Path(folder) / "found.json").read_text())
    print(table(found))
    print(json.dumps(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.docs:
        write_docs(arguments.docs, table(found), MARKS)


if __name__ == "__main__":
    main()
