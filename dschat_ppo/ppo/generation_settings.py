"""How rollouts are generated, from the flags of step 3 and the tokenizer."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.errors import UserError
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.rollout.generation_request import EngineName, GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria


def check_stop_ids(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that `--stop_token_ids` are tokens."""
    for token_id in ids:
        if token_id >= len(tokenizer):
            raise UserError(
                f"--stop_token_ids {token_id}: the tokenizer has {len(tokenizer)} tokens, numbered"
                " from 0"
            )


def end_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a response: those that training ends responses with, and the other end
    tokens of the model's generation config if it lists one of these (a config that lists none of
    them belongs to another tokenizer)."""
    trained = answer_ends(tokenizer)
    listed = None
    if model.generation_config:
        listed = model.generation_config.eos_token_id
    if not isinstance(listed, list) or not set(trained) & set(listed):
        listed = []
    return tuple(dict.fromkeys((*trained, *listed)))


def generation_config(
    flags: PPOFlags,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    source: GivenSource | None = None,
) -> GenerationConfig:
    """Sampling parameters, stopping criteria and engine that the flags ask for. A response ends
    with the end tokens of `tokenizer` and `model` (`end_ids`), and where flags say so. No
    token is drawn that stands for what the `source` gives."""
    banned_ids: tuple[int, ...] = ()
    if source is not None:
        banned_ids = source.banned_ids
    stopping = StoppingCriteria(
        flags.max_answer_seq_len,
        end_ids(tokenizer, model),
        tuple(flags.stop_token_ids),
        tuple(flags.stop_strings),
        flags.min_answer_seq_len,
        tokenizer.batch_decode,
        banned_ids,
    )
    sampling = SamplingParameters(
        flags.temperature, flags.top_p, flags.top_k, flags.min_p, flags.repetition_penalty
    )
    engine: EngineName = "continuous"
    if flags.rollout_engine == "padded":
        engine = "padded"
    return GenerationConfig(
        sampling, stopping, flags.n_samples_per_prompt, flags.rollout_rows, engine=engine
    )


def greedily(config: GenerationConfig) -> GenerationConfig:
    """The same configuration with greedy decoding; log-probs are still computed at the
    temperature."""
    return replace(config, sampling=replace(config.sampling, top_k=1))
