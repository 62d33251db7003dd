"""The tokens of earlier answers in a prompt, by generation marks and by a probe."""

import re
from dataclasses import replace

import pytest
from chat_tokenizers import TEMPLATES, chat_tokenizer, templated
from tiny_tokenizers import KINDS

from dschat_ppo.data.encode import encode_example, encode_prompt, token_spans
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import NAMED, turn_end
from dschat_ppo.errors import UserError

TALK = [
    {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "In the hall 😀"}, {"role": "user", "content": "In the hall 😀"},
    {"role": "assistant", "content": " Café\n"}, {"role": "user", "content": "And now?"},
]  # fmt: skip
CHATML = TEMPLATES["BOS by the template"]
UNMARKED = re.compile(r"\{%-? *(end)?generation *%\}")
# As those of Qwen 3 and DeepSeek R1: thinking is shown in the last answer only.
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].strip() if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = DROPS_THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def spans_of(tokenizer, prompt=TALK, tools=None) -> list[str]:
    """The text of each earlier answer; checks that the ids are those of the prompt."""
    found = encode_example(tokenizer, Example(prompt, ["lamp"], tools=tools), True)
    assert found.prompt == encode_prompt(tokenizer, prompt, tools)
    assert encode_example(tokenizer, Example(prompt, ["lamp"], tools=tools)) == replace(found, prompt_spans=[])
    ids, texts = found.prompt, []
    for start, stop in found.prompt_spans:  # decoded with what comes before: some tokenizers drop a first space
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
    end = tokenizer.convert_ids_to_tokens(turn_end(tokenizer).token)
    answers = {
        "llama-3": ["In the hall 😀", "Café"], "human-assistant": [" In the hall 😀", "  Café\n"]
    }.get(name, ["In the hall 😀", " Café\n"])  # fmt: skip
    found = [text.replace("<unk>", "") for text in spans_of(tokenizer)]  # for the letters that a vocabulary lacks
    assert found == [f"{answer}{end}" for answer in answers]


@pytest.mark.parametrize("kind", ["bytes", "letters"])
@pytest.mark.parametrize("template", [DROPS_THINKING, OPENS_THINKING])
def test_thinking_that_the_template_drops_is_not_trained(kind, template):
    answer = {"role": "assistant", "content": "<think>\nUm.\n</think>\n\nIn the hall."}
    prompt = [TALK[1], answer, TALK[5], answer, TALK[5]]
    assert spans_of(templated(template, kind), prompt) == ["In the hall.<|im_end|>"] * 2


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}ANSWER{% else %}{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FULL = ["In the hall 😀<|im_end|>", " Café\n<|im_end|>"]
ASIDE = "[aside]{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"


@pytest.mark.parametrize(("template", "expected"), [
    # marks that reach too far or not far enough end with the final token
    (MARKED.replace("ANSWER", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{{ '\n' }}"), FULL),
    (MARKED.replace("ANSWER", "{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}"), FULL),
    # wrong marks are not used
    (CHATML.replace("{{ m.role }}", "{% generation %}{{ m.role }}{% endgeneration %}"), FULL),
    (CHATML.replace("<s>", "<s>{% generation %}x{% endgeneration %}"), FULL),
    # marks leave out what the template writes before an answer
    (MARKED.replace("ANSWER", ASIDE), FULL),
    (MARKED.replace("ANSWER", UNMARKED.sub("", ASIDE)), [f"[aside]{text}" for text in FULL]),
])  # fmt: skip
def test_answers_by_marks(template, expected):
    assert spans_of(templated(template)) == expected


def test_answers_without_marks():
    """An answer may hold what the template writes after it; what precedes one belongs to it but at the start."""
    talk = [TALK[1], {"role": "assistant", "content": "Here.\n\nThere."}, {"role": "user", "content": ""},
            {"role": "assistant", "content": "Yes."}, TALK[5]]  # fmt: skip
    assert spans_of(templated(TEMPLATES["no marker"]), talk) == ["Here.\n\nThere.", "Yes."]
    spaced = TEMPLATES["no marker"].replace("{{ m", "{{ ' ' if m.role == 'assistant' else '' }}{{ m")
    assert spans_of(templated(spaced), talk) == [" Here.\n\nThere.", " Yes."]
    tokenizer = chat_tokenizer("bytes", "human-assistant")
    tokenizer.chat_template = UNMARKED.sub("", tokenizer.chat_template)
    assert spans_of(tokenizer, TALK[2:]) == ["In the hall 😀</s>", "  Café\n</s>"]


@pytest.mark.parametrize("content", [None, "Let me look."])
def test_tool_calls_are_trained_and_tool_messages_are_not(content):
    """Also where the template opens an answer with empty thinking."""
    template = (
        "{% for m in messages %}CHECK<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
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


@pytest.mark.parametrize("template", [
    CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' or loop.last }}"),  # drops answers
    CHATML.replace("{{ m.content }}", "{{ m.content | upper if loop.index < 4 else m.content }}"),
    CHATML + "{{ messages[2].content | length }}",
])  # fmt: skip
def test_an_answer_that_cannot_be_found_is_refused(template):
    talk = [m if m["role"] == "assistant" else {**m, "content": m["content"].upper()} for m in TALK]
    with pytest.raises(UserError, match="--train_on last"):
        spans_of(templated(template), talk)


def test_tokens_of_ranges_of_characters():
    offsets = [(0, 2), (2, 2), (2, 5), (5, 6), (6, 9)]
    assert token_spans(offsets, [(2, 5)]) == [(2, 3)]
    assert token_spans(offsets, [(1, 4), (5, 9)]) == [(0, 3), (3, 5)]
    assert token_spans(offsets, [(0, 2), (6, 7)]) == [(0, 1), (4, 5)]
