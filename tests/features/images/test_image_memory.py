"""The planned memory of towers and of what they made of images, against loaded towers and a cache
that is full."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from features.images.image_runs import (
    flags,
    flags_of_prompts,
    prepared_prompts,
    source_of,
    write_pictures,
    write_rows,
)
from tiny_models import new_model
from tiny_vlms import FAMILIES, save_tiny_vlm, tiny_vlm_config
from transformers import AutoModelForImageTextToText

from dschat_ppo.config.cli import parse
from dschat_ppo.features.images.lm_kinds import OF_IMAGES
from dschat_ppo.features.images.memory import tower_numbers
from dschat_ppo.features.images.tower import load_tower
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.adapters.shared_base import classifier_over_base
from dschat_ppo.models.lm_kinds import parameters_taken_out
from dschat_ppo.models.loading import load_config
from dschat_ppo.planner.model_parts import read_model_configs
from dschat_ppo.planner.phase_memory import steady_phase
from dschat_ppo.planner.plan_step import roles_of
from dschat_ppo.run.start_and_end import model_size, short_count, show_models

CPU = torch.device("cpu")
ROW = {"image": "a.png", "prompt": "what is this ?", "response": "red"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_tower_has_the_planned_bytes(family, tmp_path):
    vlm = str(save_tiny_vlm(tmp_path / "vlm", family))
    numbers = tower_numbers(load_config(vlm, "model"))
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_tower(vlm, dtype, CPU)._model.parameters()
        assert sum(weight.nbytes for weight in weights) == dtype.itemsize * numbers > 0


def held(config):
    """What the planner counts for images between two updates: (tower, host memory)."""
    models = read_model_configs(config)
    phase = steady_phase("steady", config, roles_of(config, models, 2, 10**10, False))
    return phase.total("images", on_host=False), phase.total("images", on_host=True)


def test_towers_and_caches_of_a_run(tmp_path):
    vlm = save_tiny_vlm(tmp_path / "vlm", "qwen3_vl")
    asked = save_tiny_vlm(tmp_path / "qwen3_5", "qwen3_5")
    data = write_rows(tmp_path, [ROW])
    numbers = tower_numbers(load_config(str(vlm), "model"))
    words_of_sft = flags(vlm, data, "--image_cache_gb", "0.5")
    words = list(words_of_sft)
    assert held(parse("sft", words)) == (4 * numbers, 500_000_000)
    words[words.index("fp32")] = "bf16"
    assert held(parse("sft", words)) == (2 * numbers, 500_000_000)
    # actor, reference and critic have one tower
    words = flags_of_prompts(vlm, data, "--critic_model_name_or_path", str(vlm))
    assert held(parse("ppo", words)) == (4 * numbers, 2_000_000_000)
    # that of another folder may be another one, also of the same size
    other = save_tiny_vlm(tmp_path / "other", "qwen3_vl")
    named = ["--critic_model_name_or_path", str(other), "--ref_model_name_or_path", f"{vlm}/."]
    assert held(parse("ppo", flags_of_prompts(vlm, data, *named))) == (8 * numbers, 4_000_000_000)
    named += ["--reward_model_name_or_path", str(save_tiny_vlm(tmp_path / "third", "qwen3_vl"))]
    assert held(parse("ppo", flags_of_prompts(vlm, data, *named))) == (12 * numbers, 6_000_000_000)
    # an adapter has the tower of its base
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"base_model_name_or_path": str(vlm), "peft_type": "LORA", "r": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    named = ["--critic_model_name_or_path", str(adapter)]
    assert held(parse("ppo", flags_of_prompts(vlm, data, *named))) == (4 * numbers, 2_000_000_000)
    # a model of text that learns from one that sees images loads no tower
    new_model("llama").save_pretrained(tmp_path / "lm")
    of_text = flags(tmp_path / "lm", data, "--teacher_model_name_or_path", str(vlm))
    assert held(parse("sft", of_text)) == (0, 0)
    # a tower that trains is counted with its model: pixels are kept, in step 3 beside the features
    # of a rollout and those of the reference
    assert held(parse("sft", [*words_of_sft, "--train_projector", "True"])) == (0, 500_000_000)
    trained = parse("ppo", [*words, "--train_vision_tower", "True"])
    assert held(trained) == (4 * numbers, 6_000_000_000)
    # a model that is used for text has none
    without = [word for word in flags(asked, data) if word not in ("--with_images", "True")]
    assert held(parse("sft", without)) == (0, 0)


def test_the_table_of_models_counts_a_tower_that_stands_beside_its_model(tmp_path):
    config = tiny_vlm_config("idefics3")
    numbers, _ = model_size(AutoModelForImageTextToText.from_config(config))
    actor = OF_IMAGES.build(config)
    left, trained = model_size(actor)
    assert left == trained < numbers
    reference = OF_IMAGES.build(config).requires_grad_(False)
    roles: dict[str, Any] = {
        "actor": (SimpleNamespace(module=actor), "/vlm"),
        "reference": (SimpleNamespace(module=reference), "/vlm"),
    }
    show_models(roles, "fp32", tmp_path)
    shown = json.loads((tmp_path / "models.json").read_text())
    size = (
        f"idefics3, {short_count(numbers)} parameters ({short_count(numbers - left)} of them beside"
        " the decoder, frozen)"
    )
    assert shown["actor"] == f"{size}, {100 * left / numbers:.3g} % trained, from /vlm"
    assert shown["reference"] == f"{size}, frozen, from /vlm"


def test_a_critic_over_the_weights_of_the_actor_counts_its_tower_too():
    actor = OF_IMAGES.build(tiny_vlm_config("idefics3"))
    critic = classifier_over_base(
        actor, "", AdapterSettings(4, 8.0, 0.0, None, False, False, freeze_base=True), [OF_IMAGES]
    )
    assert parameters_taken_out(critic) == parameters_taken_out(actor) > 0


def test_a_full_cache_holds_no_more_than_planned(tmp_path):
    vlm = str(save_tiny_vlm(tmp_path / "vlm", "qwen3_vl"))
    write_pictures(tmp_path)
    rows = [{**ROW, "image": f"{name}.png"} for name in "abcd"]
    # of the four pictures, about two fit
    kilobytes = 25
    words = ["--image_cache_gb", str(kilobytes / 10**6)]
    prompts, config, tokenizer = prepared_prompts(vlm, write_rows(tmp_path, rows), *words)
    _, planned = held(config)
    assert planned == kilobytes * 1000
    store = source_of(config, vlm, tokenizer, CPU)
    for record in [*prompts, *prompts]:
        store.for_rows([record], torch.tensor([record["prompt_ids"]]))
        kept = sum(row.features.bytes for row in store._kept.values())
        assert kept <= planned
    assert planned / 2 < kept and store.tower_calls > 4
