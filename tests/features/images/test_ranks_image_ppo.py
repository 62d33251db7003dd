"""Step 3 with images on one and two ranks, as a user would run it: PPO with a critic and a reward
model that see the images, and GRPO; runs that are stopped and resumed."""

import json
import re

import pytest
import torch
from features.images.image_runs import flags, flags_of_prompts, write_pictures, write_rows
from launch import numbers_of, run_steps
from safetensors.torch import load_file
from tiny_vlms import save_tiny_vlm
from transformers import AutoModelForImageTextToText

pytestmark = [pytest.mark.ranks, pytest.mark.release]

QUESTION = "what is the colour of this picture ?"
# two for each rank in a step: in the second step a rank has no image
ROWS = [
    {"image": "a.png", "prompt": QUESTION},
    {"image": "d.png", "prompt": QUESTION},  # the ids of the first row
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    *({"image": None, "prompt": f"what is {word} ?"} for word in ("red", "blue", "big")),
    {"image": "a.png", "prompt": "describe <image> ."},
    {"image": None, "prompt": "what is small ?"},
]
PAIRS = [
    {"image": row["image"], "prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
    for row, chosen, rejected in zip(ROWS, "red one no".split() * 3, "two" * 9, strict=False)
]
REWARD = "def letters(responses):\n    return [len(response) % 7 for response in responses]\n"
GRPO = ["--use_reward_model", "False", "--advantage_estimator", "grpo"]
GRPO += ["--n_samples_per_prompt", "4"]
# the teacher has another tower; the answers of the second step are those of the data
TAUGHT = ["--use_reward_model", "False", "--advantage_estimator", "none"]
TAUGHT += ["--teacher_model_name_or_path", "TEACHER", "--distill_on", "mix:0.5"]
TOWER = ["--train_vision_tower", "True", "--train_projector", "True"]


def words_of(vlm, data, ranks, *further):
    """Words of a command of step 3: four prompts in each of two steps, and two updates."""
    words = flags_of_prompts(vlm, data, *further)
    words += ["--max_answer_seq_len", "4", "--max_steps", "2", "--num_warmup_steps", "0"]
    words += ["--actor_learning_rate", "1e-3", "--critic_learning_rate", "1e-3"]
    words += ["--eval_data_path", str(data), "--eval_interval", "1"]
    words += ["--per_device_generation_batch_size", str(4 // ranks)]
    responses = 16 if "grpo" in further else 4
    return [*words, "--per_device_training_batch_size", str(responses // (2 * ranks))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name of a run -> its folder."""
    folder = tmp_path_factory.mktemp("runs")
    write_pictures(folder)
    data = write_rows(folder, ROWS)
    (folder / "pairs").mkdir()
    write_pictures(folder / "pairs")
    pairs = write_rows(folder / "pairs", PAIRS)
    (folder / "answers").mkdir()
    write_pictures(folder / "answers")
    answers = write_rows(folder / "answers", [row | {"response": "it is"} for row in ROWS])
    (folder / "letters.py").write_text(REWARD)
    families = {"ppo": "qwen3_vl", "grpo": "idefics3", "gemma": "gemma3", "qwen": "qwen3_5"}
    families["taught"] = "idefics3"
    vlms = {family: save_tiny_vlm(folder / family, family) for family in families.values()}
    save_tiny_vlm(folder / "teacher", "idefics3", seed=5)
    words = flags(vlms["qwen3_vl"], pairs, "--objective", "reward", "--max_steps", "1")
    words[words.index("1,0,0")] = "0,1,0"
    words[words.index("--output_dir") + 1] = str(folder / "reward")
    ended = run_steps({"reward": ("reward", words)}, folder, ranks=1)
    assert ended["reward"]["error"] is None, ended
    function = ["--reward_function", f"{folder}/letters.py:letters"]
    taught = [*TAUGHT, "--eval_reward_function", f"{folder}/letters.py:letters"]
    critic = ["--critic_model_name_or_path", str(folder / "reward"), "--critic_zero_stage"]
    stage = "--actor_zero_stage"
    no_cache = ["--image_cache_gb", "0"]
    cases = {
        "ppo": [*critic, "3", stage, "3", "--enable_ema", "True"],
        "ppo_stage2": [*critic, "2", stage, "2"],
        "ppo_resumed": [*critic, "3", stage, "3", "--enable_ema", "True", *no_cache],
        "grpo": [*GRPO, *function, stage, "3"],
        "grpo_stage0": [*GRPO, *function, stage, "0"],
        "grpo_resumed": [*GRPO, *function, stage, "3", *no_cache],
        "grpo_lora": [*GRPO, *function, stage, "0", "--actor_lora_dim", "4"]
        + ["--only_optimize_lora", "True"],
        "ppo_tower": [*critic, "3", stage, "3", "--enable_ema", "True", *TOWER],
        "ppo_tower_resumed": [*critic, "3", stage, "3", "--enable_ema", "True", *TOWER, *no_cache],
        "grpo_tower": [*GRPO, *function, stage, "2", *TOWER],
        "taught": [*taught, stage, "3"],
        "taught_resumed": [*taught, stage, "3", *no_cache],
        "taught_alone": [*taught, stage, "0"],
        "ppo_alone": [*critic, "0", stage, "0"],
        "grpo_alone": [*GRPO, *function, stage, "0"],
        "ppo_tower_alone": [*critic, "0", stage, "0", *TOWER],
        "grpo_tower_alone": [*GRPO, *function, stage, "0", *TOWER],
    }
    for name, further in cases.items():
        cases[name] = [str(folder / "teacher") if word == "TEACHER" else word for word in further]
    for name in ("gemma", "qwen"):
        cases[name] = [*GRPO, *function, stage, "3"]
        cases[f"{name}_alone"] = cases["grpo_alone"]
    for ranks in (1, 2):
        of_ranks = {}
        for name, further in cases.items():
            if name.endswith("alone") != (ranks == 1):
                continue
            vlm = vlms[families[name.partition("_")[0]]]
            prompts = answers if name.startswith("taught") else data
            command = words_of(vlm, prompts, ranks, *further)
            command[command.index("--output_dir") + 1] = str(folder / name)
            of_ranks[name] = ("ppo", command)
            if name.endswith("resumed"):
                of_ranks[name] = ("ppo", command, ["step_000001", None])
        ended = run_steps(of_ranks, folder, ranks=ranks)
        for name, end in ended.items():
            if name.endswith("resumed"):
                stopped, end = end
                assert stopped["stopped"] is not None, stopped
            assert end["error"] is None, (name, end)
    return folder


@pytest.mark.parametrize("name", ["ppo", "grpo", "ppo_tower", "taught"])
def test_a_resumed_run_has_the_bits_of_the_whole_one(runs, name):
    """Also without a cache of what the tower made, as the resumed one is."""
    assert numbers_of(runs / f"{name}_resumed") == numbers_of(runs / name)
    for role in ("actor", "critic", "actor_ema"):
        if not (runs / name / role).is_dir():
            assert role != "actor" and name in ("grpo", "taught")
            continue
        of_whole = load_file(runs / name / role / "model.safetensors")
        resumed = load_file(runs / f"{name}_resumed" / role / "model.safetensors")
        assert of_whole.keys() == resumed.keys()
        assert all(torch.equal(of_whole[key], resumed[key]) for key in of_whole)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ppo", "ppo_stage2"),
        ("ppo", "ppo_alone"),
        ("grpo", "grpo_stage0"),
        ("grpo", "grpo_alone"),
        ("taught", "taught_alone"),
        ("gemma", "gemma_alone"),
        ("qwen", "qwen_alone"),
        ("ppo_tower", "ppo_tower_alone"),
        ("grpo_tower", "grpo_tower_alone"),
    ],
)
def test_zero_stages_and_ranks_do_not_change_the_run(runs, one, other):
    for of_one, of_other in zip(numbers_of(runs / one), numbers_of(runs / other), strict=True):
        for name in (
            "policy/loss",
            "distill/divergence",
            "reward/score_mean",
            "value/loss",
            "eval/score",
            "kl/mean",
        ):
            if name in of_one:
                assert of_one[name] == pytest.approx(of_other[name], abs=2e-5), name


@pytest.mark.parametrize(
    ("name", "family", "roles"),
    [
        ("ppo", "qwen3_vl", ("actor", "critic", "actor_ema")),
        ("grpo", "idefics3", ("actor",)),
    ],
)
def test_the_saved_models_hold_tower_and_processor(runs, name, family, roles):
    before = load_file(runs / family / "model.safetensors")
    for role in roles:
        after = load_file(runs / name / role / "model.safetensors")
        of_tower = [key for key in before if "visual" in key or "vision" in key]
        assert of_tower
        assert all(torch.equal(before[key], after[key]) for key in of_tower)
        changed = [key for key in before if key in after and key not in of_tower]
        assert any(not torch.equal(before[key], after[key]) for key in changed)
        assert (runs / name / role / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(
    ("name", "family", "roles"),
    [
        ("ppo_tower", "qwen3_vl", ("actor", "critic", "actor_ema")),
        ("grpo_tower", "idefics3", ("actor",)),
    ],
)
def test_the_towers_that_train_are_those_of_the_saved_models(runs, name, family, roles):
    """Actor and critic train their own; transformers loads the actor."""
    before = load_file(runs / family / "model.safetensors")
    towers = []
    for role in roles:
        after = load_file(runs / name / role / "model.safetensors")
        of_tower = [key for key in before if "visual" in key or "vision" in key]
        assert not any(torch.equal(before[key], after[key]) for key in of_tower)
        towers.append(torch.cat([after[key].flatten() for key in of_tower]))
    assert len({tuple(tower.tolist()) for tower in towers}) == len(roles)
    AutoModelForImageTextToText.from_pretrained(runs / name / "actor")


def test_samples_hold_no_tokens_of_images(runs):
    lines = (runs / "grpo/samples.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert any("picture" in prompt for prompt in prompts)
    sizes = [size for prompt in prompts for size in re.findall("<image[^>]*>", prompt)]
    assert any(size.startswith("<image 32x32, ") for size in sizes)
    assert all(re.fullmatch(r"<image \d+x\d+, \d+ tokens>", size) for size in sizes)
