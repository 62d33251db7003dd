"""Step 3 in this process: the real loop and all of its parts on tiny models, with
`torch.optim.AdamW` in the place of DeepSpeed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import NO_CHECKPOINTS
from datasets import Dataset
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.checkpoint.manager import RankStates
from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.errors import StopRequested
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.early_stop import EarlyStop
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.step_trace import NO_TRACE
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.ppo.components import PPOComponents, PPOData
from dschat_ppo.ppo.evaluation import HIGHEST_SCORE, Evaluation
from dschat_ppo.ppo.followers import Follower
from dschat_ppo.ppo.loop import run
from dschat_ppo.ppo.resumable import ResumablePPO
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.ppo.step_report import PPOReport
from dschat_ppo.rewards.reward_source import RewardMixture

CPU = torch.device("cpu")
PROMPTS, STEPS, UPDATES = 12, 3, 4  # 4 prompts a PPO step; 2 rows an update, 2 epochs
MEASURED = ("time", "time/", "memory/")
FLAGS = (
    "--data_path unused --dtype fp32 --max_prompt_seq_len 16 --max_answer_seq_len 5"
    " --num_warmup_steps 0 --per_device_generation_batch_size 4 --per_device_training_batch_size 2"
    " --ppo_epochs 2 --actor_learning_rate 0.003 --critic_learning_rate 0.003"
)
EVERYTHING = (
    "--critic_warmup_rollouts 1 --entropy_target 9 --entropy_coef 0.01 --entropy_delta 0.005"
    " --kl_target 0.05 --kl_horizon 8 --normalize_rewards running"
    " --eval_data_path unused --eval_interval 2 --eval_batch_size 2"
)


class PlainEngine(nn.Module):
    """Stands for a DeepSpeed engine without ZeRO in fp32 on one rank; it has no schedule and clips
    no gradient."""

    def __init__(self, module: nn.Module, rate: float):
        super().__init__()
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
        self.optimizer.param_groups[0]["initial_lr"] = rate  # as a schedule notes it
        self.skipped_steps = 0

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        pass

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fp16_enabled(self) -> bool:
        return False

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


class FrozenEngine(nn.Module):
    """Stands for an engine that only runs forward."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)


class NoWeights:
    """Weights that follow those of the actor and are none."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, ranks) -> bool:
        return True


class PlainEngines:
    """The roles of `RLHFEngine`, but for the reward model."""

    def __init__(self, assets: Path, config):
        def language_model() -> PolicyModel:
            return PolicyModel(LlamaForCausalLM.from_pretrained(assets / "lm"))

        ppo, algorithm = config.ppo, config.algorithm
        self.actor = PlainEngine(language_model(), ppo.actor_learning_rate)
        self.reference = None
        if algorithm.has_reference:
            self.reference = FrozenEngine(language_model()).eval()
        self.further = {
            model.role: PolicyModel(LlamaForCausalLM.from_pretrained(model.name)).eval()
            for model in config.further_models
        }
        self.critic = None
        if algorithm.has_critic:
            critic = ScalarModel(LlamaForSequenceClassification.from_pretrained(assets / "reward"))
            self.critic = PlainEngine(critic, ppo.critic_learning_rate)
        self.hybrid = HybridEngine(self.actor)

    @property
    def trained(self) -> dict[str, PlainEngine]:
        engines = {"actor": self.actor, "critic": self.critic}
        return {role: engine for role, engine in engines.items() if engine is not None}

    def frozen(self, role: str):
        return {"reference": self.reference, **self.further}[role]

    def train(self) -> None:
        for engine in self.trained.values():
            engine.train()

    def eval(self) -> None:
        for engine in self.trained.values():
            engine.eval()


class TokenSum:
    """A reward that is a function of the tokens alone; NaN for the first answer in PPO step
    `bad_step`."""

    name = "token_sum"

    def __init__(self, run: "PlainRun"):
        self.run, self.bad_step = run, None

    def __call__(self, request, rollout):
        scores = torch.where(rollout.response_mask, rollout.response_ids, 0).sum(dim=1) % 7 / 2.0
        if self.run.ppo.state.steps + 1 == self.bad_step:
            scores[0] = torch.nan
        return scores


class ScoreOfStep:
    """The score of an evaluation: 1 before training, then 0.5, 3 and 2 after PPO steps 1, 2 and
    3."""

    name = "score_of_step"

    def __init__(self, run: "PlainRun"):
        self.run = run

    def __call__(self, request, rollout):
        state = self.run.ppo.state
        step = 0 if state.metrics_before is None else state.steps + 1
        return torch.full((len(request),), (1.0, 0.5, 3.0, 2.0)[step])


def prompts_of(count: int, first: int = 5) -> Dataset:
    """Prompts of 1 to 4 tokens."""
    ids = [[first + row, *range(20, 20 + row % 4)] for row in range(count)]
    return Dataset.from_dict(
        {"prompt_ids": ids, "row": [json.dumps({"number": row}) for row in range(count)]}
    )


def config_of(assets: Path, folder: Path, words: str = ""):
    known = (
        f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward"
        f" --output_dir {folder}"
    )
    return parse("ppo", f"{known} {FLAGS} {words}".split())


class PlainRun:
    """A run of step 3 with `words` as further flags; its outputs are in `folder`."""

    def __init__(self, assets: Path, folder: Path, words: str = "", further_data=()):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.config = config = config_of(assets, folder, words)
        seed_everything(1)
        tokenizer = load_tokenizer(str(assets / "lm"), "model")
        plan = plan_ppo(config.ppo, PROMPTS, 1, config.algorithm.critic_warmup_rollouts)
        self.reward = TokenSum(self)
        mixture = RewardMixture([(self.reward, 1.0)])
        engines = PlainEngines(assets, config)
        rows = TokenRows(prompts_of(PROMPTS), None)
        data = PPOData(rows, tokenizer, further_data)
        self.ppo = PPOComponents(config, plan, data, engines, mixture)
        self.saved_best: list[tuple[float, int]] = []
        self.evaluation = None
        if config.validation.eval_data_path:
            collection = self.ppo.collection
            source = "recompute" if config.recompute_old_logprobs else "rollout"
            scorer = replace(collection.passes, critic=None, old_logprobs=source)
            held_out = RewardRequests(
                RewardMixture([(ScoreOfStep(self), 1.0)]), prompts_of(3, first=40), tokenizer
            )
            self.evaluation = Evaluation(
                config.validation,
                collection.sampler,
                held_out,
                scorer if engines.reference else None,
                folder,
                self.save_best,
                early_stop=EarlyStop(config.schedule.early_stop_patience, metric=HIGHEST_SCORE),
            )
        self.health = HealthWatch(config.health)
        self.resumable = ResumablePPO(self.ppo, self.evaluation, self.health)

    def run(
        self, checkpointer=NO_CHECKPOINTS, resumed: tuple[int, int] | None = None, trace=NO_TRACE
    ) -> dict[str, Any]:
        """The PPO steps that are left; `resumed` as in `MetricsWriter`."""
        with MetricsWriter(self.folder, None, resumed) as writer:
            report = PPOReport(self.ppo, self.evaluation, self.health, writer)
            with report.bar:
                report.evaluate_before_training()
                run(self.ppo, report, checkpointer, trace)
            return report.result()

    def save_best(self) -> None:
        (self.folder / "best").mkdir(exist_ok=True)
        self.saved_best.append(self.evaluation.best)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, without what a clock measured."""
        lines = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]
        return [
            {name: line[name] for name in line if not name.startswith(MEASURED)} for line in lines
        ]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of actor and critic, and those that follow the actor."""
        found = {
            f"{role}.{name}": weight
            for role, engine in self.ppo.engines.trained.items()
            for name, weight in engine.module.state_dict().items()
        }
        for follower in self.ppo.followers:
            for name, weight in follower.weights.state_dict().items():
                found[f"{follower.state_name}.{name}"] = weight
        return found

    def save(self, folder: Path) -> None:
        """A checkpoint: what `ResumablePPO` gives, through files, and the engines."""
        folder.mkdir()
        save_state(folder / "shared", self.resumable.shared_state())
        save_state(folder / "rank", self.resumable.rank_state())
        engines = self.resumable.engines_to_save
        torch.save(
            {
                role: (e.module.state_dict(), e.optimizer.state_dict())
                for role, e in engines.items()
            },
            folder / "engines.pt",
        )

    def load(self, folder: Path) -> None:
        """Resume from `save`, on as many ranks."""
        for role, (weights, optimizer) in torch.load(
            folder / "engines.pt", weights_only=False
        ).items():
            self.ppo.engines.trained[role].module.load_state_dict(weights)
            self.ppo.engines.trained[role].optimizer.load_state_dict(optimizer)
        rank = load_state(folder / "rank")
        self.resumable.load_state(
            load_state(folder / "shared"), RankStates(rank, lambda: iter([rank]))
        )


class StopAt:
    """A checkpointer that stops the run at a position, or once it was asked `question` times inside
    rollouts."""

    def __init__(
        self, run: PlainRun, position: tuple[int, int] | None = None, question: int | None = None
    ):
        self.resumable, self.position, self.question = run.resumable, position, question
        self.asked = 0
        self.passed: list[tuple[tuple[int, int], bool]] = []

    def save_if_due(self) -> None:
        self.passed.append((self.resumable.position, self.resumable.is_best))
        if self.resumable.position == self.position or self._is_stopped():
            raise StopRequested("stopped")

    def stop_requested(self) -> bool:
        self.asked += 1
        return self._is_stopped()

    def _is_stopped(self) -> bool:
        return self.question is not None and self.asked >= self.question


def watch(run: PlainRun) -> list[Any]:
    """What the parts of a run do from now on, in order."""
    did: list[Any] = []

    def note(holder: Any, name: str, describe) -> None:
        whole = getattr(holder, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            did.append(describe(*arguments, **named))
            return whole(*arguments, **named)

        setattr(holder, name, noted)

    def mode() -> str:
        [training] = {engine.training for engine in run.ppo.engines.trained.values()}
        return "train" if training else "eval"

    ppo, collection = run.ppo, run.ppo.collection
    note(collection, "sample", lambda prompts, step, _: f"generate {step}")
    note(collection, "reward", lambda rollout, prompts, step: f"reward {step}")
    passes, take = collection.passes, collection.next_prompts

    def taken() -> Any:
        prompts = take()
        did.append(f"take {len(prompts.rows)}")
        return prompts

    def scored(*arguments: Any) -> Any:
        found = passes(*arguments)
        did.append(f"score {mode()}")
        return found

    collection.passes, collection.next_prompts = scored, taken
    note(collection, "add", lambda *_: "add")
    note(ppo.advantage_computation, "advantages", lambda rows, step: f"advantages {step}")
    note(
        ppo.updates,
        "minimise",
        lambda objectives, step: (step, *(part.role for part in objectives), mode()),
    )

    def after_step(step: int) -> dict[str, float]:
        did.append(f"follow the actor of step {step}")
        return {}

    ppo.followers.append(
        Follower(
            "--none",
            "none",
            NoWeights(),
            after_update=lambda: did.append("follow"),
            after_step=after_step,
        )
    )
    if run.evaluation is not None:
        note(run.evaluation, "run", lambda step: f"evaluate {step} {mode()}")
    return did


def note_save_points(run: PlainRun, checkpointer: StopAt, did: list) -> None:
    save = checkpointer.save_if_due

    def noted():
        did.append(("save_if_due", run.resumable.position, run.resumable.is_best))
        save()

    checkpointer.save_if_due = noted


def started(assets, folder, words=EVERYTHING, resume_from=None, **stop):
    """(run, its checkpointer, what it does from now on)"""
    run = PlainRun(assets, folder, words)
    if resume_from is not None:
        run.load(resume_from)
    checkpointer, did = StopAt(run, **stop), watch(run)
    note_save_points(run, checkpointer, did)
    return run, checkpointer, did


def stopped(assets, tmp_path, words=EVERYTHING, **stop):
    """(a run that has stopped and saved its state, what it did, the resumed run, a function that
    runs it and compares)"""
    before, checkpointer, did_before = started(assets, tmp_path / "run", words, **stop)
    with pytest.raises(StopRequested):
        before.run(checkpointer)
    before.save(tmp_path / "saved")
    after, checkpointer, did_after = started(assets, tmp_path / "run", words, tmp_path / "saved")

    def require_equal(whole) -> None:
        length = (tmp_path / "run/metrics.jsonl").stat().st_size
        result = after.run(checkpointer, (length, after.ppo.state.steps + 1))
        assert after.lines == whole[0].lines and result == whole[2]
        assert did_before + did_after == whole[1]
        for name, weight in whole[0].weights.items():
            assert torch.equal(after.weights[name], weight), name

    return before, did_before, after, require_equal
