"""A model of an evaluation: how it generates, what rewards its responses, and its images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.models.given_embeddings import GivenSource, given_sources_of
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.ppo.generation_settings import end_ids, greedily
from dschat_ppo.ppo.rollouts import (
    RolloutExtension,
    SampleRollout,
    any_observes,
    extended,
    own_rollouts,
)
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.rewards.learned_reward import model_reward
from dschat_ppo.rewards.reward_source import RewardMixture, RewardSource
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate, generate_calls
from dschat_ppo.rollout.partners import CallPartner, Partner, ReservedSequences
from dschat_ppo.rollout.sampling import StoppingCriteria
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.tools.chat_model import CheckedModel
from dschat_ppo.tools.sampling_settings import EvaluationRequest
from dschat_ppo.types import PromptBatch, Rollout, to_device


@dataclass(frozen=True)
class LoadedReward:
    """The learned reward."""

    checked: CheckedModel
    model: ScalarModel


def given_source(
    request: EvaluationRequest, checked: CheckedModel, dtype: str, scorer: LoadedReward | None
) -> GivenSource | None:
    """What a model gets in place of the embeddings of some ids; the reward model gets its own."""
    folders = {"actor": checked.folder}
    if scorer is not None:
        folders["reward"] = scorer.checked.folder
    sources = given_sources_of(request.features, folders, dtype, checked.tokenizer, dist.device())
    if scorer is not None:
        scorer.model.given_source = sources.get("reward")
    return sources.get("actor")


def generation_configs(
    model: Any,
    checked: CheckedModel,
    request: EvaluationRequest,
    extensions: Sequence[RolloutExtension],
    source: GivenSource | None,
) -> dict[str, GenerationConfig]:
    """How the model generates, by the name of the decoding, "greedy" or "sampled". `UserError` if
    its architecture is not supported. `source`: of what it gets in place of the embeddings of some
    ids."""
    banned_ids: tuple[int, ...] = ()
    if source is not None:
        banned_ids = source.banned_ids
    stopping = StoppingCriteria(
        request.settings.max_tokens,
        end_ids(checked.tokenizer, model),
        decode=checked.tokenizer.batch_decode,
        banned_ids=banned_ids,
    )
    try:
        sampled = choose_engine(
            model,
            GenerationConfig(request.settings.sampling, stopping, request.args.samples),
            has_partner=any_observes(extensions),
            source=source,
        )
    except RuntimeError as problem:
        raise UserError(f"{checked.flag} {checked.name}: {in_one_line(problem)}") from None
    configs = {"greedy": replace(greedily(sampled), samples=1), "sampled": sampled}
    decoding = request.args.decoding
    if decoding == "both":
        return configs
    return {decoding: configs[decoding]}


def reward_mixture(
    request: EvaluationRequest,
    checked: CheckedModel,
    scorer: LoadedReward | None,
    others: Sequence[tuple[RewardSource, float]],
) -> RewardMixture:
    """The reward sources that score the responses of a model, with those of features (`others`);
    empty without a reward."""
    if request.rewards is None:
        return RewardMixture([])
    learned = None
    if scorer is not None:
        scorer_tokenizer = None  # that of the policy
        if checked.tokenizer.get_vocab() != scorer.checked.tokenizer.get_vocab():
            scorer_tokenizer = scorer.checked.tokenizer
        learned = model_reward(
            scorer.model,
            scorer.checked.folder,
            checked.tokenizer,
            scorer_tokenizer,
            request.features,
            request.args.max_batch_tokens,
        )
    return build_sources(request.rewards, learned, others)


def rollouts_of(
    model: Any,
    checked: CheckedModel,
    extensions: Sequence[RolloutExtension],
    source: GivenSource | None,
) -> SampleRollout:
    """How a model responds to prompts. `source`: of what it gets in place of the embeddings of some
    ids."""
    generation = ModelGeneration(model, source)
    sample = own_rollouts(generation, filler_id(checked.tokenizer), source)
    return extended(sample, generation, extensions)


@dataclass(frozen=True, eq=False)
class ModelGeneration:
    """Generation with the weights of a model on this device."""

    model: PreTrainedModel
    source: GivenSource | None = None  # of what it gets in place of the embeddings of some ids

    def __call__(
        self,
        batch: PromptBatch,
        seeds: Tensor,
        config: GenerationConfig,
        cancelled: Callable[[], bool],
        partner: Partner | None = None,
    ) -> Rollout:
        """Responses to prompts; see `generate`."""
        device = dist.device()
        batch = to_device(batch, device)
        given_prompts = None
        if self.source is not None:
            given_prompts = self.source.for_prompts(batch, self.model)
        request = RolloutRequest(batch, seeds.to(device), given=given_prompts)
        return generate(self.model, request, config, cancelled=cancelled, partner=partner)

    def answer_calls(
        self,
        reserved: ReservedSequences,
        config: GenerationConfig,
        cancelled: Callable[[], bool],
        partner: CallPartner,
    ) -> tuple[Rollout, list[int]]:
        """The sequences that a partner opens late; see `generate_calls`."""
        return generate_calls(self.model, reserved, config, partner, cancelled=cancelled)
