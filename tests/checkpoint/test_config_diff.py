"""Which changed settings a resumed run refuses, and how they are shown."""

import json
from functools import cache

import pytest

from dschat_ppo.checkpoint.identity import FLAGS, HARMLESS, LENGTH, PRODUCTS, differences
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.ppo.begin_ppo import derived_batch_sizes

SFT = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]
PPO = ["--actor_model_name_or_path", "m", "--critic_model_name_or_path", "r", "--data_path", "d", "--output_dir", "o"]
PLANS = {"ppo": {"rows_per_update": 16, "rows_per_step": 32}}


@cache
def config_of(step, *words):
    return flatten(parse(step, [*(PPO if step == "ppo" else SFT), *words])) | PLANS.get(step, {"rows_per_update": 16})


def changed(step, *words):
    """As after a run: the former configuration comes from a file of JSON."""
    return list(differences(json.loads(json.dumps(config_of(step))), config_of(step, *words)))


def test_credentials_are_neither_saved_nor_compared():
    def saved(url, function="judge.py:f?api_key=s3cret:0.5"):
        return config_of("ppo", "--remote_reward_url", url, "--reward_function", function)

    first = saved("http://me:s3cret@host/")
    assert first["remote_reward_url"] == "http://***@host/"
    assert first["reward_function"] == ["judge.py:f?api_key=***:0.5"] and "s3cret" not in json.dumps(first)
    assert differences(first, saved("http://you:other@host/")) == {}
    assert list(differences(first, saved("http://me:s3cret@other/"))) == ["remote_reward_url"]
    assert differences(first, saved("http://me:s3cret@host/", "judge.py:f?api_key=s3cret:0.7"))


def test_the_tables_hold_the_flags_of_the_command_lines():
    lines = ("sft", "reward", "ppo")
    assert set().union(*(flatten(parse(step, PPO if step == "ppo" else SFT)) for step in lines)) == FLAGS
    assert HARMLESS | set(PRODUCTS) | LENGTH <= FLAGS and not HARMLESS & set(PRODUCTS)


HARMLESS_WORDS = [
    ("sft", "--output_dir moved"), ("sft", "--save_steps 5"), ("sft", "--resume_force True"), ("sft", "--zero_stage 2"),
    ("sft", "--per_device_train_batch_size 4"), ("reward", "--num_padding_at_beginning 0"),
    ("ppo", "--actor_zero_stage 3"), ("ppo", "--micro_batch_tokens 4096"), ("ppo", "--rollout_engine padded"),
    ("ppo", "--generation_batches 2"), ("ppo", "--per_device_generation_batch_size 4"),
]  # fmt: skip
SERIOUS_WORDS = [
    ("sft", "--learning_rate 2e-3"), ("sft", "--seed 2"), ("sft", "--dtype fp32"), ("sft", "--data_path a b"),
    ("sft", "--num_train_epochs 2"), ("sft", "--model_name_or_path n"), ("sft", "--max_seq_len 256"),
    ("sft", "--dropout 0.0"), ("sft", "--deepspeed_config file.json"), ("sft", "--max_grad_norm 0"),
    ("reward", "--objective dpo"), ("ppo", "--kl_coef 0.2"), ("ppo", "--n_samples_per_prompt 2"),
    ("ppo", "--stop_strings a b"), ("ppo", "--remote_reward_url http://h:1/r"), ("ppo", "--target_kl 0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "words", "matters"), [
    *((step, words, False) for step, words in HARMLESS_WORDS), *((step, words, True) for step, words in SERIOUS_WORDS),
    ("sft", "", False), ("ppo", "", False),
])  # fmt: skip
def test_a_change_matters_if_it_affects_the_result(step, words, matters):
    assert changed(step, *words.split()) == ([words.split()[0].removeprefix("--")] if matters else [])


@pytest.mark.parametrize(("saved", "now", "found"), [
    ({}, {"truncation": "left"}, {}),  # the checkpoint is older than the flag, which has its default
    ({}, {"truncation": "right"}, {"truncation": "(absent) -> right"}),
    ({"new_flag": None}, {}, {"new_flag": "None -> (absent)"}),
    ({}, {"new_flag": 3}, {"new_flag": "(absent) -> 3"}),
    ({"num_train_epochs": 2}, {"num_train_epochs": 2.0}, {}),  # of an earlier version
])  # fmt: skip
def test_a_flag_that_one_side_lacks(saved, now, found):
    assert differences(saved, now) == found


@pytest.mark.parametrize(("flag", "product"), PRODUCTS.items())
def test_a_factor_matters_unless_its_product_is_the_same(flag, product):
    other = "rows_per_step" if product == "rows_per_update" else "rows_per_update"
    for saved, now, found in (
        ({product: 8}, {product: 8}, []), ({product: 8}, {product: 4}, [product, flag]),
        ({product: 8}, {}, [flag, product]), ({}, {}, [flag]), ({other: 8}, {other: 8}, [flag]),
    ):  # fmt: skip
        assert sorted(differences({flag: 1, **saved}, {flag: 2, **now})) == sorted(found)


PLACES = [
    ("data_path", ["{folder}/a.jsonl:0.3", "b"], ["a.jsonl:0.3", "b"], False),
    ("data_path", ["{folder}/a.jsonl@5"], ["link.jsonl@5"], False),
    ("data_path", ["model[train]"], ["{folder}/model[train]"], False),
    ("data_path", ["{folder}/a.jsonl:0.3"], ["a.jsonl:0.4"], True), ("data_path", ["a.jsonl"], ["b.jsonl"], True),
    ("model_name_or_path", "model", "{folder}/model/", False), ("model_name_or_path", "model", "a.jsonl", True),
    ("reward_function", ["r.py:score"], ["{folder}/r.py:other"], True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "before", "after", "matters"), PLACES)
def test_paths_are_compared_by_the_places_that_they_lead_to(tmp_path, monkeypatch, name, before, after, matters):
    monkeypatch.chdir(tmp_path)
    for file in ("a.jsonl", "b.jsonl", "r.py"):
        (tmp_path / file).touch()
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "model").mkdir()
    saved, now = (json.loads(json.dumps({name: value}).replace("{folder}", str(tmp_path))) for value in (before, after))
    assert list(differences(saved, now)) == ([name] if matters else [])
    contents, place = "contents of --reward_function", f"{tmp_path}/r.py"
    assert differences({f"{contents} r.py": "12"}, {f"{contents} {place}": "12"}) == {}
    assert differences({f"{contents} r.py": "12"}, {f"{contents} {place}": "13"}) == {f"{contents} {place}": "12 -> 13"}


@pytest.mark.parametrize("words, refused", [("--dynamic_sampling", True), ("", False)])
def test_another_number_of_ranks_matters_to_dynamic_sampling_alone(words, refused):
    found = []
    for ranks, rows in ((2, 4), (1, 8)):
        sizes = f"--per_device_generation_batch_size {rows} --per_device_training_batch_size {rows}"
        config = parse("ppo", [*PPO, *f"{sizes} --n_samples_per_prompt 2 {words}".split()])
        found.append(flatten(config) | derived_batch_sizes(config, plan_ppo(config.ppo, 64, ranks)))
    assert differences(*found) == ({"ranks": "2 -> 1"} if refused else {})
