"""Peaks of the phases of a step, and what its engines hold, measured in each rank for `memory.py`."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from measure import peak_memory
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine import hybrid_engine
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
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config

GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """The models and rows of a setting: `shape` is (vocabulary, layers, hidden size), rows are those of each rank."""

    shape: tuple[int, int, int] = (8192, 8, 768)
    rows: int = 8
    prompt: int = 64
    answer: int = 32

    @property
    def folder(self) -> str:
        """Of the models, inside the working folder."""
        return "-".join(map(str, self.shape))


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
        count(hybrid_engine.training_states(engine), engine.zero_offload_optimizer())
        count(hybrid_engine.weights_of(engine), engine.zero_offload_param())
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


def config_of_setting(step: str, work: Path, words: list[str], load: Workload) -> Any:
    """The configuration of a setting; flags in `words` override those of the workload."""
    work = work / load.folder
    if step == "ppo":
        reward = str(work / ("adapter" if "--share_base" in words else "reward"))
        base: list[Any] = ["--actor_model_name_or_path", work / "lm", "--critic_model_name_or_path", reward]
        base += ["--num_warmup_steps", 0]
        base += ["--max_prompt_seq_len", load.prompt, "--max_answer_seq_len", load.answer]
        base += ["--min_answer_seq_len", load.answer]
        base += ["--per_device_generation_batch_size", load.rows, "--per_device_training_batch_size", load.rows]
    else:
        base = ["--model_name_or_path", work / ("lm" if step == "sft" else "reward")]
        base += ["--max_seq_len", load.prompt + load.answer, "--per_device_train_batch_size", load.rows]
    return parse(step, [*map(str, base), "--data_path", "unused", "--output_dir", "unused", *words])


def measure_ppo(flags: PPOConfig, load: Workload) -> dict[str, Any]:
    """Two PPO steps; the numbers of the second."""
    peaks, rows = Peaks(), load.rows
    lm, reward = flags.ppo.actor_model_name_or_path, str(flags.ppo.critic_model_name_or_path)
    plan = plan_ppo(flags.ppo, rows * dist.world_size() * 2, dist.world_size())
    engines = peaks.measure("load", lambda: RLHFEngine(flags, plan, ModelFolders(lm, reward, reward)))
    tokenizer = load_tokenizer(lm, "lm")
    rewards = build_sources(flags.rewards, learned_reward(flags, engines, tokenizer, plan.micro_batch_tokens))
    ids = np.random.default_rng(0).integers(2, 300, (plan.rollout_prompts, load.prompt)).tolist()
    prompts = Dataset.from_dict({"row": ["{}"] * len(ids), "prompt_ids": ids})
    ppo = PPOComponents(flags, plan, TokenRows(prompts, None), tokenizer, engines, rewards)
    mine = Prompts(list(range(dist.rank() * rows, (dist.rank() + 1) * rows)), dist.rank() * rows)
    collection, held = ppo.collection, dict[str, float]()
    models = [engine for engine in (engines.actor, engines.reference, engines.critic, engines.reward) if engine]
    for step in (1, 2):
        rollout = peaks.measure("rollout", lambda step=step: collection.generator.answer(mine.rows, step))

        def score(rollout: Any = rollout, step: int = step) -> Any:
            return gather_rows(collection.forward_passes(rollout, collection.reward(rollout, mine, step), mine))

        collection.clock = PhaseClock()
        scored = peaks.measure("score", score, collection.clock)
        ppo.updates.clock = PhaseClock()  # a PPO step of one update makes the critic's pass here
        valued = peaks.measure("values", lambda scored=scored, step=step: ppo.critic_pass(
            ppo.shaping.with_rewards(scored), step), ppo.updates.clock)  # fmt: skip
        ppo.keep_if_finite(ppo.shaping.advantages(valued, step), step)
        for minibatch in ppo.minibatches_left(ppo.state.experience, step):
            critic = ppo.state.critic_pass or ppo.updates.critic_objective(minibatch)
            # the critic first, because gradients that wait are applied first
            for objective in (critic, ppo.updates.actor_objective(minibatch)):
                ppo.updates.clock = PhaseClock()
                peaks.measure(objective.role, lambda made=objective, step=step: ppo.updates.minimise([made], step),
                              ppo.updates.clock)  # fmt: skip
        peaks.gib["critic"] = max(peaks.gib["critic"], peaks.gib.pop("values"))
        peaks.seconds["critic"] += peaks.seconds.pop("values")
        ppo.state.finish_step({})
        held["training"] = held_bytes(models) / GIB
        originals = [weight.data for engine in models for weight in engine.module.parameters()]
        with engines.hybrid.generating():
            held["rollout"] = held_bytes(models, originals) / GIB
    return {"peak": peaks.gib, "seconds": peaks.seconds, "held": held}


def measure_supervised(step: str, config: Any, load: Workload) -> dict[str, Any]:
    """Two updates of step 1 or 2; the numbers of the second. With packing, rows are a quarter as long."""
    peaks, folder = Peaks(), config.fit.model_name_or_path
    parts = 4 if config.fit.packing else 1
    prompt, length = load.prompt // parts, (load.prompt + load.answer) // parts
    count = load.rows * parts * dist.world_size()
    ids = np.random.default_rng(0).integers(2, 300, (count, 2 * length - prompt)).tolist()
    answers = [[row[prompt:length], row[length:]] if step == "reward" else [row[prompt:length]] for row in ids]
    columns = {"prompt_ids": [row[:prompt] for row in ids], "answers": answers, "margin": [0.0] * len(ids)}
    rows, dtype = Dataset.from_dict(columns), config.run.dtype

    def build() -> SupervisedTrainer[Any]:
        ds_config = fit_ds_config(config)
        if step == "sft":
            model: Any = PolicyModel(load_causal_lm(folder, dtype, ds_config))
            objective: Any = sft_objective(0, False, dist.device())
        else:
            model = ScalarModel(load_sequence_classifier(folder, dtype, ds_config, new_head=False))
            objective = reward_objective(0, dist.device(), config)
        if config.fit.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return SupervisedTrainer(model, ds_config, TokenRows(rows, None), objective, config)

    trainer = peaks.measure("load", build)
    own = load.rows * parts
    mine = list(range(dist.rank() * own, (dist.rank() + 1) * own))
    for _ in range(2):
        peaks.measure("actor", lambda: trainer.train_step([mine]))
    return {"peak": peaks.gib, "seconds": peaks.seconds, "held": {"training": held_bytes([trainer.engine]) / GIB}}
