"""Plans of whole steps: sums of parts, what fits, and the lines at the start of a run."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.planner.fastest_setting import fastest_setting, with_flags
from dschat_ppo.planner.hardware import GIB, HARDWARE
from dschat_ppo.planner.plan_step import HOST_PROCESS, plan_step
from dschat_ppo.planner.plan_text import full_text, json_of

LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip
SMALL = LlamaConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048,
)  # fmt: skip
GPU, HOST = HARDWARE["a100-80gb"], 1024 * GIB
CHECKPOINTING = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
STAGE_3 = "--actor_zero_stage 3 --critic_zero_stage 3"


def ppo(words=""):
    needed = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    return parse("ppo", f"{needed} {words}".split())


def sft(words=""):
    return parse("sft", f"--model_name_or_path m --data_path d --output_dir o {words}".split())


def plan_ppo(words="", model=LLAMA_8B, ranks=8, device=80 * GIB, host=HOST, hardware=GPU):
    config = ppo(words)
    roles = ["actor", "critic", "reward"] + ["reference"] * config.algorithm.has_reference
    return plan_step(config, dict.fromkeys(roles, model), ranks, device, host, hardware)


def held(plan, phase, role, part):
    [found] = [each for each in plan.phases if each.name == phase]
    return found.total(role, part)


def test_the_phases_of_each_step():
    names = ["load", "rollout", "scoring", "actor update", "critic update", "checkpoint"]
    assert [phase.name for phase in plan_ppo().phases] == names
    plan = plan_step(sft(), {"model": SMALL}, 1, 0, HOST)
    assert [phase.name for phase in plan.phases] == ["load", "update", "checkpoint"]


def test_several_machines_move_bytes_at_the_rate_of_their_link():
    def seconds(machines: int, **changes) -> float:
        hardware = replace(GPU, **changes)
        plan = plan_step(sft("--zero_stage 3"), {"model": LLAMA_8B}, 16, 80 * GIB, HOST, hardware, 16 // machines)
        return plan.time.total

    # 2 gathers of 2 P bytes and a reduction of as many, of which each rank sends 15 / 16
    moved = 3 * 2 * 8030261248 * 15 / 16
    assert seconds(2) - seconds(1) == pytest.approx(moved / GPU.node_link - moved / GPU.link)
    assert seconds(2, node_link=1e9) - seconds(1) == pytest.approx(moved / 1e9 - moved / GPU.link)
    assert seconds(2, node_link=1e15) == seconds(1)  # not faster than the link of a machine


def test_layers_that_cannot_be_divided_are_gathered_for_each_token():
    words = f"{STAGE_3} --max_answer_seq_len 256"
    lora = f"{words} --actor_lora_dim 8 --only_optimize_lora"
    rollout = [plan_ppo(each).time.seconds["rollout"] for each in (lora, f"{lora} --inference_tp_size 2")]
    # 256 gathers of the weights that a token multiplies in place of one of all weights
    active = 8030261248 - 128256 * 4096
    size = 2 * 7 / 8 / GPU.link
    assert rollout[1] - rollout[0] == pytest.approx(size * (256 * active - 8030261248), rel=0.01)
    whole = [plan_ppo(each, SMALL).time.seconds["rollout"] for each in (lora, f"{lora} --inference_tp_size 2")]
    assert whole[0] == whole[1]  # a small model is whole on each rank anyway


def test_micro_batches_of_an_update_are_whole_rows_of_all_ranks_that_share_them():
    """8 rows of 512 tokens on a rank, 4 of them an update; each micro-batch gathers weights twice."""
    words = f"{STAGE_3} --per_device_generation_batch_size 8 --per_device_training_batch_size 4"
    words += " --old_logprobs recompute"

    def gathered(more: str) -> float:
        slow, fast = (
            plan_ppo(f"{words} {more}", hardware=replace(GPU, link=link)).time.seconds["critic update"]
            for link in (1e9, 2e9)
        )
        critic = 8030261248 - 128256 * 4096 + 4096  # a head of one row
        return (slow - fast) * 2e9 / (2 * critic * 7 / 8)  # times that all weights, or gradients, are moved

    assert gathered("--micro_batch_tokens 1600") == pytest.approx(3 * 4)  # 3 rows and 1 row, twice
    assert gathered("--micro_batch_tokens 512") == pytest.approx(3 * 8)
    assert gathered("--micro_batch_tokens 256") == pytest.approx(3 * 8)  # a row is not divided
    shared = " --sequence_parallel_size 4 --gradient_accumulation_steps 2"
    assert gathered(f"--micro_batch_tokens 2048{shared}") == pytest.approx(3 * 8)


def test_earlier_micro_batches_leave_gradients_at_the_peak_of_activations():
    """In bf16 below ZeRO-2 they are in the fp32 sums of `gradients`, and nowhere else."""

    def gradients(words: str) -> list[int]:
        words += " --max_seq_len 2048 --per_device_train_batch_size 8 --gradient_accumulation_steps"
        plans = [plan_step(sft(f"{words} {count}"), {"model": SMALL}, 1, 80 * GIB, HOST, GPU) for count in (1, 2)]
        return [held(plan, "update", "model", "gradients").device for plan in plans]

    trained = plan_ppo("", SMALL).roles[0].trained
    head = 1000 * 64
    assert gradients("--zero_stage 2") == [2 * head, 2 * head + 4 * trained]
    assert gradients("--dtype fp32") == [4 * head, 4 * head + 4 * trained]
    assert gradients("") == [2 * head + 4 * trained] * 2


def test_many_epochs_of_few_prompts_are_planned():
    assert plan_ppo("--num_train_epochs 1000000 --ppo_epochs 4", SMALL).fits


def test_weights_and_states_of_a_model_of_8_billion_parameters_on_8_ranks():
    plan = plan_ppo(f"{STAGE_3} {CHECKPOINTING}")
    total = 8030261248  # as transformers counts Llama 3 8B
    assert held(plan, "scoring", "actor", "weights").device == -(-2 * total // 8)
    assert held(plan, "scoring", "actor", "optimizer").device == 12 * total // 8
    assert held(plan, "scoring", "actor", "gradients").device == 4 * total // 8
    assert held(plan, "scoring", "reference", "optimizer").device == 0
    assert held(plan, "rollout", "actor", "buffers").device > 2 * total  # gathered for generation
    assert held(plan, "load", "actor", "optimizer").device == 4 * total // 8


def test_offload_moves_states_and_weights_to_the_host():
    plan = plan_ppo(f"{STAGE_3} {CHECKPOINTING} --offload")
    total = 8030261248
    assert held(plan, "scoring", "actor", "weights").host == 2 * total // 8
    assert held(plan, "scoring", "actor", "optimizer").device == 0
    assert held(plan, "scoring", "actor", "optimizer").host == 16 * total // 8
    only = plan_ppo(f"{STAGE_3} {CHECKPOINTING} --offload_optimizer")
    assert held(only, "scoring", "actor", "weights").host == 0


def test_sleep_frees_the_device_in_a_rollout_and_keeps_host_memory():
    awake, asleep = plan_ppo(f"{STAGE_3} {CHECKPOINTING}"), plan_ppo(f"{STAGE_3} {CHECKPOINTING} --sleep_in_rollout")
    assert held(asleep, "rollout", "critic", "optimizer").device == 0
    size = held(awake, "rollout", "critic", "optimizer").device
    assert held(asleep, "rollout", "critic", "optimizer").host == size
    update = held(asleep, "actor update", "critic", "optimizer")
    assert (update.device, update.host) == (size, size)
    assert held(asleep, "rollout", "actor", "weights").device == held(awake, "rollout", "actor", "weights").device


def test_one_base_counts_once():
    lora = "--actor_lora_dim 8 --critic_lora_dim 8 --only_optimize_lora"
    shared, apart = plan_ppo(f"{lora} --share_base", SMALL), plan_ppo(lora, SMALL)
    assert held(apart, "scoring", "reference", "weights").device == 0  # the actor's base without its adapter
    of_critic = held(shared, "scoring", "critic", "weights").device
    assert of_critic == 2 * next(role for role in shared.roles if role.name == "critic").trained
    assert of_critic < held(apart, "scoring", "critic", "weights").device
    assert held(shared, "scoring", "reward", "weights").device == 2 * 64  # its head


def test_the_average_is_in_host_memory():
    plan = plan_ppo("--enable_ema", SMALL, ranks=2)
    actor = plan.roles[0].trained
    assert held(plan, "rollout", "average", "weights").host == 2 * actor  # 4 bytes, divided over 2 ranks
    assert held(plan, "rollout", "average", "weights").device == 0


def test_what_a_device_and_a_host_need():
    plan = plan_ppo(f"{STAGE_3} {CHECKPOINTING} --offload")
    rollout = plan.phases[1]
    total, needs = rollout.total(), plan.needs(rollout)
    assert needs.device == int(total.device * 1.06) + GIB
    assert needs.host == 8 * (total.host + HOST_PROCESS)
    on_cpu = plan_ppo("", SMALL, 2, 0, 16 * GIB, HARDWARE["cpu"])
    phase = on_cpu.phases[1]
    assert on_cpu.needs(phase).host == 2 * (phase.total().device + phase.total().host + HOST_PROCESS)


def test_short_lines_name_the_peak_and_what_is_too_small():
    [line] = plan_ppo(f"{STAGE_3} {CHECKPOINTING}").short_lines()
    assert line.startswith("expected peak: ") and "of 80.0 GiB per device" in line
    first, second = plan_ppo().short_lines()
    assert "may run out of memory: the phase 'actor update' needs about" in second
    assert "of a device, and 72.0 GiB of its 80.0 GiB are to be used" in second
    assert plan_ppo().fits is False
    _, host = plan_ppo(f"{STAGE_3} {CHECKPOINTING} --offload", host=64 * GIB).short_lines()
    assert "of host memory for 8 ranks, and 57.6 GiB of 64.0 GiB are to be used" in host
    [on_cpu] = plan_ppo("", SMALL, 1, 0, 16 * GIB, HARDWARE["cpu"]).short_lines()
    assert "of 16.0 GiB of host memory" in on_cpu


@pytest.mark.parametrize("hardware", [GPU, HARDWARE["cpu"]], ids=["device", "host"])
def test_a_plan_that_fits_leaves_a_tenth_of_the_memory(hardware):
    """The peak is that of an update, which does not depend on the memory as the rows of a rollout do."""
    models = {"model": SMALL}
    plan = plan_step(sft(), models, 2, 80 * GIB, HOST, hardware)
    needs = plan.needs(plan.device_peak)
    size = needs.device if hardware.on_gpu else needs.host

    def fits(memory):
        device, host = (memory, HOST) if hardware.on_gpu else (0, memory)
        return plan_step(sft(), models, 2, device, host, hardware).fits

    assert fits(int(size / 0.9) + 2) and not fits(int(size / 0.9) - 2)


def test_a_run_generates_with_fewer_rows_where_the_cache_is_too_large():
    words = f"{STAGE_3} {CHECKPOINTING} --per_device_generation_batch_size 512 --max_answer_seq_len 4000"
    words += " --gradient_accumulation_steps 32"
    plan = plan_ppo(words)
    assert 1 < plan.rows < 512
    assert 0.85 * 80 * GIB < plan.needs(plan.phases[1]).device <= 72 * GIB  # a tenth is left free here too


def test_the_fastest_setting_fits_and_keeps_the_rows_of_an_update():
    config = ppo()
    models = dict.fromkeys(["actor", "reference", "critic", "reward"], LLAMA_8B)

    def plan_of(changed):
        return plan_step(changed, models, 8, 80 * GIB, HOST, GPU)

    best = fastest_setting(config, plan_of)
    assert best is not None and best.plan.fits and not plan_of(config).fits
    assert best.changes["actor_zero_stage"] == 3
    changed = with_flags(config, best.changes).ppo
    assert changed.per_device_training_batch_size * changed.gradient_accumulation_steps == 16
    assert "actor_lora_dim" not in best.changes
    assert parse("ppo", ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c", "--data_path", "d",
                         "--output_dir", "o", *best.words]) == with_flags(config, best.changes)  # fmt: skip


def test_lora_is_tried_where_nothing_else_fits():
    config, models = sft(), {"model": LLAMA_8B}
    best = fastest_setting(config, lambda each: plan_step(each, models, 1, 24 * GIB, 64 * GIB, HARDWARE["rtx4090"]))
    assert best is not None and best.changes["lora_dim"] == 16
    none = fastest_setting(config, lambda each: plan_step(each, models, 1, GIB, GIB, HARDWARE["rtx4090"]))
    assert none is None


def test_flags_that_fit_and_are_fastest_are_kept():
    best = fastest_setting(sft(), lambda each: plan_step(each, {"model": SMALL}, 1, 80 * GIB, HOST, GPU))
    assert best is not None and best.changes == {} and best.words == []


def test_a_role_that_holds_next_to_nothing_has_no_line():
    for model, has_line in ((LLAMA_8B, True), (SMALL, False)):
        lines = full_text(plan_ppo(f"{STAGE_3} --enable_ema", model), "Step 3").splitlines()
        roles = [line.removeprefix("rollout").split()[0] for line in lines if line.strip()]
        assert ("average" in roles) == has_line
        assert roles.count("all") == 6, "one line for each phase"


def test_the_table_and_the_json_have_the_same_sums():
    plan = plan_ppo(f"{STAGE_3} {CHECKPOINTING}")
    text, found = full_text(plan, "Step 3"), json_of(plan)
    needs = plan.needs(plan.phases[1])
    [line] = [line for line in text.splitlines() if line.split()[:1] == ["all"] and "1.00" in line]
    assert line.split()[-2] == f"{needs.device / GIB:.2f}"
    assert "It fits." in text and "assumed, not measured" in text
    phase = found["phases"][1]
    assert phase["phase"] == "rollout" and phase["needs_of_device"] == needs.device
    assert sum(each["device"] for each in phase["held"]) == plan.phases[1].total().device
    assert found["seconds_of_a_step"] == pytest.approx(sum(found["seconds"].values()))
