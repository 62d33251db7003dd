"""Templates as people have them: each answer once, each trained turn with its end, rendered in linear time."""

import pytest
from test_prepare import flags_for, write_jsonl
from test_turn_end import SHAPES, tokenizer_of
from tiny_tokenizers import KINDS, encode_answer
from tiny_tokenizers import tokenizer_of as any_tokenizer

from dschat_ppo.data.encode import encode_example, encode_finished, encode_prompt
from dschat_ppo.data.examples import Example
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.templates import answer_ends

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
DROPS_ALL_THINKING = OPENS_THINK.replace("thought + '\n</think>", "'</think>")
# The last answer ends with a token that earlier ones do not have: gpt-oss; those of GLM end with the next role.
OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[final]{% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|endoftext|>"
    "{% else %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEXT_ROLE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"  # noqa: E501
CHATML = SHAPES["ChatML"].template
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>")


def thinking(thought: str, text: str) -> dict:
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}"}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


ASK, AGAIN = user("Where is the lamp?"), user("And its colour?")
MULTI = [{"messages": [ASK, thinking("I saw it.", "In the hall."), AGAIN, thinking("It is red.", "red.")]}]
PAIRS = [
    {"prompt": [ASK], "chosen": [thinking("I saw it.", "In the hall.")], "rejected": [thinking("No idea.", "Find it.")]}
]


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "streaming_rows": 2}])
@pytest.mark.parametrize("template", [OPENS_THINK, DROPS_ALL_THINKING])
@pytest.mark.parametrize(("use", "rows"), [("sft", MULTI), ("sft", PAIRS), ("preference", PAIRS), ("prompt", PAIRS)])
def test_thinking_that_the_template_opens_is_opened_once(tmp_path, use, rows, template, streaming):
    tokenizer = tokenizer_of(template, "<|endoftext|>", MARKERS)
    path = write_jsonl(tmp_path / "rows.jsonl", rows * 3)
    flags = flags_for(tmp_path, path, use=use, apply_chat_template=None, **streaming)
    row = prepare(use, tokenizer, flags, 256, all_turns=use == "sft").train[0]
    answers = [tokenizer.decode(answer) for answer in row["answers"]]
    opening = tokenizer.decode(row["prompt_ids"])
    assert opening.endswith("<|im_start|>assistant\n<think>\n")
    assert opening.count("<think>") == 1
    wanted = ["It is red.\n</think>\n\nred.<|im_end|>"] if rows is MULTI else [
        "I saw it.\n</think>\n\nIn the hall.<|im_end|>", "No idea.\n</think>\n\nFind it.<|im_end|>"
    ]  # fmt: skip
    assert answers == wanted[: {"prompt": 0, "sft": 1, "preference": 2}[use]]


def test_an_answer_in_another_layout_gets_that_of_the_template():
    tokenizer = tokenizer_of(OPENS_THINK, "</s>", MARKERS)
    answer = encode_answer(tokenizer, [ASK], "<think>I saw it.</think> In the hall.")
    assert tokenizer.decode(answer) == "I saw it.\n</think>\n\nIn the hall.<|im_end|>"


@pytest.mark.parametrize("answer", ["lamp", "s:\nlamp", "<think>", "think>\nlamp"])
def test_an_answer_that_begins_as_the_opening_ends_keeps_its_start(answer):
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}Answers:\n", "</s>", MARKERS)
    assert tokenizer.decode(encode_answer(tokenizer, [ASK], answer)) == f"{answer}<|im_end|>"


TALK = [ASK, {"role": "assistant", "content": "In the hall."}, AGAIN, {"role": "assistant", "content": "red."}, ASK]


@pytest.mark.parametrize(
    ("template", "earlier", "last"),
    [
        (OTHER_END, "[final]{}<|im_end|>", "[final]{}<|endoftext|>"),
        (NEXT_ROLE, "{}<|user|>", "{}<|endoftext|>"),
    ],
    ids=["gpt-oss", "GLM"],
)
def test_each_trained_turn_ends_with_its_end_token(template, earlier, last):
    tokenizer = tokenizer_of(template, "<|endoftext|>", MARKERS)
    found = encode_example(tokenizer, Example(TALK, ["lamp"]), True)
    trained = [tokenizer.decode(found.prompt[start:stop]) for start, stop in found.prompt_spans]
    assert trained == [earlier.format("In the hall."), earlier.format("red.")]
    assert [tokenizer.decode(answer) for answer in found.answers] == [last.format("lamp")]
    assert found.prompt == encode_prompt(tokenizer, TALK)
    assert tokenizer.convert_ids_to_tokens(answer_ends(tokenizer)) == ["<|endoftext|>"]


@pytest.mark.parametrize("template", [OPENS_THINK, OTHER_END, NEXT_ROLE])
def test_four_times_the_turns_are_four_times_the_rendered_characters(template, monkeypatch):
    tokenizer = tokenizer_of(template, "<|endoftext|>", MARKERS)
    rendered = []

    def counted(*arguments, **settings):
        rendered.append(whole(*arguments, **settings))
        return rendered[-1]

    whole = type(tokenizer).apply_chat_template
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    counts = []
    for turns in (50, 200):
        rendered.clear()
        talk = [
            *[part for number in range(turns) for part in (user(f"q{number:3}"), thinking("x", f"a{number:3}"))],
            ASK,
        ]
        found = encode_example(tokenizer, Example(talk, ["lamp"]), True)
        assert len(found.prompt_spans) == turns
        counts.append(sum(map(len, rendered)))
    assert counts[1] < 4.2 * counts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_brings_its_own_bos_has_one(kind):
    tokenizer = any_tokenizer(kind)
    with_bos, without = (
        encode_example(tokenizer, Example("", [text]), True) for text in ("<s>In the hall.", "In the hall.")
    )
    ids = [*with_bos.prompt, *with_bos.answers[0]]
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids[1:-1] == tokenizer.encode("<s>In the hall.", add_special_tokens=False)[1:]
    assert with_bos.prompt == without.prompt


@pytest.mark.parametrize("after", ["", " \n\n", "\n<|endoftext|>"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("prompt", ["", "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"])
def test_a_rendered_text_keeps_its_one_end(end, after, prompt):
    tokenizer = tokenizer_of(CHATML, "<|endoftext|>", MARKERS)
    found = encode_example(tokenizer, Example(prompt, [f"In the hall.{end}{after}"]), True)
    assert tokenizer.decode(found.answers[0]) == f"In the hall.{end}"
    assert found.answers == [encode_answer(tokenizer, prompt, f"In the hall.{end}{after}")]
    scored = encode_finished(tokenizer, f"{prompt}In the hall.{end}{after}")
    assert tokenizer.decode(scored).endswith("In the hall.<|im_end|>" if prompt else f"In the hall.{end}")
    chat = encode_answer(tokenizer, [ASK], f"In the hall.{end}{after}")
    assert tokenizer.decode(chat) == "In the hall.<|im_end|>"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("truncation", ["left", "right", "middle", "drop"])
def test_plain_text_over_the_limit_is_cut_into_blocks(tmp_path, truncation, streaming):
    tokenizer = tokenizer_of(CHATML, "</s>")
    texts = ["aaaaaaa " * 60, "Short."]  # whose blocks are equal
    long, short = ([*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts)
    blocks = [long[start : start + 24] for start in range(0, len(long) - 1, 23)]
    expected = sorted([short] if truncation == "drop" else [*blocks, short])
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    stream = {"streaming": True, "streaming_rows": len(expected)} if streaming else {}
    flags = flags_for(tmp_path, path, truncation=truncation, bad_rows="skip", **stream)
    rows = prepare("sft", tokenizer, flags, 24).train
    assert sorted([*rows[i]["prompt_ids"], *rows[i]["answers"][0]] for i in range(len(rows))) == expected


def test_the_question_stays_if_the_answer_alone_is_over_the_limit(tmp_path):
    tokenizer = tokenizer_of(CHATML, "</s>", MARKERS)
    answers = ["It is red. " * 60, "In the hall."]
    rows = [{"messages": [ASK, {"role": "assistant", "content": answer}]} for answer in answers]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    for truncation in ("left", "right", "middle"):
        flags = flags_for(tmp_path, path, apply_chat_template=None, truncation=truncation)
        (cut,) = [row for row in prepare("sft", tokenizer, flags, 64).train if len(row["answers"][0]) > 20]
        assert cut["prompt_ids"] == encode_prompt(tokenizer, [ASK])
        assert len(cut["prompt_ids"]) + len(cut["answers"][0]) == 64
