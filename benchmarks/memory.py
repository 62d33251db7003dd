"""Peak memory of a rank, by phase, under the settings that trade time for memory.

    python benchmarks/memory.py [--planner] [--only NAME ...] [--work DIR] [--json FILE]
        [--docs docs/memory.md]

Each setting runs the script of a step for two optimizer steps, on new ranks, with random Llamas and
rows of digits, and reads the second line of its `metrics.jsonl`. A peak is `memory/*_peak_gib` of a
phase, minus that of a run of models of 0.3 M parameters (`BASELINES`), which is what the libraries
take while they work: on a GPU device memory, on a CPU the resident memory. On a CPU, host and
device memory are the same, so peaks do not show what a setting moves to the host. "Held" counts, on
rank 0, the tensors of weights, optimizer states and gradient buffers that a setting leaves on the
device: between updates, and while it generates. With `--json` FILE, results are added to those in
the file, and the table shows all of them.

`--planner` compares the largest peak of other settings with the one that `dschat_ppo.tools.plan`
predicts: weights, states, activations and buffers of a rank, on the device and the host.
"""

from __future__ import annotations

import argparse
import gc
import json
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import ROOT, environment, launcher, markdown, write_docs
from models import config_of, save_reward_adapter
from ppo_parts import save_models
from torch import Tensor

from dschat_ppo.config.cli import parse
from dschat_ppo.planner.model_parts import read_model_configs
from dschat_ppo.planner.plan_step import plan_step
from dschat_ppo.tools.toy import make_tokenizer

GIB, RANK = 2**30, 16
SCRIPTS = {
    "ppo": "training/step3_ppo/main.py",
    "sft": "training/step1_sft/main.py",
    "reward": "training/step2_reward/main.py",
}
PHASES = ("rollout", "score", "train")
MARKS, PLANNER_MARKS = (
    ("<!-- memory -->", "<!-- /memory -->"),
    ("<!-- planner -->", "<!-- /planner -->"),
)
TINY, SMALL, MEDIUM, LARGE = (512, 1, 128), (8192, 8, 512), (8192, 8, 768), (8192, 8, 1024)


@dataclass(frozen=True)
class Setting:
    """A run: `shape` is (vocabulary, layers, hidden size) of its models, and `rows` are those of
    each rank."""

    step: str
    flags: str
    ranks: int = 2
    shape: tuple[int, int, int] = MEDIUM
    rows: int = 8
    prompt: int = 64
    answer: int = 32


_Z0, _Z2, _Z3 = (f"--actor_zero_stage {stage} --critic_zero_stage {stage}" for stage in (0, 2, 3))
_CHECKPOINTING = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
_FROZEN = "--offload_reference_model --offload_reward_model"
_LORA = f"--actor_lora_dim {RANK} --critic_lora_dim {RANK} --only_optimize_lora"
BASELINES = {
    "baseline, step 3": Setting("ppo", _Z2, 2, TINY, 1, 8, 4),
    "baseline, step 1": Setting("sft", "--zero_stage 2", 2, TINY, 1, 8, 4),
}
SETTINGS = {
    "ZeRO 0": Setting("ppo", _Z0),
    "ZeRO 2": Setting("ppo", _Z2),
    "ZeRO 3": Setting("ppo", _Z3),
    "ZeRO 2, optimizer offloaded": Setting("ppo", f"{_Z2} --offload_optimizer"),
    "ZeRO 3, optimizer offloaded": Setting("ppo", f"{_Z3} --offload_optimizer"),
    "ZeRO 3, offload": Setting("ppo", f"{_Z3} --offload"),
    "ZeRO 3, reference and reward offloaded": Setting("ppo", f"{_Z3} {_FROZEN}"),
    "ZeRO 0, sleep": Setting("ppo", f"{_Z0} --sleep_in_rollout"),
    "ZeRO 2, sleep": Setting("ppo", f"{_Z2} --sleep_in_rollout"),
    "ZeRO 3, sleep": Setting("ppo", f"{_Z3} --sleep_in_rollout"),
    "ZeRO 3, unpinned": Setting("ppo", f"{_Z3} --unpin_actor_parameters"),
    "ZeRO 3, tensor parallel": Setting("ppo", f"{_Z3} --inference_tp_size 2"),
    "ZeRO 3, sleep, tensor parallel": Setting(
        "ppo", f"{_Z3} --sleep_in_rollout --inference_tp_size 2"
    ),
    "ZeRO 3, checkpointing": Setting("ppo", f"{_Z3} {_CHECKPOINTING}"),
    "ZeRO 3, everything": Setting(
        "ppo", f"{_Z3} --offload {_FROZEN} {_CHECKPOINTING} --unpin_actor_parameters"
    ),
    "ZeRO 2, LoRA": Setting("ppo", f"{_Z2} {_LORA}"),
    "ZeRO 3, LoRA": Setting("ppo", f"{_Z3} {_LORA}"),
    "ZeRO 2, one base": Setting("ppo", f"{_Z2} {_LORA} --share_base"),
    "step 1, ZeRO 0": Setting("sft", "--zero_stage 0"),
    "step 1, ZeRO 3, optimizer offloaded": Setting("sft", "--zero_stage 3 --offload_optimizer"),
    "step 2, ZeRO 0": Setting("reward", "--zero_stage 0"),
    "step 2, ZeRO 3, checkpointing": Setting("reward", "--zero_stage 3 --gradient_checkpointing"),
}
PLANNED = {
    "step 3, ZeRO 0, 1 rank": Setting("ppo", "", 1),
    "step 3, ZeRO 0, 1 rank, fp32": Setting("ppo", "--dtype fp32", 1, SMALL, 8, 64, 64),
    "step 3, ZeRO 2": Setting("ppo", _Z2, 2, LARGE, 4, 64, 64),
    "step 3, ZeRO 3": Setting("ppo", _Z3),
    "step 3, ZeRO 2, optimizer offloaded": Setting("ppo", f"{_Z2} --offload_optimizer"),
    "step 3, ZeRO 2, LoRA": Setting("ppo", f"{_Z2} {_LORA}", 2, LARGE, 4, 192, 64),
    "step 3, ZeRO 2, one base": Setting("ppo", f"{_Z2} {_LORA} --share_base", 2, LARGE, 4, 192, 64),
    "step 1, ZeRO 0, 1 rank, long rows": Setting("sft", "", 1, MEDIUM, 4, 384, 128),
    "step 1, ZeRO 2, packed, checkpointing": Setting(
        "sft", "--zero_stage 2 --packing --gradient_checkpointing", 2, LARGE, 4, 384, 128
    ),
    "step 1, ZeRO 3, fp32": Setting("sft", "--zero_stage 3 --dtype fp32", 2, MEDIUM, 2, 192, 64),
    "step 2, ZeRO 2": Setting("reward", "--zero_stage 2", 2, LARGE, 4, 192, 64),
}
ALL = BASELINES | SETTINGS | PLANNED


def make_models(folder: Path, shape: tuple[int, int, int]) -> None:
    """Write the folders `lm`, `reward` and `adapter` (over `lm`), unless an earlier run left
    them."""
    save_models(folder, config_of(*shape))
    if not (folder / "adapter/tokenizer.json").exists():
        save_reward_adapter(folder / "lm", folder / "adapter", RANK)
        make_tokenizer(["a few words to merge"]).save_pretrained(folder / "adapter")


def write_rows(setting: Setting, file: Path) -> None:
    """Rows of digits, each of which is a token; with packing, four fill what a row fills else."""
    parts = 4 if "--packing" in setting.flags else 1
    # and the end of the answer
    prompt, answer = "0" * (setting.prompt // parts), "7" * (setting.answer // parts - 1)
    row = {"prompt": prompt}
    if setting.step != "ppo":
        row |= (
            {"response": answer}
            if setting.step == "sft"
            else {"chosen": answer, "rejected": "5" * len(answer)}
        )
    count = 2 * parts * setting.rows * setting.ranks
    file.write_text(
        "".join(
            json.dumps({**row, "prompt": f"{n}"[:9] + prompt[len(f"{n}") :]}) + "\n"
            for n in range(count)
        )
    )


def words_of(setting: Setting, models: Path, data: Path, output: Path) -> list[str]:
    """The command line of the step."""
    words: list[Any] = [
        "--data_path",
        data,
        "--output_dir",
        output,
        "--data_output_path",
        f"{output}_data",
    ]
    words += ["--max_steps", 2, "--apply_chat_template", False, "--num_warmup_steps", 0]
    words += ["--dtype", "bf16"]  # unless `flags` name another format
    if setting.step == "ppo":
        reward = models / ("adapter" if "--share_base" in setting.flags else "reward")
        words += [
            "--actor_model_name_or_path",
            models / "lm",
            "--critic_model_name_or_path",
            reward,
        ]
        words += ["--data_split", "0,0,1", "--max_prompt_seq_len", setting.prompt]
        words += ["--max_answer_seq_len", setting.answer, "--min_answer_seq_len", setting.answer]
        words += ["--per_device_generation_batch_size", setting.rows]
        words += ["--per_device_training_batch_size", setting.rows]
    else:
        words += ["--model_name_or_path", models / ("lm" if setting.step == "sft" else "reward")]
        words += [
            "--data_split",
            "1,0,0" if setting.step == "sft" else "0,1,0",
            "--eval_fraction",
            0,
        ]
        words += [
            "--max_seq_len",
            setting.prompt + setting.answer,
            "--per_device_train_batch_size",
            setting.rows,
        ]
    return [*map(str, words), *setting.flags.split()]


def measure(setting: Setting, work: Path) -> dict[str, Any]:
    """Run it, and read its second step."""
    models, output = work / "-".join(map(str, setting.shape)), Path(tempfile.mkdtemp(dir=work))
    make_models(models, setting.shape)
    write_rows(setting, output / "rows.jsonl")
    words = words_of(setting, models, output / "rows.jsonl", output / "run")
    command = [
        *launcher(setting.ranks),
        str(Path(__file__).resolve()),
        "--measure",
        setting.step,
        *words,
    ]
    # glibc returns freed tensors of this size at once, so that they do not count
    env = environment(MALLOC_MMAP_THRESHOLD_="65536")
    ended = subprocess.run(command, text=True, capture_output=True, check=False, env=env)
    if ended.returncode:
        sys.exit(
            f"{shlex.join(command)}\nexit code"
            f" {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        )
    line = json.loads((output / "run/metrics.jsonl").read_text().splitlines()[-1])
    peaks = {phase: line.get(f"memory/{phase}_peak_gib") for phase in (*PHASES, "reward")}
    peaks["score"] = max(filter(None, (peaks["score"], peaks.pop("reward"))), default=None)
    held = {name: line.get(f"memory/held_{name}_gib") for name in ("training", "rollout")}
    return {
        "peak": {k: v for k, v in peaks.items() if v},
        "held": {k: v for k, v in held.items() if v is not None},
    }


def run_here(step: str, words: list[str]) -> None:
    """In a rank: run the script, with what the engines hold added to its metrics; ends the
    process."""
    from deepspeed import DeepSpeedEngine

    from dschat_ppo.engine import hybrid_engine
    from dschat_ppo.features.sleep import sleep
    from dschat_ppo.monitor.writers import MetricsWriter

    if not torch.cuda.is_available():
        # as on a GPU, so that "held" sees what leaves
        sleep.is_in_device_memory = lambda tensor: True
    write, generating = MetricsWriter.write, hybrid_engine.HybridEngine.generating
    held: dict[str, float] = {}

    def engines() -> list[Any]:
        return [thing for thing in gc.get_objects() if isinstance(thing, DeepSpeedEngine)]

    @contextmanager
    def counted_generating(engine: Any) -> Iterator[Any]:
        originals = [weight.data for one in engines() for weight in one.module.parameters()]
        with generating(engine) as model:
            held["memory/held_rollout_gib"] = held_bytes(engines(), originals) / GIB
            yield model

    def counted_write(writer: Any, number: int, metrics: dict[str, float], *others: Any) -> None:
        write(
            writer,
            number,
            metrics | held | {"memory/held_training_gib": held_bytes(engines()) / GIB},
            *others,
        )

    MetricsWriter.write, hybrid_engine.HybridEngine.generating = counted_write, counted_generating
    sys.argv = [str(ROOT / SCRIPTS[step]), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def held_bytes(engines: Iterable[Any], originals: Iterable[Tensor] = ()) -> int:
    """Bytes of weights and training states that are on the device, or would be if there were one.

    `originals`: weights outside the rollout. It may hold them beside merged ones, which replace
    them in the model.
    """
    from dschat_ppo.features.sleep.sleep import gradient_buffers, training_states, weights_of

    on_device: dict[int, int] = {}

    def count(tensors: Iterable[Tensor], offloaded: Any) -> None:
        in_host_memory = offloaded is not None and str(
            getattr(offloaded, "device", "none")
        ).endswith("cpu")
        for tensor in tensors:
            if not in_host_memory:
                storage = tensor.untyped_storage()
                on_device[storage.data_ptr()] = storage.nbytes()

    for engine in engines:
        count(
            (*training_states(engine), *gradient_buffers(engine)), engine.zero_offload_optimizer()
        )
        count(weights_of(engine), engine.zero_offload_param())
        # gathered ones are on the device
        count([weight.data for weight in engine.module.parameters()], None)
    count(originals, None)
    return sum(on_device.values())


def planned_peak(setting: Setting, work: Path) -> float:
    """GiB of tensors of one rank at the largest peak of a plan, in device and host memory."""
    models = work / "-".join(map(str, setting.shape))
    make_models(models, setting.shape)  # unless they are from this run
    config = parse(setting.step, words_of(setting, models, Path("unused"), Path("unused")))
    host = psutil.virtual_memory().total
    plan = plan_step(config, read_model_configs(config), setting.ranks, 0, host)
    return max(phase.total() for phase in plan.phases) / GIB


def beyond_baseline(name: str, results: dict[str, Any]) -> dict[str, float]:
    """The peaks of a setting, by phase, without what the libraries take."""
    fixed = results["baseline, step 3" if ALL[name].step == "ppo" else "baseline, step 1"]["peak"]
    return {phase: peak - fixed[phase] for phase, peak in results[name]["peak"].items()}


def table(results: dict[str, Any]) -> str:
    """The table of settings of docs/memory.md."""
    rows = []
    for name in (name for name in SETTINGS if name in results):
        peaks, held = beyond_baseline(name, results), results[name]["held"]
        numbers = [*(peaks.get(phase) for phase in PHASES), held["training"], held.get("rollout")]
        rows.append([name, *("" if number is None else f"{number:.2f}" for number in numbers)])
    return markdown(
        ["setting", *(f"peak, {phase}" for phase in PHASES), "held, training", "held, rollout"],
        rows,
    )


def comparison(results: dict[str, Any], work: Path) -> str:
    """The table of the planner: for each setting the phase of the measured peak, both peaks, and
    their difference."""
    rows, differences = [], []
    for name in (name for name in PLANNED if name in results):
        peaks, expected = beyond_baseline(name, results), planned_peak(PLANNED[name], work)
        phase = max(peaks, key=lambda phase: peaks[phase])
        differences.append(expected / peaks[phase] - 1)
        numbers = [f"{expected:.2f}", f"{peaks[phase]:.2f}", f"{100 * differences[-1]:+.0f} %"]
        rows.append([name, phase, *numbers])
    rows.append(
        ["largest difference", "", "", "", f"{100 * max(map(abs, differences), default=0.0):.0f} %"]
    )
    return markdown(
        ["case", "phase of the peak", "planned, GiB", "measured, GiB", "difference"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(ALL),
        help="settings to measure; default: all; none: table",
    )
    parser.add_argument(
        "--planner", action="store_true", help="compare the planner with measured peaks"
    )
    parser.add_argument("--work", type=Path, help="keep the models in this folder")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    arguments = parser.parse_args()
    results = (
        json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    )
    names = (
        list(PLANNED if arguments.planner else SETTINGS)
        if arguments.only is None
        else arguments.only
    )
    names = list(dict.fromkeys([*(name for name in BASELINES if name not in results), *names]))
    with tempfile.TemporaryDirectory() as folder:
        work = (arguments.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for name in names:
            results[name] = measure(ALL[name], work)
            print(name, json.dumps(results[name]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2) + "\n")
        text = comparison(results, work) if arguments.planner else table(results)
    print(text)
    if arguments.docs:
        write_docs(arguments.docs, text, PLANNER_MARKS if arguments.planner else MARKS)


if __name__ == "__main__":
    if "--measure" in sys.argv:  # a rank of `measure`
        place = sys.argv.index("--measure")
        run_here(sys.argv[place + 1], [*sys.argv[1:place], *sys.argv[place + 2 :]])
    main()
