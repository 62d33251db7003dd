"""Conversations to prompts and answers, with tiny models with and without a chat template."""

import shutil
from dataclasses import replace

import pytest
import torch
from tiny_models import cut_at

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.errors import UserError
from dschat_ppo.tools import chat_model
from dschat_ppo.tools.chat import chat, read_arguments
from dschat_ppo.tools.chat_model import ChatModel, checked_models, conversation
from dschat_ppo.tools.sampling_settings import SamplingSettings
from dschat_ppo.tools.token_stream import stream_tokens

PLAIN, CHAT = DataFlags(["unused"]), DataFlags(["unused"], chat_template="chatml")
GREEDY = SamplingSettings(top_k=1, max_tokens=12)


@pytest.fixture(scope="module")
def plain(assets) -> ChatModel:
    [checked] = checked_models([("--model", str(assets / "lm"))], PLAIN)
    checked.tokenizer.chat_template = None
    return ChatModel(checked, "fp32")


@pytest.fixture(scope="module")
def templated(assets) -> ChatModel:
    return ChatModel(*checked_models([("--model", str(assets / "lm"))], CHAT), "fp32")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_the_chat_template_renders_the_conversation(templated):
    messages = conversation("be kind", [("a", "b")], "c")
    expected = templated.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert templated.has_template and "be kind" in expected
    assert templated.prompt_ids(messages) == templated.tokenizer.encode(
        expected, add_special_tokens=False
    )


def test_without_a_template_texts_are_joined(plain):
    messages = conversation("", [("Where is", " the lamp")], " now")
    assert not plain.has_template
    assert plain.prompt_ids(messages) == plain.tokenizer.encode("Where is the lamp now")
    with pytest.raises(
        UserError, match="no chat template, so it takes no system message.*--chat_template"
    ):
        plain.prompt_ids(conversation("be kind", [], "c"))


def test_a_model_of_text_prompts_gets_no_template_of_its_tokenizer(assets, templated):
    [checked] = checked_models([("--model", str(assets / "lm"))], CHAT)
    model = ChatModel(replace(checked, is_for_text=True), "fp32")
    messages = conversation("", [("Where is", " the lamp")], " now")
    assert model.prompt_ids(messages) == model.tokenizer.encode("Where is the lamp now")
    assert model.ends == templated.ends


@pytest.mark.parametrize(
    "flag",
    [["--system", "x"], ["--chat_template", "chatml"]],
)
def test_text_prompts_have_nothing_that_a_template_renders(flag):
    with pytest.raises(UserError, match=f"^{flag[0]} needs the chat template"):
        read_arguments(["--model", "m", "--apply_chat_template", "False", *flag])
    words = read_arguments(["--model", "m", "--apply_chat_template", "False"])[0]
    assert words.apply_chat_template is False
    assert read_arguments(["--model", "m"])[0].apply_chat_template is True


@torch.no_grad()
def test_the_answer_is_the_greedy_continuation(plain):
    ids = plain.tokenizer.encode("Where is")
    tokens = list(plain.respond([user("Where is")], GREEDY, 0))
    found = plain.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
        eos_token_id=list(plain.ends),
    )[0, len(ids) :].tolist()
    assert (
        "".join(token.text for token in tokens)
        == plain.tokenizer.decode(found, skip_special_tokens=True)
        != ""
    )
    assert len(tokens) == len(found)
    assert [token.note for token in tokens] == [""] * 11 + ["cut after 12 tokens"]


def test_answers_of_one_seed_differ_by_their_number(plain):
    def said(number: int, seed: int) -> str:
        drawn = plain.respond(
            [user("Where is")], SamplingSettings(max_tokens=12, seed=seed), number
        )
        return "".join(token.text for token in drawn)

    assert said(0, 7) == said(0, 7) and len({said(0, 7), said(1, 7), said(0, 8)}) == 3


def test_an_end_token_ends_the_answer_and_is_no_text(plain, monkeypatch):
    prompt = plain.prompt_ids([user("Where is")])
    greedy = list(stream_tokens(plain.model, prompt, 0, GREEDY.sampling, (), 12))
    end = next(token for token in greedy[2:] if plain.tokenizer.decode(token).strip())
    monkeypatch.setattr(plain, "ends", (end,))
    tokens = list(plain.respond([user("Where is")], GREEDY, 0))
    [cut] = cut_at([greedy], {end})
    assert (tokens[-1].note, len(tokens)) == ("", len(cut)) and len(cut) < 12
    assert "".join(token.text for token in tokens) == plain.tokenizer.decode(
        cut[:-1], skip_special_tokens=True
    )


def test_a_conversation_without_room_is_refused_and_the_last_positions_are_used(plain):
    with pytest.raises(
        UserError, match="has .* tokens, but the model has 128 positions; begin a new one"
    ):
        next(plain.respond([user("where is it " * 80)], GREEDY, 0))
    full = next(text for n in range(999) if len(plain.prompt_ids([user(text := "a " * n)])) == 128)
    with pytest.raises(UserError, match="has 128 tokens"):
        next(plain.respond([user(full)], GREEDY, 0))
    with pytest.raises(UserError, match="no tokens"):
        next(plain.respond([user("")], GREEDY, 0))
    count = next(n for n in range(80) if len(plain.prompt_ids([user("where is it " * n)])) > 118)
    ids = plain.prompt_ids([user("where is it " * count)])
    *_, last = plain.respond([user("where is it " * count)], GREEDY, 0)
    assert last.note == f"cut after {128 - len(ids)} tokens"


def test_all_models_are_checked_before_one_is_loaded(assets, tmp_path, monkeypatch):
    shutil.copytree(assets / "lm", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    monkeypatch.setattr(chat_model, "ChatModel", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match="broken"):
        chat(
            *read_arguments(["--model", str(assets / "lm"), "--compare", str(tmp_path / "broken")])
        )
    with pytest.raises(UserError, match=r"^--compare .*no such folder"):
        chat(*read_arguments(["--model", str(assets / "lm"), "--compare", str(tmp_path / "none")]))
