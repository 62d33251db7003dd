"""Checks of model folders that must be adapters over one base."""

import pytest
from adapter_folders import save_adapter

from dschat_ppo.config.cli import parse
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.errors import UserError
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo.begin_ppo import check_models, check_shared_base, model_folders


@pytest.fixture(scope="module")
def folders(assets):
    """Adapters over `lm`, and one over another base."""
    for name, base, scalar in (("a", "lm", False), ("r", "lm", True), ("other_r", "uniform_lm", True)):
        save_adapter(assets / base, assets / f"shared_{name}", scalar)
    return assets


def check(folders, actor: str, critic: str | None, reward: str | None) -> None:
    path = {name: None if name is None else str(folders / name) for name in (actor, critic, reward)}
    words = ["--actor_model_name_or_path", path[actor], "--critic_model_name_or_path", path[critic] or "none"]
    words += ["--reward_model_name_or_path", path[reward] or "none", "--data_path", "d", "--output_dir", "o"]
    words += ["--actor_lora_dim", "4", "--critic_lora_dim", "4", "--only_optimize_lora", "--share_base"]
    check_shared_base(parse("ppo", words), ModelFolders(path[actor], path[critic], path[reward]))


@pytest.mark.parametrize(("actor", "critic", "reward"), [
    ("lm", "shared_r", "shared_r"), ("shared_a", "shared_r", "shared_r"), ("shared_a", "lm", None),
    ("lm", "lm", "shared_r"), ("shared_a", None, "shared_r"),
])  # fmt: skip
def test_adapters_over_one_base_and_the_base_itself_are_accepted(folders, actor, critic, reward):
    check(folders, actor, critic, reward)


def test_a_folder_of_another_base_is_named(folders):
    with pytest.raises(UserError, match=r"--share_base: the base of --reward_model_name_or_path .*shared_other_r is "):
        check(folders, "shared_a", "shared_r", "shared_other_r")
    with pytest.raises(UserError, match=r"the base of --critic_model_name_or_path .*/reward is .*omit --share_base"):
        check(folders, "shared_a", "reward", "shared_r")


def test_a_link_to_the_base_is_the_base(folders):
    link = folders / "link_to_lm"
    if not link.exists():
        link.symlink_to(folders / "lm")
    check(folders, "link_to_lm", "shared_r", "shared_r")


def test_a_whole_reward_model_is_refused(folders):
    with pytest.raises(
        UserError, match=r"--share_base: --reward_model_name_or_path .*/lm is a whole model.*--lora_dim"
    ):
        check(folders, "shared_a", "shared_r", "lm")


@pytest.mark.parametrize("flag", ["--critic_model_name_or_path", "--reward_model_name_or_path"])
@pytest.mark.parametrize("folder", ["lm", "shared_a"])
def test_a_model_without_a_trained_head_is_refused_by_its_flag(folders, flag, folder):
    """A whole language model, and an adapter of one."""
    others = {"--critic_model_name_or_path": "reward", "--reward_model_name_or_path": "shared_r", flag: folder}
    words = ["--actor_model_name_or_path", str(folders / "lm"), "--data_path", "d", "--output_dir", "o"]
    words += ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "8"]
    for name, value in others.items():
        words += [name, str(folders / value)]
    config = parse("ppo", words)
    tokenizer = load_tokenizer(str(folders / "lm"), "model")
    message = rf"^{flag} {folders / folder}: has no trained scalar head \(score.weight\).*actor and critic swapped"
    with pytest.raises(UserError, match=message):
        check_models(config, model_folders(config), tokenizer)


def test_an_actor_with_a_score_head_is_refused_by_its_flag(folders):
    words = ["--actor_model_name_or_path", str(folders / "reward"), "--data_path", "d", "--output_dir", "o"]
    words += ["--critic_model_name_or_path", str(folders / "reward")]
    config = parse("ppo", [*words, "--max_prompt_seq_len", "32", "--max_answer_seq_len", "8"])
    tokenizer = load_tokenizer(str(folders / "lm"), "model")
    with pytest.raises(UserError, match=r"^--actor_model_name_or_path .*score.weight.*actor and critic swapped"):
        check_models(config, model_folders(config), tokenizer)
