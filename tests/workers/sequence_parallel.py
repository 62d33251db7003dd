"""Divided rows: trajectories of each step, and one model of each architecture against whole rows.

sequence_parallel.py ASSETS SEQUENCE_RANKS OUT_FILE

With DeepSpeed settings in OUT_FILE.ds.json, only the trajectories of `in_groups`.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from datasets import Dataset
from tiny_models import VOCABULARY, new_model
from transformers.models.llama.modeling_llama import LlamaMLP

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import epoch_order, optimizer_steps
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.errors import UserError
from dschat_ppo.models import activation_memory
from dschat_ppo.models.adapters import adapter_settings
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.long_sequences import apply_memory_flags
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.router_recorder import recorded_router
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.supervised.policy_objectives import dpo_objective
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.train_preference import load_trained_model
from dschat_ppo.supervised.trainer import SupervisedTrainer, TrainerFlags, fit_ds_config
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import experience_of, ppo_of, update_once
from workers.quick import be_quick

STEPS, BATCH = 3, 8
SHORT_ROPE = {"phi3-longrope": {"original_max_position_embeddings": 32}}  # so that 41 tokens are a long row
FAMILIES = ("llama", "mistral-window", "gemma2", "gemma3", "gpt-oss", "opt", "gpt2", "gpt-neox", "phi3-longrope")


def supervised(task: str, assets: Path, stage: int, packed: bool, device, *more: str) -> list[list[float]]:
    """Loss, gradient norm and counts of the first steps, and the evaluation after them."""
    model = str(assets / ("reward" if task == "reward" else "lm"))
    words = ["--model_name_or_path", model, "--output_dir", "unused", "--dtype", "fp32", "--zero_stage", str(stage)]
    words += ["--data_path", str(assets / ("sft.jsonl" if task == "sft" else "pairs.jsonl")), "--data_split", "1,1,0"]
    words += ["--learning_rate", "0.005", "--per_device_train_batch_size", "2", *more]
    words += ["--gradient_accumulation_steps", str(BATCH // 2 // dist.data_ranks())]
    words += ["--per_device_eval_batch_size", "3", "--eval_iters", "0"]
    words += ["--sequence_parallel_size", str(dist.sequence_ranks())]
    config = parse({"sft": "sft", "reward": "reward", "dpo": "dpo"}[task], words)
    rows = prepare("sft" if task == "sft" else "preference", load_tokenizer(model, "model"), config.data, 64).train
    ds_config = fit_ds_config(config.fit, config.run)
    if task == "sft":
        adapter = adapter_settings(config.lora.lora_dim, None, config.adapters)
        trained = PolicyModel(load_causal_lm(model, "fp32", ds_config, adapter=adapter))
        objective = sft_objective(0, False, device)
        if config.fit.gradient_checkpointing:
            trained.gradient_checkpointing_enable()
        apply_memory_flags(trained, config.memory)
    else:
        trained = load_trained_model(model, config, ds_config)
        objective = (reward_objective if task == "reward" else dpo_objective)(0, device, config)
    held_out = rows.select(range(12, 19))
    rows = TokenRows(rows.select(range(12)), held_out)
    fit = SupervisedTrainer(trained, ds_config, rows, objective, TrainerFlags.of(config))
    assert trained.layout.divided == (dist.sequence_ranks() > 1)
    assert trained.layout.packed  # chosen on a CPU
    trained.layout = replace(trained.layout, packed=packed)
    order = [index for epoch in range(3) for index in epoch_order(12, 7, epoch)]
    taken = optimizer_steps(order, 2, fit.plan.flags.gradient_accumulation_steps, dist.data_ranks(), dist.data_rank())
    steps = [fit.train_step(indices) for indices, _ in zip(taken, range(STEPS), strict=False)]
    found = [[step[name] for name in ("loss", "grad_norm", "counted", "samples", "tokens")] for step in steps]
    described = list(objective.describe(fit.engine, fit.rows).values()) if objective.describe else []
    return [*found, [fit.evaluate()["eval_loss"], *described]]


def ppo(assets: Path, stage: int, packed: bool, device, *more: str) -> list[list[float]]:
    """Losses and gradient norms of the first updates from one stored rollout."""
    words = ["--actor_model_name_or_path", str(assets / "lm"), "--critic_model_name_or_path", str(assets / "reward")]
    words += ["--data_path", "unused", "--output_dir", "unused", "--dtype", "fp32", "--actor_zero_stage", str(stage)]
    words += ["--critic_zero_stage", str(stage), "--per_device_training_batch_size", "2", "--num_warmup_steps", "0"]
    words += ["--gradient_accumulation_steps", str(BATCH // 2 // dist.data_ranks()), "--micro_batch_tokens", "28"]
    words += ["--per_device_generation_batch_size", str(16 // dist.world_size()), "--ppo_epochs", "2"]
    words += ["--actor_learning_rate", "0.005", "--critic_learning_rate", "0.005", "--entropy_coef", "0.01"]
    words += ["--old_logprobs", "recompute", "--sequence_parallel_size", str(dist.sequence_ranks()), *more]
    parts = ppo_of(parse("ppo", words), Dataset.from_dict({"row": ["{}"] * 40}), device)
    for engine in (*parts.engines.trained.values(), parts.engines.reference, parts.engines.reward):
        assert engine.module.layout.divided == (dist.sequence_ranks() > 1)
        engine.module.layout = replace(engine.module.layout, packed=packed)
    mine = torch.arange(16).view(dist.world_size(), -1)[dist.rank()]
    stored = Rollout(**torch.load(assets / "rollout.pt", weights_only=True))
    experience = experience_of(parts, select_rows(stored, mine))
    parts.engines.train()
    trajectory = [[float(experience.values.sum()), float(experience.kl.abs().sum()), float(experience.scores.sum())]]
    for minibatch, _ in zip(parts.mini_dataset.minibatches(experience, 2, step=1), range(STEPS), strict=False):
        sums = MetricSums()
        norms = update_once(parts, minibatch, sums).grad_norms
        metrics = sums.reduce()
        losses = [metrics[name] for name in ("policy/loss", "value/loss", "policy/entropy")]
        trajectory.append([*losses, norms["actor"], norms["critic"]])
    return trajectory


def against_whole_rows(kind: str, packed: bool, scalar: bool = False, choice: str = "auto", **changes) -> list[float]:
    """Largest differences between divided and whole rows: of the outputs, and of the gradients relative to them.
    `choice`: attention of the divided rows."""
    lm = new_model(kind, **changes)
    lengths = torch.tensor([41, 9, 15])  # 41 columns and 65 tokens: neither is a multiple of the ranks
    ids = torch.randint(2, VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(3))
    slots = torch.arange(41)
    wanted = (slots >= torch.tensor([[4], [2], [12]])) & (slots < lengths.unsqueeze(1))
    factors = torch.randn(2, int(wanted.sum()), generator=torch.Generator().manual_seed(4))
    if scalar:
        lm.score = torch.nn.Linear(32, 1)
        torch.nn.init.normal_(lm.score.weight, generator=torch.Generator().manual_seed(5))
        model = ScalarModel(lm, Layout(packed=packed))
    else:
        model = PolicyModel(lm, Layout(packed=packed))
    results = []
    for divided in (False, True):
        model.zero_grad()
        model.layout = replace(model.layout, divided=divided, attention=choice if divided else "auto")
        if scalar:
            outputs = model(ids, lengths)[wanted].unsqueeze(0)
            assert torch.equal(model(ids, lengths, last_only=True), model(ids, lengths).gather(
                1, (lengths - 1).unsqueeze(1)).squeeze(1)) or not divided  # fmt: skip
        else:
            forbidden = wanted & (slots % 3 == 0), (0, 1)
            outputs = torch.stack(model(ids, wanted, 0.7, True, forbidden=forbidden))
        (outputs * factors[: len(outputs)]).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((outputs.detach(), dist.all_reduce(gradients) if divided else gradients))
    (whole, expected), (found, gradients) = results
    return [float((found - whole).abs().max()), float((gradients - expected).abs().max() / expected.abs().max())]


def router_against_whole_rows(packed: bool) -> list[float]:
    """Largest differences of the load of the routers, summed over the ranks, and of its gradients."""
    lengths, ids = torch.tensor([41, 9, 15]), torch.randint(2, VOCABULARY, (3, 41), generator=torch.manual_seed(3))
    wanted = torch.arange(41) < lengths.unsqueeze(1)
    model, results = PolicyModel(new_model("mixtral"), Layout(packed=packed)), []
    for divided in (False, True):
        model.zero_grad()
        model.layout = replace(model.layout, divided=divided)
        with recorded_router(torch.tensor([True, True, False]), 2) as recorder:
            model(ids, wanted)
        [load] = recorder.loads
        (load.probability * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum().backward()
        sums = torch.cat([load.chosen, load.probability.detach(), load.count.view(1)])
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append([dist.all_reduce(x) if divided else x for x in (sums, gradients)])
    (whole, expected), (found, gradients) = results
    assert whole[-1] == (40 + 8) * 2 and expected.abs().max() > 1e-3
    return [float((found - whole).abs().max()), float((gradients - expected).abs().max() / expected.abs().max())]


def refusals() -> list[str]:
    """Why models are not divided whose tokens meet outside attention, or whose window is in their mask alone."""
    found = []
    for change in ("shift", "window"):
        lm = new_model("llama")
        if change == "shift":
            mlp = lm.model.layers[0].mlp
            mlp.forward = lambda states, inner=mlp.forward: inner(states) + states.roll(1, dims=1)
        else:
            lm.config.sliding_window = 9
        try:
            select_kernels(PolicyModel(lm))
        except UserError as problem:
            found.append(str(problem))
    return found


def in_groups(assets: Path, settings: Path, device) -> dict:
    """SFT and PPO, plain, and at stage 3 with tiled MLPs, for which ranks with uneven rows run uneven pieces."""
    tiled = ("--deepspeed_config", str(settings), "--tiled_mlp")
    runs = {
        "sft": partial(supervised, "sft", assets, 0, True, device),
        "sft tiled": partial(supervised, "sft", assets, 3, True, device, *tiled, "--gradient_checkpointing"),
        "ppo": partial(ppo, assets, 0, True, device),
        "ppo tiled": partial(ppo, assets, 3, True, device, *tiled, "--micro_batch_tokens", "96"),
    }
    found = {}
    for label, run in runs.items():
        seed_everything(1)
        with counted_pieces() as pieces:
            found[label] = {"trajectory": run()}
        found[label]["pieces"] = dist.gather_objects(pieces)
    return found


@contextmanager
def counted_pieces() -> Iterator[list[int]]:
    """The numbers of tokens with which tiled MLPs whose weights are gathered for each piece run in this block."""
    seen: list[int] = []
    before = LlamaMLP.forward

    def forward(self, states):
        if any(layer._forward_pre_hooks for layer in self.children()):  # the weights of small frozen models are whole
            seen.append(states.shape[:-1].numel())
        return before(self, states)

    LlamaMLP.forward = forward
    activation_memory._tiled.cache_clear()
    try:
        yield seen
    finally:
        LlamaMLP.forward = before
        activation_memory._tiled.cache_clear()


def main() -> None:
    be_quick()
    assets, ranks, out = Path(sys.argv[-3]), int(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    dist.share_rows(ranks)
    settings = Path(f"{out}.ds.json")
    if settings.exists():
        found = in_groups(assets, settings, device)
        if dist.is_main():
            out.write_text(json.dumps(found))
        dist.shutdown()
        leave(0)
    found = {"families": {}, "trajectories": {}}
    if ranks > 1:
        found["refusals"] = refusals()
        for kind in FAMILIES:
            for packed in (False, True):
                label = f"{kind}{' packed' * packed}"
                found["families"][label] = against_whole_rows(kind, packed, **SHORT_ROPE.get(kind, {}))
        for heads in (1, 3):
            changes = {"num_key_value_heads": heads, "num_attention_heads": 12, "hidden_size": 48}
            found["families"][f"{heads} key heads"] = against_whole_rows("llama", True, **changes)
        for kind, packed in product(("llama", "mistral-window"), (False, True)):
            label = f"{kind} eager{' packed' * packed}"
            found["families"][label] = against_whole_rows(kind, packed, choice="eager")
        for packed in (False, True):
            found["families"][f"router{' packed' * packed}"] = router_against_whole_rows(packed)
        found["families"]["scalar"] = against_whole_rows("llama", False, scalar=True)
        found["families"]["scalar packed"] = against_whole_rows("mistral-window", True, scalar=True)
    tasks = {task: partial(supervised, task) for task in ("sft", "reward", "dpo")} | {"ppo": ppo}
    for task, run in tasks.items():
        for stage, packed in ((0, False), (3, True))[:ranks]:
            seed_everything(1)
            found["trajectories"][f"{task} stage {stage}"] = run(assets, stage, packed, device)
    flags = ("--tiled_mlp", "--offload_activations", "--gradient_checkpointing")
    seed_everything(1)
    found["trajectories"]["sft with all flags"] = supervised("sft", assets, 3, True, device, *flags)
    lora = ("--only_optimize_lora", "--lora_dim", "4", "--lora_learning_rate", "0.02")
    seed_everything(1)
    found["trajectories"]["sft lora"] = supervised("sft", assets, 3, True, device, *flags, *lora)
    lora = ("--only_optimize_lora", "--actor_lora_dim", "4", "--critic_lora_dim", "4", "--tiled_mlp")
    lora += ("--actor_lora_learning_rate", "0.02", "--critic_lora_learning_rate", "0.02")
    seed_everything(1)
    found["trajectories"]["ppo lora"] = ppo(assets, 3, True, device, *lora)
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
