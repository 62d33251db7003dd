"""Fault injection: a run meets faults of every kind, is started again, and must lose nothing.

    python benchmarks/faults.py [--power] [--quick] [--seed N] [--only WORD] [--work DIR] [--json FILE] [--docs FILE.md]

A small run of step 3 (two ranks, ZeRO-3, a learned reward and a reward service, a checkpoint after every PPO step)
runs once without a fault. Then, for each fault, the same run meets it, is started again by the same command, and
must end with the same metrics and weights, bit for bit. Processes that are left over, and PPO steps that were saved but
had to be repeated, are counted too. Twenty of the faults are SIGKILL at places drawn from `--seed`.

`--power` cuts the power of runs of steps 1 and 3 twenty times instead, see `power_loss.py`. It needs root.

`--docs` writes the table between the marks of that file. The exit code is 1 if a run did not survive a fault. Full and
read-only disks are small file systems, which only root can mount; without root they are skipped with a message.
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
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import power_loss
from fault_kinds import STEPS, Fault, Service, kills, mount, others, unmount
from fault_outcomes import MARKS, Outcome, finished, left_over, resumed_at, same_outputs, saved_steps, table
from measure import publish
from models import save_tiny_models

ROOT = Path(__file__).parent.parent
FLAGS = (
    "--dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3 --data_split 0,0,1 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 6 --per_device_generation_batch_size 4 --n_samples_per_prompt 2 --ppo_epochs 2 "
    f"--per_device_training_batch_size 4 --num_warmup_steps 0 --enable_test_mode --test_stop_step {STEPS} "
    "--actor_learning_rate 0.003 --critic_learning_rate 0.003 --actor_dropout 0.1 --kl_target 0.05 "
    "--normalize_rewards running --save_steps 1 --save_minutes 0 --collective_timeout 30 --remote_reward_weight 0.01 "
    "--preprocessing_num_workers 2"
)
SFT_FLAGS = (
    "--dtype fp32 --zero_stage 3 --data_split 1,0,0 --max_seq_len 64 --per_device_train_batch_size 8 "
    "--num_train_epochs 1 --num_warmup_steps 0 --learning_rate 0.003 --dropout 0.1 --save_steps 1 --save_minutes 0 "
    "--collective_timeout 30"
)
Found = tuple[str, dict[str, Any], tuple[str, str]]  # the table, its sums, the marks between which it stands


def make_models(folder: Path) -> None:
    """A small actor, a small reward model, forty prompts and 64 answers."""
    save_tiny_models(
        folder, ("actor", "reward"), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    prompts = [{"prompt": f"word {number} of {number * 7 % 40}"} for number in range(40)]
    answers = [{"prompt": f"{number} or", "response": f" {number * 7} of {number}"} for number in range(64)]
    for name, rows in (("prompts", prompts), ("answers", answers)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


class Bench:
    """Starts runs in a work folder, each with its own output folder."""

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
        """Run without a fault; the other runs are compared with this one.

        Raises:
            SystemExit: it failed.
        """
        code = self.start({}, self.whole).wait()
        if code:
            sys.exit(f"the run without a fault failed with exit code {code}; see {self.log_of(self.whole)}")

    def log_of(self, output: Path) -> Path:
        """The output of all runs of this output folder."""
        return self.work / f"{output.name}.log"

    def start(self, inject: dict[str, Any], output: Path, *more: str) -> subprocess.Popen[str]:
        """Start a run, with additional flags `more`, in a new process group."""
        data = ["--data_output_path", str(self.work / f"{output.name}_data")]
        words = [*self._step_3(output), *data, *more]
        return self._launch(words, {"FAULT": json.dumps(inject)}, self.log_of(output))

    def start_step(self, step: int, output: Path, env: dict[str, str], log: Path) -> subprocess.Popen[str]:
        """See `power_loss.Starter`."""
        return self._launch(self._step_3(output) if step == 3 else self._step_1(output), env, log)

    def _step_1(self, output: Path) -> list[str]:
        models = self.work / "models"
        words = [str(ROOT / "training/step1_sft/main.py"), *SFT_FLAGS.split(), "--output_dir", str(output)]
        return [*words, "--model_name_or_path", str(models / "actor"), "--data_path", str(models / "answers.jsonl")]

    def _step_3(self, output: Path) -> list[str]:
        models = self.work / "models"
        words = [str(ROOT / "benchmarks/faulty_main.py"), *FLAGS.split(), "--remote_reward_url", self.url]
        words += ["--actor_model_name_or_path", str(models / "actor"), "--output_dir", str(output)]
        words += ["--critic_model_name_or_path", str(models / "reward"), "--data_path", str(models / "prompts.jsonl")]
        return words

    def _launch(self, words: list[str], settings: dict[str, str], log: Path) -> subprocess.Popen[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
        launcher += ["--num_accelerators", "2", "--master_port", str(port)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
        with log.open("a", encoding="utf-8") as file:
            return subprocess.Popen(
                [*launcher, *words], cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip

    def meet(self, fault: Fault) -> Outcome:
        """Run with the fault, start again, and compare."""
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
            done = finished(output)
            saved = saved_steps(self.log_of(output).read_text(encoding="utf-8", errors="replace"))
            if fault.mend is not None:
                fault.mend(output)
            again = self.start({}, output).wait() if code or not fault.may_survive else 0
            resumed = resumed_at(self.log_of(output).read_text(encoding="utf-8", errors="replace"))
            equal = again == 0 and same_outputs(self.whole, output)
            lost = 0 if done else max(0, saved - resumed)
            met = code != 0 or fault.may_survive or (fault.silent and not done)
            return Outcome(fault.name, code, met, orphans, lost, equal, time.perf_counter() - started)
        finally:
            if fault.disk:
                unmount(output)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight of the faults, in under eight minutes")
    parser.add_argument("--power", action="store_true", help="power losses instead: twenty, or four with --quick")
    parser.add_argument("--seed", type=int, default=0, help="of the places of SIGKILL, or of the moments without power")
    parser.add_argument("--only", help="only faults whose name holds this")
    parser.add_argument("--work", type=Path, help="keep models, outputs and logs there")
    parser.add_argument("--json", type=Path, help="write {injected, survived, steps_lost, trajectories_equal} there")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    return parser.parse_args()


def main() -> int:
    """Inject every fault, or every power loss; 1 if a run did not survive one."""
    chosen = arguments()
    work = chosen.work or Path(tempfile.mkdtemp(prefix="faults_"))
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(work.resolve())
    text, found, marks = meet_cuts(bench, chosen) if chosen.power else meet_faults(bench, chosen)
    publish(found, text, marks, chosen.json, chosen.docs)
    return 0 if found["survived"] == found["injected"] else 1


def meet_faults(bench: Bench, chosen: argparse.Namespace) -> Found:
    """Inject faults of every kind."""
    faults = [*kills(chosen.seed, 5), *others()[:3]] if chosen.quick else [*kills(chosen.seed, 20), *others()]
    faults = [fault for fault in faults if chosen.only is None or chosen.only in fault.name]
    outcomes = []
    bench.run_whole()
    for fault in faults:
        outcomes.append(bench.meet(fault))
        print(outcomes[-1], flush=True)
    found = {
        "injected": len(outcomes),
        "survived": sum(outcome.survived for outcome in outcomes),
        "steps_lost": sum(outcome.steps_lost for outcome in outcomes),
        "trajectories_equal": all(outcome.equal for outcome in outcomes),
    }
    return table(outcomes), found, MARKS


def meet_cuts(bench: Bench, chosen: argparse.Namespace) -> Found:
    """Twenty losses of power; four with `--quick`."""
    if not power_loss.may_cut():
        sys.exit("power losses need root and loop devices: a file system cannot be mounted and shut down here")
    drawn = power_loss.draw(chosen.seed, 4 if chosen.quick else 20)
    drawn = [cuts for cuts in drawn if chosen.only is None or chosen.only in str(cuts)]
    whole, losses = {}, []
    for step in sorted({cuts.step for cuts in drawn}):
        whole[step] = bench.work / f"whole_{step}"
        log = bench.log_of(whole[step])
        env = {"HF_HOME": str(bench.work / f"hf_{step}")}
        if code := bench.start_step(step, whole[step], env, log).wait():
            sys.exit(f"the run of step {step} without a cut failed with exit code {code}; see {log}")
    for number, cuts in enumerate(drawn):
        losses.append(power_loss.meet(bench, cuts, whole[cuts.step], number))
        print(losses[-1], flush=True)
    return power_loss.table(losses), power_loss.summary(losses), power_loss.MARKS


if __name__ == "__main__":
    sys.exit(main())
