"""Experience collection: prompts, sampled answers, rewards and log-probs of one PPO step; dynamic
sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.algorithms.groups import groups_that_differ, groups_within
from dschat_ppo.checkpoint.manager import CheckpointManager, load_saved
from dschat_ppo.common import dist, stop_requests
from dschat_ppo.common.logging import logger, print_line
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.common.progress import report_phase
from dschat_ppo.common.seeding import row_seeds, shared_generator
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.data.batches import IndexStream, collate_prompts, right_padded
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.episodes.rollouts import EpisodeRollouts
from dschat_ppo.errors import RolloutCancelled, UserError
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.ppo.own_algorithms import OwnSampler
from dschat_ppo.ppo.samples import printed_answers, sample_lines
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests
from dschat_ppo.rewards.reward_source import (
    DATA_SOURCE,
    MOST_NAMES,
    RewardFunctionError,
    RewardServiceError,
    Scores,
    is_routed_to,
    number_means,
)
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs
from dschat_ppo.rollout.generator import (
    EngineName,
    GenerationConfig,
    engine_text,
    generate,
)
from dschat_ppo.rollout.kv_cache import rows_for_memory
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.types import (
    FinishReason,
    Rollout,
    ScoredRollout,
    concat_rows,
    pad_rows,
    record_of,
    repeat_rows,
    select_rows,
    tensors_of,
    to_device,
)

# separates the random stream of `--distill_on` from others of the same seed and step
SOURCE_OF_ANSWERS = 4


def check_stop_ids(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that `--stop_token_ids` are tokens."""
    for number in ids:
        if number >= len(tokenizer):
            raise UserError(
                f"--stop_token_ids {number}: the tokenizer has {len(tokenizer)} tokens, numbered"
                " from 0"
            )


def end_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end an answer: those that training ends answers with, and the other end
    tokens of the model's generation config if it lists one of these (a config that lists none of
    them belongs to another tokenizer)."""
    trained = answer_ends(tokenizer)
    listed = model.generation_config.eos_token_id if model.generation_config else None
    others = listed if isinstance(listed, list) and set(trained) & set(listed) else []
    return tuple(dict.fromkeys((*trained, *others)))


def generation_config(
    flags: PPOFlags, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> GenerationConfig:
    """Sampling parameters, stopping criteria and engine that the flags ask for."""
    stopping = StoppingCriteria(
        flags.max_answer_seq_len,
        end_ids(tokenizer, model),
        tuple(flags.stop_token_ids),
        tuple(flags.stop_strings),
        flags.min_answer_seq_len,
        tokenizer.batch_decode if flags.stop_strings else None,
    )
    sampling = SamplingParameters(
        flags.temperature, flags.top_p, flags.top_k, flags.min_p, flags.repetition_penalty
    )
    engine: EngineName = "padded" if flags.rollout_engine == "padded" else "continuous"
    return GenerationConfig(
        sampling, stopping, flags.n_samples_per_prompt, flags.rollout_rows, engine=engine
    )


def greedily(config: GenerationConfig) -> GenerationConfig:
    """The same configuration with greedy decoding; log-probs are still computed at the
    temperature."""
    return replace(config, sampling=replace(config.sampling, top_k=1))


class RolloutGenerator:
    """Samples answers of the actor to the prompts of this rank, which are token rows. Constructing
    it is collective: it checks the generation engine on the model."""

    def __init__(
        self,
        flags: PPOFlags,
        hybrid: HybridEngine,
        prompts: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        episodes: EpisodeRollouts | None = None,
    ):
        self.episodes = episodes
        self.hybrid = hybrid
        self.prompts = prompts
        self.pad_id = filler_id(tokenizer)
        self.seed = seed
        self.device = dist.device()
        self.graphs = RolloutGraphs()
        config = generation_config(flags, tokenizer, hybrid.model)
        if len(config.stopping.eos_ids) > 1:
            names = ", ".join(
                f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in config.stopping.eos_ids
            )
            logger().info(f"rollout: an answer ends with any of {names}")
        if config.sampling.changes_distribution:
            logger().info(
                "note: log-probs, KL and ratios are of the policy before truncation and penalty"
            )
        hybrid.check_sharded_layers()
        with hybrid.generating() as model:
            self.config = choose_engine(
                model, config, hybrid.max_over_ranks, self.graphs, has_turns=episodes is not None
            )
            self.engine_text = engine_text(model, self.config, hybrid.max_over_ranks)

    def answer(
        self,
        indices: list[int],
        *path: int,
        prompts: Dataset | None = None,
        config: GenerationConfig | None = None,
        first: int | None = None,
        cancelled: Callable[[], bool] = never,
        step: int | None = None,
    ) -> Rollout:
        """Answer the prompts at `indices`, at least one and as many on every rank. Collective.

        An answer's seed is derived from the run's seed, `path` (the step, ...) and the answer's
        number over all ranks, which start at `first` (None: after those of the ranks before), so it
        does not depend on the rank. Once `cancelled` returns True, this rank stops generating, and
        its answers are to be discarded. `step`: the PPO step (None: the first number of `path`).
        """
        counts, config = prompts is config is None, config or self.config
        first = dist.rank() * len(indices) * config.samples if first is None else first
        own, seeds = len(indices), row_seeds(first, len(indices) * config.samples, self.seed, *path)
        place, parallel = 0, self.hybrid.parallel
        if parallel is not None:  # the ranks of a group answer the prompts of all of them together
            shares = dist.gather_objects((indices, seeds), parallel.group)
            indices = [index for share, _ in shares for index in share]
            seeds, place = torch.cat([seeds for _, seeds in shares]), parallel.rank
        rows, turns = self.prompts if prompts is None else prompts, None
        if self.episodes is None:
            batch = collate_prompts(rows, indices, self.pad_id)
        else:
            of_prompts = row_seeds(first // config.samples, len(indices), self.seed, *path).tolist()
            name = "/".join(
                map(
                    str,
                    ("sampled" if counts else "greedy" if prompts is None else "evaluation", *path),
                )
            )
            step = path[0] if step is None else step
            batch, turns = self.episodes.begin(
                rows, indices, config.samples, of_prompts, cancelled, step, name, first
            )
            config = replace(config, samples=len(seeds) // len(batch.prompt_ids))
        batch = to_device(batch, self.device)
        with self.hybrid.generating() as model:
            largest = self.hybrid.max_over_ranks
            # as many for each rank of a group
            if parallel is not None and largest is not None and config.rows == 0:
                length = batch.prompt_ids.shape[1] + config.stopping.max_new_tokens
                config = replace(config, rows=-largest(-rows_for_memory(model, length)))
            rollout = generate(
                model,
                batch,
                seeds.to(self.device),
                config,
                largest,
                cancelled=cancelled,
                graphs=self.graphs,
                turns=turns,
            )
        if self.episodes is not None and turns is not None:
            return self.episodes.end(rollout, turns, cancelled(), counts)
        if parallel is None:
            return rollout
        rows = torch.arange(own * config.samples, device=self.device)
        return select_rows(rollout, place * len(rows) + rows)

    def answers_of_the_data(self, indices: list[int]) -> Rollout:
        """The data rows' answers to the prompts at `indices`, cut at `--max_answer_seq_len`,
        without log-probs."""
        batch, limit = (
            collate_prompts(self.prompts, indices, self.pad_id),
            self.config.stopping.max_new_tokens,
        )
        answers = [self.prompts[index]["answers"][0] for index in indices]
        ids, lengths = right_padded([answer[:limit] for answer in answers], self.pad_id)
        mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)  # (B, R)
        reasons = [
            FinishReason.EOS if len(answer) <= limit else FinishReason.LENGTH for answer in answers
        ]
        rollout = Rollout(
            batch.prompt_ids,
            batch.prompt_mask,
            ids,
            mask,
            torch.zeros(ids.shape),
            torch.tensor(reasons, dtype=torch.int8),
        )
        return to_device(rollout, self.device)

    def with_teacher_prompts(self, rollout: Rollout, indices: list[int]) -> Rollout:
        """The rollout with what the teacher reads in place of the prompts at `indices`."""
        rows = [{"prompt_ids": self.prompts[index]["teacher_prompt_ids"]} for index in indices]
        seen = to_device(collate_prompts(rows, range(len(rows)), self.pad_id), self.device)
        seen = repeat_rows(seen, len(rollout.prompt_ids) // len(indices))
        width = max(seen.prompt_ids.shape[1], rollout.prompt_ids.shape[1])
        seen, rollout = (
            pad_rows(seen, width, 0),
            pad_rows(rollout, width, rollout.response_ids.shape[1]),
        )
        return replace(
            rollout, teacher_prompt_ids=seen.prompt_ids, teacher_prompt_mask=seen.prompt_mask
        )


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one round."""

    rows: list[int]  # row numbers in the prompt data set
    first: int  # number of the first one among all prompts of the run; it numbers the groups


@dataclass(eq=False)
class ExperienceCollection:
    """The steps of `make_experience`. Each is timed, and its tokens are counted."""

    config: PPOConfig
    plan: PPOPlan
    generator: RolloutGenerator
    requests: RewardRequests
    passes: ForwardPasses
    pool: GroupPool | None  # the rows of several rounds of dynamic sampling; None without
    clock: PhaseClock
    # rows carry the number of their prompt's data set, the column `source`
    several_data_sets: bool = False

    def __post_init__(self) -> None:
        prompts, seed, sampler = (
            self.generator.prompts,
            self.config.run.seed,
            self.config.ppo.sampler,
        )
        self.stream: IndexStream | OwnSampler = IndexStream(prompts, seed)
        if sampler is not None:
            self.stream = OwnSampler(sampler, [json.loads(row) for row in prompts["row"]], seed)
        self.metrics: dict[str, float] = {}  # of the last collection
        self._untaught = set[str]()  # data sources without a teacher that are named already
        self._round = self._faults = 0
        self._answers = self._left = 0  # of all rounds; those of them without a score
        self._numbers: list[dict[str, Tensor]] = []  # `Scores.numbers` of each round

    @contextmanager
    def cancelled_on_stop(self, checkpointer: CheckpointManager) -> Iterator[None]:
        """Collect the rows of one PPO step inside this block. If a stop is requested meanwhile,
        discard them, save the state before the block, and raise `StopRequested`: seeds depend only
        on the step, so a resumed run samples the same answers. A stop may end the processes or the
        service of a reward before this rank notices the request, so scores computed meanwhile are
        discarded too, and a failed reward is treated as part of the stop."""
        before = self.state_dict()
        self._round = self._faults = 0
        self._answers = self._left = 0
        self._numbers = []
        try:
            yield
            if checkpointer.stop_requested():
                raise RolloutCancelled
        except (RolloutCancelled, RewardServiceError, RewardFunctionError) as problem:
            if not isinstance(problem, RolloutCancelled) and not checkpointer.stop_requested():
                raise
            self.load_state_dict(before, dist.device())
            checkpointer.save_if_due()
            raise

    def next_prompts(self) -> Prompts:
        """This rank's prompts of the next round; all ranks take the same number. Dynamic sampling
        takes as many as should fill the step, estimated from the share of rows kept so far."""
        count, rank, ranks = self.plan.prompts_per_rank, dist.rank(), dist.world_size()
        if self.pool is not None:
            wanted = self.pool.missing / self.plan.samples / max(self.pool.kept_share, 0.1)
            count = max(1, min(count, -int(-wanted // ranks)))
        first = self.stream.taken + rank * count
        return Prompts(self.stream.take(count * ranks)[rank * count : (rank + 1) * count], first)

    def sample(self, prompts: Prompts, step: int, checkpointer: CheckpointManager) -> Rollout:
        """Sample the answers to each prompt; `RolloutCancelled` if a stop was requested.
        Collective."""
        with self.clock.phase("rollout"):
            if self._samples_in(step):
                rollout = self.generator.answer(
                    prompts.rows, *self._path(step), cancelled=stop_requests.flag_is_set
                )
            else:
                rollout = self.generator.answers_of_the_data(prompts.rows)
                rollout = replace(rollout, rollout_logprobs=self.passes.actor_logprobs(rollout))
            if self.config.distillation.teacher_prompt_column:
                rollout = self.generator.with_teacher_prompts(rollout, prompts.rows)
            self.clock.count_tokens("rollout", float(rollout.response_mask.sum()))
        if checkpointer.stop_requested():
            raise RolloutCancelled
        return rollout

    def _samples_in(self, step: int) -> bool:
        """Whether the answers of a PPO step are sampled (`--distill_on`); the same on every
        rank."""
        draw = torch.rand(
            (), generator=shared_generator(self.config.run.seed, step, 0, SOURCE_OF_ANSWERS)
        )
        return float(draw) < self.config.distillation.on_policy_share

    def _path(self, step: int) -> tuple[int, ...]:
        """What the seeds of a round's answers are derived from."""
        return (step, self._round) if self._round else (step,)

    def reward(self, rollout: Rollout, prompts: Prompts, step: int) -> Callable[[], Scores]:
        """Let functions and services begin to score the answers; the function that is returned lets
        the learned reward score them and waits for the others. With ReMax (Li et al. 2024), the
        greedy answer to each prompt is scored as well. Collective, as is the function."""
        requests, baselines, unpaired = self.requests, None, None
        if self.config.algorithm.advantage_estimator == "remax":
            with self.clock.phase("rollout"):
                config = replace(greedily(self.generator.config), samples=1)
                greedy = self.generator.answer(prompts.rows, *self._path(step), config=config)
                self.clock.count_tokens("rollout", float(greedy.response_mask.sum()))
            with self.clock.phase("reward"):
                request = requests.request(greedy, prompts.rows, step - 1)
                greedy_scores = requests.mixture(request, greedy)
                baselines = greedy_scores.total.repeat_interleave(self.plan.samples)  # (B,)
                if greedy_scores.left is not None:  # without a baseline, all answers leave
                    unpaired = greedy_scores.left.repeat_interleave(self.plan.samples)  # (B,)
        with self.clock.phase("reward"):
            pending = requests.mixture.begin(
                requests.request(rollout, prompts.rows, step - 1), rollout
            )

        def scores() -> Scores:
            with self.clock.phase("reward"):
                report_phase(0, len(rollout.response_ids), "answers")
                found = pending()
                self._faults += requests.count_failed_rows()
                self._numbers.append(found.numbers)
            if found.left is not None and unpaired is not None:
                found = replace(found, left=found.left | unpaired)
            return replace(found, baselines=baselines)

        return scores

    def forward_passes(
        self, rollout: Rollout, scores: Callable[[], Scores], prompts: Prompts
    ) -> ScoredRollout:
        """Add log-probs, KL and values, on-policy the reference's alone, while functions and
        services score; then the scores. Collective."""
        with self.clock.phase("score"):
            numbers = torch.arange(
                prompts.first, prompts.first + len(prompts.rows), device=rollout.prompt_ids.device
            )
            groups = numbers.repeat_interleave(self.plan.samples)  # (B,)
            unknown = torch.full(groups.shape, torch.nan, device=groups.device)
            scored = self.passes(
                rollout, Scores(unknown, unknown.unsqueeze(1)), groups, self._teachers(prompts)
            )
            if self.several_data_sets:
                numbers = torch.tensor(
                    self.generator.prompts[prompts.rows]["source"], device=groups.device
                )
                # (B,)
                scored = replace(scored, data_sources=numbers.repeat_interleave(self.plan.samples))
            self.clock.count_tokens(
                "score", float(rollout.response_mask.sum() + rollout.prompt_mask.sum())
            )
        found = scores()
        return replace(
            scored,
            scores=found.total,
            source_scores=found.by_source,
            baselines=found.baselines,
            left=found.left,
        )

    def _teachers(self, prompts: Prompts) -> Tensor | None:
        """(B,) int64, the number of the teacher of each row, -1 where there is none; None if one
        teaches all rows."""
        routes = [sources for sources, _ in self.config.teacher.teachers]
        if not any(routes):
            return None
        data = [json.loads(text) for text in self.generator.prompts[prompts.rows]["row"]]
        found = [
            next((n for n, route in enumerate(routes) if is_routed_to(route, row)), -1)
            for row in data
        ]
        sources = {
            repr(row.get(DATA_SOURCE))
            for row, teacher in zip(data, found, strict=True)
            if teacher < 0
        }
        if sources - self._untaught and self.config.algorithm.advantage_estimator == "none":
            self._untaught |= sources
            print_line(
                f"warning: rank {dist.rank()}: {found.count(-1)} of {len(found)} prompts have no"
                f" teacher (data_source {', '.join(sorted(sources)[:MOST_NAMES])}); nothing is"
                " learned from their answers (said once; see distill/taught_share)"
            )
        return torch.tensor(found, device=self.generator.device).repeat_interleave(
            self.plan.samples
        )

    def add(self, rows: ScoredRollout, step: int) -> ScoredRollout | None:
        """Add the rows of a round, of all ranks. Returns those of the PPO step once it has enough,
        or after the last round, and prints their answers if asked to. Collective."""
        self._round += 1
        self._answers += len(rows.groups)
        self._left += int((~rows.kept).sum())
        if isinstance(self.stream, OwnSampler):
            self.stream.update(rows.groups[rows.kept], rows.scores[rows.kept])
        if self.pool is not None:
            self.pool.add(rows)
            if self.pool.missing and self._round < self.config.algorithm.dynamic_sampling_rounds:
                return None
        self.metrics = {
            "reward/function_faults": float(self._faults),
            "rollout/left_share": self._left / self._answers,
        }
        if self.generator.episodes is not None:
            self.metrics |= self.generator.episodes.take_metrics()
        self.metrics |= {
            f"reward/{name}": mean for name, mean in number_means(self._numbers).items()
        }
        if self.pool is not None:
            self.metrics["rollout/dynamic_sampling_rounds"] = float(self._round)
            self.metrics["rollout/dynamic_sampling_kept_share"] = self.pool.kept_share
            rows, filled = self.pool.take()
            self.metrics["rollout/dynamic_sampling_filled_rows"] = float(filled)
            if filled:
                in_range = ""
                if self.pool.score_range:
                    in_range = " and whose mean is in --dynamic_sampling_range"
                logger().warning(
                    f"dynamic sampling: {self._round} rounds gave too few prompts whose answers"
                    " differ in"
                    f" score{in_range};"
                    f" {filled} rows of other prompts fill the step (see --dynamic_sampling_rounds)"
                )
        ppo = self.config.ppo
        if dist.is_main() and ppo.print_answers and step % ppo.print_answers_interval == 0:
            lines = sample_lines(
                to_device(rows, "cpu"), self.requests.tokenizer, self.requests.mixture.names
            )
            # as one record: no other line comes between
            logger().info(printed_answers(step, lines))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts and the rows kept for the next step; the same on every rank,
        between two steps."""
        pool = None if self.pool is None else self.pool.state_dict()
        return {"stream": self.stream.state_dict(), "pool": pool}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()`. A pool that the saved run did not have starts empty."""
        self.stream.load_state_dict(state["stream"])
        if self.pool is not None:
            load_saved(
                "--dynamic_sampling",
                state["pool"],
                partial(self.pool.load_state_dict, device=device),
            )


@dataclass(eq=False)
class GroupPool:
    """Collects the rows of a PPO step from several rounds of sampling: dynamic sampling (Yu et al.
    2025, DAPO).

    It replaces prompts whose answers all have the same score, so advantage 0, those of which fewer
    than two answers have a score, and those whose mean score is not within `score_range`. Every
    rank holds the rows of all ranks, so every rank makes the same decision. Accepted rows beyond
    what the step needs are kept for the next one.
    """

    rows_needed: int  # of a PPO step over all ranks, whole groups
    # (N,) raw -> scaled and clipped scores, which differ in an accepted group
    shaped: Callable[[Tensor], Tensor]
    score_range: Sequence[float] = ()  # what the mean of its raw scores is between; empty: any
    # the scores of a source with a weight may differ instead; empty: of none
    source_weights: Sequence[float] = ()
    accepted: list[ScoredRollout] = field(default_factory=list)
    dropped: list[ScoredRollout] = field(default_factory=list)
    sampled: int = 0  # rows of this step's rounds
    kept: int = 0  # those of them that were accepted

    @property
    def missing(self) -> int:
        """Rows that the step still needs."""
        return max(0, self.rows_needed - sum(len(part.groups) for part in self.accepted))

    @property
    def kept_share(self) -> float:
        """Share of the rows of this step's rounds that were accepted; 1 before the first round."""
        return self.kept / self.sampled if self.sampled else 1.0

    def add(self, rows: ScoredRollout) -> None:
        """Sort the rows of a round (whole groups) into accepted and dropped ones."""
        scored = rows.kept  # (N,) bool; a group is judged by these answers, and stays whole
        scores, groups = rows.scores[scored], rows.groups[scored]  # (n,) each
        differ = groups_that_differ(self.shaped(scores), groups)  # (n,) bool
        for weight, column in zip(self.source_weights, rows.source_scores.T, strict=False):
            if weight != 0:
                differ = differ | groups_that_differ(column[scored].nan_to_num(), groups)
        if self.score_range:
            differ = differ & groups_within(scores, groups, *self.score_range)
        kept = torch.isin(rows.groups, groups[differ])  # (N,) bool
        self.sampled += len(kept)
        self.kept += int(kept.sum())
        for parts, chosen in ((self.accepted, kept), (self.dropped, ~kept)):
            if chosen.any():
                parts.append(select_rows(rows, chosen.nonzero().squeeze(1)))

    def take(self) -> tuple[ScoredRollout, int]:
        """The rows of the step, and how many of them are dropped ones that fill it up. The next
        step begins."""
        filled = self.missing
        rows = concat_rows([*self.accepted, *(self.dropped if filled else [])])
        taken, left = torch.arange(len(rows.groups), device=rows.groups.device).tensor_split(
            [self.rows_needed]
        )
        self.accepted = [select_rows(rows, left)] if len(left) and not filled else []
        self.dropped, self.sampled, self.kept = [], 0, 0
        return select_rows(rows, taken), filled

    def state_dict(self) -> dict[str, Any]:
        """The accepted rows kept for the next step; call it between two steps."""
        return {"accepted": tensors_of(self.accepted[0]) if self.accepted else None}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict()` at the beginning of a step, on `device`."""
        kept = state["accepted"]
        self.accepted = [] if kept is None else [to_device(record_of(ScoredRollout, kept), device)]
        self.dropped, self.sampled, self.kept = [], 0, 0
