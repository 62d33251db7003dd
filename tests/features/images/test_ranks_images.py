"""Steps 1 and 2 with images on two ranks, as a user would run them: ZeRO stages, packed rows, LoRA,
and runs that are stopped and resumed."""

import json

import pytest
import torch
from features.images.image_runs import flags, prepared_pairs, source_of, write_pictures, write_rows
from launch import numbers_of, run_steps
from peft import PeftModel
from safetensors.torch import load_file
from tiny_vlms import noise, plain_logprobs, save_tiny_vlm, tiny_image_processor
from transformers import AutoModelForImageTextToText

from dschat_ppo.features.images.inputs import ImageInputs
from dschat_ppo.features.images.lm_kinds import OF_IMAGES
from dschat_ppo.features.images.tower import load_tower
from dschat_ppo.models.loading import ModelChanges, load_causal_lm, load_sequence_classifier
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel

pytestmark = pytest.mark.ranks

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION, "response": "red"},
    {"image": None, "prompt": "what is red ?", "response": "this colour"},
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?", "response": "no"},
    {"image": None, "prompt": "what is big ?", "response": "this circle"},
    {"image": None, "prompt": "what is small ?", "response": "this square"},
    {"image": "d.png", "prompt": QUESTION, "response": "green circle"},
    {"image": None, "prompt": "what is blue ?", "response": "a colour"},
    {"image": "a.png", "prompt": QUESTION, "response": "yellow"},
]
PAIRS = [
    {"image": row["image"], "prompt": row["prompt"], "chosen": row["response"], "rejected": "two"}
    for row in ROWS
]
# 8 rows, one for each rank in a step: in some steps one rank has no image
SIZES = ["--per_device_train_batch_size", "1", "--learning_rate", "1e-3", "--max_steps", "4"]
SIZES += ["--num_warmup_steps", "0"]
LORA = ["--lora_dim", "4", "--only_optimize_lora", "True", "--packing", "True"]
LORA += ["--max_seq_len", "128", "--learning_rate", "0.01"]


def losses(folder):
    return [line["loss"] for line in numbers_of(folder) if "loss" in line]


# name of a run -> (family of its model, ZeRO stage, further flags)
RUNS = {
    "zero0": ("idefics3", 0, []),
    "zero3": ("idefics3", 3, []),
    "resumed": ("idefics3", 3, ["--image_cache_gb", "0"]),
    "lora": ("idefics3", 0, LORA),
    "qwen": ("qwen3_vl", 3, []),
    "dpo": ("idefics3", 3, ["--objective", "dpo"]),
    "reward": ("qwen3_vl", 3, ["--objective", "reward"]),
    # most of its passes have no image on one rank, and some on none
    "tower": ("idefics3", 3, ["--train_vision_tower", "True", "--train_projector", "True"]),
    # the teacher has another tower, which does not train
    "taught": ("idefics3", 3, ["--teacher_model_name_or_path", "TEACHER"]),
    "taught_tower": (
        "idefics3",
        0,
        ["--teacher_model_name_or_path", "TEACHER", "--train_vision_tower", "True"],
    ),
    "reward_lora": ("idefics3", 0, ["--objective", "reward", *LORA]),
    "reward_resumed": ("qwen3_vl", 3, ["--objective", "reward"]),
}
RUN_OF_A_RELEASE = "reward_resumed"  # the trainer of `resumed`, with other rows


def case_of(folder, name: str) -> tuple:
    """(step, words) of a run, and where it is stopped."""
    family, stage, further = RUNS[name]
    data = folder / "rows.jsonl"
    words = [*flags(folder / family, data, "--eval_data_path", str(data)), *SIZES, *further]
    words += ["--output_dir", str(folder / name), "--zero_stage", str(stage)]
    step = "sft"
    if "--objective" in further:
        step = "reward"
        words[words.index("1,0,0")] = "0,1,0"
        pairs = str(folder / "pairs/rows.jsonl")
        words = [pairs if word == str(data) else word for word in words]
    words = [str(folder / "teacher") if word == "TEACHER" else word for word in words]
    if name.endswith("resumed"):
        return step, words, ["step_000002", None]
    return step, words


def run_cases(folder, names: list[str]) -> None:
    """Run these on two ranks; one that is stopped is resumed."""
    ended = run_steps({name: case_of(folder, name) for name in names}, folder)
    for name, end in ended.items():
        if name.endswith("resumed"):
            stopped, end = end
            assert stopped["stopped"] is not None
        assert end["error"] is None, end


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with the folders of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    for rows_folder, rows in ((folder, ROWS), (folder / "pairs", PAIRS)):
        rows_folder.mkdir(exist_ok=True)
        write_pictures(rows_folder)
        write_rows(rows_folder, rows)
    for family in ("idefics3", "qwen3_vl"):
        save_tiny_vlm(folder / family, family)
    save_tiny_vlm(folder / "teacher", "idefics3", seed=5)
    run_cases(folder, [name for name in RUNS if name != RUN_OF_A_RELEASE])
    return folder


@pytest.fixture(scope="module")
def further_runs(runs):
    """The same folder, with the run of a release too."""
    run_cases(runs, [RUN_OF_A_RELEASE])
    return runs


def test_all_zero_stages_give_the_same_losses(runs):
    torch.testing.assert_close(losses(runs / "zero0"), losses(runs / "zero3"), atol=1e-5, rtol=0)
    assert len(losses(runs / "qwen")) == 4
    # DPO begins at log 2, also in steps in which one rank has no image
    assert losses(runs / "dpo")[0] == pytest.approx(0.6931, abs=1e-3)


def test_a_teacher_that_sees_the_images_is_approached(runs):
    """Whether the tower of the student trains or not; the first divergence is the same."""
    first_divergences = []
    for name in ("taught", "taught_tower"):
        lines = [line for line in numbers_of(runs / name) if "divergence" in line]
        first_divergences.append(lines[0]["divergence"])
        [*_, last] = [line for line in numbers_of(runs / name) if "eval_divergence" in line]
        assert 0 < last["eval_divergence"] < 0.9 * lines[0]["divergence"]
    assert first_divergences[0] == pytest.approx(first_divergences[1], abs=1e-5)


@pytest.mark.parametrize(
    ("folder", "name", "whole"),
    [
        ("runs", "resumed", "zero3"),
        pytest.param("further_runs", RUN_OF_A_RELEASE, "reward", marks=pytest.mark.release),
    ],
)
def test_a_resumed_run_has_the_bits_of_the_whole_one(request, folder, name, whole):
    """Also without a cache of what the tower made, as `resumed` is."""
    runs = request.getfixturevalue(folder)
    assert numbers_of(runs / name) == numbers_of(runs / whole)
    of_whole = load_file(runs / whole / "model.safetensors")
    resumed = load_file(runs / name / "model.safetensors")
    assert of_whole.keys() == resumed.keys()
    assert all(torch.equal(of_whole[key], resumed[key]) for key in of_whole)


@pytest.mark.parametrize(("name", "family"), [("reward", "qwen3_vl"), ("reward_lora", "idefics3")])
def test_a_trained_reward_model_scores_as_the_run_did(runs, name, family):
    """The mean loss and the mean score of its last evaluation, by hand from the saved folder: each
    row alone."""
    words = ["--objective", "reward"]
    rows, config, tokenizer = prepared_pairs(runs / family, runs / "pairs/rows.jsonl", *words)
    kinds = ModelChanges(kinds=(OF_IMAGES,))
    model = ScalarModel(load_sequence_classifier(str(runs / name), "fp32", None, False, kinds))
    source = source_of(config, str(runs / family), tokenizer, torch.device("cpu"))
    scores = torch.empty(2, len(rows))
    with torch.no_grad():
        for index, row in enumerate(rows):
            for side in (0, 1):
                ids = torch.tensor([row["prompt_ids"] + row["answers"][side]])
                length = torch.tensor([ids.shape[1]])
                given = source.for_rows([row], ids)
                scores[side, index] = model(ids, length, last_only=True, given=given)
    [*_, last] = [line for line in numbers_of(runs / name) if "eval_loss" in line]
    loss = (1 + (scores[1] - scores[0]).exp()).log().mean()
    assert last["eval_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert last["eval_chosen_score"] == pytest.approx(scores[0].mean().item(), abs=1e-5)
    saved = json.loads((runs / name / "config.json").read_text())
    assert saved["reward_mean"] == pytest.approx(scores.mean().item(), abs=1e-5)
    losses_of_run = losses(runs / name)
    assert losses_of_run[-1] != losses_of_run[0]


@pytest.mark.parametrize(
    ("name", "family"), [("zero3", "idefics3"), ("qwen", "qwen3_vl"), ("dpo", "idefics3")]
)
def test_the_saved_model_is_the_whole_one_with_another_decoder(runs, name, family):
    before = load_file(runs / family / "model.safetensors")
    after = load_file(runs / name / "model.safetensors")
    assert before.keys() == after.keys()
    of_tower = {key for key in before if "language_model" not in key and "text_model" not in key}
    of_tower.discard("lm_head.weight")
    assert of_tower
    for key in before:
        assert torch.equal(before[key], after[key]) == (key in of_tower), key


def test_the_tower_trains(runs):
    """Where its flags ask for it: all its weights change, and transformers loads the model."""
    before = load_file(runs / "idefics3/model.safetensors")
    after = load_file(runs / "tower/model.safetensors")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert {key for key in before if "vision_model" in key or "connector" in key} <= changed
    AutoModelForImageTextToText.from_pretrained(runs / "tower")
    # the frozen run begins with the same loss, and the next one differs
    assert losses(runs / "tower")[0] == pytest.approx(losses(runs / "zero3")[0], abs=1e-5)
    assert abs(losses(runs / "tower")[1] - losses(runs / "zero3")[1]) > 1e-3


def test_an_adapter_loads_on_the_whole_model(runs):
    """peft's model gives a row with a picture the log-probs of the merged model of this project."""
    vlm = runs / "idefics3"
    base = AutoModelForImageTextToText.from_pretrained(vlm)
    adapted = PeftModel.from_pretrained(base, runs / "lora").eval()
    merged = load_causal_lm(str(runs / "lora"), "fp32", None, ModelChanges(kinds=(OF_IMAGES,)))
    ids = torch.tensor([[4, *[7] * 4, 60, 61, 62, 63]])
    ids[0, 1:5] = base.config.image_token_id
    pixels = tiny_image_processor("idefics3")([noise(16, 16, 0)], return_tensors="pt")
    pixels = {name: pixels[name][:, -1:] for name in ("pixel_values", "pixel_attention_mask")}
    tower = load_tower(str(vlm), torch.float32, torch.device("cpu"))
    features = tower.features(pixels)
    index = torch.full_like(ids, -1)
    index[0, 1:5] = torch.arange(4)
    policy = PolicyModel(merged)
    targets = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        logprobs = policy(ids, targets, given=ImageInputs(features, index))[0]
    expected = plain_logprobs(adapted, {"input_ids": ids, **pixels})
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    untrained = AutoModelForImageTextToText.from_pretrained(vlm)
    without = plain_logprobs(untrained, {"input_ids": ids, **pixels})
    assert not torch.allclose(expected, without, atol=1e-3)
