"""The price of `--exact_rollout`: a PPO step with and without it, on a CPU.

    python benchmarks/exact_rollout.py [--repeats 3] [--workloads fixed varied] [--dtype bf16]

The models and workloads of `ppo_step.py`. Each way runs in a process of its own, because MKL reads
its variable at its first product; the two alternate. A process makes one step that is not counted,
and one whose CPU time with one thread counts. Printed are the medians of `--repeats` processes for
the rollout and for the whole step, their ratios, and the largest difference between the log-probs
of sampling and of training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKLOADS = ("fixed", "varied", "group")
WAYS = {"default": [], "exact": ["--exact_rollout"]}


def measure_step(name: str, dtype: str, flags: list[str], is_tiny: bool) -> dict[str, float]:
    """Seconds of CPU time of the rollout and of a step, and the difference of log-probs."""
    import ppo_parts
    import torch
    from ppo_step import FULL, TINY

    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.features.exact_rollout.runs import begin_rank
    from dschat_ppo.monitor.rollout_metrics import drift_metrics
    from dschat_ppo.run.process_group import init_process_group

    torch.set_num_threads(1)
    quiet_libraries()
    init_process_group()
    sizes = FULL
    if is_tiny:
        sizes = TINY
    work = sizes.workload(name, sizes.model.vocab_size)
    words = ["--dtype", dtype, *flags]
    with tempfile.TemporaryDirectory() as folder:
        begin_rank(ppo_parts.ppo_config(Path(folder), 1, 1, (1, 1), words))
        if name == "group":
            words += ppo_parts.GRPO
        ppo = sizes.components(Path(folder), sizes.model, work, words)
        ppo_parts.ppo_step(ppo, work)
        ppo.state.actor_updates = ppo.state.updates = 0
        before = time.process_time()
        with ppo_parts.given_lengths(ppo, work):
            indices = list(range(len(work.prompts.prompt_ids)))
            ppo.collection.sampler.sample(indices, 2)
        rollout = time.process_time() - before
        before = time.process_time()
        ppo_parts.ppo_step(ppo, work, step=2)
        step = time.process_time() - before
        assert ppo.state.experience is not None
        differences = drift_metrics(ppo.state.experience)
    return {"rollout": rollout, "step": step, "difference": differences["rollout/logprob_diff_max"]}


def run_of(way: str, name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure_step` in a new process."""
    words = ["--workloads", name, "--dtype", arguments.dtype, "--way", way]
    if arguments.tiny:
        words.append("--tiny")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *words]
    finished = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    measured: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    print(name, way, json.dumps(measured), file=sys.stderr, flush=True)
    return measured


def medians_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each number over the runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def command_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="processes of each way")
    parser.add_argument("--workloads", nargs="+", default=["fixed", "varied"], choices=WORKLOADS)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--tiny", action="store_true", help="a trial of the script on tiny sizes")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = command_arguments()
    if arguments.way is not None:
        flags = WAYS[arguments.way]
        [name] = arguments.workloads
        print(json.dumps(measure_step(name, arguments.dtype, flags, arguments.tiny)), flush=True)
        os._exit(0)  # the threads of DeepSpeed would keep the process
    for name in arguments.workloads:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.repeats):
            for way in WAYS:
                runs[way].append(run_of(way, name, arguments))
        medians = {way: medians_of(runs[way]) for way in WAYS}
        for key in ("rollout", "step"):
            ratio = medians["exact"][key] / medians["default"][key]
            print(f"{name}, {key}: exact / default = {ratio:.3f}")
        print(name, json.dumps(medians), flush=True)


if __name__ == "__main__":
    main()
