"""A whole PPO step against the plain way, in one run.

    python benchmarks/ppo_step.py [--json FILE] [--repeats 5] [--workloads fixed varied group]
        [--dtype auto] [--compare trl]

31.6 M parameters for each model, random, in the format that `--dtype auto` chooses; one update per
step. "fixed": PPO with actor, critic, reference and reward model; 32 prompts, 128 + 128 tokens.
"varied": the same with prompts of 32 to 128 tokens and answers lognormal with mean 63, at most 256.
"group": GRPO with actor and reference, the KL in the loss, a reward without cost; 16 prompts of 384
tokens, 8 answers of 64 tokens to each.

The plain way is in `plain.py`; both use the same DeepSpeed engines. `--old_logprobs` is that of our
way. It takes `--micro_batch_tokens 2048`, a quarter of what the plain way has in one pass of
"fixed". Peak memory is compared on "fixed" at a vocabulary of 32768, beyond what models and
optimizers hold; its ratio is ours to the plain way's (less is better), the others are the plain
way's cost to ours (more is better). `--compare trl` also runs TRL's GRPO trainer on "group", where
TRL is installed, in bf16 and in fp32, and takes the faster. Beside each phase of our step stands
what its matrix products alone take at the best rate of the machine (`products.py`). `--tiny` makes
models and workloads so small that only the script itself is tried.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plain
import ppo_parts
import products
from measure import costs, markdown, peak_memory, threads
from models import Workload, config_of, workload
from transformers import PretrainedConfig

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group

WORKLOADS = {"fixed": 32, "varied": 32, "group": 16}  # name -> prompts
TOKENS = 2048  # of our micro-batches


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and workloads."""

    model: PretrainedConfig
    wide: PretrainedConfig  # for the peak memory
    shrink: int = 1  # divides the numbers of prompts and tokens

    def workload(self, name: str, vocabulary: int) -> Workload:
        return workload(name, vocabulary, max(2, WORKLOADS[name] // self.shrink), self.shrink)

    def components(
        self, folder: Path, config: PretrainedConfig, work: Workload, flags: list[str]
    ) -> PPOComponents:
        """Step 3 for a workload and those with longer answers, on models that are made in
        `folder`."""
        ppo_parts.save_models(folder, config)
        prompts, longest = work.prompts.prompt_ids.shape
        most = (longest, max(256 // self.shrink, 1))
        flags = [*flags, "--micro_batch_tokens", str(max(TOKENS // self.shrink, sum(most)))]
        return ppo_parts.make_ppo(folder, prompts, work.samples, most, flags)


FULL = Sizes(config_of(), config_of(32768))
TINY = Sizes(config_of(320, 2, 128), config_of(512, 2, 128), shrink=16)


def ways_of(ppo: PPOComponents, work: Workload) -> dict[str, Any]:
    return {
        "plain": lambda: plain.step(ppo, work),
        "dschat_ppo": lambda: ppo_parts.ppo_step(ppo, work),
    }


def compare(ppo: PPOComponents, work: Workload, repeats: int, cores: int) -> dict[str, Any]:
    found, samples = costs(ways_of(ppo, work), repeats, cores), len(work.answer_lengths)
    before, ours = found["plain"], found["dschat_ppo"]
    return {
        "phases": phases(ppo, work, repeats, cores),
        "ratio_wall": before.wall / ours.wall,
        "ratio_cpu": before.cpu / ours.cpu,
        "samples_per_s": samples / ours.wall,
        "plain_samples_per_s": samples / before.wall,
    }


def phases(
    ppo: PPOComponents, work: Workload, repeats: int, cores: int
) -> dict[str, dict[str, float]]:
    """Of our step: the seconds of each phase, and what its products alone take."""
    taken: dict[str, list[float]] = {}
    with threads(cores):
        rate = products.best_rate(ppo.device, ppo.engines.actor.module.config)
        for _ in range(repeats):
            ppo.clock.take()
            ppo_parts.ppo_step(ppo, work)
            for phase, seconds in ppo.clock.take()[0].items():
                taken.setdefault(phase, []).append(seconds)
    medians = {phase: statistics.median(seconds) for phase, seconds in taken.items()}
    return products.shares_of(medians, products.operations_of_step(ppo, work), rate)


def peaks(ppo: PPOComponents, work: Workload, cores: int) -> dict[str, float]:
    """Peak GiB of one step of each way, once optimizers have their states."""
    ways = ways_of(ppo, work)
    with threads(cores):
        for run in ways.values():
            run()
        return {name: peak_memory(run) for name, run in ways.items()}


def table(results: dict[str, Any]) -> str:
    """The numbers for docs/benchmarks.md."""
    found = {name: results[name] for name in WORKLOADS if name in results}
    rows = [
        [
            name,
            f"{r['plain_samples_per_s']:.2f}",
            f"{r['samples_per_s']:.2f}",
            f"{r['ratio_wall']:.2f}",
            f"{r['ratio_cpu']:.2f}",
        ]
        for name, r in found.items()
    ]
    return markdown(
        ["workload", "plain, samples/s", "ours, samples/s", "ratio (wall)", "ratio (CPU)"], rows
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each way, of which the median counts"
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument(
        "--old_logprobs", choices=["auto", "rollout", "recompute"], default="auto", help="of ours"
    )
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--compare", choices=["trl"], help="measure another trainer too")
    parser.add_argument("--tiny", action="store_true", help="a trial of the script on tiny sizes")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    if arguments.compare:
        import trl  # noqa: F401  (fails now if it is not installed, and not after an hour)
    quiet_libraries()
    init_process_group()
    sizes = TINY if arguments.tiny else FULL
    # in a trial one: threads that wait for each other cost a busy machine most of the time
    cores, results = 1 if arguments.tiny else len(os.sched_getaffinity(0)), dict[str, Any]()
    dtype = arguments.dtype
    if dtype == "auto":
        with threads(cores):
            dtype = "fp32" if arguments.tiny else products.faster_dtype(sizes.model)
    print(f"dtype: {dtype}", flush=True)
    common = ["--old_logprobs", arguments.old_logprobs, "--dtype", dtype]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in arguments.workloads:
            work = sizes.workload(name, sizes.model.vocab_size)
            ppo = sizes.components(
                folder, sizes.model, work, common + (ppo_parts.GRPO if name == "group" else [])
            )
            results[name] = compare(ppo, work, arguments.repeats, cores)
            print(name, json.dumps(results[name]), flush=True)
            del ppo
        if arguments.compare and "group" in arguments.workloads:
            from trl_step import samples_per_second

            work = sizes.workload("group", sizes.model.vocab_size)
            rates = {
                name: samples_per_second(folder / "lm", work, cores, dtype)
                for name, dtype in products.FORMATS.items()
            }
            print("trl", json.dumps(rates), flush=True)
            results["trl_samples_per_s"] = rate = max(rates.values())
            results["ratio_to_trl"] = results["group"]["samples_per_s"] / rate
        if "fixed" in arguments.workloads:
            work = sizes.workload("fixed", sizes.wide.vocab_size)
            wide = sizes.components(folder / "wide", sizes.wide, work, common)
            results["peak_memory_gib"] = held = peaks(wide, work, cores)
            results["peak_memory_ratio"] = held["dschat_ppo"] / held["plain"]
    print(table(results))
    print(products.table({name: results[name]["phases"] for name in WORKLOADS if name in results}))
    print(json.dumps({name: value for name, value in results.items() if name not in WORKLOADS}))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
