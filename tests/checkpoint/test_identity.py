"""The identity of a run: a resumed run detects changed settings, and changed contents behind its
flags."""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import save_file

from dschat_ppo.checkpoint import identity
from dschat_ppo.checkpoint.identity import (
    DIGEST,
    HARMLESS,
    LENGTH,
    PRODUCTS,
    SAMPLE_BYTES,
    SAMPLES,
    RunIdentity,
    RunInputs,
    identify_run,
    input_fingerprints,
    model_fingerprint,
    rows_fingerprint,
)
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import STEPS, parse
from dschat_ppo.config.step_config import defaults_of, flatten
from dschat_ppo.data.further_data import FurtherData
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.models.model_folders import with_bases
from dschat_ppo.ppo.begin_ppo import derived_batch_sizes, inputs_of
from dschat_ppo.rewards.function_reward import function_files

SFT = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"]
PPO = [
    "--actor_model_name_or_path",
    "m",
    "--critic_model_name_or_path",
    "r",
    "--data_path",
    "d",
    "--output_dir",
    "o",
]
PLANS = {"ppo": {"rows_per_update": 16, "rows_per_step": 32}}


def differences(saved, now):
    return identity.differences(saved, now, defaults_of(STEPS["sft"]))


@cache
def config_of(step, *words):
    return flatten(parse(step, [*(PPO if step == "ppo" else SFT), *words])) | PLANS.get(
        step, {"rows_per_update": 16}
    )


def changed(step, *words):
    """As after a run: the former configuration comes from a file of JSON."""
    return list(differences(json.loads(json.dumps(config_of(step))), config_of(step, *words)))


def test_credentials_are_neither_saved_nor_compared():
    def saved(url, function="judge.py:f?api_key=s3cret:0.5"):
        return config_of("ppo", "--remote_reward_url", url, "--reward_function", function)

    first = saved("http://me:s3cret@host/")
    assert first["remote_reward_url"] == "http://***@host/"
    assert first["reward_function"] == [
        "judge.py:f?api_key=***:0.5"
    ] and "s3cret" not in json.dumps(first)
    assert differences(first, saved("http://you:other@host/")) == {}
    assert list(differences(first, saved("http://me:s3cret@other/"))) == ["remote_reward_url"]
    assert differences(first, saved("http://me:s3cret@host/", "judge.py:f?api_key=s3cret:0.7"))


def test_the_tables_hold_the_flags_of_the_command_lines():
    flags = set().union(
        *(flatten(parse(step, PPO if step == "ppo" else SFT)) for step in ("sft", "reward", "ppo"))
    )
    assert HARMLESS | set(PRODUCTS) | LENGTH <= flags and not HARMLESS & set(PRODUCTS)


HARMLESS_WORDS = [
    ("sft", "--output_dir moved"),
    ("sft", "--save_steps 5"),
    ("sft", "--resume_force True"),
    ("sft", "--zero_stage 2"),
    ("sft", "--per_device_train_batch_size 4"),
    ("reward", "--num_padding_at_beginning 0"),
    ("ppo", "--actor_zero_stage 3"),
    ("ppo", "--micro_batch_tokens 4096"),
    ("ppo", "--rollout_engine padded"),
    ("ppo", "--generation_batches 2"),
    ("ppo", "--per_device_generation_batch_size 4"),
]
SERIOUS_WORDS = [
    ("sft", "--learning_rate 2e-3"),
    ("sft", "--seed 2"),
    ("sft", "--dtype fp32"),
    ("sft", "--data_path a b"),
    ("sft", "--num_train_epochs 2"),
    ("sft", "--model_name_or_path n"),
    ("sft", "--max_seq_len 256"),
    ("sft", "--dropout 0.0"),
    ("sft", "--deepspeed_config file.json"),
    ("sft", "--max_grad_norm 0"),
    ("reward", "--objective dpo"),
    ("ppo", "--kl_coef 0.2"),
    ("ppo", "--n_samples_per_prompt 2"),
    ("ppo", "--stop_strings a b"),
    ("ppo", "--remote_reward_url http://h:1/r"),
    ("ppo", "--target_kl 0.1"),
]


@pytest.mark.parametrize(
    ("step", "words", "matters"),
    [
        *((step, words, False) for step, words in HARMLESS_WORDS),
        *((step, words, True) for step, words in SERIOUS_WORDS),
        ("sft", "", False),
        ("ppo", "", False),
    ],
)
def test_a_change_matters_if_it_affects_the_result(step, words, matters):
    assert changed(step, *words.split()) == (
        [words.split()[0].removeprefix("--")] if matters else []
    )


@pytest.mark.parametrize(
    ("saved", "now", "found"),
    [
        (
            {},
            {"truncation": "left"},
            {},
        ),  # the checkpoint is older than the flag, which has its default
        ({}, {"truncation": "right"}, {"truncation": "(absent) -> right"}),
        ({"new_flag": None}, {}, {"new_flag": "None -> (absent)"}),
        ({}, {"new_flag": 3}, {"new_flag": "(absent) -> 3"}),
        ({"num_train_epochs": 2}, {"num_train_epochs": 2.0}, {}),  # of an earlier version
    ],
)
def test_a_flag_that_one_side_lacks(saved, now, found):
    assert differences(saved, now) == found


@pytest.mark.parametrize(("flag", "product"), PRODUCTS.items())
def test_a_factor_matters_unless_its_product_is_the_same(flag, product):
    other = "rows_per_step" if product == "rows_per_update" else "rows_per_update"
    for saved, now, found in (
        ({product: 8}, {product: 8}, []),
        ({product: 8}, {product: 4}, [product, flag]),
        ({product: 8}, {}, [flag, product]),
        ({}, {}, [flag]),
        ({other: 8}, {other: 8}, [flag]),
    ):
        assert sorted(differences({flag: 1, **saved}, {flag: 2, **now})) == sorted(found)


PLACES = [
    ("data_path", ["{folder}/a.jsonl:0.3", "b"], ["a.jsonl:0.3", "b"], False),
    ("data_path", ["{folder}/a.jsonl@5"], ["link.jsonl@5"], False),
    ("data_path", ["model[train]"], ["{folder}/model[train]"], False),
    ("data_path", ["{folder}/a.jsonl:0.3"], ["a.jsonl:0.4"], True),
    ("data_path", ["a.jsonl"], ["b.jsonl"], True),
    ("model_name_or_path", "model", "{folder}/model/", False),
    ("model_name_or_path", "model", "a.jsonl", True),
    ("reward_function", ["r.py:score"], ["{folder}/r.py:other"], True),
]


@pytest.mark.parametrize(("name", "before", "after", "matters"), PLACES)
def test_paths_are_compared_by_the_places_that_they_lead_to(
    tmp_path, monkeypatch, name, before, after, matters
):
    monkeypatch.chdir(tmp_path)
    for file in ("a.jsonl", "b.jsonl", "r.py"):
        (tmp_path / file).touch()
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "model").mkdir()
    saved, now = (
        json.loads(json.dumps({name: value}).replace("{folder}", str(tmp_path)))
        for value in (before, after)
    )
    assert list(differences(saved, now)) == ([name] if matters else [])
    contents, place = "contents of --reward_function", f"{tmp_path}/r.py"
    assert differences({f"{contents} r.py": "12"}, {f"{contents} {place}": "12"}) == {}
    assert differences({f"{contents} r.py": "12"}, {f"{contents} {place}": "13"}) == {
        f"{contents} {place}": "12 -> 13"
    }


def test_another_number_of_ranks_does_not_matter():
    found = []
    for ranks, rows in ((2, 4), (1, 8)):
        sizes = f"--per_device_generation_batch_size {rows} --per_device_training_batch_size {rows}"
        config = parse("ppo", [*PPO, *sizes.split()])
        found.append(flatten(config) | derived_batch_sizes(config, plan_ppo(config.ppo, 64, ranks)))
    assert differences(*found) == {}


TRAIN = Dataset.from_dict({"ids": [[1], [2]]})
LARGE = 3 * SAMPLES * SAMPLE_BYTES + 17


def model(folder: Path, value: float = 0.0) -> Path:
    """A folder that looks like a model: settings, a tokenizer, a small file of weights and a large
    one."""
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.full((9,), value)}, folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(bytes(LARGE))
    return folder


FLIPS = [
    ("config.json", 2),
    ("tokenizer.json", 0),
    ("model.safetensors", -1),
    ("pytorch_model.bin", 0),
    ("pytorch_model.bin", LARGE - 1),
    ("pytorch_model.bin", (LARGE - SAMPLE_BYTES) // (SAMPLES - 1)),
    ("pytorch_model.bin", 40 * (LARGE - SAMPLE_BYTES) // (SAMPLES - 1) + SAMPLE_BYTES - 1),
]


def test_any_change_of_a_model_changes_its_fingerprint_and_its_place_does_not(tmp_path):
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    found = [model_fingerprint(one)]
    (other / "README.md").write_text("no file of the model")
    assert model_fingerprint(str(other)) == found[0]
    for name, place in FLIPS:
        content = bytearray((one / name).read_bytes())
        content[place] ^= 1
        (one / name).write_bytes(content)
        found.append(model_fingerprint(one))
    (one / "pytorch_model.bin").rename(one / "other.bin")
    found.append(model_fingerprint(one))
    (one / "chat_template.jinja").write_text("{{ x }}")
    found.append(model_fingerprint(one))
    assert len(set(found)) == len(FLIPS) + 3
    with (other / "model.safetensors").open("wb") as file:
        file.truncate(2**40)  # takes no room, and is not read whole
    assert len(model_fingerprint(other)) == 64


def inputs(folder: Path, texts: int = 3) -> RunInputs:
    blocks = Dataset.from_dict({"ids": [[number] for number in range(texts)]})
    files = function_files("--reward_function", [f"{folder}/reward.py:score:0.5", "length"])
    models = [
        ("--actor_model_name_or_path", str(folder / "model")),
        ("--critic_model_name_or_path", None),
    ]
    return RunInputs(
        TRAIN, {"texts": blocks, "evaluation": None}, models, [*files, ("--deepspeed_config", None)]
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    model(tmp_path / "model")
    (tmp_path / "reward.py").write_text("def score(prompt, response): return 1\n")
    return tmp_path


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_adds_a_short_fingerprint_of_each_input_to_the_identity(
    rank, folder, monkeypatch
):
    monkeypatch.setenv("RANK", str(rank))
    config = parse(
        "sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", f"{folder}/output"]
    )
    settings = flatten(config) | {"rows_per_update": 8}
    found = identify_run(config, inputs(folder), {"rows_per_update": 8})
    if rank == 1:
        assert found == RunIdentity("sft", settings, "", defaults_of(STEPS["sft"]))
        return
    reward, actor = (
        f"contents of --reward_function {folder}/reward.py",
        "contents of --actor_model_name_or_path",
    )
    assert found.data == rows_fingerprint(TRAIN) and found.config.keys() == {
        *settings,
        "texts",
        actor,
        reward,
    }
    assert (
        found.config[reward] == hashlib.sha256((folder / "reward.py").read_bytes()).hexdigest()[:16]
    )
    (folder / "reward.py").write_text("def score(prompt, response): return 2\n")
    save_file({"weight": torch.full((9,), 0.5)}, folder / "model/model.safetensors")
    now = identify_run(config, inputs(folder, texts=2), {"rows_per_update": 8})
    assert list(differences(found.config, now.config)) == ["texts", actor, reward]


STEP_3 = "--actor_model_name_or_path a --data_path d --output_dir o --deepspeed_config d.json"


def test_step_3_fingerprints_every_model_and_file_that_it_reads(folder):
    own, reward = f"--reward_function {folder}/reward.py:score", f"{folder}/reward.py"
    models = (
        "--critic_model_name_or_path c --reward_model_name_or_path r --ref_model_name_or_path f"
    )
    config = parse("ppo", f"{STEP_3} {models} {own}".split())
    further_data = [FurtherData("more", "--more", TRAIN, "further rows (SHA-256)", None)]
    rows = TokenRows(TRAIN, TRAIN.select([0]))
    found = inputs_of(config, ModelFolders("A", "C", "R", "F"), rows, further_data)
    assert found.train is TRAIN
    assert found.rows == {
        "evaluation rows (SHA-256)": rows.eval,
        "further rows (SHA-256)": TRAIN,
    }
    folders = {"actor": "A", "critic": "C", "reward": "R", "ref": "F"}
    folders = {f"--{role}_model_name_or_path": path for role, path in folders.items()}
    assert dict(found.models) == folders
    assert dict(found.files) == {
        "--deepspeed_config": "d.json",
        f"--reward_function {reward}": reward,
    }


def test_an_adapter_and_its_base_are_both_fingerprinted(tmp_path):
    base, adapter = model(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    inputs = RunInputs(TRAIN, models=with_bases([("--m", str(adapter)), ("--none", None)]))
    before = input_fingerprints(inputs)
    (base / "config.json").write_text('{"a": 2}')
    other_base = input_fingerprints(inputs)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    other_adapter = input_fingerprints(inputs)
    own, of_base = "contents of --m", "contents of the base of --m"
    assert before.keys() == {own, of_base}
    assert before[own] == other_base[own] != other_adapter[own]
    assert before[of_base] != other_base[of_base] == other_adapter[of_base]


def test_fingerprints_are_those_of_earlier_versions(tmp_path):
    """Manifests hold them: other values would refuse every saved run."""
    assert (
        rows_fingerprint(TRAIN)
        == "2b55853023bb57b31c619e3cc2d29ac2a1ab5f8ab2ae48aebae96e829ee00d5c"
    )
    expected = "85ea71aed1a9dd8a645b323eff580eae96290b18c5307fedae812ef68254c6bd"
    assert model_fingerprint(model(tmp_path / "model")) == expected


def test_a_fingerprint_tells_rows_apart_however_they_are_stored(tmp_path):
    content = {"ids": [[1, 2], [3], []], "row": ["a", "b", "c"]}
    rows = Dataset.from_dict(content)
    expected = rows_fingerprint(rows)
    assert len(expected) == 64 and rows_fingerprint(Dataset.from_dict(content)) == expected
    rows.save_to_disk(str(tmp_path / "rows"), num_shards=2)
    assert rows_fingerprint(Dataset.load_from_disk(str(tmp_path / "rows"))) == expected
    assert rows_fingerprint(rows.select([0, 1, 2])) == expected
    assert rows_fingerprint(rows.select([2, 1, 0]).select([2, 1, 0])) == expected
    for other in ({**content, "ids": [[1, 2], [4], []]}, {**content, "ids": [[1], [2, 3], []]}):
        assert rows_fingerprint(Dataset.from_dict(other)) != expected
    assert rows_fingerprint(rows.select([1, 0, 2])) != expected
    assert rows_fingerprint(rows.select([0, 1])) != expected


def digested(count: int, **changed: int) -> Dataset:
    """Rows whose tokens are left alone, so that only their digests can tell them apart."""
    digests = [changed.get(f"row_{number}", number - 2**62) for number in range(count)]
    return Dataset.from_dict({"ids": [[1]] * count, DIGEST: digests})


def test_many_rows_are_known_by_their_digests_in_order(monkeypatch):
    monkeypatch.setattr(identity, "MANY_ROWS", 100)
    rows, order = digested(120), [*range(60, 120), *range(60)]
    numbers = b"".join((number - 2**62).to_bytes(8, "little", signed=True) for number in range(120))
    expected = hashlib.sha256(numbers).hexdigest()
    assert rows_fingerprint(rows) == rows_fingerprint(rows.select(order).select(order)) == expected
    halves = concatenate_datasets([rows.select(range(60, 120)), rows.select(range(60))])
    assert rows_fingerprint(halves) == rows_fingerprint(rows.select(order)) != expected
    assert rows_fingerprint(digested(120, row_77=5)) != expected
    assert rows_fingerprint(rows.select(range(119))) != expected
