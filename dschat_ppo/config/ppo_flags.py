"""Flags of step 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat_ppo.config.schema import (
    SCHEDULERS,
    ZERO_STAGES,
    flag,
    flag_list,
    require,
    require_bounded_updates,
    require_fraction,
    require_not_negative,
    require_positive,
)

EMA_DECAY = 0.992  # DeepSpeed-Chat's


@dataclass(frozen=True)
class PPOFlags:
    """Models, rollout, update and engines of PPO."""

    _argument_group_name: ClassVar[str] = "PPO"

    actor_model_name_or_path: str = flag("SFT model: the actor starts from it, the reference stays it")
    critic_model_name_or_path: str | None = flag(
        "reward model: the critic starts from it, and it gives the reward unless --reward_model_name_or_path names "
        "another. Not needed with neither a critic nor a learned reward. With --use_reward_model False it may lack a "
        "score head: the critic gets a new one",
        None,
    )

    per_device_generation_batch_size: int = flag(
        "prompts per device; times --generation_batches: the prompts per device of one PPO step", 16
    )
    per_device_training_batch_size: int = flag(
        "rows of a PPO micro-batch on one device, if they are at their longest (see --micro_batch_tokens)",
        16,
    )
    micro_batch_tokens: int = flag(
        "most tokens of one forward pass of scoring and training, padding included, so a pass takes more short rows. "
        "0: --per_device_training_batch_size x (--max_prompt_seq_len + --max_answer_seq_len)",
        0,
    )
    generation_batches: int = flag("multiplies --per_device_generation_batch_size", 1)
    ppo_epochs: int = flag("passes over the collected experience", 1)
    gradient_accumulation_steps: int = flag("micro-batches of one optimizer step, if rows were at their longest", 1)
    num_train_epochs: int = flag("passes over the prompts", 1)
    max_prompt_seq_len: int = flag("most tokens of a prompt (longer ones: see --truncation)", 256)
    max_answer_seq_len: int = flag("most new tokens of an answer", 256)

    temperature: float = flag("sampling temperature; scoring uses the same", 1.0)
    top_p: float = flag("nucleus sampling: smallest set of tokens with this probability; 1 = off", 1.0)
    top_k: int = flag("sample among the k likeliest tokens; 0 = off, 1 = greedy", 0)
    min_p: float = flag("sample among tokens at least this likely, in units of the likeliest; 0 = off", 0.0)
    repetition_penalty: float = flag("above 1 makes tokens that stand in prompt or answer less likely; 1 = off", 1.0)
    n_samples_per_prompt: int = flag("answers sampled for each prompt", 1)
    min_answer_seq_len: int = flag("fewest new tokens of an answer: no EOS or stop token comes before", 0)
    stop_strings: list[str] = flag_list("texts that end an answer (the text itself belongs to it)", list)
    stop_token_ids: list[int] = flag_list("token ids that end an answer, besides EOS", list)
    rollout_rows: int = flag("answers at work at a time on one device; 0 = as many as memory allows, up to 256", 0)
    rollout_engine: Literal["auto", "padded"] = flag(
        "'auto' generates by continuous batching where a check at the start finds it right for the model; 'padded' "
        "by batches that wait for their last row",
        "auto",
    )
    rollout_graphs: bool = flag("on a GPU, replay decode steps as CUDA graphs", True)
    prepack_weights: bool = flag("lay weights out for oneDNN while generating (CPU, bf16); costs their memory", True)
    unpin_actor_parameters: bool = flag(
        "gather ZeRO-3 parameters layer by layer while generating, instead of all of them once: less memory, slower",
        False,
    )
    sleep_in_rollout: bool = flag(
        "keep optimizer states and fp32 weights of actor and critic in host memory while generating (ZeRO-3)", False
    )

    old_logprobs: Literal["auto", "recompute", "rollout"] = flag(
        "the denominators of the ratios: 'recompute' by a forward pass of the actor; 'rollout' takes those recorded "
        "while sampling and saves the pass; 'auto' is 'rollout' in fp32 and 'recompute' in bf16 and fp16",
        "auto",
    )
    actor_learning_rate: float = flag("peak learning rate of the actor, at most 1", 9.65e-6)
    critic_learning_rate: float = flag("peak learning rate of the critic, at most 1", 5e-6)
    actor_weight_decay: float = flag("weight decay of the actor; biases and norms are exempt", 0.0)
    critic_weight_decay: float = flag("weight decay of the critic; biases and norms are exempt", 0.0)
    lr_scheduler_type: SCHEDULERS = flag("learning rate schedule of transformers, per optimizer step", "cosine")
    num_warmup_steps: int = flag("warm-up, in optimizer steps", 100)
    max_grad_norm: float = flag("gradients are scaled down to this global norm; 0 turns it off", 1.0)

    actor_zero_stage: ZERO_STAGES = flag("ZeRO stage of the actor (3: of the reference too; 0 in bf16 or fp16 is 1)", 0)
    critic_zero_stage: ZERO_STAGES = flag(
        "ZeRO stage of the critic (3: of the reward model too; 0 in bf16 or fp16 is 1)", 0
    )
    offload: bool = flag("keep optimizer state (and parameters at stage 3) in host memory", False)
    offload_reference_model: bool = flag("keep the reference's parameters in host memory (needs actor stage 3)", False)
    offload_reward_model: bool = flag("keep the reward model's parameters in host memory (needs critic stage 3)", False)
    actor_gradient_checkpointing: bool = flag("recompute the actor's activations in its backward pass", False)
    critic_gradient_checkpointing: bool = flag("recompute the critic's activations in its backward pass", False)
    actor_dropout: float | None = flag("dropout of the actor in training; not given: 0", None)
    critic_dropout: float | None = flag("dropout of the critic in training; not given: 0", None)

    print_answers: bool = flag("print prompts and answers of every rank", False)
    print_answers_interval: int = flag("PPO steps between two printings", 1)
    enable_test_mode: bool = flag("stop after --test_stop_step PPO steps", False)
    test_stop_step: int = flag("where --enable_test_mode stops", 0)

    num_padding_at_beginning: int = flag("kept for old scripts: the score position comes from the mask", 1)
    add_eot_token: bool = flag("kept for old scripts: answers end as the chat template ends them, else with EOS", False)
    enable_hybrid_engine: bool = flag("kept for old scripts: the hybrid engine is always used", False)
    release_inference_cache: bool = flag("kept for old scripts: the cache is always released after a rollout", False)
    inference_tp_size: int = flag("tensor-parallel degree of generation", 1)
    tp_gather_partition_size: int = flag("layers gathered at once for tensor-parallel generation", 8)
    unsupervised_dataset_name: str | None = flag(
        "data set with a column `text` for the PTX loss: plain language modelling beside PPO, in the same updates", None
    )
    unsupervised_dataset_config_name: str | None = flag("configuration of --unsupervised_dataset_name on the hub", None)
    unsup_coef: float = flag("weight of the PTX loss", 27.8)
    actor_lora_dim: int = flag("LoRA rank of the actor, 0 = off", 0)
    actor_lora_module_name: str = flag("modules of the actor that get LoRA", "decoder.layers.")
    actor_lora_learning_rate: float = flag("learning rate of the actor's LoRA parameters", 5e-4)
    critic_lora_dim: int = flag("LoRA rank of the critic, 0 = off", 0)
    critic_lora_module_name: str = flag("modules of the critic that get LoRA", "decoder.layers.")
    critic_lora_learning_rate: float = flag("learning rate of the critic's LoRA parameters", 5e-4)
    only_optimize_lora: bool = flag("freeze all but LoRA", False)
    enable_mixed_precision_lora: bool = flag("quantise frozen weights under LoRA", False)
    enable_ema: bool = flag("keep a moving average of the actor's weights, saved as `actor_ema/`", False)
    ema_decay: float = flag("decay of the moving average, once per update of the actor", EMA_DECAY)
    align_overflow: bool = flag("skip both optimizer steps when either fp16 loss scaler overflows", False)

    def __post_init__(self) -> None:
        require_positive(
            self,
            "per_device_generation_batch_size per_device_training_batch_size generation_batches ppo_epochs "
            "gradient_accumulation_steps num_train_epochs max_prompt_seq_len max_answer_seq_len temperature "
            "actor_learning_rate critic_learning_rate print_answers_interval n_samples_per_prompt repetition_penalty",
        )
        require_not_negative(
            self,
            "micro_batch_tokens top_k min_answer_seq_len rollout_rows unsup_coef actor_weight_decay "
            "critic_weight_decay num_warmup_steps test_stop_step max_grad_norm",
        )
        require_fraction(self, "actor_dropout critic_dropout ema_decay")
        for role in ("actor", "critic"):
            require_bounded_updates(self, f"{role}_learning_rate", f"{role}_weight_decay")
        require(0 <= self.min_p < 1, f"--min_p must be at least 0 and below 1, got {self.min_p}")
        require(0 < self.top_p <= 1, f"--top_p must be above 0 and at most 1, got {self.top_p}")
        self._check_combinations()

    def _check_combinations(self) -> None:
        require(
            self.min_answer_seq_len <= self.max_answer_seq_len,
            f"--min_answer_seq_len {self.min_answer_seq_len} is above --max_answer_seq_len {self.max_answer_seq_len}",
        )
        require(all(number >= 0 for number in self.stop_token_ids), "--stop_token_ids must not be negative")
        require(self.enable_ema or self.ema_decay == EMA_DECAY, "--ema_decay is for --enable_ema, which is not given")
        require(all(self.stop_strings), "--stop_strings must not be empty texts")
        require(
            not self.offload_reference_model or self.actor_zero_stage == 3,
            "--offload_reference_model needs --actor_zero_stage 3: only ZeRO-3 keeps parameters in host memory",
        )
        require(
            not self.offload_reward_model or self.critic_zero_stage == 3,
            "--offload_reward_model needs --critic_zero_stage 3: only ZeRO-3 keeps parameters in host memory",
        )
        require(
            self.enable_test_mode == (self.test_stop_step > 0),
            "--enable_test_mode and --test_stop_step N (N above 0) go together: the second says where the first stops",
        )
