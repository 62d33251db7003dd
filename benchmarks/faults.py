"""What a run loses when something goes wrong: faults of every kind are injected, and the run is started again.

    python benchmarks/faults.py [--quick] [--seed N] [--only WORD] [--work DIR] [--json FILE] [--docs FILE.md]

A small run of step 3 (two ranks, ZeRO-3, a learned reward beside a reward service, a checkpoint after every PPO step)
is made once without a fault. Then, for each fault, the same run meets it, is started again by the same command, and
must end with the same metrics and the same weights to the last bit. Counted are also processes that are left over, and
PPO steps that were saved but had to be made again. Twenty of the faults are SIGKILL at places drawn from `--seed`.

`--docs` puts the table between the marks of that file. The exit code is 1 if a fault was not survived. Full and
read-only disks are small file systems that are mounted for it, which needs root; without it they are left out, and said
so.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import torch
from fault_kinds import STEPS, Fault, Service, kills, mount, others, unmount
from measure import markdown
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.tools.toy import make_tokenizer

ROOT = Path(__file__).parent.parent
MARKS = ("<!-- faults -->", "<!-- /faults -->")
MEASURED = ("time", "seconds/", "peak_memory_gib/", "tokens_per_second/")
FLAGS = (
    "--dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3 --data_split 0,0,1 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 6 --per_device_generation_batch_size 4 --n_samples_per_prompt 2 --ppo_epochs 2 "
    f"--per_device_training_batch_size 4 --num_warmup_steps 0 --enable_test_mode --test_stop_step {STEPS} "
    "--actor_learning_rate 0.003 --critic_learning_rate 0.003 --actor_dropout 0.1 --kl_target 0.05 "
    "--normalize_rewards running --save_steps 1 --save_minutes 0 --collective_timeout 30 --remote_reward_weight 0.01 "
    "--preprocessing_num_workers 2"
)


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended, and how the second start did."""

    name: str
    code: int
    met: bool  # the first start ended by the fault, or was allowed not to
    orphans: int
    steps_lost: int
    equal: bool
    seconds: float

    @property
    def survived(self) -> bool:
        return self.met and self.orphans == 0 and self.steps_lost == 0 and self.equal


def make_models(folder: Path) -> None:
    """A small actor, a small reward model and forty prompts."""
    tokenizer = make_tokenizer(["a few words to merge"])
    shape = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, num_labels=1, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(shape).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"prompt": f"word {number} of {number * 7 % 40}"} for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Bench:
    """Starts runs in a work folder, each with its outputs in a folder of its own."""

    def __init__(self, work: Path):
        """Makes the models and starts the reward service."""
        self.work = work
        make_models(work / "models")
        server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.whole = work / "whole"

    def run_whole(self) -> None:
        """The run without a fault, which the others are compared with.

        Raises:
            SystemExit: it failed.
        """
        code = self.start({}, self.whole).wait()
        if code:
            sys.exit(f"the run without a fault failed with exit code {code}; see {self.log_of(self.whole)}")

    def log_of(self, output: Path) -> Path:
        """Everything that the runs on this output folder printed."""
        return self.work / f"{output.name}.log"

    def start(self, inject: dict[str, Any], output: Path, *more: str) -> subprocess.Popen[str]:
        """Begin a run, with more flags if given; it is a process group of its own."""
        models = self.work / "models"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--num_accelerators",
            "2",
            "--master_port",
            str(port),
        ]
        words += [str(ROOT / "benchmarks/faulty_main.py"), *FLAGS.split(), "--remote_reward_url", self.url]
        words += ["--actor_model_name_or_path", str(models / "actor"), "--output_dir", str(output)]
        words += ["--critic_model_name_or_path", str(models / "reward"), "--data_path", str(models / "prompts.jsonl")]
        words += ["--data_output_path", str(self.work / f"{output.name}_data"), *more]
        env = {**os.environ, "FAULT": json.dumps(inject), "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
        with self.log_of(output).open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                words, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )

    def meet(self, fault: Fault) -> Outcome:
        """Run into the fault, start again, compare."""
        started = time.perf_counter()
        output = self.work / fault.name.replace(" ", "_").replace(",", "")
        if fault.disk:
            output.mkdir()
            mount("-t", "tmpfs", "-o", f"size={fault.disk}", "tmpfs", str(output))
        try:
            process = self.start(fault.inject, output)
            if fault.outside is not None:
                fault.outside(process, output)
            code = process.wait()
            orphans = left_over(str(output))
            finished = (output / "result.json").exists()
            saved = saved_steps(self.log_of(output).read_text(encoding="utf-8", errors="replace"))
            if fault.mend is not None:
                fault.mend(output)
            again = self.start({}, output).wait() if code or not fault.may_survive else 0
            resumed = resumed_at(self.log_of(output).read_text(encoding="utf-8", errors="replace"))
            equal = again == 0 and same_outputs(self.whole, output)
            lost = 0 if finished else max(0, saved - resumed)
            met = code != 0 or fault.may_survive or (fault.silent and not finished)
            return Outcome(fault.name, code, met, orphans, lost, equal, time.perf_counter() - started)
        finally:
            if fault.disk:
                unmount(output)


def left_over(word: str, patience: float = 40.0) -> int:
    """Processes that still have `word` in their command line after a while; they are killed."""
    deadline = time.monotonic() + patience
    while True:
        found = [p for p in psutil.process_iter(["cmdline"]) if any(word in part for part in p.info["cmdline"] or [])]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    for process in found:
        process.kill()
    return len(found)


def saved_steps(log: str) -> int:
    """The last PPO step whose checkpoint was said to be saved; 0: none."""
    steps = [
        line.split("step_")[1][:6] for line in log.splitlines() if "checkpoint step_" in line and ": saved" in line
    ]
    return max(map(int, steps), default=0)


def resumed_at(log: str) -> int:
    """The PPO step after which the second start went on; 0: it began anew."""
    steps = [line.split("step_")[1][:6] for line in log.splitlines() if "going on from" in line]
    return int(steps[-1]) if steps else 0


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without what measures the machine."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def same_outputs(one: Path, other: Path) -> bool:
    """Whether metrics and saved weights are equal to the last bit."""
    if metrics_of(one) != metrics_of(other):
        return False
    for role in ("actor", "critic"):
        first, second = (load_file(output / role / "model.safetensors") for output in (one, other))
        if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
            return False
    return True


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a row for each fault."""
    rows = [
        [o.name, str(o.code), str(o.orphans), str(o.steps_lost), "yes" if o.equal else "no"] for o in outcomes
    ]  # fmt: skip
    header = ["fault", "exit code", "processes left", "saved steps lost", "metrics and weights equal after resuming"]
    return markdown(header, rows)


def write_docs(file: Path, text: str) -> None:
    """Put the table between the marks."""
    before, rest = file.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    file.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight of the faults, in under eight minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the places of SIGKILL")
    parser.add_argument("--only", help="only faults whose name holds this")
    parser.add_argument("--work", type=Path, help="keep models, outputs and logs there")
    parser.add_argument("--json", type=Path, help="write {injected, survived, steps_lost, trajectories_equal} there")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    return parser.parse_args()


def main() -> int:
    """Meet every fault; 1 if one was not survived."""
    chosen = arguments()
    work = chosen.work or Path(tempfile.mkdtemp(prefix="faults_"))
    work.mkdir(parents=True, exist_ok=True)
    faults = [*kills(chosen.seed, 5), *others()[:3]] if chosen.quick else [*kills(chosen.seed, 20), *others()]
    faults = [fault for fault in faults if chosen.only is None or chosen.only in fault.name]
    bench, outcomes = Bench(work.resolve()), list[Outcome]()
    bench.run_whole()
    for fault in faults:
        outcomes.append(bench.meet(fault))
        print(outcomes[-1], flush=True)
    text = table(outcomes)
    print(text)
    found = {
        "injected": len(outcomes),
        "survived": sum(outcome.survived for outcome in outcomes),
        "steps_lost": sum(outcome.steps_lost for outcome in outcomes),
        "trajectories_equal": all(outcome.equal for outcome in outcomes),
    }
    print(json.dumps(found))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if chosen.docs:
        write_docs(chosen.docs, text)
    return 0 if found["survived"] == found["injected"] else 1


if __name__ == "__main__":
    sys.exit(main())
