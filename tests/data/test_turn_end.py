"""The end-of-turn token of common chat templates, on tokenizers with a different EOS.

The templates follow the structure of those of the models that they are named after.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from tiny_tokenizers import encode_answer
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from dschat_ppo.data.encode import encode_finished, encode_prompt
from dschat_ppo.data.templates import TurnEnd, answer_ends, turn_end
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.ppo.collect import end_ids
from dschat_ppo.tools.toy import make_tokenizer

ASK = [{"role": "user", "content": "Where is the lamp?"}]
TALK = [*ASK, {"role": "assistant", "content": "In the hall."}, {"role": "user", "content": "And the\nchair?"}]
EACH, EVERY = "{% for m in messages %}", "{% endfor %}"


def opened_by(text: str) -> str:
    return "{% if add_generation_prompt %}" + text + "{% endif %}"


@dataclass(frozen=True)
class Shape:
    """A template, the tokenizer's EOS, its special tokens, and the text after an answer."""

    template: str
    eos: str
    tokens: tuple[str, ...]
    end: str
    dropped: str


SHAPES = {
    "ChatML": Shape(
        EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + EVERY + opened_by("<|im_start|>assistant\n"),
        "</s>", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "\n",
    ),
    "Gemma": Shape(
        "<bos>" + EACH + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n" + EVERY + opened_by("<start_of_turn>model\n"),
        "<eos>", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "\n",
    ),
    "Phi": Shape(
        EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + EVERY
        + "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", "\n<|endoftext|>",
    ),
    "Llama-3": Shape(
        "<|begin|>" + EACH + "<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot_id|>" + EVERY
        + opened_by("<|header|>assistant<|/header|>\n\n"),
        "<|end_of_text|>", ("<|begin|>", "<|header|>", "<|/header|>", "<|eot_id|>"), "<|eot_id|>", "",
    ),
    "Mistral": Shape(
        "<s>" + EACH + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
        "{{ m.content }}</s>{% endif %}"
        + EVERY, "</s>", ("<s>",), "</s>", "",
    ),
    "Zephyr": Shape(
        EACH + "<|{{ m.role }}|>\n{{ m.content + eos_token }}\n" + EVERY + opened_by("<|assistant|>\n"),
        "</s>", (), "</s>", "\n",
    ),
    "line break first": Shape(
        EACH + "[{{ m.role }}]\n{{ m.content }}\n<|im_end|>\n" + EVERY + opened_by("[assistant]\n"),
        "</s>", ("<|im_end|>",), "<|im_end|>", "\n",
    ),
}  # fmt: skip
NO_TOKEN = EACH + "{{ m.role }}: {{ m.content }}\n" + EVERY + opened_by("assistant: ")
THINKING = EACH + "<u>{{ m.content }}{{ '<e>' if m.role == 'assistant' }}" + EVERY + opened_by("<u><think>\n")


def tokenizer_of(template: str, eos: str, tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(["Where is the lamp? It is in the hall."])
    tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return tokenizer


def shaped(name: str) -> tuple[PreTrainedTokenizerFast, Shape]:
    shape = SHAPES[name]
    return tokenizer_of(shape.template, shape.eos, shape.tokens), shape


def rendered_ids(tokenizer, prompt, answer: str, end: int) -> list[int]:
    """Ids of the rendered chat, up to and including the last `end`."""
    chat = [*prompt, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    return ids[: len(ids) - ids[::-1].index(end)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("prompt", [ASK, TALK], ids=["ask", "talk"])
@pytest.mark.parametrize("answer", ["In the hall.", "", "  two words ", "a\nb\n", "lamp?"])
def test_prompt_and_answer_equal_the_rendered_chat_up_to_the_end_of_turn(name, prompt, answer):
    tokenizer, shape = shaped(name)
    end = tokenizer.convert_tokens_to_ids(shape.end)
    ids = encode_answer(tokenizer, prompt, answer)
    assert encode_prompt(tokenizer, prompt) + ids == rendered_ids(tokenizer, prompt, answer, end)
    assert (ids[-1], ids.count(end)) == (end, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_the_end_of_turn_token_is_found_in_the_template(name):
    tokenizer, shape = shaped(name)
    found = turn_end(tokenizer)
    assert (found.token, found.dropped) == (tokenizer.convert_tokens_to_ids(shape.end), shape.dropped)
    assert found.kept.strip() == shape.end
    assert answer_ends(tokenizer) == tuple(dict.fromkeys((tokenizer.eos_token_id, found.token)))


@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_with_final_tokens_keeps_exactly_one(name):
    tokenizer, shape = shaped(name)
    plain = encode_answer(tokenizer, ASK, "In the hall.")
    for brought in (shape.end, shape.eos, shape.end * 2):
        found = encode_answer(tokenizer, ASK, f"In the hall.{brought}")
        assert tokenizer.decode(found).replace("\n", "") == tokenizer.decode(plain).replace("\n", "")


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_prompt_keeps_the_tokenizers_eos(name):
    tokenizer, shape = shaped(name)
    assert tokenizer.decode(encode_answer(tokenizer, "Where?", "Here.")) == f"Here.{shape.eos}"


def test_a_template_without_an_end_of_turn_token_uses_eos():
    tokenizer = tokenizer_of(NO_TOKEN, "</s>", ("<|im_end|>",))
    assert turn_end(tokenizer) == TurnEnd("", "\n", tokenizer.eos_token_id)
    assert tokenizer.decode(encode_answer(tokenizer, ASK, "Here.")) == "Here.</s>"
    assert answer_ends(tokenizer) == (tokenizer.eos_token_id,)


def test_text_that_is_not_a_token_is_not_an_end_of_turn():
    """ChatML on a tokenizer without its tokens: generation cannot stop at a string of several tokens."""
    tokenizer = tokenizer_of(SHAPES["ChatML"].template, "</s>")
    assert tokenizer.decode(encode_answer(tokenizer, ASK, "Here.")) == "Here.</s>"


def test_a_template_with_two_renderings_of_the_opening():
    tokenizer = tokenizer_of(THINKING, "</s>", ("<u>", "<e>"))
    assert tokenizer.decode(encode_answer(tokenizer, ASK, "Here.")) == "Here.<e>"


def test_special_tokens_precede_other_added_tokens_and_spaces_are_skipped():
    tokenizer = tokenizer_of(EACH + "{{ m.content }}  </answer><|im_end|>\n" + EVERY, "</s>", ("<|im_end|>",))
    tokenizer.add_tokens(["  ", "\n", "</answer>"])
    assert turn_end(tokenizer).kept == "  </answer><|im_end|>"
    tokenizer.chat_template = EACH + "{{ m.content }}  </answer>\n" + EVERY
    assert turn_end(tokenizer) == TurnEnd("  </answer>", "\n", tokenizer.convert_tokens_to_ids("</answer>"))


def test_the_added_tokens_are_listed_once(monkeypatch):
    tokenizer, _ = shaped("ChatML")
    listed = []
    added = type(tokenizer).added_tokens_decoder.fget
    monkeypatch.setattr(
        type(tokenizer), "added_tokens_decoder", property(lambda found: listed.append(0) or added(found))
    )
    for _ in range(3):
        encode_answer(tokenizer, ASK, "In the hall.")
    assert len(listed) == 1  # for the end of turn and for the tokens that split a text


def test_a_template_that_rejects_the_example_leaves_eos():
    refusing = ["{{ raise_exception('a system message must come first') }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}"]
    for template in (*refusing, "{% broken", {"tools": "x"}, "no message is shown", None):
        tokenizer = tokenizer_of(template, "</s>")
        assert answer_ends(tokenizer) == (tokenizer.eos_token_id,)


def test_a_tokenizer_that_prepends_a_space_to_every_text():
    """As Llama 2 does: an answer encoded on its own would start with a token that no template renders."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Metaspace()
    letters = list("[/INST] Where is the lamp? In the hall.")
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=letters)
    bpe.train_from_iterator(["In", "hall", "lamp"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = SHAPES["Mistral"].template
    whole = encode_prompt(tokenizer, ASK) + encode_answer(tokenizer, ASK, "In the hall.")
    assert tokenizer.convert_ids_to_tokens(whole).count("▁In") == 1
    assert whole == rendered_ids(tokenizer, ASK, "In the hall.", tokenizer.eos_token_id)


def test_the_final_token_of_one_text_follows_its_rendering():
    tokenizer, _ = shaped("ChatML")
    rendered = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    expected = encode_prompt(tokenizer, ASK) + encode_answer(tokenizer, ASK, "Here.")
    for given in (f"{rendered}Here.", f"{rendered}Here.<|im_end|>"):
        assert encode_finished(tokenizer, given) == expected
    assert tokenizer.decode(encode_finished(tokenizer, "Where? Here.")) == "Where? Here.</s>"


# What depends on it: data, generation, saved models


@pytest.mark.parametrize(
    ("listed", "others"), [(None, ()), (7, ()), ([7, 9], ()), (["eos", 9], (9,)), (["end", 9, "eos"], (9,))]
)
def test_generation_stops_at_eos_at_the_end_of_turn_and_at_further_tokens_of_the_model(listed, others):
    tokenizer, _ = shaped("Phi")
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    if isinstance(listed, list):
        listed = [{"eos": eos, "end": end}.get(number, number) for number in listed]
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed))
    assert end_ids(tokenizer, model) == (eos, end, *others)


@pytest.fixture
def saved(assets, tmp_path):
    """A function that saves a model with the given EOS in its generation config, and loads it again."""

    def save(listed):
        tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
        lm = LlamaForCausalLM(tiny_config())
        lm.generation_config.eos_token_id = listed
        save_model(SimpleNamespace(module=PolicyModel(lm)), tokenizer, tmp_path, ends=(1, 4))
        return LlamaForCausalLM.from_pretrained(tmp_path).eval()

    return save


@pytest.mark.parametrize(("listed", "after"), [(1, [1, 4]), ([4, 9], [1, 4, 9]), ([8, 9], [1, 4]), (None, [1, 4])])
def test_saved_models_list_every_final_token(saved, listed, after):
    assert saved(listed).generation_config.eos_token_id == after


def test_transformers_generate_stops_at_the_end_of_turn(saved):
    model = saved(1)

    def third_is_the_end(ids, scores):
        token = 4 if ids.shape[1] == 4 else 60
        return torch.zeros_like(scores).index_fill_(1, torch.tensor([token]), 100.0)

    found = model.generate(
        torch.tensor([[5, 6]]), max_new_tokens=9, do_sample=False, logits_processor=[third_is_the_end]
    )
    assert found[0, 2:].tolist() == [60, 60, 4]


@pytest.mark.parametrize(("pad", "kept"), [(0, 0), (1, None), (4, None)])
def test_the_pad_token_of_a_saved_reward_model_is_no_final_token(assets, tmp_path, pad, kept):
    """transformers scores a sequence at its last token other than PAD."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "reward")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    module = ScalarModel(LlamaForSequenceClassification(tiny_config(num_labels=1)))
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path, ends=(1, 4))
    assert LlamaForSequenceClassification.from_pretrained(tmp_path).config.pad_token_id == kept
