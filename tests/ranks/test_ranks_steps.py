"""The three steps by their command lines on two ranks, PPO under the launcher as a user runs it; one by plain python.

`tests/docs/test_commands.py` runs SFT under the launcher.
"""

import json
import math
import re
import shutil
import sys

import pytest
import torch
import yaml
from launch import ROOT, deepspeed, forked, metrics_of, run, succeed
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PPO_METRICS = """
reward/score_mean reward/score_std reward/score_min reward/score_max reward/kl_penalty reward/total_mean
kl/ref_k1 kl/ref_k3 policy/approx_kl policy/entropy policy/ratio_mean policy/ratio_max policy/clip_fraction
policy/first_log_ratio_abs_max policy/loss value/loss value/clip_fraction value/explained_variance
policy/advantage_mean policy/advantage_std value/return_mean value/return_std value/mean value/std
rollout/length_mean rollout/length_max rollout/ended_share rollout/cut_share rollout/distinct_share
optim/grad_norm/actor optim/grad_norm/critic optim/lr/actor optim/lr/critic
optim/overflow/actor optim/overflow/critic optim/nonfinite_skipped
rollout/logprob_diff_mean rollout/logprob_diff_max policy/kl_k3 policy/updates_done_share
time/rollout time/score time/train time/rollout_tokens_per_s time/score_tokens_per_s
time/train_tokens_per_s memory/rollout_peak_gib memory/score_peak_gib memory/train_peak_gib
""".split()


@pytest.fixture(scope="module")
def out(assets, tmp_path_factory):
    """Output folders `sft`, `reward`, `ppo` (and `again`, the same once more) of runs on two ZeRO-3 ranks in fp32."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "sft.yaml").write_text("learning_rate: 1.0\nnum_train_epochs: 3\nzero_stage: 3\ndtype: fp32\n")
    tokenizer = AutoTokenizer.from_pretrained(shutil.copytree(assets / "lm", folder / "lm"))
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|system|>")  # not its EOS
    tokenizer.save_pretrained(folder / "lm")
    sft = f"--config {folder}/sft.yaml --model_name_or_path {folder}/lm --data_path {assets}/sft.jsonl"
    sft += f" --data_split 1,0,0 --learning_rate 0.01 --per_device_train_batch_size 3 --output_dir {folder}/sft"
    sft += " --eval_interval 2 --enable_tensorboard --max_seq_len 32 --truncation left"
    succeed(forked(2, "training/step1_sft/main.py", *sft.split()))
    reward = f"--model_name_or_path {folder}/sft --data_path {assets}/pairs.jsonl --data_split 0,1,0 --dtype fp32"
    reward += f" --output_dir {folder}/reward --zero_stage 3 --per_device_train_batch_size 4 --learning_rate 0.005"
    result = succeed(forked(2, "training/step2_reward/main.py", *reward.split()))
    (folder / "reward.log").write_text(result.stdout + result.stderr)
    ppo = f"--actor_model_name_or_path {folder}/sft --critic_model_name_or_path {folder}/reward --dtype fp32"
    ppo += f" --data_path {assets}/prompts.jsonl --data_split 0,0,1 --output_dir {folder}/ppo --actor_zero_stage 3"
    ppo += " --critic_zero_stage 3 --per_device_generation_batch_size 4 --per_device_training_batch_size 2"
    ppo += " --generation_batches 2 --ppo_epochs 2 --gradient_accumulation_steps 2 --max_answer_seq_len 8"
    ppo += " --max_prompt_seq_len 64 --actor_learning_rate 0.001 --num_warmup_steps 0 --print_answers --temperature 0.8"
    ppo += " --deterministic"
    result = succeed(deepspeed(2, "training/step3_ppo/main.py", *ppo.split()))
    again = ppo.replace(f"{folder}/ppo", f"{folder}/again").split()
    succeed(forked(2, "training/step3_ppo/main.py", *again))
    (folder / "ppo.log").write_text(result.stdout + result.stderr)
    return folder


@pytest.mark.parametrize("model", ["sft", "ppo/actor"])
def test_plain_transformers_stops_where_the_chat_template_ends_an_answer(out, model):
    assert GenerationConfig.from_pretrained(out / model).eos_token_id == [1, 4]


def test_sft_lowers_the_loss_on_held_out_rows(out):
    result = json.loads((out / "sft/result.json").read_text())
    assert result["eval_loss_after"] < result["eval_loss_before"] - 0.5
    assert result["eval_perplexity_after"] == pytest.approx(math.exp(result["eval_loss_after"]))
    assert result["world_size"] == 2


def test_sft_evaluates_at_the_start_every_interval_and_each_epoch(out):
    lines = metrics_of(out / "sft")
    per_epoch = -(-38 // 6)
    assert [line["step"] for line in lines] == list(range(3 * per_epoch + 1))
    expected = [s for s in range(3 * per_epoch + 1) if s % 2 == 0 or s % per_epoch == 0]
    assert [line["step"] for line in lines if "eval_loss" in line] == expected


def test_flags_override_yaml_and_the_resolved_configuration_is_saved(out):
    config = yaml.safe_load((out / "sft/config.yaml").read_text())
    assert config["learning_rate"] == 0.01
    assert config["num_train_epochs"] == 3
    assert config["zero_stage"] == 3
    assert config["per_device_eval_batch_size"] == 16


def test_tensorboard_mirrors_the_metrics(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(out / "sft/step1_tensorboard")).Reload()
    losses = {event.step: event.value for event in board.Scalars("loss")}
    lines = {line["step"]: line["loss"] for line in metrics_of(out / "sft") if "loss" in line}
    assert losses == pytest.approx(lines)


def test_a_reward_model_from_a_base_model_logs_that_its_head_is_new(out):
    log = (out / "reward.log").read_text()
    assert log.count("has no scalar head; a new one is initialised") == 1
    result = json.loads((out / "reward/result.json").read_text())
    assert {"eval_accuracy_after", "eval_margin_after", "eval_loss_before"} <= set(result)
    model, info = AutoModelForSequenceClassification.from_pretrained(out / "reward", output_loading_info=True)
    assert model.config.num_labels == 1
    assert not info["missing_keys"]


def test_each_ppo_step_logs_everything(out):
    lines = metrics_of(out / "ppo")
    assert [line["step"] for line in lines] == [1, 2, 3]  # ceil(40 prompts / (4 x 2 x 2 rows))
    for line in lines:
        assert set(PPO_METRICS) <= set(line)
        assert all(isinstance(line[name], int | float) for name in PPO_METRICS)


def test_first_ratio_is_one_and_kl_to_the_reference_starts_at_zero(out):
    first, *later = metrics_of(out / "ppo")
    assert first["policy/first_log_ratio_abs_max"] < 1e-5
    for name in ("kl/ref_k1", "kl/ref_k3", "reward/kl_penalty"):
        assert abs(first[name]) < 1e-5, "in fp32 the old log-probs, seen while sampling, are those of the reference"
    assert first["rollout/logprob_diff_max"] < 1e-4
    for line in later:
        assert line["policy/first_log_ratio_abs_max"] < 1e-5
        assert line["kl/ref_k3"] > 0


def test_advantages_are_whitened_and_the_policy_changes(out):
    for line in metrics_of(out / "ppo"):
        assert line["policy/advantage_mean"] == pytest.approx(0, abs=1e-5)
        assert line["policy/advantage_std"] == pytest.approx(1, abs=1e-3)
        assert line["policy/log_ratio_abs_max"] > line["policy/first_log_ratio_abs_max"]


def test_a_run_is_reproducible_from_its_seed(out):
    measured = ("time", "time/", "memory/")
    runs = [
        [{name: line[name] for name in line if not name.startswith(measured)} for line in metrics_of(out / folder)]
        for folder in ("ppo", "again")
    ]
    assert len(runs[0]) == 3
    assert runs[0] == runs[1]


def test_batch_table_and_answers_of_both_ranks_are_printed(out):
    log = (out / "ppo.log").read_text()
    assert "16 / 8 x 2 epochs = 4" in log  # updates per PPO step: rows / global batch x epochs
    for step in (1, 2, 3):
        _, block = log.split(f"PPO step {step}: 16 answers\n")
        lines = re.sub("\n {12}.*", "", block).splitlines()[:48]  # answers of several lines
        for number, (about, prompt, answer) in enumerate(zip(*[iter(lines)] * 3, strict=True), start=1):
            assert re.fullmatch(
                rf"\[{number}\] score -?[0-9.]+, \d tokens, (ended by EOS|cut at the length limit)", about
            )
            assert prompt.startswith("    prompt: ") and answer.startswith("    answer: ")


def test_saved_actor_and_critic_load_and_differ_from_their_start(out):
    for name, start, kind in (
        ("actor", "sft", AutoModelForCausalLM),
        ("critic", "reward", AutoModelForSequenceClassification),
    ):
        after, before = kind.from_pretrained(out / "ppo" / name), kind.from_pretrained(out / start)
        pairs = zip(after.parameters(), before.parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs)
        assert AutoTokenizer.from_pretrained(out / "ppo" / name).eos_token == "<|end|>"


def test_plain_python_trains_a_single_process(assets, tmp_path):
    words = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --dtype fp32"
    words += f" --output_dir {tmp_path}/sft --learning_rate 0.01 --eval_fraction 0.2"
    succeed(run([sys.executable, str(ROOT / "training/step1_sft/main.py"), *words.split()]))
    result = json.loads((tmp_path / "sft/result.json").read_text())
    assert result["world_size"] == 1
    assert result["eval_loss_after"] < result["eval_loss_before"]


def test_help_names_every_flag():
    printed = succeed(run([sys.executable, str(ROOT / "training/step3_ppo/main.py"), "--help", "all"])).stdout
    for flag in ("--actor_model_name_or_path", "--ppo_epochs", "--kl_coef", "--truncation", "--deepspeed_config"):
        assert flag in printed


def held_out_rows(assets, use: str, name: str, split: str):
    """The rows that the run held out for evaluation: same data, same division."""
    words = f"--model_name_or_path m --data_path {assets}/{name}.jsonl --data_split {split} --output_dir o"
    config = parse("sft" if use == "sft" else "reward", words.split())
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    return prepare(use, tokenizer, config.data, 32 if use == "sft" else 512, eval_fraction=0.05).eval


def test_the_saved_sft_model_has_the_reported_loss_in_plain_transformers(assets, out):
    model = AutoModelForCausalLM.from_pretrained(out / "sft")
    total, count = 0.0, 0
    for row in held_out_rows(assets, "sft", "sft", "1,0,0"):
        prompt, answer = row["prompt_ids"], row["answers"][0]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].double()
        for place, token in enumerate(answer, start=len(prompt)):
            total -= float(torch.log_softmax(logits[place - 1], dim=-1)[token])
            count += 1
    assert total / count == pytest.approx(
        json.loads((out / "sft/result.json").read_text())["eval_loss_after"], abs=1e-5
    )


def test_the_saved_reward_model_has_the_reported_margin_in_plain_transformers(assets, out):
    model = AutoModelForSequenceClassification.from_pretrained(out / "reward")
    margins = []
    for row in held_out_rows(assets, "preference", "pairs", "0,1,0"):
        with torch.no_grad():
            chosen, rejected = (float(model(torch.tensor([row["prompt_ids"] + a])).logits) for a in row["answers"])
        margins.append(chosen - rejected)
    reported = json.loads((out / "reward/result.json").read_text())["eval_margin_after"]
    assert sum(margins) / len(margins) == pytest.approx(reported, abs=1e-5)


def test_the_saved_reward_model_records_mean_and_spread_of_its_scores(assets, out):
    model = AutoModelForSequenceClassification.from_pretrained(out / "reward")
    with torch.no_grad():
        scores = [
            float(model(torch.tensor([row["prompt_ids"] + answer])).logits)
            for row in held_out_rows(assets, "preference", "pairs", "0,1,0")
            for answer in row["answers"]
        ]
    mean = sum(scores) / len(scores)
    assert model.config.reward_mean == pytest.approx(mean, abs=1e-5)
    assert model.config.reward_std == pytest.approx(math.sqrt(sum((s - mean) ** 2 for s in scores) / len(scores)))
    result = json.loads((out / "reward/result.json").read_text())
    assert (result["reward_mean"], result["reward_std"]) == (model.config.reward_mean, model.config.reward_std)


def test_non_finite_loss_stops_before_the_update(assets, tmp_path):
    """The logit of one token is beyond fp32 wherever it is positive."""
    model = AutoModelForCausalLM.from_pretrained(assets / "lm")
    model.lm_head.weight.data[7] = 3e38
    model.save_pretrained(tmp_path / "lm")
    AutoTokenizer.from_pretrained(assets / "lm").save_pretrained(tmp_path / "lm")
    words = f"--model_name_or_path {tmp_path}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --dtype fp32"
    words += f" --output_dir {tmp_path}/sft --learning_rate 0.01"
    result = forked(1, "training/step1_sft/main.py", *words.split())
    assert result.returncode == 3
    [said] = re.findall(r"^error: .*", result.stderr, re.M)
    assert "model, step 1: the loss is not finite (rank 0, micro-batch 0); its update was skipped." in said
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "sft/result.json").exists()
    assert not (tmp_path / "sft/model.safetensors").exists()
