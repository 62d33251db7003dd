"""Kills of runs whose responses are episodes of agents: in a call, in an agent's own time, and
while the journal is written.

The agents note what they do in files of the run, by which a kill finds its moment, and which show
afterwards that no agent whose end was in the journal played again.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fault_outcomes import Outcome, is_finished, left_over, lost_steps
from measure import ROOT, markdown, metrics_of
from safetensors.torch import load_file

sys.path.insert(0, str(ROOT / "tests"))
from launch import Ranks, fork_ranks, rank_environments  # noqa: E402

AGENT_MARKS = ("<!-- agents -->", "<!-- /agents -->")
NOTES = "FAULTS_NOTES"  # the variable that names the folder of the notes
STEPS = 4  # of every run, each with one update
LARGEST_DIFFERENCE = 1e-4  # of weights, where runs are equal within rounding
FLAGS = (
    "--dtype fp32 --num_warmup_steps 0 --save_steps 1 --save_minutes 0 --collective_timeout 60"
    " --actor_zero_stage 3 --data_split 0,0,1 --max_prompt_seq_len 96 --max_answer_seq_len 400"
    " --chat_template chatml --per_device_generation_batch_size 4 --n_samples_per_prompt 2"
    " --per_device_training_batch_size 8 --actor_learning_rate 0.0003 --kl_coef 0.1"
    " --preprocessing_num_workers 1 --use_reward_model False --advantage_estimator grpo"
    f" --max_steps {STEPS}"
)
SCRIPT = "training/step3_ppo/main.py"
FUNCTION = ["--agent", "{models}/agent.py:play"]
PROGRAM = ["--agent_command", "{python} '{models}/agent.py'"]
# What trains then depends on the tokens alone, and is equal to the bit. Otherwise the KL in the
# reward is that of the log-probs recorded while sampling, which differ by rounding with the calls
# that run at the same time.
EXACT = ["--old_logprobs", "recompute"]
PADDED = ["--rollout_engine", "padded"]
RUNS = {  # name -> flags
    "a function": FUNCTION,
    "a function, padded, log-probs recomputed": [*FUNCTION, *PADDED, *EXACT],
    "a program, log-probs recomputed": [*PROGRAM, *EXACT],
}
# Runs as a function, and as a program. Some agents sleep, some fail, some begin another
# conversation, some ask the untrained model; what they do depends on the replies alone.
AGENT = """
import json, os, pathlib, sys, time, urllib.request, zlib

def note(name):
    with pathlib.Path(os.environ["FAULTS_NOTES"], name).open("a") as file:
        file.write(name + "\\n")

def ask(messages, model="policy"):
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 8}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        body,
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    note("asked")
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    note("answered")
    return message

def think(text):
    note("thinks")
    time.sleep(zlib.crc32(text.encode()) % 20 / 100)
    note("thought")

def play(row):
    note("begun")
    messages = [{"role": "user", "content": row["prompt"]}]
    rewards = []
    for turn in range(1 + row["number"] % 3):
        reply = ask(messages)
        think(reply["content"])
        rewards.append(len(reply["content"]) % 7 / 7)
        messages += [reply, {"role": "user", "content": str(len(reply["content"]))}]
    if row["number"] % 4 == 0:
        ask(messages, "policy-untrained")
        reply = ask([{"role": "user", "content": "sum up"}])
        rewards.append(len(reply["content"]) % 7 / 7)
    if zlib.crc32(reply["content"].encode()) % 8 == 0:
        raise ValueError("no")
    note("ended")
    return {"call_rewards": rewards, "asked": len(rewards)}

if __name__ == "__main__":
    result = json.dumps(play(json.load(sys.stdin)))
    pathlib.Path(os.environ["DSCHAT_RESULT"]).write_text(result)
"""
# moment -> (what agents note when it begins, and when it is over)
MOMENTS = {
    "a call": ("asked", "answered"),
    "an agent's own time": ("thinks", "thought"),
    "a write of the journal": ("ended", ""),
}
VICTIMS = ("rank 0", "rank 1", "the launcher", "the front of rank 0", "the agents of rank 0")
# words in the command lines of what a rank starts
CHILDREN = {"the front": "features.agents.front", "the agents": "environments.episode_processes"}


@dataclass(frozen=True)
class Kill:
    """SIGKILL of `victim` in `moment`, once the share `after` of what a whole run does is done.
    `cuts`: the last line of each journal then loses its end, as when the machine stops."""

    run: str
    victim: str
    moment: str
    after: float
    cuts: bool

    def __str__(self) -> str:
        name = f"{self.run}: SIGKILL of {self.victim} in {self.moment}, {self.after:.0%} done"
        if self.cuts:
            name += ", its last line cut"
        return name


def draw_agent_kills(seed: int, count: int) -> list[Kill]:
    """Kills in each moment by turns, of each run by turns."""
    drawn = random.Random(seed)
    kills = list[Kill]()
    for number in range(count):
        moment = list(MOMENTS)[number % len(MOMENTS)]
        run = list(RUNS)[number // len(MOMENTS) % len(RUNS)]
        cuts = moment == "a write of the journal" and drawn.random() < 0.5
        kills.append(Kill(run, drawn.choice(VICTIMS), moment, drawn.uniform(0.3, 0.9), cuts))
    return kills


@dataclass(frozen=True)
class AgentBench:
    """Starts runs in the folder `work`, each with its own output folder. Their ranks are forked
    from a process that has imported the libraries."""

    work: Path
    models: Path

    def whole(self, run: str) -> Path:
        """The outputs of this run without a fault. It runs at the first call."""
        output = self.work / f"whole_{list(RUNS).index(run)}"
        if not is_finished(output):
            ranks = self.start(run, output)
            if code_of(ranks) != 0:
                sys.exit(f"{run} without a fault failed: {ranks.out}{ranks.err}")
        return output

    def notes_of(self, output: Path) -> Path:
        """The folder in which agents of this run note what they do."""
        return self.work / f"{output.name}_notes"

    def start(self, run: str, output: Path) -> Ranks:
        """Start two ranks of a run."""
        notes = self.notes_of(output)
        notes.mkdir(exist_ok=True)
        words = [*FLAGS.split(), *RUNS[run], "--output_dir", str(output)]
        words += ["--actor_model_name_or_path", "{models}/actor"]
        words += ["--data_path", "{models}/prompts.jsonl", "--data_output_path", f"{output}_data"]
        words = [word.format(models=self.models, python=sys.executable) for word in words]
        files = Path(tempfile.mkdtemp(prefix=f"{output.name}_start_", dir=self.work))
        environments = rank_environments(2, {NOTES: str(notes)})
        return fork_ranks(files, environments, SCRIPT, *words)


def code_of(ranks: Ranks) -> int:
    """The exit code of ranks, after their end."""
    while ranks.code is None:
        time.sleep(0.05)
    return ranks.code


def noted(folder: Path, name: str) -> int:
    """How often agents have noted this."""
    file = folder / name
    if not name or not file.exists():
        return 0
    return len(file.read_bytes().split())


def journals(output: Path) -> list[Path]:
    """The journals of all steps and ranks."""
    return sorted((output / "checkpoints").glob("agents/step_*.jsonl"))


def comes(ranks: Ranks, kill: Kill, output: Path, notes: Path, most: int) -> bool:
    """Wait for the moment of a kill; whether it comes before the run ends. `most`: how often a
    whole run notes its beginning."""
    begins, is_over = MOMENTS[kill.moment]
    before = -1
    while ranks.code is None:
        time.sleep(0.001)
        begun = noted(notes, begins)
        if begun < kill.after * most:
            continue
        if is_over:
            if begun > noted(notes, is_over):
                return True
            continue
        size = sum(file.stat().st_size for file in journals(output))
        if before not in (-1, size):
            return True
        before = size
    return False


def victim_of_kill(ranks: Ranks, victim: str) -> psutil.Process | None:
    """A rank, its launcher, or what a rank has started for its agents; None if it is not there."""
    with suppress(psutil.Error, IndexError, StopIteration):
        launcher = psutil.Process(ranks.pid).children()[0]
        if victim == "the launcher":
            return launcher
        processes = sorted(launcher.children(), key=lambda process: process.pid)
        if victim.startswith("rank"):
            return processes[int(victim[-1])]
        words = CHILDREN[victim.removesuffix(" of rank 0")]
        children = processes[0].children()
        return next(child for child in children if words in " ".join(child.cmdline()))
    return None


def ended_agents(output: Path, resumed: int) -> int:
    """How many agents had ended in the steps after step `resumed`, by the journals' whole
    lines."""
    count = 0
    for file in journals(output):
        if int(file.name.split("_")[1]) <= resumed:
            continue
        for line in file.read_bytes().split(b"\n")[:-1]:
            [name] = json.loads(line)
            count += "/reply/" not in name and "/context/" not in name
    return count


def cut_last_lines(output: Path) -> None:
    """Take the end of the last line of each journal."""
    for file in journals(output):
        with file.open("rb+") as opened:
            opened.truncate(max(0, file.stat().st_size - 3))


def differences(one: Path, other: Path) -> tuple[bool, float]:
    """Whether both runs drew the same and have metrics that differ by rounding alone; and the
    greatest difference of their weights."""
    is_equal = samples_of(one) == samples_of(other)
    for line, other_line in zip(metrics_of(one), metrics_of(other), strict=True):
        is_equal &= line.keys() == other_line.keys()
        for name, value in line.items():
            is_number = isinstance(value, int | float)
            is_equal &= not is_number or abs(value - other_line[name]) <= 1e-3 + 1e-2 * abs(value)
    greatest = 0.0
    for file in one.glob("actor/*.safetensors"):
        weights = load_file(other / file.relative_to(one))
        for name, weight in load_file(file).items():
            difference = weight.double() - weights[name].double()
            greatest = max(greatest, float(difference.abs().max()))
    return is_equal and greatest < LARGEST_DIFFERENCE, greatest


def samples_of(output: Path) -> list[Any]:
    """The texts of the rows that the run kept."""
    lines = (output / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


def meet_agent_kill(bench: AgentBench, kill: Kill, number: int) -> Outcome:
    """Run with the kill, start again, and compare; `number` names the files."""
    whole = bench.whole(kill.run)
    whole_notes = bench.notes_of(whole)
    output = bench.work / f"kill_{number:02d}"
    notes = bench.notes_of(output)
    ranks = bench.start(kill.run, output)
    begins, _ = MOMENTS[kill.moment]
    met = comes(ranks, kill, output, notes, noted(whole_notes, begins))
    victim = victim_of_kill(ranks, kill.victim)
    if victim is not None:
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
    code = code_of(ranks)
    left = left_over(str(notes))
    if is_finished(output):
        is_equal, difference = differences(whole, output)
        return Outcome(str(kill), False, code, left, 0, is_equal, difference=difference)
    if kill.cuts:
        cut_last_lines(output)
    saved = [folder.name for folder in output.glob("checkpoints/step_*[0-9]")]  # none in parts
    resumed = int(max(saved, default="step_0").split("_")[1])
    ended = 0  # a run that starts without a checkpoint asks everything again
    if resumed > 0:
        ended = ended_agents(output, resumed)
    begun = noted(notes, "begun")
    again = bench.start(kill.run, output)
    is_done = code_of(again) == 0
    lost = lost_steps(ranks.out, ranks.out + again.out)
    episodes = noted(whole_notes, "begun") // STEPS  # of a step
    must_begin = episodes * (STEPS - resumed) - ended
    played_again = noted(notes, "begun") - begun - must_begin
    is_equal = False
    difference = math.nan
    if is_done:
        is_equal, difference = differences(whole, output)
        if set(EXACT) <= set(RUNS[kill.run]):
            is_equal &= difference == 0
    met = met and victim is not None
    return Outcome(str(kill), met, code, left, lost, is_equal, ended, played_again, difference)


def agents_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row for each kill."""
    rows = list[list[str]]()
    for outcome in outcomes:
        code = str(outcome.code)
        if not outcome.met:
            code = "0 (it had ended)"
        equal = "no"
        if outcome.equal and outcome.difference == 0:
            equal = "to the bit"
        elif outcome.equal:
            equal = f"weights to {outcome.difference:.0e}"
        counts = [outcome.left, outcome.steps_lost, outcome.agents, outcome.played_again]
        rows.append([outcome.name, code, *map(str, counts), equal])
    header = ["kill", "exit code", "processes left", "saved steps lost", "agents that had ended"]
    return markdown([*header, "that played again", "equal after resuming"], rows)
