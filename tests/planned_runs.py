"""Plans of runs of two models, by their flags."""

from transformers import LlamaConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.planner.plan_step import GIB, plan_step

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
LLAMA_1B = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=2048,
)
SMALL = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)
HOST = 1024 * GIB
CHECKPOINTING = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
STAGE_3 = "--actor_zero_stage 3 --critic_zero_stage 3"


def ppo(words=""):
    needed = (
        "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    )
    return parse("ppo", f"{needed} {words}".split())


def sft(words=""):
    return parse("sft", f"--model_name_or_path m --data_path d --output_dir o {words}".split())


def plan_ppo(words="", model=LLAMA_8B, ranks=8, device=80 * GIB, host=HOST):
    config = ppo(words)
    roles = ["actor", "critic", "reward"] + ["reference"] * config.algorithm.has_reference
    return plan_step(config, dict.fromkeys(roles, model), ranks, device, host)


def held(plan, phase, role, part, on_host=False):
    [found] = [each for each in plan.phases if each.name == phase]
    return found.total(role, part, on_host)
