"""Flags of step 3: models, rollout, optimisation and engines, its evaluation, and its reward
sources."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from dschat_ppo.config.schema import (
    EPOCHS_HELP,
    REQUIRED,
    SCHEDULERS,
    VALIDATE_ONLY,
    ZERO_STAGES,
    check_not_empty,
    check_values,
    finite,
    flag,
    fraction,
    not_negative,
    positive,
    require,
    require_used,
    share,
)
from dschat_ppo.errors import UserError

ADDRESS_NEEDED = (
    "must be an address such as http://host:5000/get_reward (a Python file: --reward_function"
    " FILE.py:FUNCTION)"
)


@dataclass(frozen=True)
class PPOFlags:
    """Models, rollout, optimisation and engines of step 3."""

    actor_model_name_or_path: str = flag(
        REQUIRED, "SFT model: initialises the actor and serves, unchanged, as the reference"
    )
    critic_model_name_or_path: str | None = flag(
        None,
        "reward model: initialises the critic, and gives the reward unless"
        " --reward_model_name_or_path is given. Not needed without a critic and a learned reward."
        " With --use_reward_model False it may lack a score head: the critic gets a new one, whose"
        " first values are 0",
    )

    per_device_generation_batch_size: int = positive(
        16,
        "prompts per generation batch and device; a PPO step takes this times --generation_batches"
        " prompts per device",
    )
    per_device_training_batch_size: int = positive(
        16,
        "PPO micro-batch size per device for answers of maximum length (see --micro_batch_tokens)",
    )
    micro_batch_tokens: int = not_negative(
        0,
        "maximum tokens per forward pass of scoring and training, padding included; shorter rows"
        " make larger micro-batches. 0 = --per_device_training_batch_size x (--max_prompt_seq_len +"
        " --max_answer_seq_len), on CPUs at most 1024 (2048 with several ranks), which is faster",
    )
    generation_batches: int = positive(
        1, "generation batches per PPO step (multiplies --per_device_generation_batch_size)"
    )
    ppo_epochs: int = positive(1, "epochs over the experience of a PPO step")
    gradient_accumulation_steps: int = positive(
        1, "micro-batches per optimizer step, for answers of maximum length"
    )
    num_train_epochs: float = positive(1, EPOCHS_HELP.format("prompts"))
    max_prompt_seq_len: int = positive(256, "maximum tokens of a prompt (see --truncation)")
    max_answer_seq_len: int = positive(256, "maximum new tokens of an answer")

    temperature: float = flag(
        1.0,
        "sampling temperature, above 0; log-probs are computed at the same temperature",
        range="temperature",
    )
    top_p: float = share(
        1.0,
        "nucleus sampling: sample from the smallest set of tokens with this probability; 1 = off",
    )
    top_k: int = not_negative(0, "sample from the k most likely tokens; 0 = off, 1 = greedy")
    min_p: float = fraction(
        0.0, "drop tokens less likely than this fraction of the most likely token; 0 = off"
    )
    repetition_penalty: float = positive(
        1.0,
        "repetition penalty: above 1, tokens of the prompt and the answer so far become less"
        " likely; 1 = off",
    )
    n_samples_per_prompt: int = positive(1, "number of answers sampled for each prompt")
    min_answer_seq_len: int = not_negative(
        0,
        "minimum new tokens of an answer; EOS and stop tokens are suppressed until then, in"
        " log-probs and KL too",
    )
    stop_strings: list[str] = flag(
        [],
        "strings that end an answer; they are part of it",
        check=partial(check_not_empty, "stop_strings"),
    )
    stop_token_ids: list[int] = not_negative(
        [], "token ids that end an answer, in addition to EOS", commas=True
    )
    rollout_rows: int = not_negative(
        0,
        "maximum answers decoded at a time per device; 0 = as many as memory allows, up to 256"
        " (GPU: 1024)",
    )
    rollout_engine: Literal["auto", "padded"] = flag(
        "auto",
        "'auto' uses continuous batching if a self-check at the start confirms it for the model,"
        " else padded batches, else passes of whole rows; 'padded' begins with padded batches,"
        " which wait for their longest answer",
    )
    unpin_actor_parameters: bool = flag(
        False,
        "gather ZeRO-3 parameters layer by layer while generating, instead of all at once: less"
        " memory, slower",
    )

    old_logprobs: Literal["auto", "recompute", "rollout"] = flag(
        "auto",
        "log-probs of the old policy: 'recompute' by a forward pass of the actor; 'rollout' uses"
        " those recorded while sampling and saves the pass; 'auto' takes them, and the values, from"
        " the forward passes of the update where a PPO step makes one optimizer step and nothing"
        " needs them before it; else it is 'rollout' in fp32 and 'recompute' in bf16 and fp16",
    )
    actor_learning_rate: float = share(9.65e-6, "peak learning rate of the actor, at most 1")
    critic_learning_rate: float = share(5e-6, "peak learning rate of the critic, at most 1")
    actor_weight_decay: float = not_negative(
        0.0, "weight decay of the actor; biases and norm weights are exempt"
    )
    critic_weight_decay: float = not_negative(
        0.0, "weight decay of the critic; biases and norm weights are exempt"
    )
    lr_scheduler_type: SCHEDULERS = flag(
        "cosine", "learning rate schedule, as in transformers, per optimizer step"
    )
    num_warmup_steps: int = not_negative(
        100, "warm-up steps of the learning rate, in optimizer steps"
    )
    max_grad_norm: float = not_negative(1.0, "clip gradients to this global norm; 0 = off")

    actor_zero_stage: ZERO_STAGES = flag(
        0, "ZeRO stage of the actor; 3 also shards the reference; in bf16 and fp16, 0 runs as 1"
    )
    critic_zero_stage: ZERO_STAGES = flag(
        0, "ZeRO stage of the critic; 3 also shards the reward model; in bf16 and fp16, 0 runs as 1"
    )
    offload: bool = flag(False, "keep optimizer states (and parameters at stage 3) in host memory")
    offload_reference_model: bool = flag(
        False, "keep the parameters of the reference in host memory (needs --actor_zero_stage 3)"
    )
    offload_reward_model: bool = flag(
        False,
        "keep the parameters of the reward model in host memory (needs --critic_zero_stage 3)",
    )
    actor_gradient_checkpointing: bool = flag(
        False, "recompute the actor's activations in the backward pass"
    )
    critic_gradient_checkpointing: bool = flag(
        False, "recompute the critic's activations in the backward pass"
    )
    actor_dropout: float | None = fraction(None, "dropout of the actor in training; not given: 0")
    critic_dropout: float | None = fraction(None, "dropout of the critic in training; not given: 0")

    sampler: str | None = flag(
        None,
        "class of your own, FILE.py:CLASS, that chooses the prompts of each PPO step, such as a"
        " curriculum (docs/extending.md); not given: each prompt once an epoch, in random order",
    )
    metrics: list[str] = flag(
        [],
        "functions of your own, FILE.py:FUNCTION, of the experience of a PPO step; their numbers"
        " are logged as own/NAME (docs/extending.md)",
    )
    print_answers: bool = flag(False, "print the prompts, answers and scores of all ranks")
    print_answers_interval: int = positive(1, "print answers every N PPO steps")
    sample_interval: int = not_negative(
        10,
        "write 8 answers with their scores to samples.jsonl after the first and every Nth PPO step;"
        " 0 = off",
    )
    enable_test_mode: bool = flag(False, "stop after --test_stop_step PPO steps")
    test_stop_step: int = not_negative(0, "number of PPO steps with --enable_test_mode")

    align_overflow: bool = flag(
        False,
        "skip the updates of both actor and critic when the fp16 gradients of either overflow",
    )

    def __post_init__(self) -> None:
        if self.min_answer_seq_len > self.max_answer_seq_len:
            raise UserError(
                f"--min_answer_seq_len {self.min_answer_seq_len} is above --max_answer_seq_len "
                f"{self.max_answer_seq_len}"
            )
        if self.offload_reference_model and self.actor_zero_stage < 3:
            raise UserError(
                "--offload_reference_model needs --actor_zero_stage 3: only ZeRO-3 keeps "
                "parameters in host memory"
            )
        if self.offload_reward_model and self.critic_zero_stage < 3:
            raise UserError(
                "--offload_reward_model needs --critic_zero_stage 3: only ZeRO-3 keeps "
                "parameters in host memory"
            )
        if self.enable_test_mode != (self.test_stop_step > 0):
            raise UserError(
                "--enable_test_mode needs --test_stop_step N, N above 0, and --test_stop_step "
                "needs --enable_test_mode"
            )


@dataclass(frozen=True)
class EvaluationFlags:
    """Evaluation on held-out prompts before, during and after training."""

    eval_data_path: list[str] = flag(
        [], "data sets of held-out prompts, used whole; not given: no evaluation", commas=True
    )
    eval_interval: int = not_negative(
        0,
        "evaluate every N PPO steps, and always before the first and after the last; 0 = only"
        " these two",
    )
    eval_samples: int = positive(
        1, "number of answers to each held-out prompt, for pass@k and majority@n"
    )
    eval_greedy: bool = flag(False, "decode greedily instead of sampling as in training")
    eval_batch_size: int = positive(64, "held-out prompts per generation batch and device")
    eval_max_prompts: int = not_negative(
        0, "maximum number of held-out prompts, taken from the start of the data; 0 = all"
    )
    eval_pass_score: float = flag(1.0, "minimum score of an answer that passes")
    eval_reward_function: str | None = flag(
        None,
        "reward function for evaluation, written as for --reward_function; not given: the training"
        " reward",
    )
    validate_only: bool = flag(False, VALIDATE_ONLY)
    save_best: bool = flag(
        True, "keep the models of the best evaluation in `best/` inside --output_dir"
    )

    def __post_init__(self) -> None:
        if self.validate_only and not self.eval_data_path:
            raise UserError("--validate_only needs held-out prompts: give --eval_data_path")
        if self.eval_greedy and self.eval_samples > 1:
            raise UserError("--eval_greedy gives the same answer every time: omit --eval_samples")
        names = [flag_field.name for flag_field in fields(self)]
        names.remove("eval_data_path")
        require_used(
            self, " ".join(names), when=bool(self.eval_data_path), purpose="--eval_data_path"
        )


def parse_reward_default(text: str) -> float | None:
    """`--reward_default`: the score of an answer without one; None: it leaves its group."""
    if text == "leave":
        return None
    score = math.nan
    with suppress(ValueError):
        score = float(text)
    require(math.isfinite(score), f"--reward_default {text}: expected 'leave' or a finite number")
    return score


def _check_reward_functions(functions: list[str]) -> None:
    check_not_empty("reward_function", functions)
    for function in functions:
        weight = split_weight(function)[1]
        require(
            math.isfinite(weight),
            f"--reward_function {function}: the weight must be finite, got {weight}",
        )


def _split_urls(text: str) -> list[str]:
    return [url.strip() for url in text.split(",")]


def _check_remote_urls(text: str) -> None:
    for url in _split_urls(text):
        require(bool(url), "--remote_reward_url contains an empty URL")
        # what precedes an @ may be a password
        require(
            url.startswith(("http://", "https://")),
            f"--remote_reward_url {url.rpartition('@')[2]}: {ADDRESS_NEEDED}",
        )


@dataclass(frozen=True)
class RewardSourceFlags:
    """Reward sources; the score of an answer is their weighted sum."""

    use_reward_model: bool = flag(
        True,
        "score with a learned reward; False: only with reward functions or a remote reward service",
    )
    reward_model_name_or_path: str | None = flag(
        None,
        "reward model, if it is not the model that initialises the critic; its tokenizer may differ"
        " from the actor's",
    )
    reward_model_weight: float = finite(1.0, "weight of the learned reward; 0 = only log it")
    reward_model_sources: list[str] = flag(
        [], "data sources whose rows the learned reward scores; not given: all rows", commas=True
    )
    reward_function: list[str] = flag(
        [],
        "reward functions: path.py:name, module.path:name or the name of a built-in rule, each with"
        " optional ?key=value settings and :weight; SOURCE= in front: only for the rows of this"
        " data source (docs/rewards.md)",
        check=_check_reward_functions,
    )
    reward_workers: int = positive(
        2, "number of worker processes on each rank, for each reward function"
    )
    reward_timeout: float = flag(
        10.0, "timeout of a reward function call, in seconds", range="seconds_to_days"
    )
    reward_default: str = flag(
        "leave",
        "score of an answer on which a reward source with a weight or its environment failed, or"
        " that no source scores; leave: such an answer leaves its group and trains nothing",
        check=parse_reward_default,
    )
    allow_weak_sandbox: bool = flag(
        False,
        "run code_tests also where bubblewrap does not work: programs of the model can then write"
        " and delete the files of this user",
    )
    remote_reward_url: str | None = flag(
        None,
        "URL of a reward service, http://host:port/get_reward, or of several; with *** for"
        " credentials, it is taken from DSCHAT_PPO_REMOTE_REWARD_URL",
        commas=True,
        check=_check_remote_urls,
    )
    remote_reward_weight: float = finite(1.0, "weight of the remote reward; 0 = only log it")
    remote_reward_sources: list[str] = flag(
        [],
        "data sources whose rows are sent to the reward service; not given: all rows",
        commas=True,
    )
    remote_reward_timeout: float = flag(
        60.0, "timeout of a request, in seconds", range="seconds_to_days"
    )

    def __post_init__(self) -> None:
        check_values(self)
        require_used(
            self,
            "reward_model_name_or_path reward_model_sources",
            when=self.use_reward_model,
            purpose="--use_reward_model",
        )
        require_used(
            self,
            "remote_reward_sources",
            when=self.remote_reward_url is not None,
            purpose="--remote_reward_url",
        )

    @property
    def default_score(self) -> float | None:
        """The score of an answer without one; None: it leaves its group."""
        return parse_reward_default(self.reward_default)

    @property
    def has_functions(self) -> bool:
        """Whether a function or a service scores."""
        return bool(self.reward_function) or self.remote_reward_url is not None

    @property
    def remote_urls(self) -> list[str]:
        """The URLs in `--remote_reward_url`; empty if it is not given."""
        if self.remote_reward_url is None:
            return []
        return _split_urls(self.remote_reward_url)

    @property
    def learned_alone(self) -> bool:
        """Whether scores are those of the learned reward: the other sources, if there are any, are
        only logged."""
        weights = [split_weight(text)[1] for text in self.reward_function]
        if self.remote_urls:
            weights.append(self.remote_reward_weight)
        return self.use_reward_model and not any(weights)


def split_weight(text: str) -> tuple[str, float]:
    """`"name:0.5"` of a `--reward_function` -> ("name", 0.5); without a number at its end the
    weight is 1."""
    name, colon, weight = text.rpartition(":")
    if not colon:
        return text, 1.0
    try:
        return name, float(weight)
    except ValueError:
        return text, 1.0
