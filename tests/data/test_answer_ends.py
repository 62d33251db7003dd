"""How an answer begins and ends in chat templates as people have them, on tokenizers with a different EOS: each answer
once, with one final token, and what depends on that token in generation and saved models."""

from types import SimpleNamespace

import pytest
from chat_tokenizers import EACH, EVERY, SHAPES, opened_by, shaped, special_tokenizer
from conftest import tiny_config
from tiny_tokenizers import KINDS, encode_answer, tokenizer_of
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.data.encode import encode_example, encode_finished, encode_prompt
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import TurnEnd, answer_ends, turn_end
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.ppo.collect import end_ids

# As those of DeepSeek R1 and Qwen 3: the opening begins the thinking, and earlier answers lose theirs.
OPENS_THINK = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].strip() %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# The last answer ends with a token that earlier ones do not have: gpt-oss; those of GLM end with the next role.
OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[final]{% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|endoftext|>"
    "{% else %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEXT_ROLE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"  # noqa: E501
CHATML = SHAPES["ChatML"].template
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>")
ASK, AGAIN = {"role": "user", "content": "Where is the lamp?"}, {"role": "user", "content": "And its\ncolour?"}
TALK = [ASK, {"role": "assistant", "content": "In the hall."}, AGAIN]


def thinking(thought: str, text: str) -> dict:
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}"}


@pytest.mark.parametrize("name", SHAPES)
def test_the_end_of_turn_token_is_found_in_the_template_and_stands_once(name):
    tokenizer, shape = shaped(name)
    found = turn_end(tokenizer)
    assert (found.token, found.dropped) == (tokenizer.convert_tokens_to_ids(shape.end), shape.dropped)
    assert found.kept.strip() == shape.end
    assert answer_ends(tokenizer) == tuple(dict.fromkeys((tokenizer.eos_token_id, found.token)))
    plain = tokenizer.decode(encode_answer(tokenizer, [ASK], "In the hall."))
    for brought in (shape.end, shape.eos, shape.end * 2):
        answer = tokenizer.decode(encode_answer(tokenizer, [ASK], f"In the hall.{brought}"))
        assert answer.replace("\n", "") == plain.replace("\n", "")
    assert tokenizer.decode(encode_answer(tokenizer, "Where?", "Here.")) == f"Here.{shape.eos}"


THINK = EACH + "<u>{{ m.content }}{{ '<e>' if m.role == 'assistant' }}" + EVERY + opened_by("<u><think>\n")


@pytest.mark.parametrize(("template", "tokens", "answer"), [
    (EACH + "{{ m.role }}: {{ m.content }}\n" + EVERY + opened_by("assistant: "), ("<|im_end|>",), "Here.</s>"),
    (CHATML, (), "Here.</s>"),  # generation cannot stop at a string of several tokens
    (THINK, ("<u>", "<e>"), "Here.<e>"),  # renders the opening in two ways
])  # fmt: skip
def test_an_answer_ends_with_eos_if_the_template_has_no_token_of_its_own(template, tokens, answer):
    tokenizer = special_tokenizer(template, "</s>", tokens)
    assert tokenizer.decode(encode_answer(tokenizer, [ASK], "Here.")) == answer
    assert len(answer_ends(tokenizer)) == 1 + answer.endswith("<e>")


def test_the_example_that_a_template_renders_may_have_other_added_tokens_or_be_rejected():
    tokenizer = special_tokenizer(EACH + "{{ m.content }}  </answer><|im_end|>\n" + EVERY, "</s>", ("<|im_end|>",))
    tokenizer.add_tokens(["  ", "\n", "</answer>"])  # special tokens precede them, and spaces do not count
    assert turn_end(tokenizer).kept == "  </answer><|im_end|>"
    tokenizer.chat_template = EACH + "{{ m.content }}  </answer>\n" + EVERY
    assert turn_end(tokenizer) == TurnEnd("  </answer>", "\n", tokenizer.convert_tokens_to_ids("</answer>"))
    for template in ("{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{% broken", {"tools": "x"}, "no message", None):
        tokenizer = special_tokenizer(template, "</s>")
        assert answer_ends(tokenizer) == (tokenizer.eos_token_id,)


# Thinking that the opening begins


def test_thinking_that_the_template_opens_is_opened_once():
    tokenizer = special_tokenizer(OPENS_THINK, "<|endoftext|>", MARKERS)
    talk = [ASK, thinking("Um.", "Which?"), AGAIN]
    answers = [thinking("I saw it.", "In the hall."), thinking("No idea.", "Find it.")]
    found = encode_example(tokenizer, Example(talk, answers), True)
    opening = tokenizer.decode(found.prompt)
    assert opening.endswith("<|im_start|>assistant\n<think>\n") and opening.count("<think>") == 1
    assert list(map(tokenizer.decode, found.answers)) == [
        "I saw it.\n</think>\n\nIn the hall.<|im_end|>", "No idea.\n</think>\n\nFind it.<|im_end|>"
    ]  # fmt: skip


DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
)


@pytest.mark.parametrize(("opened", "answer", "expected"), [
    ("<think>\n", "<think>\nUm.</think>Here.", "Um.</think>Here."),
    ("<think>\n", "Um.</think>Here.", "Um.</think>Here."),
    ("", "<think>\nUm.</think>Here.", "<think>\nUm.</think>Here."),  # its template would drop what is trained
    ("", "Here.", "Here."),
    ("Answers:\n", "s:\nlamp", "s:\nlamp"),  # begins as the opening ends, and keeps its start
])  # fmt: skip
def test_the_thinking_of_an_answer_is_kept_and_opened_once(opened, answer, expected):
    tokenizer = special_tokenizer(DROPS.replace("OPENED", opened), "</s>", MARKERS)
    assert tokenizer.decode(encode_answer(tokenizer, [ASK], answer)) == f"{expected}<|im_end|>"
    tokenizer.chat_template = OPENS_THINK  # whose layout an answer in another one gets
    answer = encode_answer(tokenizer, [ASK], "<think>I saw it.</think> In the hall.")
    assert tokenizer.decode(answer) == "I saw it.\n</think>\n\nIn the hall.<|im_end|>"


# Each turn of a talk


@pytest.mark.parametrize(("template", "earlier", "last"), [
    (OTHER_END, "[final]{}<|im_end|>", "[final]{}<|endoftext|>"), (NEXT_ROLE, "{}<|user|>", "{}<|endoftext|>"),
], ids=["gpt-oss", "GLM"])  # fmt: skip
def test_each_trained_turn_ends_with_its_end_token(template, earlier, last):
    tokenizer = special_tokenizer(template, "<|endoftext|>", MARKERS)
    talk = [*TALK, {"role": "assistant", "content": "red."}, ASK]
    found = encode_example(tokenizer, Example(talk, ["lamp"]), True)
    trained = [tokenizer.decode(found.prompt[start:stop]) for start, stop in found.prompt_spans]
    assert trained == [earlier.format("In the hall."), earlier.format("red.")]
    assert [tokenizer.decode(answer) for answer in found.answers] == [last.format("lamp")]
    assert found.prompt == encode_prompt(tokenizer, talk)
    assert tokenizer.convert_ids_to_tokens(answer_ends(tokenizer)) == ["<|endoftext|>"]


# Texts that bring their own final tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_brings_its_own_bos_has_one(kind):
    tokenizer = tokenizer_of(kind)
    with_bos, without = (
        encode_example(tokenizer, Example("", [text]), True) for text in ("<s>In the hall.", "In the hall.")
    )
    ids = [*with_bos.prompt, *with_bos.answers[0]]
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids[1:-1] == tokenizer.encode("<s>In the hall.", add_special_tokens=False)[1:]
    assert with_bos.prompt == without.prompt


@pytest.mark.parametrize(("end", "after"), [
    ("<|im_end|>", ""), ("<|im_end|>", "\n<|endoftext|>"), ("<|endoftext|>", " \n\n"),
])  # fmt: skip
@pytest.mark.parametrize("prompt", ["", "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"])
def test_a_rendered_text_keeps_its_one_end(end, after, prompt):
    tokenizer = special_tokenizer(CHATML, "<|endoftext|>", MARKERS)
    found = encode_example(tokenizer, Example(prompt, [f"In the hall.{end}{after}"]), True)
    assert tokenizer.decode(found.answers[0]) == f"In the hall.{end}"
    assert found.answers == [encode_answer(tokenizer, prompt, f"In the hall.{end}{after}")]
    scored = encode_finished(tokenizer, f"{prompt}In the hall.{end}{after}")
    assert tokenizer.decode(scored).endswith("In the hall.<|im_end|>" if prompt else f"In the hall.{end}")
    chat = encode_answer(tokenizer, [ASK], f"In the hall.{end}{after}")
    assert tokenizer.decode(chat) == "In the hall.<|im_end|>"


# What depends on it: generation and saved models


@pytest.mark.parametrize(("listed", "after"), [(1, [1, 4]), ([4, 9], [1, 4, 9]), ([8, 9], [1, 4]), (None, [1, 4])])
def test_saved_models_list_every_final_token(assets, tmp_path, listed, after):
    lm = LlamaForCausalLM(tiny_config())
    lm.generation_config.eos_token_id = listed
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    save_model(SimpleNamespace(module=PolicyModel(lm)), tokenizer, tmp_path, ends=(1, 4))
    assert LlamaForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == after
    eos, end = shaped("Phi")[0].convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])  # generation stops at these, too
    for ids, others in ((None, ()), (7, ()), ([7, 9], ()), ([end, 9, eos], (9,))):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))
        assert end_ids(shaped("Phi")[0], model) == (eos, end, *others)


@pytest.mark.parametrize(("pad", "kept"), [(0, 0), (1, None), (4, None)])
def test_the_pad_token_of_a_saved_reward_model_is_no_final_token(assets, tmp_path, pad, kept):
    """transformers scores a sequence at its last token other than PAD."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "reward")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    module = ScalarModel(LlamaForSequenceClassification(tiny_config(num_labels=1)))
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path, ends=(1, 4))
    assert LlamaForSequenceClassification.from_pretrained(tmp_path).config.pad_token_id == kept
