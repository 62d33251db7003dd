"""Peak memory of each rank, by phase, under the settings that trade time for memory.

    python benchmarks/memory.py [--only NAME ...] [--ranks 2] [--work DIR] [--json FILE] [--docs docs/memory.md]
    python benchmarks/memory.py --planner [--only NAME ...] [--work DIR] [--json FILE] [--docs docs/memory.md]

Each setting starts new ranks: random Llamas of 65 M parameters in bf16, one update from 8 rows per rank of 64 + 32
tokens; the second PPO step (steps 1 and 2: the second update) is measured. "Peak" is what a phase needs beyond an idle
rank: on a GPU its memory, on a CPU the resident memory. On a CPU, host and device memory are the same, so peaks do not
show what a setting moves to the host. "Held" counts the tensors of weights, optimizer states and gradient buffers that
a setting leaves on the device: between updates, and while it generates. With `--json` FILE, results are added to those
in the file, and the table shows all of them.

`--planner` compares the peaks that `dschat_ppo.tools.plan` predicts with measured ones (see `planned_memory.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import markdown, write_docs
from memory_phases import Workload, config_of_setting, measure_ppo, measure_supervised
from models import classifier, config_of, language_model, save_reward_adapter
from planned_memory import CASES, comparison, planned_peaks

from dschat_ppo.common import dist, host_memory
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.engine import hybrid_engine
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.tools.toy import make_tokenizer

RANK = 16
MARKS, PLANNER_MARKS = ("<!-- memory -->", "<!-- /memory -->"), ("<!-- planner -->", "<!-- /planner -->")
PHASES = ("load", "rollout", "score", "actor", "critic")
THRESHOLD = 65536  # glibc returns freed tensors of this size at once, so that they do not count

_Z0, _Z2, _Z3 = (f"--actor_zero_stage {stage} --critic_zero_stage {stage}" for stage in (0, 2, 3))
_CHECKPOINTING = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
_FROZEN = "--offload_reference_model --offload_reward_model"
_LORA = f"--actor_lora_dim {RANK} --critic_lora_dim {RANK} --only_optimize_lora"


USUAL = Workload()
# name -> (step, flags)
SETTINGS = {
    "ZeRO 0": ("ppo", _Z0),
    "ZeRO 2": ("ppo", _Z2),
    "ZeRO 3": ("ppo", _Z3),
    "ZeRO 2, optimizer offloaded": ("ppo", f"{_Z2} --offload_optimizer"),
    "ZeRO 3, optimizer offloaded": ("ppo", f"{_Z3} --offload_optimizer"),
    "ZeRO 3, offload": ("ppo", f"{_Z3} --offload"),
    "ZeRO 3, reference and reward offloaded": ("ppo", f"{_Z3} {_FROZEN}"),
    "ZeRO 0, sleep": ("ppo", f"{_Z0} --sleep_in_rollout"),
    "ZeRO 2, sleep": ("ppo", f"{_Z2} --sleep_in_rollout"),
    "ZeRO 3, sleep": ("ppo", f"{_Z3} --sleep_in_rollout"),
    "ZeRO 3, unpinned": ("ppo", f"{_Z3} --unpin_actor_parameters"),
    "ZeRO 3, tensor parallel": ("ppo", f"{_Z3} --inference_tp_size 2"),
    "ZeRO 3, sleep, tensor parallel": ("ppo", f"{_Z3} --sleep_in_rollout --inference_tp_size 2"),
    "ZeRO 3, checkpointing": ("ppo", f"{_Z3} {_CHECKPOINTING}"),
    "ZeRO 3, everything": ("ppo", f"{_Z3} --offload {_FROZEN} {_CHECKPOINTING} --unpin_actor_parameters"),
    "ZeRO 2, LoRA": ("ppo", f"{_Z2} {_LORA}"),
    "ZeRO 3, LoRA": ("ppo", f"{_Z3} {_LORA}"),
    "ZeRO 2, one base": ("ppo", f"{_Z2} {_LORA} --share_base"),
    "step 1, ZeRO 0": ("sft", "--zero_stage 0"),
    "step 1, ZeRO 3, optimizer offloaded": ("sft", "--zero_stage 3 --offload_optimizer"),
    "step 2, ZeRO 0": ("reward", "--zero_stage 0"),
    "step 2, ZeRO 3, checkpointing": ("reward", "--zero_stage 3 --gradient_checkpointing"),
}


def make_models(work: Path, load: Workload = USUAL) -> None:
    """Write the folders `lm`, `reward` and `adapter` (over `lm`), unless an earlier run left them."""
    work, config = work / load.folder, config_of(*load.shape)
    tokenizer = make_tokenizer(["a few words to merge"])
    for name, model in (("lm", language_model), ("reward", classifier)):
        if not (work / name / "config.json").exists():
            model(config).save_pretrained(work / name)
            tokenizer.save_pretrained(work / name)
    if not (work / "adapter/adapter_config.json").exists():
        save_reward_adapter(work / "lm", work / "adapter", RANK)
        tokenizer.save_pretrained(work / "adapter")


def setting_of(name: str) -> tuple[str, list[str], Workload]:
    """(step, words, workload) of a setting of this module, or of a case of `planned_memory.py`."""
    if name in CASES:
        case = CASES[name]
        return case.step, case.flags.split(), Workload(case.shape, case.rows, case.prompt, case.answer)
    return SETTINGS[name][0], SETTINGS[name][1].split(), USUAL


def measure_here(name: str, work: Path, out: Path) -> None:
    """Measure one setting in this rank; rank 0 writes the largest numbers of all ranks."""
    quiet_libraries()
    init_process_group()
    step, words, load = setting_of(name)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        hybrid_engine.on_device = lambda tensor: True  # as on a GPU, so that `held` sees what leaves
        host_memory.LARGEST = THRESHOLD  # else loading a model ends with a higher threshold
    config = config_of_setting(step, work, words, load)
    found = measure_ppo(config, load) if step == "ppo" else measure_supervised(step, config, load)
    ranks = dist.gather_objects(found)
    if dist.is_main():
        largest = {
            part: {key: round(max(rank[part][key] for rank in ranks), 3) for key in found[part]} for part in found
        }
        out.write_text(json.dumps(largest | {"device": dist.device().type, "ranks": dist.world_size()}))
    dist.shutdown()
    leave(0)


def measure_in_ranks(name: str, work: Path, ranks: int) -> dict[str, Any]:
    """Start the ranks of one setting, and wait for its numbers."""
    out = work / "one_setting.json"
    out.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    command += ["--master_port", str(port), str(Path(__file__).resolve()), "--measure", name, "--work", str(work)]
    ended = subprocess.run(command, text=True, capture_output=True, check=False,
                           env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD)})  # fmt: skip
    if ended.returncode or not out.exists():
        sys.exit(f"{name}: exit code {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    return json.loads(out.read_text())


def table(results: dict[str, Any]) -> str:
    """The table of docs/memory.md."""

    def cell(numbers: dict[str, float], key: str) -> str:
        return f"{numbers[key]:.2f}" if key in numbers else ""

    rows = []
    for name in (name for name in SETTINGS if name in results):
        peak, held = results[name]["peak"], results[name]["held"]
        rows.append([name, *(cell(peak, phase) for phase in PHASES), cell(held, "training"), cell(held, "rollout")])
    peaks = [f"peak, {phase}" for phase in PHASES]
    return markdown(["setting", *peaks, "held, training", "held, rollout"], rows)


def measured(names: list[str], work: Path, ranks: int, kept: Path | None) -> dict[str, Any]:
    """The numbers of these settings or cases, with those in the file `kept`, to which they are added."""
    results = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for name in names:
        make_models(work, setting_of(name)[2])
        results[name] = measure_in_ranks(name, work, CASES[name].ranks if name in CASES else ranks)
        print(name, json.dumps(results[name]), flush=True)
        if kept:
            kept.write_text(json.dumps(results, indent=2) + "\n")
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", choices=[*SETTINGS, *CASES], help="settings to measure; default: all; none: table"
    )
    parser.add_argument("--planner", action="store_true", help="compare the planner with measured peaks")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each setting")
    parser.add_argument("--work", type=Path, help="keep the models in this folder")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(arguments.measure, arguments.work, arguments.work / "one_setting.json")
    with tempfile.TemporaryDirectory() as folder:
        work = (arguments.work or Path(folder)).resolve()
        names = list(CASES if arguments.planner else SETTINGS) if arguments.only is None else arguments.only
        results = measured(names, work, arguments.ranks, arguments.json)
        text, marks = table(results), MARKS
        if arguments.planner:
            configs = {}
            for name in (name for name in results if name in CASES):
                step, words, load = setting_of(name)
                make_models(work, load)  # unless it is measured in this run
                configs[name] = config_of_setting(step, work, words, load)
            planned = {name: planned_peaks(config, CASES[name].ranks) for name, config in configs.items()}
            text, marks = comparison(planned, results), PLANNER_MARKS
    print(text)
    if arguments.docs:
        write_docs(arguments.docs, text, marks)


if __name__ == "__main__":
    main()
