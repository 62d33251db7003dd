"""The folder of the reference: which model it may be."""

import json
import shutil

import pytest
from conftest import tiny_config
from transformers import AutoTokenizer, LlamaForCausalLM

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.begin_ppo import check_models, model_folders


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory):
    """A folder with references: of other sizes, with another tokenizer, without a head."""
    folder = tmp_path_factory.mktemp("references")
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    changes = {
        "deeper": {"num_hidden_layers": 3},
        "more_rows": {"vocab_size": 336},
        "few_rows": {"vocab_size": 64},
        "short": {"max_position_embeddings": 8},
    }
    for name, change in changes.items():
        LlamaForCausalLM(tiny_config(**change)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    shutil.copytree(assets / "lm", folder / "other_tokens")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder / "other_tokens")
    (folder / "here").symlink_to(assets / "lm")
    return folder


def check(assets, words: str):
    known = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward --data_path d"
    config = parse("ppo", f"{known} --output_dir o --max_prompt_seq_len 64 --max_answer_seq_len 32 {words}".split())
    folders = model_folders(config)
    check_models(config, folders, load_tokenizer(folders.actor, "model"))
    return folders.reference


def test_a_reference_of_its_own_is_accepted_and_the_actors_folder_is_none(assets, models):
    assert check(assets, "") is None
    for same in (f"{assets}/lm", f"{models}/here"):
        assert check(assets, f"--ref_model_name_or_path {same} --ref_sync_interval 1") is None
    for other in (f"{assets}/uniform_lm", f"{models}/deeper", f"{models}/more_rows"):
        assert check(assets, f"--ref_model_name_or_path {other}") == other
    assert check(assets, f"--ref_model_name_or_path {assets}/uniform_lm --ref_sync_interval 1 --kl_estimator full")


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("nothing", "", "nothing: no such folder"),
        ("other_tokens", "", "other_tokens: its tokenizer differs from the actor's"),
        ("few_rows", "", "few_rows: its vocabulary of 64 does not fit"),
        ("short", "", "8 positions"),
        ("more_rows", "--kl_estimator full", "more_rows: has 336 rows in its vocabulary and the actor 320"),
        ("more_rows", "--kl_loss_coef 0.1 --kl_loss_estimator full", "has 336 rows in its vocabulary"),
        ("more_rows", "--ref_sync_interval 1", r"different parameters \(lm_head.weight\)"),
        ("deeper", "--ref_sync_interval 1", r"different parameters \(model.layers.2.input_layernorm.weight\)"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(assets, models, name, words, reason):
    with pytest.raises(UserError, match=reason) as problem:
        check(assets, f"--ref_model_name_or_path {models}/{name} {words}")
    assert "\n" not in str(problem.value)
    if name != "short":
        assert "--ref_model_name_or_path" in str(problem.value)


def test_a_classifier_is_no_reference(assets):
    with pytest.raises(UserError, match=r"^--ref_model_name_or_path .*reward.* is a reward model or critic"):
        check(assets, f"--ref_model_name_or_path {assets}/reward")


def test_added_rows_count_for_the_vocabulary_if_they_are_added(assets, models):
    """Both models get rows for the tokens of the tokenizer."""
    config = json.loads((models / "few_rows/config.json").read_text())
    assert config["vocab_size"] == 64
    assert check(assets, f"--ref_model_name_or_path {models}/few_rows --resize_vocabulary")
