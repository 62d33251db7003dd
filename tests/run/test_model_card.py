"""The model card of a saved model, read as the hub reads it, and its code, run as it stands."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from dschat_ppo.config.cli import parse
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.loading import ModelChanges, load_causal_lm, load_sequence_classifier
from dschat_ppo.models.saving import SavedForm, save_model
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.run.model_card import model_card


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
    actor, critic = (
        ModelCard(model_card(config, role, is_adapter=False, has_template=True))
        for role in ("actor", "critic")
    )
    assert actor.data.base_model == "Qwen/Qwen2.5-0.5B" and actor.data.tags == ["dschat_ppo", "ppo"]
    assert critic.data.base_model == "reward" and "started from `reward`" in critic.text
    assert (
        "(gae, ppo)" in actor.text
        and "trained on `prompts.jsonl`, `openai/gsm8k:main`" in actor.text
    )
    assert "| `--gamma` | `0.9` |" in actor.text and "push_to_hub" not in actor.text
    assert str(tmp_path) not in actor.content + critic.content


def test_the_base_of_a_later_step_is_that_of_the_first(tmp_path):
    words = "--data_path d.jsonl --output_dir o --model_name_or_path".split()
    first = model_card(parse("sft", [*words, "Qwen/Qwen2.5-0.5B"]), "model", False, True)
    (tmp_path / "README.md").write_text(first)
    later = parse("sft", [*words, str(tmp_path)])
    assert ModelCard(model_card(later, "model", True, True)).data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "library_name": "peft",
        "tags": ["dschat_ppo", "sft", "lora"],
    }
    # the card of somebody else names the base of that model, not the model
    (tmp_path / "README.md").write_text("---\nbase_model: a/b\ntags: [chat]\n---\n")
    assert ModelCard(model_card(later, "model", True, True)).data.base_model == tmp_path.name


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize("step", ["sft", "reward"])
def test_the_code_of_a_card_runs_in_the_folder(
    assets, tmp_path, monkeypatch, capsys, step, is_adapter, template
):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    tokenizer.chat_template = template
    adapter = AdapterSettings(2, 8.0, 0.0, None, False, False, True) if is_adapter else None
    if step == "sft":
        module = PolicyModel(
            load_causal_lm(str(assets / "lm"), "fp32", None, ModelChanges(adapter=adapter))
        )
    else:
        module = ScalarModel(
            load_sequence_classifier(
                str(assets / "reward"), "fp32", None, False, ModelChanges(adapter=adapter)
            )
        )
    for name, weight in module.named_parameters():
        if "lora_B" in name:  # zero in a new adapter
            torch.nn.init.normal_(weight)
    words = ["--model_name_or_path", str(assets / "lm"), "--data_path", "d", "--output_dir", "o"]
    card = partial(model_card, parse(step, words), "model")
    form = SavedForm(merge=False, card=card)
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path, form=form)
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    if step == "sft":
        # as a prompt of training: special tokens are those of the template, if there is one
        ids = tokenizer(names["text"], add_special_tokens=template is None)["input_ids"]
        assert names["output"][0, : len(ids)].tolist() == ids
        return
    ids = names["inputs"]["input_ids"]
    with torch.no_grad():
        expected = module.eval()(ids, torch.tensor([ids.shape[1]]), last_only=True)
    printed = float(capsys.readouterr().out.split()[-1])
    assert printed == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
