"""The model folders of step 3: which are accepted, and by which flag the others are refused."""

import shutil

import pytest
from adapter_folders import save_adapter
from conftest import tiny_config
from transformers import AutoTokenizer, LlamaForCausalLM

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.begin_ppo import check_models, local_model_folders

SHARED = "--actor_lora_dim 4 --critic_lora_dim 4 --only_optimize_lora --share_base"


@pytest.fixture(scope="module")
def folders(assets, tmp_path_factory):
    """Links to the models of `assets`; adapters over `lm` and over another base; language models of
    other sizes and with another tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name, linked in (
        ("lm", "lm"),
        ("reward", "reward"),
        ("uniform_lm", "uniform_lm"),
        ("link_to_lm", "lm"),
    ):
        (folder / name).symlink_to(assets / linked)
    for name, base, scalar in (
        ("a", "lm", False),
        ("r", "lm", True),
        ("other_r", "uniform_lm", True),
    ):
        save_adapter(assets / base, folder / f"shared_{name}", scalar)
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
    return folder


def config_of(folders, words: str):
    """`words`: ROLE=NAME of a folder, and flags. The actor is `lm` and the critic `reward` unless
    they name others."""
    named = {"actor": "lm", "critic": "reward"} | dict(
        w.split("=") for w in words.split() if "=" in w
    )
    models = [
        part
        for role, name in named.items()
        for part in (f"--{role}_model_name_or_path", f"{folders}/{name}")
    ]
    flags = [word for word in words.split() if "=" not in word]
    lengths = ["--max_prompt_seq_len", "64", "--max_answer_seq_len", "32"]
    return parse("ppo", [*models, "--data_path", "d", "--output_dir", "o", *lengths, *flags])


def check(folders, words: str):
    config = config_of(folders, words)
    found = local_model_folders(config)
    check_models(config, found, load_tokenizer(str(folders / "lm"), "model"))
    return found


def check_bases(folders, words: str):
    config = config_of(folders, f"{words} {SHARED}")
    for check_folders in hooks("checks.check_folders"):
        check_folders(config, local_model_folders(config))


def test_a_reference_of_its_own_is_accepted_and_the_actors_folder_is_none(folders):
    for same in ("", "ref=lm", "ref=link_to_lm"):
        assert check(folders, same).reference is None
    for name, words in (
        ("uniform_lm", "--kl_estimator full"),
        ("deeper", ""),
        ("more_rows", "--kl_estimator full"),
        ("few_rows", "--resize_vocabulary"),  # both models get rows for the tokens of the tokenizer
    ):
        assert check(folders, f"ref={name} {words}").reference == f"{folders}/{name}"


@pytest.mark.parametrize(
    "words",
    [
        "critic=shared_r reward=shared_r",
        "actor=shared_a critic=shared_r reward=shared_r",
        "critic=lm reward=shared_r",
        "actor=link_to_lm critic=shared_r reward=shared_r",
    ],
)
def test_adapters_over_one_base_and_the_base_itself_are_accepted(folders, words):
    check_bases(folders, words)


UNTRAINED = r": has no trained scalar head \(score.weight\).*actor and critic swapped"
REFUSED = {
    "no folder": (check, "ref=nothing", "^--ref_model_name_or_path .*nothing: no such folder"),
    "tokens": (
        check,
        "ref=other_tokens",
        "^--ref_.*other_tokens: its tokenizer differs from that of the model",
    ),
    "vocabulary": (check, "ref=few_rows", "^--ref_.*few_rows: its vocabulary of 64 does not fit"),
    "positions": (check, "ref=short", "8 positions"),
    "classifier": (
        check,
        "ref=reward",
        "^--ref_model_name_or_path .*reward.* is a reward model or critic",
    ),
    "actor": (
        check,
        "actor=reward",
        "^--actor_model_name_or_path .*score.weight.*actor and critic swapped",
    ),
    "critic": (check, "critic=lm", "^--critic_model_name_or_path .*lm" + UNTRAINED),
    "critic, adapter": (
        check,
        "critic=shared_a",
        "^--critic_model_name_or_path .*shared_a" + UNTRAINED,
    ),
    "reward model": (check, "reward=lm", "^--reward_model_name_or_path .*lm" + UNTRAINED),
    "base": (
        check_bases,
        "actor=shared_a critic=shared_r reward=shared_other_r",
        (
            "--share_base: the base of --reward_model_name_or_path .*shared_other_r is .*omit"
            " --share_base"
        ),
    ),
    "base of critic": (
        check_bases,
        "actor=shared_a critic=reward reward=shared_r",
        "base of --critic_model_name_or_p",
    ),
    "whole": (
        check_bases,
        "actor=shared_a critic=shared_r reward=lm",
        "--reward_.*/lm is a whole model.*--lora_dim",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_fit_is_refused_by_its_flag(folders, case):
    checked, words, reason = REFUSED[case]
    with pytest.raises(UserError, match=reason) as problem:
        checked(folders, words)
    assert "\n" not in str(problem.value)
