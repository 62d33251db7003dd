"""Chats as tokens, in chat templates as people have them: which tokens of earlier answers train,
how an answer begins and ends, once, with one final token, and what is shown of a sample."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from chat_tokenizers import (
    EACH,
    EVERY,
    SHAPES,
    TEMPLATES,
    chat_tokenizer,
    opened_by,
    shaped,
    special_tokenizer,
    templated,
)
from conftest import tiny_config
from datasets import Dataset
from tiny_tokenizers import KINDS, encode_answer, tokenizer_of
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.data.encode import encode_example, encode_finished, encode_prompt, token_spans
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import NAMED, TurnEnd, answer_ends, turn_end
from dschat_ppo.errors import UserError
from dschat_ppo.models.saving import SavedForm, save_model
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.ppo.generation_settings import end_ids
from dschat_ppo.run.start_and_end import MOST_CHARACTERS, log_samples, row_sample

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "In the hall 😀"},
    {"role": "user", "content": "In the hall 😀"},
    {"role": "assistant", "content": " Café\n"},
    {"role": "user", "content": "And now?"},
]
CHATML = TEMPLATES["BOS by the template"]
UNMARKED = re.compile(r"\{%-? *(end)?generation *%\}")
# As those of Qwen 3 and DeepSeek R1: thinking is shown in the last answer only.
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].strip() if"
    " m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = DROPS_THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def spans_of(tokenizer, prompt=TALK, tools=None) -> list[str]:
    """The text of each earlier answer; checks that the ids are those of the prompt."""
    found = encode_example(tokenizer, Example(prompt, ["lamp"], tools=tools), True)
    assert found.prompt == encode_prompt(tokenizer, prompt, tools)
    assert encode_example(tokenizer, Example(prompt, ["lamp"], tools=tools)) == replace(
        found, prompt_spans=[]
    )
    ids, texts = found.prompt, []
    # decoded with what comes before: some tokenizers drop a first space
    for start, stop in found.prompt_spans:
        before = tokenizer.decode(ids[:start])
        whole = tokenizer.decode(ids[:stop])
        texts.append(whole[len(before) :])
    return texts


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_named_templates_with_and_without_marks(kind, name, marks):
    tokenizer = chat_tokenizer(kind, name)
    if not marks:
        tokenizer.chat_template = UNMARKED.sub("", tokenizer.chat_template)
    end = tokenizer.convert_ids_to_tokens(turn_end(tokenizer).token_id)
    answers = {
        "llama-3": ["In the hall 😀", "Café"],
        "human-assistant": [" In the hall 😀", "  Café\n"],
    }.get(name, ["In the hall 😀", " Café\n"])
    # for the letters that a vocabulary lacks
    found = [text.replace("<unk>", "") for text in spans_of(tokenizer)]
    assert found == [f"{answer}{end}" for answer in answers]


@pytest.mark.parametrize("kind", ["bytes", "letters"])
@pytest.mark.parametrize("template", [DROPS_THINKING, OPENS_THINKING])
def test_thinking_that_the_template_drops_is_not_trained(kind, template):
    answer = {"role": "assistant", "content": "<think>\nUm.\n</think>\n\nIn the hall."}
    prompt = [TALK[1], answer, TALK[5], answer, TALK[5]]
    assert spans_of(templated(template, kind), prompt) == ["In the hall.<|im_end|>"] * 2


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}ANSWER{% else"
    " %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)
FULL = ["In the hall 😀<|im_end|>", " Café\n<|im_end|>"]
ASIDE = "[aside]{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # marks that reach too far or not far enough end with the final token
        (
            MARKED.replace(
                "ANSWER", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{{ '\n' }}"
            ),
            FULL,
        ),
        (
            MARKED.replace(
                "ANSWER", "{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}"
            ),
            FULL,
        ),
        # wrong marks are not used
        (CHATML.replace("{{ m.role }}", "{% generation %}{{ m.role }}{% endgeneration %}"), FULL),
        (CHATML.replace("<s>", "<s>{% generation %}x{% endgeneration %}"), FULL),
        # marks leave out what the template writes before an answer
        (MARKED.replace("ANSWER", ASIDE), FULL),
        (MARKED.replace("ANSWER", UNMARKED.sub("", ASIDE)), [f"[aside]{text}" for text in FULL]),
    ],
)
def test_answers_by_marks(template, expected):
    assert spans_of(templated(template)) == expected


def test_answers_without_marks():
    """An answer may hold what the template writes after it; what precedes one belongs to it but at
    the start."""
    talk = [
        TALK[1],
        {"role": "assistant", "content": "Here.\n\nThere."},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "Yes."},
        TALK[5],
    ]
    assert spans_of(templated(TEMPLATES["no marker"]), talk) == ["Here.\n\nThere.", "Yes."]
    spaced = TEMPLATES["no marker"].replace(
        "{{ m", "{{ ' ' if m.role == 'assistant' else '' }}{{ m"
    )
    assert spans_of(templated(spaced), talk) == [" Here.\n\nThere.", " Yes."]
    tokenizer = chat_tokenizer("bytes", "human-assistant")
    tokenizer.chat_template = UNMARKED.sub("", tokenizer.chat_template)
    assert spans_of(tokenizer, TALK[2:]) == ["In the hall 😀</s>", "  Café\n</s>"]


@pytest.mark.parametrize("content", [None, "Let me look."])
def test_tool_calls_are_trained_and_tool_messages_are_not(content):
    """Also where the template opens an answer with empty thinking."""
    template = (
        "{% for m in messages %}CHECK<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in"
        " m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{%"
        " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{%"
        " endif %}"
    )
    call = {"type": "function", "function": {"name": "find", "arguments": {"what": "lamp"}}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    talk = [TALK[1], answer, {"role": "tool", "content": "hall"}]
    called = '<call>{"name": "find", "arguments": {"what": "lamp"}}</call><|im_end|>'
    assert spans_of(templated(template.replace("CHECK", "")), talk) == [f"{content or ''}{called}"]
    missing = "m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
    check = f"{{% if {missing} %}}{{{{ raise_exception('no call') }}}}{{% endif %}}"
    with pytest.raises(UserError, match="cannot be found for certain"):
        spans_of(templated(template.replace("CHECK", check)), talk)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace(
            "{{ m.content }}", "{{ m.content if m.role != 'assistant' or loop.last }}"
        ),  # drops answers
        CHATML.replace(
            "{{ m.content }}", "{{ m.content | upper if loop.index < 4 else m.content }}"
        ),
        CHATML + "{{ messages[2].content | length }}",
    ],
)
def test_an_answer_that_cannot_be_found_is_refused(template):
    talk = [m if m["role"] == "assistant" else {**m, "content": m["content"].upper()} for m in TALK]
    with pytest.raises(UserError, match="--train_on last"):
        spans_of(templated(template), talk)


def test_tokens_of_ranges_of_characters():
    offsets = [(0, 2), (2, 2), (2, 5), (5, 6), (6, 9)]
    assert token_spans(offsets, [(2, 5)]) == [(2, 3)]
    assert token_spans(offsets, [(1, 4), (5, 9)]) == [(0, 3), (3, 5)]
    assert token_spans(offsets, [(0, 2), (6, 7)]) == [(0, 1), (4, 5)]


# As those of DeepSeek R1 and Qwen 3: the opening begins the thinking, and earlier answers lose
# theirs.
OPENS_THINK = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last"
    " = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}{%"
    " set thought = '' %}{% if m.role == 'assistant' and '</think>' in text %}{% set thought ="
    " text.split('</think>')[0].split('<think>')[-1].strip() %}{% set text ="
    " text.split('</think>')[-1].strip() %}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}{% if"
    " m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n'"
    " }}{% endif %}{{ text + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# The last answer ends with a token that earlier ones do not have: gpt-oss; those of GLM end with
# the next role.
OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[final]{% endif"
    " %}{{ m.content }}{% if m.role == 'assistant' and loop.last and not add_generation_prompt"
    " %}<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)
NEXT_ROLE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"  # noqa: E501
PLAIN_CHATML = SHAPES["ChatML"].template
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>")
ASK, AGAIN = (
    {"role": "user", "content": "Where is the lamp?"},
    {"role": "user", "content": "And its\ncolour?"},
)
LAMP_TALK = [ASK, {"role": "assistant", "content": "In the hall."}, AGAIN]


def thinking(thought: str, text: str) -> dict:
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}"}


@pytest.mark.parametrize("name", SHAPES)
def test_the_end_of_turn_token_is_found_in_the_template_and_stands_once(name):
    tokenizer, shape = shaped(name)
    found = turn_end(tokenizer)
    assert (found.token_id, found.dropped) == (
        tokenizer.convert_tokens_to_ids(shape.end),
        shape.dropped,
    )
    assert found.kept.strip() == shape.end
    assert answer_ends(tokenizer) == tuple(dict.fromkeys((tokenizer.eos_token_id, found.token_id)))
    plain = tokenizer.decode(encode_answer(tokenizer, [ASK], "In the hall."))
    for brought in (shape.end, shape.eos, shape.end * 2):
        answer = tokenizer.decode(encode_answer(tokenizer, [ASK], f"In the hall.{brought}"))
        assert answer.replace("\n", "") == plain.replace("\n", "")
    assert tokenizer.decode(encode_answer(tokenizer, "Where?", "Here.")) == f"Here.{shape.eos}"


THINK = (
    EACH
    + "<u>{{ m.content }}{{ '<e>' if m.role == 'assistant' }}"
    + EVERY
    + opened_by("<u><think>\n")
)


@pytest.mark.parametrize(
    ("template", "tokens", "answer"),
    [
        (
            EACH + "{{ m.role }}: {{ m.content }}\n" + EVERY + opened_by("assistant: "),
            ("<|im_end|>",),
            "Here.</s>",
        ),
        (PLAIN_CHATML, (), "Here.</s>"),  # generation cannot stop at a string of several tokens
        (THINK, ("<u>", "<e>"), "Here.<e>"),  # renders the opening in two ways
    ],
)
def test_an_answer_ends_with_eos_if_the_template_has_no_token_of_its_own(template, tokens, answer):
    tokenizer = special_tokenizer(template, "</s>", tokens)
    assert tokenizer.decode(encode_answer(tokenizer, [ASK], "Here.")) == answer
    assert len(answer_ends(tokenizer)) == 1 + answer.endswith("<e>")


def test_the_example_that_a_template_renders_may_have_other_added_tokens_or_be_rejected():
    tokenizer = special_tokenizer(
        EACH + "{{ m.content }}  </answer><|im_end|>\n" + EVERY, "</s>", ("<|im_end|>",)
    )
    # special tokens precede them, and spaces do not count
    tokenizer.add_tokens(["  ", "\n", "</answer>"])
    assert turn_end(tokenizer).kept == "  </answer><|im_end|>"
    tokenizer.chat_template = EACH + "{{ m.content }}  </answer>\n" + EVERY
    assert turn_end(tokenizer) == TurnEnd(
        "  </answer>", "\n", tokenizer.convert_tokens_to_ids("</answer>")
    )
    for template in (
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% broken",
        {"tools": "x"},
        "no message",
        None,
    ):
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
        "I saw it.\n</think>\n\nIn the hall.<|im_end|>",
        "No idea.\n</think>\n\nFind it.<|im_end|>",
    ]


DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] if m.role"
    " == 'assistant' else m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\nOPENED{% endif %}"
)


@pytest.mark.parametrize(
    ("opened", "answer", "expected"),
    [
        ("<think>\n", "<think>\nUm.</think>Here.", "Um.</think>Here."),
        ("<think>\n", "Um.</think>Here.", "Um.</think>Here."),
        (
            "",
            "<think>\nUm.</think>Here.",
            "<think>\nUm.</think>Here.",
        ),  # its template would drop what is trained
        ("", "Here.", "Here."),
        ("Answers:\n", "s:\nlamp", "s:\nlamp"),  # begins as the opening ends, and keeps its start
    ],
)
def test_the_thinking_of_an_answer_is_kept_and_opened_once(opened, answer, expected):
    tokenizer = special_tokenizer(DROPS.replace("OPENED", opened), "</s>", MARKERS)
    assert tokenizer.decode(encode_answer(tokenizer, [ASK], answer)) == f"{expected}<|im_end|>"
    tokenizer.chat_template = OPENS_THINK  # whose layout an answer in another one gets
    answer = encode_answer(tokenizer, [ASK], "<think>I saw it.</think> In the hall.")
    assert tokenizer.decode(answer) == "I saw it.\n</think>\n\nIn the hall.<|im_end|>"


# Each turn of a talk


@pytest.mark.parametrize(
    ("template", "earlier", "last"),
    [
        (OTHER_END, "[final]{}<|im_end|>", "[final]{}<|endoftext|>"),
        (NEXT_ROLE, "{}<|user|>", "{}<|endoftext|>"),
    ],
    ids=["gpt-oss", "GLM"],
)
def test_each_trained_turn_ends_with_its_end_token(template, earlier, last):
    tokenizer = special_tokenizer(template, "<|endoftext|>", MARKERS)
    talk = [*LAMP_TALK, {"role": "assistant", "content": "red."}, ASK]
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
        encode_example(tokenizer, Example("", [text]), True)
        for text in ("<s>In the hall.", "In the hall.")
    )
    ids = [*with_bos.prompt, *with_bos.answers[0]]
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids[1:-1] == tokenizer.encode("<s>In the hall.", add_special_tokens=False)[1:]
    assert with_bos.prompt == without.prompt


@pytest.mark.parametrize(
    ("end", "after"),
    [
        ("<|im_end|>", ""),
        ("<|im_end|>", "\n<|endoftext|>"),
        ("<|endoftext|>", " \n\n"),
    ],
)
@pytest.mark.parametrize(
    "prompt", ["", "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"]
)
def test_a_rendered_text_keeps_its_one_end(end, after, prompt):
    tokenizer = special_tokenizer(PLAIN_CHATML, "<|endoftext|>", MARKERS)
    found = encode_example(tokenizer, Example(prompt, [f"In the hall.{end}{after}"]), True)
    assert tokenizer.decode(found.answers[0]) == f"In the hall.{end}"
    assert found.answers == [encode_answer(tokenizer, prompt, f"In the hall.{end}{after}")]
    scored = encode_finished(tokenizer, f"{prompt}In the hall.{end}{after}")
    assert tokenizer.decode(scored).endswith(
        "In the hall.<|im_end|>" if prompt else f"In the hall.{end}"
    )
    chat = encode_answer(tokenizer, [ASK], f"In the hall.{end}{after}")
    assert tokenizer.decode(chat) == "In the hall.<|im_end|>"


# What depends on it: generation and saved models


@pytest.mark.parametrize(
    ("listed", "after"), [(1, [1, 4]), ([4, 9], [1, 4, 9]), ([8, 9], [1, 4]), (None, [1, 4])]
)
def test_saved_models_list_every_final_token(assets, tmp_path, listed, after):
    lm = LlamaForCausalLM(tiny_config())
    lm.generation_config.eos_token_id = listed
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    save_model(
        SimpleNamespace(module=PolicyModel(lm)), tokenizer, tmp_path, form=SavedForm(ends=(1, 4))
    )
    assert LlamaForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == after
    # generation stops at these, too
    eos, end = shaped("Phi")[0].convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    for ids, others in ((None, ()), (7, ()), ([7, 9], ()), ([end, 9, eos], (9,))):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))
        assert end_ids(shaped("Phi")[0], model) == (eos, end, *others)


@pytest.mark.parametrize(("pad", "kept"), [(0, 0), (1, None), (4, None)])
def test_the_pad_token_of_a_saved_reward_model_is_no_final_token(assets, tmp_path, pad, kept):
    """transformers scores a sequence at its last token other than PAD."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "reward")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    module = ScalarModel(LlamaForSequenceClassification(tiny_config(num_labels=1)))
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path, form=SavedForm(ends=(1, 4)))
    assert LlamaForSequenceClassification.from_pretrained(tmp_path).config.pad_token_id == kept


HALL_TALK = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "In the hall."},
    {"role": "user", "content": "And now?"},
]


def row_of(encoded) -> dict:
    return {
        "prompt_ids": encoded.prompt,
        "answers": encoded.answers,
        "prompt_spans": encoded.prompt_spans,
    }


def sample(kind: str, answers: list[str], prompt=HALL_TALK) -> str:
    tokenizer = chat_tokenizer(kind, "zephyr")
    encoded = encode_example(tokenizer, Example(prompt, answers), True)
    return row_sample(tokenizer, row_of(encoded))


@pytest.mark.parametrize("kind", ["bytes", "letters"])
def test_trained_parts_are_marked(kind):
    expected = (
        "<|user|>\nWhere is it?</s>\n<|assistant|>\n⟦In the hall.</s>⟧\n<|user|>\nAnd"
        " now?</s>\n<|assistant|>\n"
    )
    assert sample(kind, ["There."]) == expected + "⟦There.</s>⟧"
    assert sample(kind, ["There.", "No."]) == expected + "⟦There.</s>⟧\nor ⟦No.</s>⟧"
    text = sample(kind, ["c" * 3000 + "b"])
    assert (
        text.startswith("<|user|>")
        and text.endswith("cb</s>⟧")
        and len(text) == MOST_CHARACTERS + len(" [...] ")
    )
    assert sample(kind, []) == expected.replace("⟦", "").replace("⟧", "")


def test_the_first_row_of_each_data_set_is_logged(said):
    tokenizer = chat_tokenizer("letters", "zephyr")
    encoded = [row_of(encode_example(tokenizer, Example(letter, ["x"]))) for letter in "abcd"]
    rows = Dataset.from_list(
        [row | {"source": source} for row, source in zip(encoded, (1, 1, 0, 0), strict=True)]
    )
    for count, shown in (
        (1, ["first c", "second a"]),
        (3, ["first c", "first d", "second a", "second b"]),
    ):
        said.clear()
        log_samples(tokenizer, rows, ("first", "second"), count)
        lines = [text.split() for text in shown]
        assert said == [
            f"data: {name}: a sample, answers in ⟦ ⟧:\n{prompt}⟦x</s>⟧" for name, prompt in lines
        ]


def test_a_sample_and_a_refusal_do_not_control_the_terminal(capsys):
    tokenizer = chat_tokenizer("bytes", "zephyr")
    evil = "a\x1b[2Jb\x9b1mc\r\u202ed\te"
    encoded = encode_example(tokenizer, Example([{"role": "user", "content": evil}], [evil]), True)
    log_samples(tokenizer, Dataset.from_list([row_of(encoded) | {"source": 0}]), ["d"])
    for shown in (capsys.readouterr().out, str(UserError(f"row 1: {evil}"))):
        assert "a\\x1b[2Jb\\x9b1mc\\r\\u202ed\te" in shown
        assert not set(shown) & set("\x1b\x9b\r\u202e")


def parted(tokenizer, *answers):
    """The text of a prompt, and the text of each answer of several messages after it, with the
    trained parts in brackets."""
    encoded = encode_example(tokenizer, Example(TALK[:2], list(answers)))
    texts = [tokenizer.decode(encoded.prompt)]
    for ids, spans in zip(encoded.answers, encoded.untrained_spans, strict=True):
        text = ""
        begin = 0
        for start, end in spans:
            text += f"[{tokenizer.decode(ids[begin:start])}]{tokenizer.decode(ids[start:end])}"
            begin = end
        texts.append(f"{text}[{tokenizer.decode(ids[begin:])}]")
    return texts


@pytest.mark.parametrize("name", ["chatml", "llama-3", "zephyr"])
def test_an_answer_of_several_messages_trains_what_the_assistant_says(name):
    """All of it is what the template renders of the conversation."""
    tokenizer = chat_tokenizer("bytes", name)
    one = [{"role": "assistant", "content": text} for text in ("Here.", "There.")]
    asked = {"role": "user", "content": "And now?"}
    rest = [{"role": "assistant", "content": text} for text in ("Gone.", "Still there.")]
    prompt, *answers = parted(tokenizer, *([a, asked, b] for a, b in zip(one, rest, strict=True)))
    end = turn_end(tokenizer)
    for answer, first, last in zip(answers, one, rest, strict=True):
        begun, between, ended = re.fullmatch(r"\[(.*?)\](.*)\[(.*)\]", answer, re.S).groups()
        assert [begun, ended] == [first["content"] + end.kept, last["content"] + end.kept]
        assert "And now?" in between
        whole = tokenizer.apply_chat_template([*TALK[:2], first, asked, last], tokenize=False)
        assert prompt + begun + between + ended + end.dropped == whole


def test_a_turn_of_several_messages_that_is_excluded_is_not_trained():
    """The printed sample shows it too."""
    tokenizer = chat_tokenizer("bytes", "chatml")
    excluded = {"role": "assistant", "content": "Here.", "_context": True}
    answer = [
        excluded,
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "No"},
    ]
    [_, text, plain] = parted(tokenizer, answer, "Yes")
    assert text.startswith("[]Here.<|im_end|>[]") and text.endswith("[No<|im_end|>]")
    assert plain == "[Yes<|im_end|>]"
    encoded = encode_example(tokenizer, Example(TALK[:2], [answer, "Yes"]))
    row = {
        "prompt_ids": encoded.prompt,
        "answers": encoded.answers,
        "untrained_spans": encoded.untrained_spans,
    }
    sample, other = row_sample(tokenizer, row).split("\nor ")
    assert "⟦Here" not in sample and sample.endswith("⟦No<|im_end|>⟧")
    assert other.endswith("⟦Yes<|im_end|>⟧") and other.count("⟦") == 1
