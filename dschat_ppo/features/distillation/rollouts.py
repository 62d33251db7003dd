"""What distillation changes of the rollouts of training: answers of the data in place of samples
(`--distill_on`), and columns that say which teacher reads what."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.batches import collate_prompts, right_padded
from dschat_ppo.features.distillation.flags import DistillationFlags
from dschat_ppo.models.micro_batches import even_passes
from dschat_ppo.models.wrapped_models import response_logprobs
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.ppo.rollouts import RolloutTask, SampleRollout, prompt_batch
from dschat_ppo.ppo.score import ForwardPasses
from dschat_ppo.rewards.reward_source import DATA_SOURCE, MOST_NAMES, is_routed_to
from dschat_ppo.types import (
    FinishReason,
    Rollout,
    pad_rows,
    repeat_rows,
    row_lengths,
    select_rows,
    to_device,
    with_columns,
)

# separates the draws of `--distill_on` from others of the same seed and step
SOURCE_OF_RESPONSES = 4


def with_models(
    sample_rollout: SampleRollout,
    config: PPOConfig,
    sampler: RolloutSampler,
    passes: ForwardPasses,
) -> SampleRollout:
    """`sample_rollout` with what teachers need, in a run that distils.

    Args:
        sample_rollout: gives the responses of a task.
        config: the flags.
        sampler: of the run.
        passes: of scoring.
    """
    if not config.of(DistillationFlags).distils:
        return sample_rollout
    return TaughtRollouts(sample_rollout, config, sampler, passes)


@dataclass(eq=False)
class TaughtRollouts:
    """Rollouts of training, with what their teachers need. Those of other purposes are as they
    were."""

    sample_rollout: SampleRollout  # by the policy
    config: PPOConfig
    sampler: RolloutSampler
    passes: ForwardPasses
    # data sources without a teacher that are named already
    named: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.flags = self.config.of(DistillationFlags)

    def __call__(self, task: RolloutTask) -> Rollout:
        """The responses of a task. Collective."""
        if task.purpose != "sampled":
            return self.sample_rollout(task)
        if self.samples_in(task.step):
            rollout = self.sample_rollout(task)
        else:
            rollout = self.responses_of_the_data(task)
            rollout = replace(rollout, rollout_logprobs=actor_logprobs(self.passes, rollout))
        if self.flags.teacher_prompt_column:
            rollout = self.with_teacher_prompts(rollout, task)
        if any(sources for sources, _ in self.flags.teachers):
            teachers = self.teachers_of_prompts(task)  # (prompts,)
            samples = len(rollout.response_ids) // len(teachers)
            rollout = with_columns(rollout, {"teachers": teachers.repeat_interleave(samples)})
        return rollout

    def samples_in(self, step: int) -> bool:
        """Whether the responses of a PPO step are sampled (`--distill_on`); the same on every
        rank."""
        generator = shared_generator(self.config.run.seed, step, 0, SOURCE_OF_RESPONSES)
        draw = torch.rand((), generator=generator)
        return float(draw) < self.flags.sampled_share

    def responses_of_the_data(self, task: RolloutTask) -> Rollout:
        """The data rows' responses to the prompts, cut at `--max_answer_seq_len`, without
        log-probs."""
        pad_id = self.sampler.pad_id
        batch = prompt_batch(task.prompts, task.indices, pad_id, self.sampler.given_source)
        limit = task.config.stopping.max_new_tokens
        responses = [task.prompts[index]["answers"][0] for index in task.indices]
        ids, lengths = right_padded([response[:limit] for response in responses], pad_id)
        mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)  # (B, R)
        reasons = []
        for response in responses:
            if len(response) <= limit:
                reasons.append(FinishReason.EOS)
            else:
                reasons.append(FinishReason.LENGTH)
        rollout = Rollout(
            batch.prompt_ids,
            batch.prompt_mask,
            ids,
            mask,
            torch.zeros(ids.shape),
            torch.tensor(reasons, dtype=torch.int8),
            extra=batch.extra,
        )
        return to_device(rollout, self.sampler.device)

    def with_teacher_prompts(self, rollout: Rollout, task: RolloutTask) -> Rollout:
        """The rollout with what the teacher reads in place of the prompts."""
        rows = []
        for index in task.indices:
            rows.append({"prompt_ids": task.prompts[index]["teacher_prompt_ids"]})
        batch = collate_prompts(rows, range(len(rows)), self.sampler.pad_id)
        batch = to_device(batch, self.sampler.device)
        batch = repeat_rows(batch, len(rollout.prompt_ids) // len(rows))
        width = max(batch.prompt_ids.shape[1], rollout.prompt_ids.shape[1])
        batch = pad_rows(batch, width, 0)
        rollout = pad_rows(rollout, width, rollout.response_ids.shape[1])
        return with_columns(
            rollout,
            {"teacher_prompt_ids": batch.prompt_ids, "teacher_prompt_mask": batch.prompt_mask},
        )

    def teachers_of_prompts(self, task: RolloutTask) -> Tensor:
        """(prompts,) int64, the index of the teacher of each prompt, -1 where there is none."""
        teachers = []
        untaught = set()  # data sources
        for text in task.prompts[task.indices]["row"]:
            row = json.loads(text)
            teacher = -1
            for index, (sources, _) in enumerate(self.flags.teachers):
                if is_routed_to(sources, row):
                    teacher = index
                    break
            if teacher == -1:
                untaught.add(repr(row.get(DATA_SOURCE)))
            teachers.append(teacher)
        learns_from_teachers_alone = self.config.algorithm.advantage_estimator == "none"
        if untaught - self.named and learns_from_teachers_alone:
            self.named |= untaught
            print_line(
                f"warning: rank {dist.rank()}: {teachers.count(-1)} of {len(teachers)} prompts have"
                f" no teacher (data_source {', '.join(sorted(untaught)[:MOST_NAMES])}); nothing is"
                " learned from their answers (said once; see distill/taught_share)"
            )
        return torch.tensor(teachers, device=self.sampler.device)


@torch.no_grad()
def actor_logprobs(passes: ForwardPasses, rollout: Rollout) -> Tensor:
    """Log-probs of the response tokens under the actor in eval mode, (B, R) fp32. Collective."""
    passes.actor.eval()
    micro_batches, count = even_passes(row_lengths(rollout), passes.micro_batch_tokens)
    logprobs = torch.zeros(rollout.response_mask.shape, device=rollout.response_mask.device)
    for position, row_indices in enumerate(micro_batches):
        rows = select_rows(rollout, row_indices)
        outputs = response_logprobs(
            passes.actor, rows, passes.temperature, forbidden_tokens=passes.forbidden_tokens
        )
        if position < count:  # the others repeat the last one
            width = outputs.logprobs.shape[1]
            logprobs[row_indices, :width] = outputs.logprobs
    return logprobs
