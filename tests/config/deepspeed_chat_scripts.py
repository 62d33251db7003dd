"""The 41 training scripts of DeepSpeed-Chat: the flags that each passes to `main.py`, with its
default arguments.

`sweep` scripts call `run_single.sh` in a loop; their entry is its call with the most flags. Those
of the DPO step are those of the reward step.
"""

import re
from dataclasses import dataclass

RM_STATIC = "Dahoas/rm-static"
FOUR_SETS = (
    RM_STATIC,
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "yitingxie/rlhf-reward-datasets",
)
SIX_SETS = (*FOUR_SETS, "openai/webgpt_comparisons", "stanfordnlp/SHP")
CHINESE = (
    "wangrui6/Zhihu-KOL",
    "Cohere/miracl-zh-queries-22-12",
    "Hello-SimpleAI/HC3-Chinese",
    "mkqa-Chinese",
)
JAPANESE = ("mkqa-Japanese", "Cohere/miracl-ja-queries-22-12", "lmqg/qg_jaquad", "lmqg/qag_jaquad")


@dataclass(frozen=True)
class Script:
    """A script: its step, and its flags in two parts, data sets and others."""

    step: str  # "sft", "reward", "dpo" or "ppo"
    data: tuple[str, ...]  # of --data_path; () if the script leaves it to the default
    flags: str

    @property
    def words(self) -> list[str]:
        """The command line."""
        data = ["--data_path", *self.data] if self.data else []
        return [*data, *self.flags.split(), "--output_dir", "output", "--deepspeed"]


_SEED = "--lr_scheduler_type cosine --num_warmup_steps 0 --seed 1234"


def _fit(
    model: str, rows: int, rate: str, decay: str, epochs: int, others: str, accumulation: int = 1
) -> str:
    return (
        f"--data_split 2,4,4 --model_name_or_path {model} --per_device_train_batch_size {rows}"
        f" --per_device_eval_batch_size {rows} --max_seq_len 512 --learning_rate {rate}"
        f" --weight_decay {decay} --num_train_epochs {epochs} --gradient_accumulation_steps"
        f" {accumulation} {_SEED} {others}"
    )


def _ppo(
    rows: int,
    stage: int,
    others: str,
    rate: str = "9.65e-6",
    decay: str | None = "0.1",
    steps: int = 1,
) -> str:
    decays = "" if decay is None else f"--actor_weight_decay {decay} --critic_weight_decay {decay}"
    return (
        "--data_split 2,4,4 --actor_model_name_or_path ACTOR --critic_model_name_or_path CRITIC"
        f" --num_padding_at_beginning 1 --per_device_generation_batch_size {rows}"
        f" --per_device_training_batch_size {rows} --generation_batches 1 --ppo_epochs 1"
        f" --max_answer_seq_len 256 --max_prompt_seq_len 256 --actor_learning_rate {rate}"
        f" --critic_learning_rate 5e-6 {decays} --num_train_epochs 1 --lr_scheduler_type cosine"
        f" --gradient_accumulation_steps {steps} --num_warmup_steps 100 --seed 1234 --actor_dropout"
        f" 0.0 --actor_zero_stage {stage} --critic_zero_stage {stage} {others}"
    )


LLAMA, OPT = "meta-llama/Llama-2-7b-hf", "facebook/opt-"
OPT_LORA = "--lora_dim 128 --lora_module_name decoder.layers."
LLAMA_LORA = "--lora_dim 128 --lora_module_name layers."
ACTOR_LORA = "--actor_lora_dim 128 --actor_lora_module_name decoder.layers."
BOTH_LORA = (
    "--actor_lora_dim 64 --critic_lora_dim 64 --critic_lora_module_name layers."
    " --actor_lora_module_name layers."
)
CHECKPOINTING = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
HYBRID = "--enable_hybrid_engine"
BOARD = "--enable_tensorboard --tensorboard_path output"
SMALL = (
    f"{OPT}350m --weight_decay 0.1 --dropout 0.0 --gradient_accumulation_steps 4 --zero_stage 0"
    f" {BOARD}"
)
NO_DROPOUT = "--dropout 0.0 --zero_stage 0"
PADDING = "--num_padding_at_beginning"

SCRIPTS = {
    "step1/llama2/run_llama2_7b": Script(
        "sft",
        FOUR_SETS,
        _fit(LLAMA, 4, "9.65e-6", "0.", 4, "--gradient_checkpointing --zero_stage 3"),
    ),
    "step1/llama2/run_llama2_7b_lora": Script(
        "sft",
        (RM_STATIC,),
        _fit(
            LLAMA,
            4,
            "9.65e-6",
            "0.",
            4,
            f"--gradient_checkpointing --zero_stage 3 --offload {LLAMA_LORA}",
        ),
    ),
    "step1/opt/multi_node/run_66b": Script(
        "sft",
        SIX_SETS,
        _fit(
            f"{OPT}66b", 4, "1e-4", "0.1", 2, f"--gradient_checkpointing --zero_stage 3 {OPT_LORA}"
        ),
    ),
    "step1/opt/single_gpu/run_1.3b": Script(
        "sft",
        (),
        f"--model_name_or_path {OPT}1.3b --gradient_accumulation_steps 8 --lora_dim 128"
        f" --zero_stage 0 {BOARD}",
    ),
    "step1/opt/single_gpu/run_6.7b_lora": Script(
        "sft",
        FOUR_SETS,
        _fit(
            f"{OPT}6.7b",
            8,
            "1e-3",
            "0.",
            16,
            f"--gradient_checkpointing --zero_stage 0 {OPT_LORA}",
            16,
        ),
    ),
    "step1/opt/single_node/run_1.3b": Script(
        "sft", FOUR_SETS, _fit(f"{OPT}1.3b", 8, "9.65e-6", "0.", 16, f"--zero_stage 2 {BOARD}")
    ),
    "step1/opt/single_node/run_1.3b_lora": Script(
        "sft",
        FOUR_SETS,
        _fit(f"{OPT}1.3b", 8, "1e-3", "0.1", 16, f"--zero_stage 0 {OPT_LORA} --only_optimize_lora"),
    ),
    "step1/opt/single_node/run_13b": Script(
        "sft",
        FOUR_SETS,
        _fit(
            f"{OPT}13b", 4, "1e-4", "0.", 16, f"--gradient_checkpointing --zero_stage 3 {OPT_LORA}"
        ),
    ),
    "step1/opt/single_node/run_30b_lora": Script(
        "sft",
        FOUR_SETS,
        _fit(
            f"{OPT}30b",
            4,
            "9.65e-6",
            "0.",
            16,
            "--lora_dim 128 --gradient_checkpointing --zero_stage 3",
        ),
    ),
    "step1/opt/single_node/run_6.7b": Script(
        "sft",
        FOUR_SETS,
        _fit(f"{OPT}6.7b", 6, "9.65e-6", "0.", 16, "--gradient_checkpointing --zero_stage 3"),
    ),
    "step1/opt/single_node/sweep/run_single": Script(
        "sft", FOUR_SETS, _fit(f"{OPT}1.3b", 8, "9.65e-6", "0.", 16, "--zero_stage 2 --lora_dim 0")
    ),
    "step1/opt/single_node/sweep/run_step1_sweep": Script(
        "sft",
        FOUR_SETS,
        _fit(
            f"{OPT}1.3b",
            8,
            "1e-3",
            "0.1",
            16,
            f"--zero_stage 3 --offload {OPT_LORA} --only_optimize_lora",
        ),
    ),
    "step1/other_language/run_chinese": Script(
        "sft",
        CHINESE,
        _fit("bigscience/bloom-1b1", 8, "9.65e-6", "0.", 16, "--zero_stage 2").replace(
            "2,4,4", "10,0,0"
        ),
    ),
    "step1/other_language/run_japanese": Script(
        "sft",
        JAPANESE,
        "--data_split 10,0,0 --model_name_or_path sberbank-ai/mGPT --per_device_train_batch_size 2"
        " --per_device_eval_batch_size 2 --learning_rate 9.65e-6 --num_train_epochs 16"
        f" --deepspeed_config ds_config.json {_SEED}",
    ),
    "step2/llama2/run_llama2_7b": Script(
        "reward",
        (RM_STATIC,),
        _fit(
            LLAMA,
            8,
            "9.65e-6",
            "0.1",
            1,
            f"{PADDING} 0 --gradient_checkpointing --zero_stage 3 --offload",
        ),
    ),
    "step2/llama2/run_llama2_7b_lora": Script(
        "reward",
        (RM_STATIC,),
        _fit(
            LLAMA,
            8,
            "9.65e-6",
            "0.1",
            1,
            f"{PADDING} 0 --gradient_checkpointing --zero_stage 3 --offload {LLAMA_LORA}",
        ),
    ),
    "step2/opt/multi_node/run_350m": Script(
        "reward", FOUR_SETS, _fit(f"{OPT}350m", 2, "5e-5", "0.1", 1, f"{PADDING} 1 {NO_DROPOUT}")
    ),
    "step2/opt/single_gpu/run_350m": Script(
        "reward", (), f"--model_name_or_path {SMALL} {PADDING} 1"
    ),
    "step2/opt/single_node/run_350m": Script(
        "reward", FOUR_SETS, _fit(f"{OPT}350m", 4, "5e-5", "0.1", 1, f"{PADDING} 1 {NO_DROPOUT}")
    ),
    "step2/opt/single_node/sweep/run_single": Script(
        "reward", FOUR_SETS, _fit(f"{OPT}350m", 4, "5e-5", "0.1", 1, f"{PADDING} 1 {NO_DROPOUT}")
    ),
    "step2/opt/single_node/sweep/run_step2_sweep": Script(
        "reward",
        FOUR_SETS,
        _fit(
            f"{OPT}350m", 4, "5e-5", "0.1", 1, f"{PADDING} 1 --dropout 0.0 --zero_stage 3 --offload"
        ),
    ),
    "step3/llama2/run_llama2_7b": Script(
        "ppo", (RM_STATIC,), _ppo(1, 3, f"{CHECKPOINTING} --offload_reference_model {HYBRID}")
    ),
    "step3/llama2/run_llama2_7b_lora": Script(
        "ppo",
        (RM_STATIC,),
        _ppo(1, 3, f"{CHECKPOINTING} --offload_reference_model {HYBRID} {BOTH_LORA}"),
    ),
    "step3/llama2/run_llama2_7b_mixz": Script(
        "ppo",
        (RM_STATIC,),
        _ppo(
            1,
            3,
            f"{CHECKPOINTING} --offload_reference_model --enable_mixed_precision_lora {BOTH_LORA}",
        ),
    ),
    "step3/opt/multi_node/run_66b": Script(
        "ppo",
        (RM_STATIC,),
        _ppo(
            4,
            3,
            f"{HYBRID} --inference_tp_size 8 --tp_gather_partition_size 4"
            f" --actor_gradient_checkpointing {ACTOR_LORA}",
            "5e-4",
        ),
    ),
    "step3/opt/single_gpu/run_1.3b": Script(
        "ppo",
        (),
        "--actor_model_name_or_path ACTOR --critic_model_name_or_path CRITIC --actor_zero_stage 0"
        " --critic_zero_stage 0 --num_padding_at_beginning 1 --gradient_accumulation_steps 2"
        " --actor_lora_dim 128 --enable_hybrid_engine --actor_gradient_checkpointing"
        " --actor_dropout 0.0",
    ),
    "step3/opt/single_gpu/run_6.7b_lora": Script(
        "ppo",
        (RM_STATIC,),
        _ppo(8, 0, f"--actor_lora_dim 128 {CHECKPOINTING} {HYBRID}", "5e-4", None, 16),
    ),
    "step3/opt/single_node/run_1.3b": Script(
        "ppo", (RM_STATIC,), _ppo(4, 2, f"{HYBRID} --enable_ema {BOARD}", decay=None)
    ),
    "step3/opt/single_node/run_1.3b_lora": Script(
        "ppo", (RM_STATIC,), _ppo(4, 2, f"{HYBRID} {ACTOR_LORA}", decay=None)
    ),
    "step3/opt/single_node/run_13b": Script(
        "ppo",
        (RM_STATIC,),
        _ppo(
            16,
            3,
            f"{HYBRID} --inference_tp_size 2 --actor_gradient_checkpointing {ACTOR_LORA}",
            "5e-4",
        ),
    ),
    "step3/opt/single_node/run_30b_lora": Script(
        "ppo",
        (RM_STATIC,),
        _ppo(4, 3, f"--actor_gradient_checkpointing {HYBRID} {ACTOR_LORA}", "5e-4", None),
    ),
    "step3/opt/single_node/run_6.7b": Script(
        "ppo", (RM_STATIC,), _ppo(4, 3, f"--actor_gradient_checkpointing {HYBRID}")
    ),
    "step3/opt/single_node/sweep/run_single": Script(
        "ppo", (RM_STATIC,), _ppo(4, 2, "--print_answers --actor_lora_dim 0", decay="0")
    ),
    "step3/opt/single_node/sweep/run_step3_sweep": Script(
        "ppo",
        (RM_STATIC,),
        _ppo(4, 3, f"--print_answers {HYBRID} --offload {ACTOR_LORA}", decay="0"),
    ),
}
SCRIPTS |= {
    name.replace("step2", "dpo", 1): Script(
        "dpo",
        script.data,
        script.flags if "sweep" in name else re.sub(rf" {PADDING} \d", "", script.flags),
    )
    for name, script in SCRIPTS.items()
    if name.startswith("step2")
}

# Scripts whose optimizer step takes the rows of several PPO steps, which here are one: the
# --generation_batches for it.
GENERATION_BATCHES = {"step3/opt/single_gpu/run_1.3b": 2, "step3/opt/single_gpu/run_6.7b_lora": 16}

# Scripts that end with one line: (what it says, the flag without which they parse).
REFUSED = {
    "step3/llama2/run_llama2_7b_mixz": (
        "--enable_mixed_precision_lora needs .* and --dtype fp16",
        "--enable_mixed_precision_lora",
    ),
}
