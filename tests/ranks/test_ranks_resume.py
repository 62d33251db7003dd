"""Whole runs: stopped and resumed they give the results of uninterrupted ones to the last bit, and
on another number of ranks within rounding."""

import filecmp
import json
import math
import shutil

import pytest
import torch
from adapter_folders import save_adapter
from launch import ROOT, metrics_of, numbers_of, run_steps
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.checkpoint.engine_state import common_state
from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.tools.export import main as export

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

INSIDE = "step_000001_update_0002"  # a place inside a PPO step that trains the actor too
BEFORE = "step_000000_update_0001"  # inside one that trains the critic alone
# {a} is the folder of assets; @8 stands for 8 over all ranks, and @@ for the number of ranks
FIT = (
    "--model_name_or_path {a}/lm --num_train_epochs 2 --max_seq_len 48 --save_minutes 0"
    " --keep_final_checkpoint"
)
SFT = (
    f"{FIT} --data_path {{a}}/sft.jsonl --data_split 1,0,0 --eval_fraction 0.2"
    " --per_device_train_batch_size @8"
)
LORA = (
    "--lora_dim 4 --only_optimize_lora --lora_learning_rate 0.02 --lora_dropout 0.1"
    " --num_train_epochs 1"
)
LORA += (
    " --eval_interval 2 --metric_for_best perplexity --save_hf_steps 2 --save_total_limit 9 --dtype"
    " bf16"
)
STREAM = "--streaming --streaming_rows 34 --apply_chat_template False"
MODELS = "--actor_model_name_or_path {a}/lm --critic_model_name_or_path {a}/reward"
PPO = (
    "--data_path {a}/prompts.jsonl --data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len"
    " 6 --ppo_epochs 2 --num_warmup_steps 0 --actor_learning_rate 0.003 --critic_learning_rate"
    " 0.003 --save_minutes 0 --keep_final_checkpoint --enable_test_mode --test_stop_step"
)
BATCHES = (
    "--generation_batches 2 --n_samples_per_prompt 2 --eval_data_path {a}/prompts.jsonl"
    " --eval_max_prompts 4"
)
HALF = f"{BATCHES} --per_device_generation_batch_size @4 --per_device_training_batch_size @8"
HALF += " --eval_interval 2 --sample_interval 2"
PLAIN_TEXT = "--unsupervised_dataset_name {a}/plain.jsonl --unsup_coef 0.1"
ADAPTERS = (
    "--actor_model_name_or_path {a}/actor_adapter --critic_model_name_or_path"
    f" {{a}}/reward_adapter {PPO} 2 --per_device_generation_batch_size @8"
    " --per_device_training_batch_size @8 --actor_lora_dim 4 --critic_lora_dim 4 --lora_alpha 8"
    " --only_optimize_lora --share_base --enable_ema --ema_decay 0.5 --dtype fp32"
    " --actor_zero_stage 3 --critic_zero_stage 3"
)
# name -> (step, flags, places at which the run that is called `cut` is stopped)
RUNS = {
    "sft": (  # the loss falls, and rises with the rate
        "sft",
        (
            f"{SFT} --learning_rate 1 --num_warmup_steps 7 --save_steps 3 --save_total_limit 1"
            " --eval_interval 3 --dropout 0.1 --zero_stage 2 --dtype bf16"
        ),
        [3, 2],
    ),
    "kto": (
        "reward",
        (
            f"{FIT} --data_path {{a}}/pairs.jsonl --data_split 0,1,0 --per_device_train_batch_size"
            " @8 --learning_rate 0.01 --dropout 0.1 --eval_interval 3 --objective kto --zero_stage"
            " 3 --dtype fp32 --num_train_epochs 1"
        ),
        [4],
    ),
    "dora": ("sft", f"{SFT} {LORA} --zero_stage 3 --use_dora --lora_merge", ["step_000002"]),
    "packed": (
        "sft",
        (
            f"{SFT} --per_device_train_batch_size 1 --gradient_accumulation_steps 2"
            " --num_train_epochs 1 --packing --sequence_parallel_size @@ --learning_rate 0.01"
            " --zero_stage 3 --dtype fp32 --gradient_checkpointing"
        ),
        None,
    ),
    "stream": (
        "sft",
        (
            f"{SFT} {STREAM} --eval_fraction 0 --per_device_train_batch_size @12 --learning_rate"
            " 0.01 --zero_stage 2 --dtype fp32"
        ),
        ["step_000002"],
    ),
    "ppo": (  # with a critic that trains alone at first, and a reference that moves
        "ppo",
        (
            f"{MODELS} {PPO} 3 {HALF} --kl_target 0.05 --normalize_rewards running --entropy_target"
            " 2 --entropy_coef 0.01 --critic_warmup_rollouts 1 --enable_ema --ema_decay 0.5"
            " --ref_sync_interval 1 --ref_sync_mixup 0.5 --actor_zero_stage 3 --critic_zero_stage"
            " 3 --dtype fp32"
        ),
        [BEFORE, INSIDE],
    ),
    "sampled": (
        "ppo",
        (
            f"{MODELS} {PPO} 3 {HALF} {PLAIN_TEXT} --actor_dropout 0.1 --advantage_estimator grpo"
            " --dynamic_sampling --kl_coef 0.1 --kl_estimator k3 --lr_scheduler_type linear"
            " --enable_ema --ema_decay 0 --actor_zero_stage 2 --dtype bf16"
        ),
        [3, 5],
    ),
    "shared base": ("ppo", ADAPTERS, ["step_000001"]),
    "distilled": (
        "ppo",
        (
            "--actor_model_name_or_path {a}/lm --teacher_model_name_or_path {a}/uniform_lm"
            f" {PPO} 3 --data_path {{a}}/sft.jsonl --per_device_generation_batch_size @8"
            " --per_device_training_batch_size @4 --advantage_estimator none --use_reward_model"
            " False --distill_on mix:0.5 --distill_loss jsd --actor_zero_stage 3 --dtype fp32"
        ),
        [INSIDE],
    ),
    "shared rows": (
        "ppo",
        (
            f"{MODELS} {PPO} 2 {BATCHES} {PLAIN_TEXT} --per_device_generation_batch_size @4"
            " --eval_interval 1 --per_device_training_batch_size 4 --gradient_accumulation_steps 2"
            " --sequence_parallel_size @@ --old_logprobs recompute --kl_target 0.05 --entropy_coef"
            " 0.01 --actor_zero_stage 3 --critic_zero_stage 2 --offload_activations --dtype fp32"
        ),
        [INSIDE],
    ),
    "ppo stream": (
        "ppo",
        (
            f"{MODELS} {PPO} 4 {STREAM} --per_device_generation_batch_size @12"
            " --per_device_training_batch_size @12 --num_train_epochs 2 --dtype fp32 --top_p 0.9"
            " --min_p 0.01 --repetition_penalty 1.3 --min_answer_seq_len 2 --stop_strings a e i o"
            " --stop_token_ids 40 41"
        ),
        ["step_000002"],
    ),
    # a tokenizer with more tokens than the model has rows
    "resized": (
        "ppo",
        (
            f"--actor_model_name_or_path {{a}}/few_rows {PPO} 1 --per_device_generation_batch_size"
            " @8 --use_reward_model False --reward_function"
            f" {ROOT}/tests/reward_functions.py:lengths --per_device_training_batch_size @8"
            " --resize_vocabulary --actor_zero_stage 3 --critic_zero_stage 3 --dtype fp32"
        ),
        None,
    ),
}
# Only a release runs them: the code that saves and restores them is that of the others, and what is
# their own has tests in one process or in `test_ranks_layouts.py`.
RUNS_OF_A_RELEASE = ("kto", "packed", "distilled", "shared rows")
ALONE = "--actor_zero_stage 2 --critic_zero_stage 2"
# a PPO step that makes no second update
REFUSED = "--critic_warmup_rollouts 0 --max_log_ratio 0.001"


def case(assets, output, name: str, places: list, ranks: int = 2, more: str = "") -> tuple:
    step, flags, _ = RUNS[name]
    words = (
        f"{flags} {more} --output_dir {output}".replace("{a}", str(assets))
        .replace("@@", str(ranks))
        .split()
    )
    return step, [str(int(word[1:]) // ranks) if word[0] == "@" else word for word in words], places


def first_starts(assets, folder, in_release: bool) -> dict[str, tuple]:
    """The runs that are not interrupted, and those that are stopped and resumed at once."""
    starts = {}
    for name, (_, _, places) in RUNS.items():
        if (name in RUNS_OF_A_RELEASE) != in_release:
            continue
        home = folder / name.replace(" ", "_")
        starts[f"{name} whole"] = case(assets, home / "whole", name, [None])
        if places and name in ("ppo", "shared rows"):
            starts[f"{name} cut"] = case(assets, home / "cut", name, places)
        elif places:
            starts[f"{name} cut"] = case(assets, home / "cut", name, [*places, None])
    return starts


def run_all(launches: list[tuple[int, dict]], folder, found: dict) -> None:
    """Run the cases of each (ranks, cases), and add how they ended to `found`."""
    for ranks, cases in launches:
        for name, starts in run_steps(cases, folder, ranks).items():
            found.setdefault(name, []).extend(starts)
    assert not any(start["error"] for starts in found.values() for start in starts)


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """(folder with `whole` and `cut` below each name of `RUNS`, "name how" -> how each start of it
    ended).

    Below `more` and `refused` are runs of `ppo` that go from one rank to two; `moved` are copies of
    `cut` that go from two to one, and `alone` are runs on one.
    """
    folder = tmp_path_factory.mktemp("resumed")
    (assets / "plain.jsonl").write_text('{"text": "a few words"}\n' * 9)
    save_adapter(assets / "lm", assets / "actor_adapter", scalar=False, seed=7)
    save_adapter(assets / "lm", assets / "reward_adapter", scalar=True)
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    model = AutoModelForCausalLM.from_pretrained(assets / "lm")
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.add_tokens(["<tool>", "</tool>", "<note>"])
    model.save_pretrained(assets / "few_rows"), tokenizer.save_pretrained(assets / "few_rows")

    def at(name: str, how: str, places: list, ranks: int = 2, more: str = "") -> tuple:
        return case(assets, folder / name / how, name, places, ranks, more)

    found: dict = {}
    run_all([(2, first_starts(assets, folder, in_release=False))], folder, found)
    shutil.copytree(folder / "ppo/cut", folder / "ppo/moved")
    shutil.copytree(folder / "sft/cut", folder / "sft/extended")
    alone = {
        "stream alone": at("stream", "alone", [None], 1),
        "ppo moved": at("ppo", "moved", [None], 1, ALONE),
        "ppo more": at("ppo", "more", [INSIDE], 1, ALONE),
        "ppo refused": at("ppo", "refused", [BEFORE], 1, f"{ALONE} {REFUSED}"),
    }
    forced = (
        "--num_train_epochs 3 --learning_rate 0.02 --lr_scheduler_type constant --resume_force True"
    )
    last = {
        "ppo more": at("ppo", "more", [None]),
        "ppo refused": at("ppo", "refused", [None], 2, REFUSED),
        "ppo cut": at("ppo", "cut", [None]),
        "again": at("sft", "whole", [None]),
        "checked": at("ppo", "checked", [None], 2, "--validate_only"),
        "other": at("sft", "extended", [None], 2, forced),
    }
    run_all([(1, alone), (2, last)], folder, found)
    return folder, found


@pytest.fixture(scope="module")
def further_runs(runs, assets, tmp_path_factory):
    """As `runs`, of those that only a release runs."""
    folder = tmp_path_factory.mktemp("further")
    found: dict = {}
    run_all([(2, first_starts(assets, folder, in_release=True))], folder, found)
    rows = folder / "shared_rows"
    shutil.copytree(rows / "cut", rows / "moved")
    alone = {
        "packed alone": case(assets, folder / "packed/alone", "packed", [None], 1),
        "shared rows alone": case(assets, rows / "alone", "shared rows", [None], 1),
        "shared rows moved": case(assets, rows / "moved", "shared rows", [None], 1),
    }
    last = {"shared rows cut": case(assets, rows / "cut", "shared rows", [None])}
    run_all([(1, alone), (2, last)], folder, found)
    return folder, found


@pytest.fixture
def runs_of(request):
    """Name of a run -> `runs` or `further_runs`, which has it."""

    def chosen(name: str) -> tuple:
        if name in RUNS_OF_A_RELEASE:
            return request.getfixturevalue("further_runs")
        return request.getfixturevalue("runs")

    return chosen


def with_marks(names: list[str]) -> list:
    """Parameters whose first words are the name of a run: only a release runs some of them."""
    parameters = []
    for name in names:
        marks = ()
        if name.startswith(RUNS_OF_A_RELEASE):
            marks = pytest.mark.release
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.fixture(scope="module")
def folder(runs):
    return runs[0]


def kept_models(folder) -> list:
    return sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "name", with_marks([name for name, (_, _, places) in RUNS.items() if places])
)
def test_a_resumed_run_has_the_metrics_models_and_samples_of_an_uninterrupted_one(runs_of, name):
    folder, found = runs_of(name)
    starts = found[f"{name} cut"]
    assert [start["stopped"] is not None for start in starts] == [True] * (len(starts) - 1) + [
        False
    ]
    assert all("resuming from" in start["said"] for start in starts[1:])
    whole, cut = (folder / name.replace(" ", "_") / how for how in ("whole", "cut"))
    expected, lines = numbers_of(whole), numbers_of(cut)
    assert lines == expected
    steps = [line["step"] for line in expected]
    assert steps == sorted(set(steps)) and len(steps) > 1
    models = [path for path in kept_models(whole) if "best" not in path.parts or name != "sft"]
    parts = {"ppo": 3, "shared base": 3, "sampled": 2, "shared rows": 2, "ppo stream": 2}
    assert len(models) >= parts.get(name, 1)
    for path in models:
        assert (whole / path).read_bytes() == (cut / path).read_bytes(), path
    if "--sample_interval" in RUNS[name][1]:
        assert (whole / "samples.jsonl").read_text() == (cut / "samples.jsonl").read_text()
        assert [json.loads(line)["step"] for line in (whole / "samples.jsonl").open()] == [
            1
        ] * 8 + [2] * 8


@pytest.mark.parametrize(
    "name",
    with_marks(
        [
            "ppo more",
            "ppo moved",
            "shared rows whole",
            "shared rows moved",
            "packed whole",
            "stream whole",
        ]
    ),
)
def test_another_number_of_ranks_and_another_stage_match_within_rounding(runs_of, name):
    run, how = name.rsplit(" ", 1)
    folder, found = runs_of(run)
    home = folder / run.replace(" ", "_")
    expected, lines = (
        numbers_of(home / ("whole" if run == "ppo" else "alone")),
        numbers_of(home / how),
    )
    assert (
        len(expected) > 2
        and len({line.get("loss", line.get("value/loss")) for line in expected}) > 2
    )
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4)
    if how in ("more", "moved"):
        assert (
            "resharded" in found[name][-1]["said"]
            and f"checkpoints/{INSIDE}: 1 steps" in found[name][-1]["said"]
        )
        averages = [load_file(home / one / "actor/model.safetensors") for one in ("whole", how)]
        assert all(
            torch.allclose(averages[0][key], averages[1][key], atol=1e-3) for key in averages[0]
        )
    if run == "ppo":
        averages = [load_file(home / one / "actor_ema/model.safetensors") for one in ("whole", how)]
        assert all(
            torch.allclose(averages[0][key], averages[1][key], atol=1e-4) for key in averages[0]
        )


def test_a_new_rank_agrees_on_the_metrics_of_a_step_whose_updates_are_over(runs):
    folder, found = runs
    assert BEFORE in found["ppo refused"][0]["stopped"]
    first, *_ = numbers_of(folder / "ppo/refused")[1:]
    assert first["policy/updates_done_share"] == 0.25 and first["optim/grad_norm/actor"] > 0


def test_the_checkpoint_of_the_best_evaluation_is_kept(folder):
    run = folder / "sft/whole"
    losses = {
        line["step"]: line["eval_loss"]
        for line in metrics_of(run)
        if line["step"] and "eval_loss" in line
    }
    ups = [
        step
        for step in losses
        if losses[step] == min(losses[before] for before in losses if before <= step)
    ]
    best = max(step for step in ups if step % 3 == 0 or step == max(losses))
    assert CheckpointFolder(run).best() == f"step_{best:06d}"
    assert set(CheckpointFolder(run).names()) == {f"step_{best:06d}", f"step_{max(losses):06d}"}


def test_a_finished_run_does_not_start_again_but_resume_force_can_extend_it(runs):
    folder, found = runs
    assert "this run is done" in found["again"][0]["stopped"]
    lines, done = metrics_of(folder / "sft/extended"), len(metrics_of(folder / "sft/cut"))
    assert [line["step"] for line in lines] == list(range(done // 2 * 3 + 1))
    assert {line["lr"] for line in lines[done:]} == {0.02}, "forced settings take effect"
    assert "  --learning_rate: 1.0 -> 0.02" in found["other"][0]["said"]


def test_a_validation_gives_the_metrics_and_answers_that_training_logs_before_its_first_step(
    folder,
):
    checked, trained = folder / "ppo/checked/validation", folder / "ppo/whole"
    [found], first = numbers_of(checked), numbers_of(trained)[0]
    assert found == first and first["step"] == 0 and "eval/kl_ref_k1" in found
    answers = "eval/step_000000.jsonl"
    assert (checked / answers).read_bytes() == (trained / answers).read_bytes()
    assert not (folder / "ppo/checked/actor").exists()


@pytest.mark.parametrize("name", ["sft", "dora", "ppo", "shared_base"])
def test_exports_of_the_last_checkpoint_are_byte_for_byte_what_the_run_saves(
    folder, tmp_path, name
):
    output, out = folder / name / "whole", tmp_path / "out"
    assert export([str(max((output / "checkpoints").glob("step_*"))), str(out)]) == 0
    made = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in made)
    assert [
        path for path in made if not filecmp.cmp(out / path, output / path, shallow=False)
    ] == []


def test_scoring_agrees_with_a_generation_that_is_cut_and_steered(folder):
    for line in metrics_of(folder / "ppo_stream/whole"):
        assert line["rollout/logprob_diff_max"] < 1e-4 and line["rollout/ended_share"] > 0
        assert 2 <= line["rollout/length_mean"] < 6


def test_the_average_is_of_the_actors_own_weights_and_the_reference_moves(folder):
    """Without any memory of former weights the average is the actor, at ZeRO-2; with some it lies
    behind, at ZeRO-3."""
    for name, same in (("sampled", True), ("ppo", False)):
        actor, average = (
            load_file(folder / name / "cut" / r / "model.safetensors")
            for r in ("actor", "actor_ema")
        )
        assert actor.keys() == average.keys()
        assert all(torch.equal(actor[key], average[key]) for key in actor) is same
        assert all(
            torch.allclose(actor[key].float(), average[key].float(), atol=0.05) for key in actor
        )
    assert all(line["kl/reference_moved"] > 0 for line in metrics_of(folder / "ppo/whole")[2:])


@pytest.mark.parametrize("name", ["dora", "shared_base"])
def test_checkpoints_do_not_hold_the_frozen_base(folder, assets, name):
    for checkpoint in (folder / name / "whole/checkpoints").glob("step_*"):
        states = [common_state(role) for role in checkpoint.iterdir() if role.is_dir()]
        assert len(states) == (2 if name == "shared_base" else 1)
        for common in states:
            assert common["shapes"] and all(
                ".lora_" in key or key.endswith("score.weight") for key in common["shapes"]
            )
            assert len(common["frozen"]) > 15 and not any(
                ".lora_" in key for key in common["frozen"]
            )
        size = sum(path.stat().st_size for path in checkpoint.glob("*/*.pt"))
        assert size < (assets / "lm/model.safetensors").stat().st_size


def test_saved_adapters_load_in_peft(folder, assets):
    adapters = folder / "shared_base/whole"
    before = load_file(assets / "actor_adapter/adapter_model.safetensors")
    for role in ("actor", "actor_ema"):
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(assets / "lm"), adapters / role
        )
        weights = load_file(adapters / role / "adapter_model.safetensors")
        assert weights.keys() == before.keys(), "nothing but the adapter"
        assert not any(torch.equal(weights[name], first) for name, first in before.items()), (
            "something was not trained"
        )


def test_actor_and_reference_get_the_same_new_rows(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder / "resized/whole/actor", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    [line] = metrics_of(folder / "resized/whole")
    assert abs(line["kl/ref_k1"]) < 1e-6 and math.isfinite(line["policy/loss"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "resized/whole/actor")
    assert model.config.vocab_size == len(model.lm_head.weight) == len(tokenizer)
