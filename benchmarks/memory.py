"""Peak memory of each rank, by phase, under the settings that trade time for memory.

    python benchmarks/memory.py [--only NAME ...] [--ranks 2] [--work DIR] [--json FILE] [--docs docs/memory.md]

Each setting starts new ranks: random Llamas of 65 M parameters in bf16, one update from 8 rows per rank of 64 + 32
tokens; the second PPO step (steps 1 and 2: the second update) is measured. "Peak" is what a phase needs beyond an idle
rank: on a GPU its memory, on a CPU the resident memory. On a CPU, host and device memory are the same, so peaks do not
show what a setting moves to the host. "Held" counts the tensors of weights, optimizer states and gradient buffers that
a setting leaves on the device: between updates, and while it generates. With `--json` FILE, results are added to those
in the file, and the table shows all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from fault_outcomes import write_docs
from measure import markdown, peak_memory
from models import classifier, config_of, language_model, save_reward_adapter
from torch import Tensor

from dschat_ppo.common import dist, heap
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine import sleep
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.collect import Prompts
from dschat_ppo.ppo.mini_dataset import gather_rows
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.ppo.train_ppo import learned_reward
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.runtime.launch import leave
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.supervised.reward_objective import reward_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config
from dschat_ppo.tools.toy import make_tokenizer

VOCABULARY, LAYERS, HIDDEN = 8192, 8, 768
ROWS, PROMPT, ANSWER = 8, 64, 32  # of each rank
RANK = 16
MARKS = ("<!-- memory -->", "<!-- /memory -->")
PHASES = ("load", "rollout", "score", "actor", "critic")
GIB = 2**30
THRESHOLD = 65536  # glibc returns freed tensors of this size at once, so that they do not count

_Z0, _Z2, _Z3 = (f"--actor_zero_stage {stage} --critic_zero_stage {stage}" for stage in (0, 2, 3))
_CHECKPOINTING = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
_FROZEN = "--offload_reference_model --offload_reward_model"
_LORA = f"--actor_lora_dim {RANK} --critic_lora_dim {RANK} --only_optimize_lora"
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


def make_models(work: Path) -> None:
    """Write the folders `lm`, `reward` and `adapter` (over `lm`), unless an earlier run left them."""
    config, tokenizer = config_of(VOCABULARY, LAYERS, HIDDEN), make_tokenizer(["a few words to merge"])
    for name, model in (("lm", language_model), ("reward", classifier)):
        if not (work / name / "config.json").exists():
            model(config).save_pretrained(work / name)
            tokenizer.save_pretrained(work / name)
    if not (work / "adapter/adapter_config.json").exists():
        save_reward_adapter(work / "lm", work / "adapter", RANK)
        tokenizer.save_pretrained(work / "adapter")


def held_bytes(engines: Iterable[Any], originals: Iterable[Tensor] = ()) -> int:
    """Bytes of weights and training states that are on the device, or would be if there were one.

    `originals`: weights outside the rollout. It may hold them beside merged ones, which replace them in the model.
    """
    on_device: dict[int, int] = {}

    def count(tensors: Iterable[Tensor], offloaded: Any) -> None:
        in_host_memory = offloaded is not None and str(getattr(offloaded, "device", "none")).endswith("cpu")
        for tensor in tensors:
            if not in_host_memory:
                storage = tensor.untyped_storage()
                on_device[storage.data_ptr()] = storage.nbytes()

    for engine in engines:
        count(sleep.training_states(engine), engine.zero_offload_optimizer())
        count(sleep.weights_of(engine), engine.zero_offload_param())
        count([weight.data for weight in engine.module.parameters()], None)  # gathered ones are on the device
    count(originals, None)
    return sum(on_device.values())


class Peaks:
    """Peaks of the phases of this rank, and their seconds."""

    def __init__(self) -> None:
        self.gib: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.idle = 0.0
        self.idle = self._now()

    def _now(self) -> float:
        gc.collect()
        if torch.cuda.is_available():
            return torch.cuda.memory_allocated() / GIB
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        clock = PhaseClock()
        with clock.phase("now"):
            pass
        return clock.peak_gib["now"] - self.idle

    def measure(self, name: str, run: Callable[[], Any], clock: PhaseClock | None = None) -> Any:
        """Run a phase; `clock`: the one that the phase resets the peak for."""
        before, found, start = self._now(), [], time.perf_counter()
        grown = peak_memory(lambda: found.append(run()))
        self.gib[name] = before + grown
        if clock is not None:
            self.gib[name] = max(clock.peak_gib.values()) - self.idle
        self.seconds[name] = time.perf_counter() - start
        return found[0]


def measure_ppo(work: Path, words: list[str]) -> dict[str, Any]:
    """Two PPO steps; the numbers of the second."""
    peaks = Peaks()
    lm, reward = str(work / "lm"), str(work / ("adapter" if "--share_base" in words else "reward"))
    base: list[Any] = ["--actor_model_name_or_path", lm, "--critic_model_name_or_path", reward]
    base += ["--data_path", "unused", "--output_dir", "unused", "--num_warmup_steps", 0, "--prepack_weights", False]
    base += ["--max_prompt_seq_len", PROMPT, "--max_answer_seq_len", ANSWER, "--min_answer_seq_len", ANSWER]
    base += ["--per_device_generation_batch_size", ROWS, "--per_device_training_batch_size", ROWS]
    flags = parse("ppo", [*map(str, base), *words])
    plan = plan_ppo(flags.ppo, ROWS * dist.world_size() * 2, dist.world_size())
    engines = peaks.measure("load", lambda: RLHFEngine(flags, plan, ModelFolders(lm, reward, reward)))
    tokenizer = load_tokenizer(lm, "lm")
    rewards = build_sources(flags.rewards, learned_reward(flags, engines, tokenizer, plan.micro_batch_tokens))
    ids = np.random.default_rng(0).integers(2, 300, (plan.rollout_prompts, PROMPT)).tolist()
    prompts = Dataset.from_dict({"row": ["{}"] * len(ids), "prompt_ids": ids})
    ppo = PPOComponents(flags, plan, engines, prompts, tokenizer, rewards, dist.device())
    mine = Prompts(list(range(dist.rank() * ROWS, (dist.rank() + 1) * ROWS)), dist.rank() * ROWS)
    collection, held = ppo.collection, dict[str, float]()
    models = [engine for engine in (engines.actor, engines.reference, engines.critic, engines.reward) if engine]
    for step in (1, 2):
        rollout = peaks.measure("rollout", lambda step=step: collection.generator.generate(mine.rows, step))

        def score(rollout: Any = rollout, step: int = step) -> Any:
            return gather_rows(collection.score(rollout, collection.reward(rollout, mine, step), mine))

        collection.clock = PhaseClock()
        scored = peaks.measure("score", score, collection.clock)
        experience = ppo.advantages(scored, step)
        ppo.begin_updates(experience)
        for minibatch in ppo.minibatches_left(ppo.state.experience, step):
            for role, objective in (("actor", ppo.updates.actor_objective), ("critic", ppo.updates.critic_objective)):
                ppo.updates.clock = PhaseClock()
                made = [objective(minibatch)]
                peaks.measure(role, lambda made=made, step=step: ppo.updates.optimizer_step(made, step),
                              ppo.updates.clock)  # fmt: skip
        ppo.state.finish_step({})
        held["training"] = held_bytes(models) / GIB
        originals = [weight.data for engine in models for weight in engine.module.parameters()]
        with engines.hybrid.generating():
            held["rollout"] = held_bytes(models, originals) / GIB
    return {"peak": peaks.gib, "seconds": peaks.seconds, "held": held}


def measure_supervised(step: str, work: Path, words: list[str]) -> dict[str, Any]:
    """Two updates of step 1 or 2; the numbers of the second."""
    peaks, folder = Peaks(), str(work / ("lm" if step == "sft" else "reward"))
    length = PROMPT + ANSWER
    base = ["--model_name_or_path", folder, "--data_path", "d", "--output_dir", "o", "--max_seq_len", str(length)]
    config = parse(step, [*base, "--per_device_train_batch_size", str(ROWS), *words])
    ids = np.random.default_rng(0).integers(2, 300, (ROWS * dist.world_size(), PROMPT + 2 * ANSWER)).tolist()
    answers = [[row[PROMPT:length], row[length:]] if step == "reward" else [row[PROMPT:length]] for row in ids]
    columns = {"prompt_ids": [row[:PROMPT] for row in ids], "answers": answers, "margin": [0.0] * len(ids)}
    rows = Dataset.from_dict(columns)

    def load() -> SupervisedTrainer[Any]:
        ds_config = fit_ds_config(config.fit, config.run, config.memory)
        if step == "sft":
            model: Any = PolicyModel(load_causal_lm(folder, "bf16", ds_config))
            objective: Any = sft_objective(0, False, dist.device())
        else:
            model = ScalarModel(load_sequence_classifier(folder, "bf16", ds_config, new_head=False))
            objective = reward_objective(0, dist.device(), config)
        if config.fit.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return SupervisedTrainer(model, ds_config, TokenRows(rows, None), objective, config.fit, config.run)

    trainer = peaks.measure("load", load)
    mine = list(range(dist.rank() * ROWS, (dist.rank() + 1) * ROWS))
    for _ in range(2):
        peaks.measure("actor", lambda: trainer.train_step([mine]))
    return {"peak": peaks.gib, "seconds": peaks.seconds, "held": {"training": held_bytes([trainer.engine]) / GIB}}


def measure_here(name: str, work: Path, out: Path) -> None:
    """Measure one setting in this rank; rank 0 writes the largest numbers of all ranks."""
    quiet_libraries()
    init_process_group()
    step, words = SETTINGS[name][0], SETTINGS[name][1].split()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        sleep.on_device = lambda tensor: True  # as on a GPU, so that `held` sees what leaves
        heap.LARGEST = THRESHOLD  # else loading a model ends with a higher threshold
    found = measure_ppo(work, words) if step == "ppo" else measure_supervised(step, work, words)
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
    out = work / "found.json"
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", choices=list(SETTINGS), help="settings to measure; default: all; none: table"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each setting")
    parser.add_argument("--work", type=Path, help="keep the models in this folder")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(arguments.measure, arguments.work, arguments.work / "found.json")
    with tempfile.TemporaryDirectory() as folder:
        work = (arguments.work or Path(folder)).resolve()
        make_models(work)
        results = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
        for name in SETTINGS if arguments.only is None else arguments.only:
            results[name] = measure_in_ranks(name, work, arguments.ranks)
            print(name, json.dumps(results[name]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    if arguments.docs:
        write_docs(arguments.docs, table(results), MARKS)


if __name__ == "__main__":
    main()
