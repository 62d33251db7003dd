"""The model card of a saved model, read as the hub reads it."""

from huggingface_hub import ModelCard

from dschat_ppo.config.cli import parse
from dschat_ppo.run.run_models import model_card


def test_a_card_names_what_a_model_started_from_its_data_and_its_flags_without_places(tmp_path):
    (tmp_path / "reward").mkdir()
    words = (
        "--actor_model_name_or_path Qwen/Qwen2.5-0.5B --critic_model_name_or_path"
        f" {tmp_path}/reward --data_path "
    )
    words += (
        f"{tmp_path}/prompts.jsonl openai/gsm8k:main --output_dir {tmp_path}/out --gamma 0.9"
        " --push_to_hub me/m"
    )
    config = parse("ppo", words.split())
    actor, critic = (ModelCard(model_card(config, role)) for role in ("actor", "critic"))
    assert actor.data.base_model == "Qwen/Qwen2.5-0.5B" and actor.data.tags == ["dschat_ppo", "ppo"]
    assert critic.data.base_model is None and "started from `reward`" in critic.text
    assert (
        "(gae, ppo)" in actor.text
        and "trained on `prompts.jsonl`, `openai/gsm8k:main`" in actor.text
    )
    assert "| `--gamma` | `0.9` |" in actor.text and "push_to_hub" not in actor.text
    assert str(tmp_path) not in actor.content + critic.content
