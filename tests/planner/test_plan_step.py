"""Plans of whole steps: sums of parts, what fits, flags that fit, and the lines at the start of a
run."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from planned_runs import (
    CHECKPOINTING,
    HOST,
    LLAMA_1B,
    LLAMA_8B,
    SMALL,
    STAGE_3,
    held,
    plan_ppo,
    ppo,
    sft,
)
from transformers import LlamaConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.planner import plan_step as plan_module
from dschat_ppo.planner.plan_step import (
    GIB,
    HOST_PROCESS,
    larger_micro_batch,
    plan_step,
    show_memory_plan,
)
from dschat_ppo.planner.role_memory import PARTS
from dschat_ppo.tools.plan import flags_that_fit, memory_table


def test_earlier_micro_batches_leave_gradients_at_the_peak_of_activations():
    """In bf16 below ZeRO-2 they are in the fp32 sums of `gradients`, and nowhere else."""

    def gradients(words: str) -> list[int]:
        words += " --max_seq_len 2048 --per_device_train_batch_size 8 --gradient_accumulation_steps"
        plans = [
            plan_step(sft(f"{words} {count}"), {"model": SMALL}, 1, 80 * GIB, HOST)
            for count in (1, 2)
        ]
        return [held(plan, "update", "model", "gradients") for plan in plans]

    trained = plan_ppo("", SMALL).roles[0].sizes.trained
    head = 1000 * 64
    assert gradients("--zero_stage 2") == [2 * head, 2 * head + 4 * trained]
    assert gradients("--dtype fp32") == [4 * head, 4 * head + 4 * trained]
    assert gradients("") == [2 * head + 4 * trained] * 2


def test_weights_and_states_of_a_model_of_8_billion_parameters_on_8_ranks():
    plan = plan_ppo(f"{STAGE_3} {CHECKPOINTING}")
    total = 8030261248  # as transformers counts Llama 3 8B
    assert held(plan, "checkpoint", "actor", "weights") == -(-2 * total // 8)
    assert held(plan, "checkpoint", "actor", "optimizer") == 12 * total // 8
    assert held(plan, "checkpoint", "actor", "gradients") == 4 * total // 8
    assert held(plan, "checkpoint", "reference", "optimizer") == 0
    assert held(plan, "rollout", "actor", "buffers") > 2 * total  # gathered for generation
    [*_, line] = memory_table(plan, PARTS).splitlines()
    assert line.split()[:2] == ["checkpoint", "all"]
    assert line.split()[-2:] == [f"{needs / GIB:.2f}" for needs in plan.needs(plan.phases[-1])]


def test_offload_moves_states_and_weights_to_the_host():
    plan = plan_ppo(f"{STAGE_3} {CHECKPOINTING} --offload")
    total = 8030261248
    assert held(plan, "checkpoint", "actor", "weights", True) == 2 * total // 8
    assert held(plan, "checkpoint", "actor", "optimizer") == 0
    assert held(plan, "checkpoint", "actor", "optimizer", True) == 16 * total // 8
    only = plan_ppo(f"{STAGE_3} {CHECKPOINTING} --offload_optimizer")
    assert held(only, "checkpoint", "actor", "weights", True) == 0


def test_one_base_counts_once():
    lora = "--actor_lora_dim 8 --critic_lora_dim 8 --only_optimize_lora"
    shared, apart = plan_ppo(f"{lora} --share_base", SMALL), plan_ppo(lora, SMALL)
    # the actor's base without its adapter
    assert held(apart, "checkpoint", "reference", "weights") == 0
    of_critic = held(shared, "checkpoint", "critic", "weights")
    assert (
        of_critic == 2 * next(role for role in shared.roles if role.name == "critic").sizes.trained
    )
    assert of_critic < held(apart, "checkpoint", "critic", "weights")
    assert held(shared, "checkpoint", "reward", "weights") == 2 * 64  # its head


def tokens_of_a_pass(prompt, answer, samples, prompts, rows, words="", ranks=1):
    """Tokens of the actor's update: without gradient checkpointing it holds what each of them
    saves."""
    sizes = (
        f"--max_prompt_seq_len {prompt} --max_answer_seq_len {answer} --n_samples_per_prompt"
        f" {samples}"
    )
    sizes += (
        f" --per_device_generation_batch_size {prompts} --per_device_training_batch_size {rows}"
    )
    plan = plan_ppo(f"--advantage_estimator grpo {sizes} {words}", SMALL, ranks)
    return held(plan, "actor update", "actor", "activations") / plan.roles[0].sizes.saved.whole


def test_answers_of_a_group_share_their_prompt():
    # a group takes 384 + 8 x 64 tokens and seven copies of 384 / 8: 1,232, where rows apart take 8
    # x 448 = 3,584
    assert tokens_of_a_pass(384, 64, 8, 16, 128) == 16 * 1232
    assert tokens_of_a_pass(384, 64, 8, 16, 64) == 64 * 448, (
        "an update of half of the rows may have no whole groups"
    )
    assert tokens_of_a_pass(384, 64, 8, 16, 128, "--micro_batch_tokens 8192") == 8192, (
        "shorter answers fill it"
    )
    assert tokens_of_a_pass(384, 64, 8, 16, 128, "--micro_batch_tokens 100") == 448, (
        "no row is divided"
    )
    # 3 x 64 tokens are less than a tenth of 4 x 576
    assert tokens_of_a_pass(64, 512, 4, 7, 28) == 28 * 576
    divided = tokens_of_a_pass(384, 64, 8, 2, 32, "--sequence_parallel_size 2", ranks=2)
    assert divided == 32 * 448 / 2, "ranks that divide rows share no prompts"


def test_pairs_take_two_rows_each():
    words = "--model_name_or_path m --data_path d --output_dir o --max_seq_len 2048".split()
    plans = [plan_step(parse(step, words), {"model": SMALL}, 1, 0, HOST) for step in ("sft", "dpo")]
    one, two = (held(plan, "update", "model", "activations") for plan in plans)
    assert two == 2 * one


def test_what_a_device_and_a_host_need():
    plan = plan_ppo(f"{STAGE_3} {CHECKPOINTING} --offload")
    first, last = plan.phases[0], plan.phases[-1]
    device, host = plan.needs(first)
    assert device == int(first.total(on_host=False) * 1.06) + GIB
    assert host == 8 * (first.total(on_host=True) + HOST_PROCESS)
    assert plan.needs(last)[1] == 8 * (last.total(on_host=True) + HOST_PROCESS) + 2 * 8030261248, (
        "rank 0 collects"
    )
    on_cpu = plan_ppo("", SMALL, 2, 0, 16 * GIB)
    assert on_cpu.needs(on_cpu.phases[0]) == (0, 2 * (on_cpu.phases[0].total() + HOST_PROCESS))
    assert [[peak.memory for peak in each.peaks] for each in (plan, on_cpu)] == [
        [80 * GIB, HOST],
        [16 * GIB],
    ]
    lora = plan_ppo(f"{STAGE_3} --actor_lora_dim 8 --actor_lora_learning_rate 1e-4")
    gathered = [lora.phases[n].total(part="buffers") for n in (1, -1)]
    assert gathered[0] - gathered[1] == 2 * 10**9, "scoring gathers weights of one model"


def test_a_rollout_gathers_the_actor_whole_or_by_layer():
    actor = plan_ppo("").roles[0].sizes

    def gathered(words, ranks=8):
        plans = [
            plan_ppo(f"{STAGE_3} {each}", ranks=ranks)
            for each in (words, "--advantage_estimator gae")
        ]
        sizes = [held(plan, "rollout", "actor", "buffers") for plan in plans]
        assert sizes[1] - held(plans[1], "checkpoint", "actor", "buffers") == 2 * actor.total
        return sizes[0] - held(plans[0], "checkpoint", "actor", "buffers")

    one_layer = 2 * (actor.layer + actor.head)
    assert gathered("--unpin_actor_parameters") == one_layer


@pytest.mark.parametrize("on_gpu", [True, False], ids=["device", "host"])
def test_a_plan_that_fits_leaves_a_tenth_of_the_memory(on_gpu):
    """The peak is that of an update, which does not depend on the memory as the rows of a rollout
    do."""

    def planned(memory):
        device, host = (memory, HOST) if on_gpu else (0, memory)
        return plan_step(sft(), {"model": SMALL}, 2, device, host)

    plan = planned(HOST)
    size = plan.peaks[0].needs
    assert not planned(int(size / 0.9) + 2).missing and planned(int(size / 0.9) - 2).missing


def test_a_run_generates_with_fewer_rows_where_the_cache_is_too_large():
    words = (
        f"{STAGE_3} {CHECKPOINTING} --per_device_generation_batch_size 512 --max_answer_seq_len"
        " 4000"
    )
    words += " --gradient_accumulation_steps 32"
    plan = plan_ppo(words)
    assert 1 < plan.rows < 512
    # a tenth is left free here too
    assert 0.85 * 80 * GIB < plan.needs(plan.phases[0])[0] <= 72 * GIB


def proposed(config, models, ranks, device, host):
    """Flags that make it fit, and the configuration with them."""
    step = "ppo" if "actor" in models else "sft"
    needed = (
        "--actor_model_name_or_path a --critic_model_name_or_path c"
        if step == "ppo"
        else "--model_name_or_path m"
    )
    configs = []

    def plan_with(words):
        configs.append(
            parse(step, [*needed.split(), "--data_path", "d", "--output_dir", "o", *words])
        )
        return plan_step(configs[-1], models, ranks, device, host)

    found = flags_that_fit(config, plan_with)
    if found is None:
        return None
    words, plan = found
    assert not plan.missing and not plan_with(words).missing
    return words, configs[-1]


def test_a_proposal_fits_keeps_the_rows_of_an_update_and_needs_each_of_its_flags():
    models = dict.fromkeys(["actor", "reference", "critic", "reward"], LLAMA_8B)
    words, config = proposed(ppo(), models, 8, 80 * GIB, HOST)
    assert words == [
        "--actor_zero_stage",
        "3",
        "--critic_zero_stage",
        "3",
        "--per_device_training_batch_size",
        "8",
        "--gradient_accumulation_steps",
        "2",
    ]
    assert config.ppo.per_device_training_batch_size * config.ppo.gradient_accumulation_steps == 16
    for fewer in (words[:4], words[4:]):
        assert plan_ppo(" ".join(fewer)).missing


def test_host_memory_is_proposed_where_the_device_is_not_enough():
    words, _ = proposed(sft(), {"model": LLAMA_8B}, 2, 80 * GIB, 256 * GIB)
    assert words == ["--zero_stage", "2", "--offload_optimizer", "True"]


def test_what_needs_more_memory_is_not_taken():
    checkpointing = "--actor_gradient_checkpointing"

    def plan_with(words):
        missing = 0 if "--offload" in words else 4 if "3" in words else 5
        return SimpleNamespace(missing=missing + 9 * (checkpointing in words))

    words, _ = flags_that_fit(ppo(), plan_with)
    assert "--offload" in words and checkpointing not in words


@pytest.mark.release
def test_lora_is_proposed_where_nothing_else_fits():
    words, config = proposed(sft(), {"model": LLAMA_8B}, 1, 24 * GIB, 64 * GIB)
    assert (
        config.value("lora_dim") == 16
        and config.value("only_optimize_lora")
        and "--offload" not in words
    )
    assert proposed(sft(), {"model": LLAMA_8B}, 1, GIB, GIB) is None


@pytest.fixture
def saved_config(tmp_path, monkeypatch):
    """Flags of step 1 with a model folder; the host has 16 GiB."""
    SMALL.architectures = ["LlamaForCausalLM"]
    SMALL.save_pretrained(tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB))
    return parse(
        "sft", ["--model_name_or_path", str(tmp_path), "--data_path", "d", "--output_dir", "o"]
    )


def test_a_model_that_the_planner_does_not_understand_ends_no_run(
    saved_config, capsys, monkeypatch
):
    models = plan_module.read_model_configs(saved_config)
    vars(models["model"])["num_attention_heads"] = None
    monkeypatch.setattr(plan_module, "read_model_configs", lambda config: models)
    show_memory_plan(saved_config)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: no memory plan: LlamaConfig: its memory cannot be counted: ")


def test_one_line_says_what_a_run_needs_of_a_host_or_of_a_gpu(saved_config, capsys, monkeypatch):
    show_memory_plan(saved_config)
    [line] = capsys.readouterr().out.splitlines()
    assert (
        line.startswith("expected peak: 0.8 ")
        and "of 16.0 GiB of host memory for 1 rank (phase 'update'" in line
    )
    monkeypatch.setattr(plan_module.dist, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    show_memory_plan(saved_config)
    [line] = capsys.readouterr().out.splitlines()
    assert "of 79.0 GiB per device, 0." in line
    monkeypatch.setattr(plan_module, "larger_micro_batch", lambda *arguments: 4096)
    show_memory_plan(saved_config)
    [_, note] = capsys.readouterr().out.splitlines()
    assert note == "note: larger micro-batches fit, for fewer passes: --micro_batch_tokens 4096"


# 32 prompts of 256 tokens with responses of 256: at most 32 x 512 tokens in a micro-batch
BATCHES = "--per_device_generation_batch_size 32 --gradient_accumulation_steps 8"


@pytest.mark.parametrize(
    ("words", "rows", "gib", "expected"),
    [
        (BATCHES, 4, 80, 16384),
        (BATCHES, 4, 48, 8192),
        (BATCHES, 4, 44, 4096),
        (BATCHES, 4, 40, None),
        ("--per_device_generation_batch_size 8", 4, 80, 4096),  # of 8 rows
        ("--per_device_generation_batch_size 4", 4, 80, None),
        (f"{BATCHES} --micro_batch_tokens 16000", 4, 80, None),
    ],
)
def test_a_larger_micro_batch_that_fits(words, rows, gib, expected):
    words = f"{words} --per_device_training_batch_size {rows}"
    config = ppo(words)

    def plan_of(config):
        roles = ("actor", "critic", "reward", "reference")
        return plan_step(config, dict.fromkeys(roles, LLAMA_1B), 1, gib * GIB, HOST)

    assert larger_micro_batch(config, 1, plan_of) == expected
    if gib < 80:
        run_tokens = expected or 2048
        assert not plan_of(ppo(f"{words} --micro_batch_tokens {run_tokens}")).missing
        assert plan_of(ppo(f"{words} --micro_batch_tokens {2 * run_tokens}")).missing


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        ("", 0, (1024, 16)),  # 16 x 512 tokens, of which step 3 would run 1024 at a time
        ("", 80 * GIB, (16 * 512, 2)),
        ("--max_seq_len 2048", 0, (2048, 32)),  # one row at a time
        ("--max_seq_len 32", 0, (512, 2)),
    ],
)
def test_a_micro_batch_of_step_1_runs_in_passes_on_a_cpu(words, device, expected):
    config = sft(
        "--per_device_train_batch_size 16 --gradient_accumulation_steps 2 --max_seq_len 512 "
        + words
    )
    assert plan_module.supervised_batch(config, 1, device > 0) == expected


@pytest.mark.parametrize(
    ("words", "start", "size"),
    [
        ("--dtype bf16", torch.bfloat16, 2),
        ("--dtype bf16", torch.float32, 4),
        ("--dtype bf16", None, 2),
        ("--dtype fp32", torch.bfloat16, 4),
        ("--dtype bf16 --save_dtype fp32", torch.bfloat16, 4),
    ],
)
def test_a_model_is_saved_in_its_own_format(words, start, size):
    model = LlamaConfig(**SMALL.to_diff_dict() | {"dtype": start})
    plan = plan_step(sft(words), {"model": model}, 1, 0, HOST)
    assert plan.phases[-1].once == size * plan.roles[0].sizes.total
