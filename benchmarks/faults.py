"""Fault injection: runs meet faults of every kind, are started again, and must lose nothing.

    python benchmarks/faults.py [--power] [--agents] [--kills N] [--quick] [--seed N]
        [--only WORD] [--work DIR] [--json FILE] [--docs FILE.md]

Small runs on two ranks, with a checkpoint after every step, are interrupted, started again by the
same command, and compared with a run that nothing interrupted: metrics and weights must be equal,
bit for bit. Processes and shared memory that are left over, and steps that were saved but had to be
repeated, are counted too.

SIGKILL meets a rank, the launcher or a child of a rank (a process of a reward function or of data)
of one of `RUNS`, at moments drawn from `--seed`. `others` lists the remaining kinds. `--power` cuts
the power of runs instead (`fault_outcomes.py`), `--agents` kills runs whose responses are episodes
of agents (`agent_faults.py`). Full and read-only disks, and power losses, need root. The exit code
is 1 if a run did not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from agent_faults import (
    AGENT,
    AGENT_MARKS,
    AgentBench,
    agents_table,
    draw_agent_kills,
    meet_agent_kill,
)
from fault_outcomes import (
    POWER_MARKS,
    Outcome,
    comes_in_time,
    draw_cuts,
    is_finished,
    left_over,
    lost_steps,
    may_cut,
    meet_cut,
    same_outputs,
    table,
)
from measure import ROOT, environment, launcher, publish
from models import save_tiny_models

STEPS = 4  # of every run
MARKS = ("<!-- faults -->", "<!-- /faults -->")
COMMON = "--dtype fp32 --num_warmup_steps 0 --save_steps 1 --save_minutes 0 --collective_timeout 60"
SFT = (
    f"{COMMON} --zero_stage 3 --data_split 1,0,0 --max_seq_len 64 --per_device_train_batch_size 8"
    f" --num_train_epochs 1 --learning_rate 0.003 --dropout 0.1 --max_steps {STEPS}"
)
STEP_3 = (
    f"{COMMON} --actor_zero_stage 3 --data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len"
    " 6 --per_device_generation_batch_size 4 --n_samples_per_prompt 2 --ppo_epochs 2"
    " --per_device_training_batch_size 4 --actor_learning_rate 0.003 --preprocessing_num_workers 2"
    f" --max_steps {STEPS}"
)
PPO = (
    f"{STEP_3} --critic_zero_stage 3 --critic_learning_rate 0.003 --kl_target 0.05"
    " --normalize_rewards running"
)
FUNCTION = "--advantage_estimator grpo --use_reward_model False --reward_workers 1"
PLAY = """
import os, time, zlib
class Game:
    def reset(self, seed=None, options=None):
        return "?"
    def step(self, text):  # some actions make it raise, hang, die or write too much
        place = zlib.crc32(text.encode()) % 20
        if place == 0:
            raise ValueError("no")
        if place == 1:
            time.sleep(60)
        if place == 2:
            os._exit(3)
        return "x" * 10**8 if place == 3 else str(place), place / 20, False, False, {}
"""
TURNS = (
    f"{STEP_3.replace('answer_seq_len 6', 'answer_seq_len 48')} --advantage_estimator grpo"
    " --use_reward_model False --rollout_engine padded --max_turns 4 --turn_reward to_go"
    f" --environment_timeout 3 --stop_token_ids {' '.join(map(str, range(40, 90)))}"
)
RUNS = {  # name -> (script, flags)
    "PPO": ("training/step3_ppo/main.py", f"{PPO} --actor_dropout 0.1"),
    "GRPO": ("training/step3_ppo/main.py", f"{STEP_3} {FUNCTION} --actor_dropout 0.1"),
    "LoRA": (
        "training/step3_ppo/main.py",
        f"{STEP_3} {FUNCTION} --actor_lora_dim 4 --only_optimize_lora",
    ),
    "episodes": ("training/step3_ppo/main.py", TURNS),
    "SFT, packed": ("training/step1_sft/main.py", f"{SFT} --packing"),
    "SFT, streamed": ("training/step1_sft/main.py", f"{SFT} --streaming --streaming_rows 16"),
}
# files that appear in the output folder, in this order; a fault follows one of them after some time
MOMENTS = {
    "the start": "config.yaml",
    "metrics": "metrics.jsonl",
    "checkpoint 1": "checkpoints/step_000001",
    "checkpoint 3": "checkpoints/step_000003",
    "the export": "**/*.safetensors",
}
Act = Callable[[subprocess.Popen[str], Path], None]


@dataclass(frozen=True)
class Fault:
    """`act` causes it, given the process of the command and the output folder, once `moment` has
    come.

    `mend` repairs the output folder before the second start; `disk` is the size of a file system
    for the outputs.
    """

    name: str
    act: Act
    run: str = "PPO"
    moment: str = "checkpoint 1"
    delay: float = 0.0
    mend: Callable[[Path], None] | None = None
    disk: str | None = None


def make_models(folder: Path) -> None:
    """A small actor, a small reward model, forty prompts, 640 answers, a reward function, an
    environment and an agent."""
    save_tiny_models(
        folder,
        ("actor", "reward"),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    prompts = [
        {"prompt": f"word {number} of {number * 7 % 40}", "number": number} for number in range(40)
    ]
    answers = [
        {"prompt": f"{number} or", "response": f" {number * 7} of {number}"}
        for number in range(640)
    ]
    for name, rows in (("prompts", prompts), ("answers", answers)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (folder / "scores.py").write_text(
        "def length(response):\n    return float(len(response) % 7)\n"
    )
    (folder / "play.py").write_text(PLAY)
    (folder / "agent.py").write_text(AGENT)


class Bench:
    """Starts runs in a work folder, each with its own output folder."""

    def __init__(self, work: Path):
        self.work, self.models = work, work / "models"
        make_models(self.models)

    def whole(self, run: str) -> Path:
        """The outputs of this run without a fault. It runs at the first call."""
        output = self.work / f"whole_{list(RUNS).index(run)}"
        if not is_finished(output) and (code := self.start(run, output, {}).wait()):
            sys.exit(
                f"{run} without a fault failed with exit code {code}; see {self.log_of(output)}"
            )
        return output

    def log_of(self, output: Path) -> Path:
        """The output of all starts with this output folder."""
        return self.work / f"{output.name}.log"

    def start(
        self, run: str, output: Path, settings: dict[str, str], log: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a run in a new process group, with additional environment variables; `log` receives
        its output."""
        script, flags = RUNS[run]
        words = [str(ROOT / script), *flags.split(), "--output_dir", str(output)]
        words += ["--data_output_path", f"{output}_data"] if log is None else []
        if script == "training/step3_ppo/main.py":
            words += ["--actor_model_name_or_path", str(self.models / "actor")]
            words += ["--data_path", str(self.models / "prompts.jsonl")]
            words += {
                "PPO": ["--critic_model_name_or_path", str(self.models / "reward")],
                "episodes": ["--environment", f"{self.models / 'play.py'}:Game"],
            }.get(run, ["--reward_function", f"{self.models / 'scores.py'}:length"])
        else:
            words += ["--model_name_or_path", str(self.models / "actor")]
            words += ["--data_path", str(self.models / "answers.jsonl")]
        with (log or self.log_of(output)).open("a", encoding="utf-8") as file:
            return subprocess.Popen(
                [*launcher(2), *words],
                cwd=ROOT,
                env=environment(**settings),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def meet(self, fault: Fault, number: int) -> Outcome:
        """Run with the fault, start again, and compare."""
        whole, output = self.whole(fault.run), self.work / f"fault_{number:02d}"
        if fault.disk:
            output.mkdir()
            mount("-t", "tmpfs", "-o", f"size={fault.disk}", "tmpfs", str(output))
        segments = set(os.listdir("/dev/shm"))
        try:
            process = self.start(fault.run, output, {})
            met = comes_in_time(process, output, MOMENTS[fault.moment], fault.delay)
            if met:
                fault.act(process, output)
            code = process.wait()
            left = left_over(str(output)) + len(set(os.listdir("/dev/shm")) - segments)
            done, first = is_finished(output), self._log(output)
            if fault.mend is not None:
                fault.mend(output)
            again = 0 if done else self.start(fault.run, output, {}).wait()
            lost = 0 if done else lost_steps(first, self._log(output))
            return Outcome(
                fault.name, met, code, left, lost, again == 0 and same_outputs(whole, output)
            )
        finally:
            if fault.disk:
                unmount(output)

    def _log(self, output: Path) -> str:
        return self.log_of(output).read_text(encoding="utf-8", errors="replace")


def mount(*words: str) -> None:
    """`mount` with these arguments; `subprocess.CalledProcessError` if it is not permitted."""
    subprocess.run(["mount", *words], check=True, capture_output=True)


def unmount(place: Path) -> None:
    """Unmount a file system, even if it is in use."""
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def victim_of(process: subprocess.Popen[str], kind: str) -> psutil.Process | None:
    """The launcher, a rank, or a child of rank 0; None if there is none at the moment."""
    with suppress(psutil.Error, IndexError):
        launcher = psutil.Process(process.pid).children()[0]
        if kind == "the launcher":
            return launcher
        ranks = sorted(launcher.children(), key=lambda rank: int(rank.environ().get("RANK", 0)))
        return ranks[int(kind[-1])] if kind.startswith("rank") else ranks[0].children()[0]
    return None


def signals(kind: str, number: signal.Signals) -> Act:
    """Sends a signal to a victim; to rank 0 if it has no child."""

    def act(process: subprocess.Popen[str], output: Path) -> None:
        victim = victim_of(process, kind) or victim_of(process, "rank 0")
        if victim is not None:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(number)

    return act


def kills(seed: int, count: int) -> list[Fault]:
    """SIGKILL of a rank, the launcher or a child of a rank, over all kinds of runs."""
    draw = random.Random(seed)
    victims = ("rank 0", "rank 1", "the launcher", "a child of rank 0")
    found = []
    for number in range(count):
        run, moment = (
            list(RUNS)[number % len(RUNS)],
            list(MOMENTS)[number // len(RUNS) % len(MOMENTS)],
        )
        victim, delay = draw.choice(victims), draw.uniform(0, 1.5)
        name = f"{run}: SIGKILL of {victim}, {delay:.1f} s after {moment}"
        found.append(Fault(name, signals(victim, signal.SIGKILL), run, moment, delay))
    return found


def others() -> list[Fault]:
    """All other kinds of faults. A stopped rank stands for one that hangs."""
    faults = [
        Fault("rank 1 hangs", signals("rank 1", signal.SIGSTOP)),
        Fault("SIGTERM to the launcher", signals("the launcher", signal.SIGTERM)),
        Fault("SIGTERM to the command", lambda process, _: process.terminate()),
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
            unmount(Path(folder))
    except (OSError, subprocess.CalledProcessError):
        print(
            "full and read-only disks are left out: file systems cannot be mounted without root",
            flush=True,
        )
        return faults
    return [
        *faults,
        Fault(
            "disk full",
            lambda *_: None,
            moment="the start",
            disk="2m",
            mend=lambda out: mount("-o", "remount,size=64m", str(out)),
        ),
        Fault(
            "disk read-only",
            lambda _, out: mount("-t", "tmpfs", "-o", "ro", "tmpfs", f"{out}/checkpoints"),
            mend=lambda out: unmount(out / "checkpoints"),
        ),
    ]


def meetings(
    bench: Bench, chosen: argparse.Namespace
) -> list[tuple[str, Callable[[int], Outcome]]]:
    """(name, what causes the fault and compares) of each fault; the latter gets its number."""
    if chosen.power:
        if not may_cut():
            sys.exit(
                "power losses need root and loop devices: a file system cannot be mounted and shut"
                " down here"
            )
        cuts = draw_cuts(chosen.seed, 4 if chosen.quick else 20)
        return [(str(cut), partial(meet_cut, bench, cut)) for cut in cuts]
    if chosen.agents:
        count = chosen.kills
        if chosen.quick:
            count = 3
        agents = AgentBench(bench.work, bench.models)
        drawn = draw_agent_kills(chosen.seed, count)
        return [(str(kill), partial(meet_agent_kill, agents, kill)) for kill in drawn]
    faults = [*kills(chosen.seed, chosen.kills), *others()]
    if chosen.quick:
        faults = [*kills(chosen.seed, 5), *others()[:3]]
    return [(fault.name, partial(bench.meet, fault)) for fault in faults]


def main() -> int:
    """Inject the faults, or the power losses; 1 if a run did not survive one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40, help="number of SIGKILLs (default: 40)")
    parser.add_argument("--power", action="store_true", help="twenty power losses instead")
    parser.add_argument("--agents", action="store_true", help="kills of runs with agents instead")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="five SIGKILLs and three others, or four power losses, or three kills of agents",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the victims and moments")
    parser.add_argument("--only", default="", help="only faults whose name holds this")
    parser.add_argument("--work", type=Path, help="keep models, outputs and logs there")
    parser.add_argument(
        "--json", type=Path, help="write {injected, survived, steps_lost, trajectories_equal} there"
    )
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    chosen = parser.parse_args()
    work = chosen.work or Path(tempfile.mkdtemp(prefix="faults_"))
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(work.resolve())
    outcomes: list[Outcome] = []
    for number, (name, meet) in enumerate(meetings(bench, chosen)):
        if chosen.only in name:
            outcomes.append(meet(number))
            print(outcomes[-1], flush=True)
    marks = MARKS
    text = table(outcomes)
    if chosen.power:
        marks = POWER_MARKS
    elif chosen.agents:
        marks = AGENT_MARKS
        text = agents_table(outcomes)
    found = {
        "injected": len(outcomes),
        "survived": sum(outcome.survived for outcome in outcomes),
        "steps_lost": sum(outcome.steps_lost for outcome in outcomes),
        "trajectories_equal": all(outcome.equal for outcome in outcomes),
    }
    publish(found, text, marks, chosen.json, chosen.docs)
    return int(found["survived"] < found["injected"])


if __name__ == "__main__":
    sys.exit(main())
