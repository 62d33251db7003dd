"""Tokenizers with chat templates in the shapes of published ones, and the templates by name."""

from dataclasses import dataclass

from tiny_tokenizers import KINDS, tokenizer_of
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dschat_ppo.data.templates import NAMED, named_template
from dschat_ppo.tools.toy import make_tokenizer

_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    **dict.fromkeys(NAMED),
    "BOS by the template": "<s>" + _CHATML + _OPENED,
    "space before answers": (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role != 'assistant' else"
        " ' ' + m.content + '</s>' }}{% endfor %}"
    ),
    "opening ends with a token": _CHATML + "{% if add_generation_prompt %}<|im_start|>{% endif %}",
    "no marker": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
}
CASES = [(kind, name) for kind in KINDS for name in TEMPLATES]


def templated(template: str, kind: str = "bytes") -> PreTrainedTokenizerBase:
    """A tokenizer of a kind with a template."""
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = template
    return tokenizer


def chat_tokenizer(kind: str, name: str) -> PreTrainedTokenizerBase:
    """A tokenizer of a kind with a template of `TEMPLATES`."""
    return templated(TEMPLATES[name] or named_template(name, tokenizer_of(kind)), kind)


# The templates follow the structure of those of the models that they are named after


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
        EACH
        + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        + EVERY
        + opened_by("<|im_start|>assistant\n"),
        "</s>",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "\n",
    ),
    "Gemma": Shape(
        "<bos>" + EACH + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n" + EVERY + opened_by("<start_of_turn>model\n"),
        "<eos>",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "\n",
    ),
    "Phi": Shape(
        EACH
        + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        + EVERY
        + "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "<|endoftext|>",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        "\n<|endoftext|>",
    ),
    "Llama-3": Shape(
        "<|begin|>"
        + EACH
        + "<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot_id|>"
        + EVERY
        + opened_by("<|header|>assistant<|/header|>\n\n"),
        "<|end_of_text|>",
        ("<|begin|>", "<|header|>", "<|/header|>", "<|eot_id|>"),
        "<|eot_id|>",
        "",
    ),
    "Mistral": Shape(
        "<s>" + EACH + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
        "{{ m.content }}</s>{% endif %}" + EVERY,
        "</s>",
        ("<s>",),
        "</s>",
        "",
    ),
    "Zephyr": Shape(
        EACH
        + "<|{{ m.role }}|>\n{{ m.content + eos_token }}\n"
        + EVERY
        + opened_by("<|assistant|>\n"),
        "</s>",
        (),
        "</s>",
        "\n",
    ),
    "line break first": Shape(
        EACH + "[{{ m.role }}]\n{{ m.content }}\n<|im_end|>\n" + EVERY + opened_by("[assistant]\n"),
        "</s>",
        ("<|im_end|>",),
        "<|im_end|>",
        "\n",
    ),
}


def special_tokenizer(
    template: str, eos: str, tokens: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """The toy tokenizer with a template, an EOS and further special tokens."""
    tokenizer = make_tokenizer(["Where is the lamp? It is in the hall."])
    tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return tokenizer


def shaped(name: str, shapes: dict[str, Shape] = SHAPES) -> tuple[PreTrainedTokenizerFast, Shape]:
    shape = shapes[name]
    return special_tokenizer(shape.template, shape.eos, shape.tokens), shape


# Templates with tools


_TOOLS = "{% if tools %}<|im_start|>system\nCall these: {{ tools | tojson }}<|im_end|>\n{% endif %}"
_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
WITH_TOOLS = {
    "Hermes": Shape(  # and Qwen 2.5: results of one turn are one message of the user
        _TOOLS
        + EACH
        + "{% set next = messages[loop.index0 + 1] if not loop.last else m %}{% if m.role == 'tool'"
        " %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\n'"
        " }}<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or next.role !="
        " 'tool' %}<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}{% if m.content %}{{"
        " '\n' + m.content }}{% endif %}{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
        + _CALL
        + "}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
        + EVERY
        + opened_by("<|im_start|>assistant\n"),
        "</s>",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "\n",
    ),
    "Llama-3": Shape(  # one call, which is all of a message
        "<|begin|>"
        + EACH
        + "<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>\n\n"
        "{% if m.role == 'user' and loop.first %}Call these: {{ tools | tojson }}\n\n{% endif %}"
        "{% for c in m.tool_calls or [] %}"
        + _CALL.replace('arguments"', 'parameters"')
        + "}{% else %}"
        "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}{% endfor %}<|eot_id|>"
        + EVERY
        + opened_by("<|header|>assistant<|/header|>\n\n"),
        "<|end_of_text|>",
        ("<|begin|>", "<|header|>", "<|/header|>", "<|eot_id|>"),
        "<|eot_id|>",
        "",
    ),
    "Mistral": Shape(  # the tools stand before the last message of the user
        "<s>{% set asked = messages | selectattr('role', 'equalto', 'user') | list | last %}"
        + EACH
        + "{% if m.role == 'user' %}{% if m == asked and tools %}[AVAILABLE_TOOLS] {{ tools |"
        " tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls"
        " %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        + _CALL
        + ', "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>'
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] "
        '{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% else %} {{ m.content }}</s>{% endif %}" + EVERY,
        "</s>",
        (
            "<s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        "</s>",
        "",
    ),
}
