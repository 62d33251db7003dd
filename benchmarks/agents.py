"""Rollouts with an agent beside rollouts with `--tools`, in one process with one thread.

    python benchmarks/agents.py [--latencies 0 0.2] [--repeats 5] [--seed 7] [--work DIR] [--tiny]

Both play the sums of `training_scripts/examples/calculator` with its SFT model, which is made first
(some minutes) and gets weights that add 0 until it has 31.6 M parameters: 8 prompts, 8 episodes
each, 64 workers, fp32. The agent is the loop of `training_scripts/examples/agents`. With one seed
both sample the same tokens, so the ratio of their seconds is that of their throughput. They
alternate. A call that cannot be read ends the agent alone; then the next seed is taken.
`--tiny`: a trial with few episodes and a model without training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from measure import ROOT, environment
from tool_turns import EXAMPLE, TOOL, make_larger
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.data.prepare import prepare
from dschat_ppo.features.agents import rollouts as agents
from dschat_ppo.features.agents.flags import AgentFlags
from dschat_ppo.features.environments import rollouts as environments
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.ppo.rollouts import RolloutExtension, RolloutTask, own_rollouts
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.tools.evaluated_model import ModelGeneration
from dschat_ppo.types import Rollout

PROMPTS, SAMPLES, TINY_SAMPLES = 8, 8, 1
MOST_SEEDS = 10  # that are tried
PROMPT_LENGTH, RESPONSE_LENGTH = 48, 128
WIDTH = 13_568  # of the MLPs, with which the model has 31.6 M parameters
AGENT = """
import sys, time
sys.path.append({folder!r})
import calculator_agent
calculate = calculator_agent.calculate
def slowly(expression):
    time.sleep({seconds})
    return calculate(expression)
calculator_agent.calculate = slowly
play = calculator_agent.play
"""


def make_model(work: Path, is_tiny: bool) -> Path:
    """The folder of the model; the data lies in `work/task/data`."""
    env = environment(RANKS="1", DTYPE="fp32")
    if is_tiny:
        task = [sys.executable, str(EXAMPLE / "task.py"), str(work / "task")]
        subprocess.run(task, env=env, check=True, stdout=subprocess.DEVNULL)
        return work / "task/model"
    model = work / "larger"
    if not model.exists():
        if not (work / "sft/result.json").exists():
            words = ["--max_steps", "1", "--output_dir", str(work / "unused")]
            command = ["bash", str(EXAMPLE / "run.sh"), str(work), *words]
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(work / "sft", model)
        make_larger(model, WIDTH)
    return model


def token_rows(
    work: Path, tokenizer: PreTrainedTokenizerBase, tools: Any, most_rows: int
) -> Dataset:
    """The first prompts, with these tools."""
    flags = DataFlags(
        data_path=[str(work / "task/data/prompts.jsonl")],
        data_split="0,0,1",
        data_output_path=str(work / "cache"),
    )
    step = StepData(
        "prompt", flags, PROMPT_LENGTH, tools=tools, most_rows=most_rows, whole_flag="--data_path"
    )
    rows = prepare(step, tokenizer).eval
    assert rows is not None
    return rows


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to play the episodes."""

    extension: RolloutExtension
    play: Callable[[], Rollout]


def files_of(work: Path, latency: float) -> tuple[Path, Path]:
    """The tool and the agent, in which a sum takes `latency` seconds."""
    tool = work / f"tool_{int(latency * 1000)}.py"
    tool.write_text(TOOL.format(folder=str(EXAMPLE), seconds=latency), encoding="utf-8")
    agent = work / f"agent_{int(latency * 1000)}.py"
    folder = str(EXAMPLE.parent / "agents")
    agent.write_text(AGENT.format(folder=folder, seconds=latency), encoding="utf-8")
    return tool, agent


def contender_of(
    work: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    seed: int,
    environment_flags: EnvironmentFlags,
    agent_flags: AgentFlags,
) -> Contender:
    """What plays `samples` episodes of each prompt with these flags."""
    features = FeatureFlags((environment_flags, agent_flags))
    room: Any = environments
    if agent_flags.is_used:
        room = agents
    end = cast(int, tokenizer.convert_tokens_to_ids("<|end|>"))
    stopping = StoppingCriteria(RESPONSE_LENGTH, (end,), decode=tokenizer.batch_decode)
    config = GenerationConfig(SamplingParameters(), stopping, samples)
    tools = room.tools_of(features, tokenizer, PROMPT_LENGTH)
    rows = token_rows(work, tokenizer, tools, PROMPTS)
    task = RolloutTask(rows, range(len(rows)), config, seed, (1, 0), 0, 1)
    extension = room.start_extension(features, tokenizer, PROMPT_LENGTH, None)
    generation = ModelGeneration(model)
    sample = extension.wrap(own_rollouts(generation, 0), generation)
    return Contender(extension, partial(sample, task))


def contenders_of(
    work: Path, model: Any, tokenizer: PreTrainedTokenizerBase, latency: float, options: Any
) -> tuple[int, dict[str, Contender]]:
    """The first seed from `--seed` on with which both draw the same tokens, and the two."""
    samples = SAMPLES
    if options.tiny:
        samples = TINY_SAMPLES
    tool, agent = files_of(work, latency)
    workers = PROMPTS * samples
    with_tools = EnvironmentFlags(tools=[f"{tool}:calculate"], environment_workers=workers)
    without_tools = EnvironmentFlags(environment_workers=workers)
    agent_flags = AgentFlags(agent=f"{agent}:play")
    for seed in range(options.seed, options.seed + MOST_SEEDS):
        common = (work, model, tokenizer, samples, seed)
        contenders = {
            "tools": contender_of(*common, with_tools, AgentFlags()),
            "agent": contender_of(*common, without_tools, agent_flags),
        }
        first, second = [contender.play().response_ids for contender in contenders.values()]
        if torch.equal(first, second):
            return seed, contenders
        print(f"seed {seed}: a call cannot be read", flush=True)
        for contender in contenders.values():
            contender.extension.close()
    raise SystemExit(f"none of {MOST_SEEDS} seeds from --seed {options.seed} on has calls to read")


def measure(
    work: Path, model: Any, tokenizer: PreTrainedTokenizerBase, latency: float, options: Any
) -> dict[str, float]:
    """Median seconds of a rollout by each of the two, with a tool that takes `latency` seconds, and
    the ratio of their throughput: its median, its least and its greatest. `cpu_ratio`: the same of
    the processor's seconds in this process, which other work on the machine changes little."""
    # what it plays to choose a seed also starts the processes
    seed, contenders = contenders_of(work, model, tokenizer, latency, options)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_times: dict[str, list[float]] = {name: [] for name in contenders}
    ids: dict[str, torch.Tensor] = {}
    for _ in range(options.repeats):
        for name, contender in contenders.items():
            began = time.perf_counter()
            cpu_began = time.process_time()
            ids[name] = contender.play().response_ids
            times[name].append(time.perf_counter() - began)
            cpu_times[name].append(time.process_time() - cpu_began)
        assert torch.equal(ids["tools"], ids["agent"])
    result = {
        "latency": latency,
        "seed": seed,
        "calls": contenders["agent"].extension.take_metrics()["agent/calls"],
    }
    for contender in contenders.values():
        contender.extension.close()
    ratios = [tools / agent for tools, agent in zip(times["tools"], times["agent"], strict=True)]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    result["ratio"] = medians["tools"] / medians["agent"]
    cpu_medians = {name: statistics.median(seconds) for name, seconds in cpu_times.items()}
    result["cpu_ratio"] = cpu_medians["tools"] / cpu_medians["agent"]
    return {**result, "least": min(ratios), "most": max(ratios), **medians}


def main() -> None:
    """Measure each latency, and print a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--latencies", type=float, nargs="+", default=[0.0, 0.2], help="seconds of a call"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rollouts of each that are counted")
    parser.add_argument("--seed", type=int, default=7, help="of the tokens")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "agents")
    parser.add_argument("--tiny", action="store_true", help="a trial of the script on tiny sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    options.work.mkdir(parents=True, exist_ok=True)
    folder = make_model(options.work, options.tiny)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    use_fast_layers(model.eval())
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters")
    for latency in options.latencies:
        print(measure(options.work, model, tokenizer, latency, options), flush=True)


if __name__ == "__main__":
    main()
