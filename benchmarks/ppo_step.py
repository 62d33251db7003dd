"""A whole PPO step against the plain way, in one run.

    python benchmarks/ppo_step.py [--json FILE] [--repeats 5] [--old_logprobs rollout] [--compare trl]

32 prompts, one update; 31.6 M parameters for each of actor, critic, reference and reward model, random, in bf16.
"fixed": 128 + 128 tokens. "varied": prompts of 32 to 128 tokens, answers lognormal with mean 63, at most 256. The plain
way is in `plain.py`; both use the same DeepSpeed engines. Ours skips the pass for old log-probs, as
`--old_logprobs rollout` does; `recompute`, the trainer's default in bf16, can be measured too. It takes
`--micro_batch_tokens 3072`, a quarter of what the plain way has in one pass. Peak memory is compared at a vocabulary of
32768, beyond what models and optimizers hold; its ratio is ours to the plain way's (less is better), the others are the
plain way's cost to ours (more is better). `--compare trl` measures TRL's PPO and GRPO trainers beside, where TRL is
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain
from datasets import Dataset
from measure import costs, markdown, peak_memory, threads
from models import Workload, classifier, config_of, language_model, workload

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.collect import Prompts
from dschat_ppo.ppo.loop import update
from dschat_ppo.ppo.mini_dataset import gather_rows
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.ppo.train_ppo import learned_reward
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.runtime.launch import leave
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.tools.toy import make_tokenizer

BATCH = 32
WIDE = 32768
TOKENS = 3072  # of our micro-batches


def make_ppo(folder: Path, vocabulary: int, old_logprobs: str) -> PPOComponents:
    """The parts of step 3 on random models."""
    config = config_of(vocabulary)
    tokenizer = make_tokenizer(["a few words to merge"])
    for name, model in (("lm", language_model(config)), ("reward", classifier(config))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    words = ["--actor_model_name_or_path", folder / "lm", "--critic_model_name_or_path", folder / "reward"]
    words += ["--data_path", "unused", "--output_dir", "unused", "--num_warmup_steps", 0]
    words += ["--max_prompt_seq_len", 128, "--max_answer_seq_len", 256, "--old_logprobs", old_logprobs]
    words += ["--per_device_generation_batch_size", BATCH, "--per_device_training_batch_size", BATCH]
    words += ["--micro_batch_tokens", TOKENS]
    flags = parse("ppo", [str(word) for word in words])
    plan = plan_ppo(flags.ppo, BATCH, 1)
    engines = RLHFEngine(flags, plan, ModelFolders(*(str(folder / name) for name in ("lm", "reward", "reward"))))
    tokenizer = load_tokenizer(str(folder / "lm"), "lm")
    rewards = build_sources(flags.rewards, learned_reward(flags, engines, tokenizer, plan.micro_batch_tokens))
    prompts = Dataset.from_dict({"row": ["{}"] * BATCH})
    return PPOComponents(flags, plan, engines, prompts, tokenizer, rewards, dist.device())


def our_step(ppo: PPOComponents, work: Workload) -> None:
    """One PPO step as the loop makes it, with answers of given lengths."""
    collection = ppo.collection
    config = replace(collection.generator.config, stopping=StoppingCriteria(int(work.answer_lengths.max())))
    with ppo.engines.hybrid.generating() as model:
        rollout = generate(model, work.prompts, row_seeds(0, BATCH, 0), config, limits=work.answer_lengths)
    assert int(rollout.response_mask.sum()) == work.tokens
    prompts = Prompts(list(range(BATCH)), first=0)
    scores = collection.reward(rollout, prompts, step=1)
    experience = ppo.advantages(gather_rows(collection.score(rollout, scores, prompts)), step=1)
    ppo.begin_updates(experience)
    for minibatch in ppo.minibatches_left(experience, step=1):
        update(ppo, minibatch, step=1)


def ways_of(ppo: PPOComponents, work: Workload) -> dict[str, Any]:
    """Contenders."""
    return {
        "plain": lambda: plain.step(ppo, work),
        "dschat_ppo": lambda: our_step(ppo, work),
    }


def compare(ppo: PPOComponents, name: str, repeats: int, cores: int) -> dict[str, Any]:
    """All numbers of one workload."""
    work = workload(name, ppo.engines.actor.module.config.vocab_size, BATCH)
    found = costs(ways_of(ppo, work), repeats, cores)
    before, ours = found["plain"], found["dschat_ppo"]
    return {
        "ratio_wall": before.wall / ours.wall,
        "ratio_cpu": before.cpu / ours.cpu,
        "samples_per_s": BATCH / ours.wall,
        "plain_samples_per_s": BATCH / before.wall,
    }


def peaks(ppo: PPOComponents, work: Workload, cores: int) -> dict[str, float]:
    """Peak GiB of one step of each way, once optimizers have their states."""
    ways = ways_of(ppo, work)
    with threads(cores):
        for run in ways.values():
            run()
        return {name: peak_memory(run) for name, run in ways.items()}


def table(results: dict[str, Any]) -> str:
    """The numbers for docs/benchmarks.md."""
    rows = [
        [name, f"{r['plain_samples_per_s']:.2f}", f"{r['samples_per_s']:.2f}", f"{r['ratio_wall']:.2f}",
         f"{r['ratio_cpu']:.2f}"]
        for name, r in results.items() if isinstance(r, dict) and "samples_per_s" in r
    ]  # fmt: skip
    return markdown(["workload", "plain, samples/s", "ours, samples/s", "ratio (wall)", "ratio (CPU)"], rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way, of which the median counts")
    parser.add_argument("--old_logprobs", choices=["rollout", "recompute"], default="rollout", help="of our way")
    parser.add_argument("--compare", choices=["trl"], help="measure another trainer beside")
    arguments = parser.parse_args()
    if arguments.compare:
        import trl  # noqa: F401  (fails now if it is not installed, and not after an hour)
    quiet_libraries()
    init_process_group()
    cores, results = len(os.sched_getaffinity(0)), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        ppo = make_ppo(Path(folder), 8192, arguments.old_logprobs)
        for name in ("fixed", "varied"):
            results[name] = compare(ppo, name, arguments.repeats, cores)
            print(name, json.dumps(results[name]), flush=True)
        if arguments.compare:
            from trl_step import samples_per_second

            results["trl"] = samples_per_second(Path(folder) / "lm", Path(folder) / "reward", cores)
        wide, work = make_ppo(Path(folder) / "wide", WIDE, arguments.old_logprobs), workload("fixed", WIDE, BATCH)
        results["peak_memory_gib"] = held = peaks(wide, work, cores)
        results["peak_memory_ratio"] = held["dschat_ppo"] / held["plain"]
    print(table(results))
    print(json.dumps({name: value for name, value in results.items() if name not in ("fixed", "varied")}))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
