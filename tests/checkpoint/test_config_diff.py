"""Which changed settings a resumed run refuses, and how they are shown."""

import json
from functools import cache
from pathlib import Path

import pytest

from dschat_ppo.checkpoint.identity import (
    FLAGS,
    HARMLESS,
    LENGTH,
    PRODUCTS,
    ConfigChange,
    compare_configs,
    format_diff,
    refuse_changes,
)
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.errors import UserError
from dschat_ppo.ppo.begin_ppo import derived_batch_sizes

SFT = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]
PPO = ["--actor_model_name_or_path", "m", "--critic_model_name_or_path", "r", "--data_path", "d", "--output_dir", "o"]
FOLDER = Path("output/checkpoints/step_000004")
PLANS = {"sft": {"rows_per_update": 16}, "ppo": {"rows_per_update": 16, "rows_per_step": 32}}


@cache
def config_of(step, *words):
    return flatten(parse(step, [*(PPO if step == "ppo" else SFT), *words])) | PLANS.get(step, PLANS["sft"])


def test_credentials_are_neither_saved_nor_compared():
    def saved(url, function="judge.py:f?api_key=s3cret:0.5"):
        return config_of("ppo", "--remote_reward_url", url, "--reward_function", function)

    first = saved("http://me:s3cret@host/")
    assert first["remote_reward_url"] == "http://***@host/"
    assert first["reward_function"] == ["judge.py:f?api_key=***:0.5"] and "s3cret" not in json.dumps(first)
    assert compare_configs(first, saved("http://you:other@host/")) == []
    assert [change.name for change in compare_configs(first, saved("http://me:s3cret@other/"))] == ["remote_reward_url"]
    assert compare_configs(first, saved("http://me:s3cret@host/", "judge.py:f?api_key=s3cret:0.7"))


def changed(step, *words):
    """As after a run: the former configuration comes from a file of JSON."""
    saved = json.loads(json.dumps(config_of(step)))
    return {change.name: change for change in compare_configs(saved, config_of(step, *words))}


def test_the_tables_hold_existing_flags():
    assert set(HARMLESS) <= FLAGS
    assert set(PRODUCTS) | LENGTH <= FLAGS
    assert not set(HARMLESS) & set(PRODUCTS)


def test_the_flags_are_those_of_the_command_lines():
    lines = ("sft", "reward", "ppo")
    assert set().union(*(flatten(parse(step, PPO if step == "ppo" else SFT)) for step in lines)) == FLAGS


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_the_same_command_changes_nothing(step):
    assert changed(step) == {}
    assert format_diff([]) == ""
    refuse_changes(FOLDER, [], force=False)


HARMLESS_WORDS = [
    ("sft", "--output_dir moved"), ("sft", "--overwrite_output_dir True"), ("sft", "--save_steps 5"),
    ("sft", "--resume never"), ("sft", "--resume_force True"), ("sft", "--collective_timeout 60"),
    ("sft", "--on_nonfinite skip"), ("sft", "--zero_stage 2"), ("sft", "--gradient_checkpointing True"),
    ("sft", "--preprocessing_num_workers 4"), ("sft", "--per_device_eval_batch_size 3"), ("sft", "--print_loss True"),
    ("sft", "--per_device_train_batch_size 4"), ("sft", "--gradient_accumulation_steps 4"),
    ("sft", "--deterministic True"), ("sft", "--resize_vocabulary True"), ("sft", "--lora_merge True"),
    ("reward", "--num_padding_at_beginning 0"), ("reward", "--offload_reference_model True"),
    ("ppo", "--actor_zero_stage 3"), ("ppo", "--micro_batch_tokens 4096"), ("ppo", "--rollout_engine padded"),
    ("ppo", "--rollout_rows 7"), ("ppo", "--reward_workers 5"),
    ("ppo", "--remote_reward_timeout 5"), ("ppo", "--generation_batches 2"), ("ppo", "--print_answers True"),
    ("ppo", "--sample_interval 3"),
    ("ppo", "--per_device_training_batch_size 4"), ("ppo", "--per_device_generation_batch_size 4"),
]  # fmt: skip
SERIOUS_WORDS = [
    ("sft", "--learning_rate 2e-3"), ("sft", "--seed 2"), ("sft", "--dtype fp32"), ("sft", "--data_path a b"),
    ("sft", "--num_train_epochs 2"), ("sft", "--model_name_or_path n"), ("sft", "--max_seq_len 256"),
    ("sft", "--eval_fraction 0.1"), ("sft", "--train_on_prompt True"), ("sft", "--dropout 0.0"),
    ("sft", "--deepspeed_config file.json"), ("sft", "--data_split 1,1,1"), ("sft", "--max_grad_norm 0"),
    ("reward", "--objective dpo"), ("reward", "--use_margin False"),
    ("ppo", "--kl_coef 0.2"), ("ppo", "--temperature 0.9"), ("ppo", "--ppo_epochs 2"), ("ppo", "--reward_default 1"),
    ("ppo", "--n_samples_per_prompt 2"), ("ppo", "--old_logprobs recompute"), ("ppo", "--align_overflow True"),
    ("ppo", "--stop_strings a b"), ("ppo", "--remote_reward_url http://h:1/r"), ("ppo", "--target_kl 0.1"),
]  # fmt: skip


@pytest.mark.parametrize("step, words", HARMLESS_WORDS)
def test_a_change_that_keeps_the_result_is_accepted(step, words):
    [change] = changed(step, *words.split()).values()
    assert not change.matters
    assert change.name == words.split()[0].removeprefix("--")
    refuse_changes(FOLDER, [change], force=False)


@pytest.mark.parametrize("step, words", SERIOUS_WORDS)
def test_a_change_that_affects_the_result_is_refused(step, words):
    [change] = changed(step, *words.split()).values()
    assert change.matters
    with pytest.raises(UserError, match=change.name):
        refuse_changes(FOLDER, [change], force=False)
    refuse_changes(FOLDER, [change], force=True)


@pytest.mark.parametrize("value, matters", [("left", False), ("drop", False), ("right", True)])
def test_a_flag_that_the_checkpoint_does_not_know_matters_unless_it_has_its_default(value, matters):
    [change] = compare_configs({}, {"truncation": value})
    assert (change.before, change.matters) == ("(absent)", matters)


def test_derived_batch_sizes_matter_and_their_factors_alone_do_not():
    saved = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "rows_per_update": 8}
    halved = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "rows_per_update": 8}
    fewer_ranks = {**saved, "rows_per_update": 4}
    assert [c.matters for c in compare_configs(saved, halved)] == [False]
    assert [(c.name, c.matters) for c in compare_configs(saved, fewer_ranks)] == [("rows_per_update", True)]


@pytest.mark.parametrize("flag, product", PRODUCTS.items())
def test_a_factor_matters_unless_both_sides_hold_its_product(flag, product):
    for saved_product, now_product, matters in ((1, 1, False), (None, 1, True), (1, None, True), (None, None, True)):
        saved = {flag: 1} | ({product: saved_product} if saved_product else {})
        now = {flag: 2} | ({product: now_product} if now_product else {})
        assert {c.name: c.matters for c in compare_configs(saved, now)}[flag] is matters


@pytest.mark.parametrize("flag, other", [
    ("per_device_training_batch_size", "rows_per_step"),
    ("per_device_train_batch_size", "rows_per_step"),
    ("gradient_accumulation_steps", "rows_per_step"),
    ("per_device_generation_batch_size", "rows_per_update"),
    ("generation_batches", "rows_per_update"),
])  # fmt: skip
def test_a_factor_is_excused_by_its_own_product_alone(flag, other):
    saved = {flag: 1, other: 8}
    assert compare_configs(saved, {**saved, flag: 2})[0].matters


LENGTHS = [
    ("sft", "--num_train_epochs 2"), ("sft", "--num_train_epochs 0.5"), ("sft", "--max_steps 7"),
    ("ppo", "--num_train_epochs 2"), ("ppo", "--max_steps 7"), ("ppo", "--enable_test_mode --test_stop_step 3"),
]  # fmt: skip


@pytest.mark.parametrize("step, words", LENGTHS)
@pytest.mark.parametrize("rates, matters", [
    ("--lr_scheduler_type cosine", True), ("--lr_scheduler_type linear", True),
    ("--lr_scheduler_type constant", False), ("--lr_scheduler_type constant_with_warmup", False),
    ("--lr_scheduler_type constant_with_warmup --warmup_ratio 0.1", True),
])  # fmt: skip
def test_the_length_matters_where_a_learning_rate_depends_on_it(step, words, rates, matters):
    saved, now = (json.loads(json.dumps(config_of(step, *rates.split(), *more))) for more in ((), words.split()))
    changes = compare_configs(saved, now)
    assert changes and all(change.matters is matters for change in changes)


def test_another_schedule_and_another_length_both_matter():
    saved, now = config_of("sft"), config_of("sft", "--lr_scheduler_type", "constant", "--max_steps", "7")
    for one, other in ((saved, now), (now, saved)):
        found = {change.name: change.matters for change in compare_configs(one, other)}
        assert found == {"lr_scheduler_type": True, "max_steps": True}


def test_epochs_of_an_earlier_version_are_whole_numbers():
    assert compare_configs({"num_train_epochs": 2}, {"num_train_epochs": 2.0}) == []


def test_a_flag_that_one_side_lacks_matters():
    assert compare_configs({"new_flag": None}, {}) == [ConfigChange("new_flag", "None", "(absent)", True)]
    assert compare_configs({}, {"new_flag": 3}) == [ConfigChange("new_flag", "(absent)", "3", True)]
    assert [c.matters for c in compare_configs({}, {"rollout_rows": 3})] == [False]


def test_changes_that_matter_come_first_in_the_order_of_the_command_line():
    saved = {"a": 1, "output_dir": "x", "b": 1, "gone": 1, "save_steps": 1}
    now = {"save_steps": 2, "b": 2, "output_dir": "y", "a": 2}
    assert [c.name for c in compare_configs(saved, now)] == ["b", "a", "gone", "save_steps", "output_dir"]


def test_changes_are_shown_one_per_line():
    saved = {"learning_rate": 1e-3, "data_path": ["a b"], "rows_per_update": 8, "stop_strings": [], "seed": 0, "old": 1}
    now = {"learning_rate": 2e-3, "data_path": ["a", "b"], "rows_per_update": 4, "stop_strings": ("é",), "seed": None}
    assert format_diff(compare_configs(saved, {**now, "eot_token": ""})).splitlines() == [
        "  --learning_rate: 0.001 -> 0.002",
        '  --data_path: ["a b"] -> ["a", "b"]',
        "  rows_per_update: 8 -> 4",
        '  --stop_strings: [] -> ["é"]',
        "  --seed: 0 -> None",
        "  old: 1 -> (absent)",
        '  --eot_token: (absent) -> ""',
    ]


PLACES = [
    ("data_path", ["{folder}/a.jsonl"], ["a.jsonl"], False), ("data_path", ["a.jsonl"], ["./a.jsonl"], False),
    ("data_path", ["{folder}/a.jsonl:0.3", "b"], ["a.jsonl:0.3", "b"], False),
    ("data_path", ["{folder}/a.jsonl@5"], ["link.jsonl@5"], False),
    ("data_path", ["model[train]"], ["{folder}/model[train]"], False),
    ("data_path", ["{folder}/a.jsonl:0.3"], ["a.jsonl:0.4"], True), ("data_path", ["a.jsonl"], ["b.jsonl"], True),
    ("data_path", ["{folder}/none.jsonl"], ["none.jsonl"], True), ("data_path", ["a.jsonl"], ["a.jsonl", "b"], True),
    ("model_name_or_path", "model", "{folder}/model/", False), ("model_name_or_path", "model", "a.jsonl", True),
    ("reward_function", ["r.py:score:0.5"], ["{folder}/r.py:score:0.5"], False),
    ("reward_function", ["r.py:score"], ["{folder}/r.py:other"], True),
    ("chat_template", None, "a.jsonl", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "before", "after", "matters"), PLACES)
def test_paths_are_compared_by_the_places_that_they_lead_to(tmp_path, monkeypatch, name, before, after, matters):
    monkeypatch.chdir(tmp_path)
    for file in ("a.jsonl", "b.jsonl", "r.py"):
        (tmp_path / file).touch()
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "model").mkdir()
    saved, now = (json.loads(json.dumps({name: value}).replace("{folder}", str(tmp_path))) for value in (before, after))
    assert [change.matters for change in compare_configs(saved, now)] == ([True] if matters else [])


def test_the_contents_of_a_file_are_compared_under_any_of_its_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").touch()
    name, place = "contents of --reward_function", f"{tmp_path}/r.py"
    assert compare_configs({f"{name} r.py": "12"}, {f"{name} {place}": "12"}) == []
    [change] = compare_configs({f"{name} r.py": "12"}, {f"{name} {place}": "13"})
    assert change == ConfigChange(f"{name} {place}", "12", "13", True)
    [change] = compare_configs({f"{name[:-9]}model": "12"}, {f"{name[:-9]}model": "13"})
    assert change.matters and change.name == f"{name[:-9]}model"


def test_a_refusal_shows_only_changes_that_matter_and_the_ways_out():
    changes = compare_configs({"seed": 1, "save_steps": 1}, {"seed": 2, "save_steps": 2})
    with pytest.raises(UserError) as refusal:
        refuse_changes(FOLDER, changes, force=False)
    text = str(refusal.value)
    assert text.startswith(f"{FOLDER} was saved under settings")
    assert text.endswith(":\n  --seed: 1 -> 2")
    assert "save_steps" not in text
    assert all(way in text for way in ("--resume_force", "--overwrite_output_dir", "another --output_dir"))


def test_a_refusal_shows_the_factors_of_a_changed_batch_size():
    saved = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "rows_per_update": 8, "zero_stage": 2}
    now = {**saved, "per_device_train_batch_size": 2, "rows_per_update": 4, "zero_stage": 3}
    with pytest.raises(UserError) as refusal:
        refuse_changes(FOLDER, compare_configs(saved, now), force=False)
    shown = [line for line in str(refusal.value).splitlines() if line.startswith("  ")]
    assert shown == ["  rows_per_update: 8 -> 4", "  --per_device_train_batch_size: 4 -> 2"]


@pytest.mark.parametrize("words, refused", [("--dynamic_sampling", True), ("", False)])
def test_another_number_of_ranks_matters_to_dynamic_sampling_alone(words, refused):
    found = []
    for ranks, rows in ((2, 4), (1, 8)):
        sizes = f"--per_device_generation_batch_size {rows} --per_device_training_batch_size {rows}"
        config = parse("ppo", [*PPO, *f"{sizes} --n_samples_per_prompt 2 {words}".split()])
        found.append(flatten(config) | derived_batch_sizes(config, plan_ppo(config.ppo, 64, ranks)))
    serious = [(change.name, change.before, change.after) for change in compare_configs(*found) if change.matters]
    assert serious == ([("ranks", "2", "1")] if refused else [])
