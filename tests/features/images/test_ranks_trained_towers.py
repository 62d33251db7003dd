"""Vision towers and projectors in training on two ranks, of which one has rows without images in
some steps: ZeRO stages, runs that are stopped and resumed, and what is saved."""

import pytest
import torch
from features.images.image_runs import flags, write_pictures, write_rows
from launch import numbers_of, run_steps
from safetensors.torch import load_file
from tiny_vlms import save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.tools.export import main as export

pytestmark = [pytest.mark.ranks, pytest.mark.release]

QUESTION = "what is the colour of this picture ?"
# one for each rank in a step: most have no image
ROWS = [
    {"image": "a.png", "prompt": QUESTION, "response": "red"},
    {"image": None, "prompt": "what is red ?", "response": "this colour"},
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?", "response": "no"},
    {"image": None, "prompt": "what is big ?", "response": "this circle"},
    {"image": None, "prompt": "what is small ?", "response": "this square"},
    {"image": None, "prompt": "what is blue ?", "response": "a colour"},
]
PAIRS = [
    {"image": row["image"], "prompt": row["prompt"], "chosen": row["response"], "rejected": "two"}
    for row in ROWS
]
SIZES = ["--learning_rate", "1e-3", "--max_steps", "3", "--num_warmup_steps", "0"]
SIZES += ["--train_vision_tower", "True", "--train_projector", "True"]
# name of a run -> (family of its model, ZeRO stage, further flags)
RUNS = {
    "zero3": ("idefics3", 3, []),
    "zero0": ("idefics3", 0, []),
    "zero2": ("idefics3", 2, ["--gradient_checkpointing", "True"]),
    "resumed": ("idefics3", 3, ["--image_cache_gb", "0"]),
    "qwen": ("qwen3_vl", 3, ["--keep_final_checkpoint"]),
    "qwen0": ("qwen3_vl", 0, []),
    "qwen_projector": ("qwen3_vl", 3, ["--train_vision_tower", "False"]),
    "dpo": ("qwen3_vl", 3, ["--objective", "dpo"]),
    "reward": ("qwen3_vl", 3, ["--objective", "reward"]),
    "lora": ("idefics3", 2, ["--lora_dim", "4", "--packing", "True", "--max_seq_len", "128"]),
    "alone": ("idefics3", 0, []),
    "qwen_alone": ("qwen3_vl", 0, []),
    "reward_alone": ("qwen3_vl", 0, ["--objective", "reward"]),
}


def run_cases(folder, names, ranks=2):
    """Run some of `RUNS` in one launch, in a folder with the rows and the models."""
    cases = {}
    for name in names:
        family, stage, further = RUNS[name]
        data = folder / "rows.jsonl"
        words = [*flags(folder / family, data), *SIZES, *further, "--zero_stage", str(stage)]
        words += ["--per_device_train_batch_size", str(2 // ranks)]
        words += ["--output_dir", str(folder / name)]
        step = "sft"
        if "--objective" in further:
            step = "reward"
            words[words.index("1,0,0")] = "0,1,0"
            words[words.index(str(data))] = str(folder / "pairs/rows.jsonl")
        cases[name] = (step, words)
        if name == "resumed":
            cases[name] = (step, words, ["step_000002", None])
    for name, end in run_steps(cases, folder, ranks=ranks).items():
        if name == "resumed":
            stopped, end = end
            assert stopped["stopped"] is not None
        assert end["error"] is None, end


def begin(folder, families):
    """Rows, pairs and models of a folder."""
    for rows_folder, rows in ((folder, ROWS), (folder / "pairs", PAIRS)):
        rows_folder.mkdir(exist_ok=True)
        write_pictures(rows_folder)
        write_rows(rows_folder, rows)
    for family in families:
        save_tiny_vlm(folder / family, family)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with the folders of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    begin(folder, ("idefics3", "qwen3_vl"))
    of_one_rank = [name for name in RUNS if name.endswith("alone")]
    run_cases(folder, of_one_rank, ranks=1)
    run_cases(folder, [name for name in RUNS if name not in of_one_rank])
    return folder


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def changed_of(before, after):
    """The names of the weights that differ."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def is_beside_decoder(name):
    return "language_model" not in name and "text_model" not in name and "lm_head" not in name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("zero3", "alone"),
        ("zero2", "alone"),
        ("zero0", "alone"),
        ("qwen", "qwen_alone"),
        ("qwen0", "qwen_alone"),
        ("reward", "reward_alone"),
    ],
)
def test_ranks_and_zero_stages_do_not_change_the_run(runs, one, other):
    of_one = [line["loss"] for line in numbers_of(runs / one) if "loss" in line]
    of_other = [line["loss"] for line in numbers_of(runs / other) if "loss" in line]
    assert len(of_one) == 3
    assert of_one == pytest.approx(of_other, abs=2e-5)


def test_a_resumed_run_has_the_bits_of_the_whole_one(runs):
    assert numbers_of(runs / "resumed") == numbers_of(runs / "zero3")
    assert not changed_of(weights_of(runs / "zero3"), weights_of(runs / "resumed"))


def test_an_export_of_the_last_checkpoint_is_what_the_run_saves(runs):
    [checkpoint] = (runs / "qwen/checkpoints").glob("step_*")
    assert export([str(checkpoint), str(runs / "exported")]) == 0
    for file in ("config.json", "model.safetensors", "preprocessor_config.json"):
        assert (runs / "exported" / file).read_bytes() == (runs / "qwen" / file).read_bytes()


@pytest.mark.parametrize("name", ["zero3", "qwen_projector", "qwen", "dpo", "lora"])
def test_the_parts_that_train_change(runs, name):
    family = RUNS[name][0]
    before = weights_of(runs / family)
    changed = changed_of(before, weights_of(runs / name))
    for key in filter(is_beside_decoder, before):
        assert (key in changed) == (name != "qwen_projector" or "merger" in key), key
    AutoModelForImageTextToText.from_pretrained(runs / name)
