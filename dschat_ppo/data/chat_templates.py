"""The chat template of a run: `--chat_template` and `--chat_template_kwargs`.

Both become part of the tokenizer's own template text. It is saved with the model, so later steps, generation, the
reward server and plain transformers render the same text without these flags.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.errors import UserError, reading

FLAG, VARIABLES_FLAG = "--chat_template", "--chat_template_kwargs"
# Variables and functions that each rendering has.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_BAKED = r"\{{%- set {} = [^\n]* %\}}\n"  # a line of `with_variables`

# Of the named templates. `start` and `end_of_turn` are set above this text, see `named_template`.
_CHECKS = """\
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception("the template NAME has no form for the role '" ~ message.role ~ "'") }}
{%- endif %}
{%- if message.tool_calls or tools %}
{{- raise_exception('the template NAME has no form for tools') }}
{%- endif %}
{%- endfor %}
{{- start }}
"""


@dataclass(frozen=True)
class NamedTemplate:
    """A template that `--chat_template` knows by name: `text` is its Jinja text after `_CHECKS`, `end` the token that
    ends a turn (None for the tokenizer's EOS), `tokens` further tokens that it writes."""

    end: str | None
    tokens: tuple[str, ...]
    text: str


# DeepSpeed-Chat's data sets give " Human: QUESTION Assistant:" and " ANSWER", without line breaks.
NAMED = {
    "chatml": NamedTemplate(
        "<|im_end|>",
        ("<|im_start|>",),
        """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + end_of_turn }}{%- endgeneration %}
{%- else %}
{{- message.content + end_of_turn }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    ),
    "llama-3": NamedTemplate(
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        """\
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content | trim + end_of_turn }}{%- endgeneration %}
{%- else %}
{{- message.content | trim + end_of_turn }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    ),
    "zephyr": NamedTemplate(
        None,
        (),
        """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + end_of_turn }}{%- endgeneration %}
{%- else %}
{{- message.content + end_of_turn }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
""",
    ),
    "human-assistant": NamedTemplate(
        None,
        (),
        """\
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- ' System: ' + message.content }}
{%- elif message.role == 'user' %}
{{- ' Human: ' + message.content }}
{%- else %}
{{- ' Assistant:' }}
{%- generation %}{{- ' ' + message.content + end_of_turn }}{%- endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- ' Assistant:' }}
{%- endif %}
""",
    ),
}


class _GenerationTag(Extension):
    """`{% generation %}`, by which templates mark the assistant's text; here it only has to parse."""

    tags = {"generation"}  # noqa: RUF012  the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_JINJA = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])


UNBOUNDED = "computes a power (**) or a product of two variables, which can take forever; remove it"


@cache
def has_unbounded_numbers(template: str) -> bool:
    """Whether the Jinja text computes powers or products of two variables; False if it has a syntax error. Repeated
    squaring gives numbers of millions of digits, and nothing interrupts a single operation on them. Raises
    `RecursionError` for a text that is nested too deeply."""
    try:
        tree = _JINJA.parse(template)
    except jinja2.TemplateSyntaxError:  # rendering reports it
        return False
    factors = [(product.left, product.right) for product in tree.find_all(nodes.Mul)]
    products = [pair for pair in factors if not any(isinstance(factor, nodes.Const) for factor in pair)]
    return bool(products) or tree.find(nodes.Pow) is not None


def with_template_flags(tokenizer: PreTrainedTokenizerBase, flags: DataFlags) -> PreTrainedTokenizerBase:
    """Give `tokenizer`, in place, the template of `--chat_template` with the variables of `--chat_template_kwargs`."""
    if flags.chat_template in NAMED:
        tokenizer.chat_template = named_template(flags.chat_template, tokenizer)
    elif flags.chat_template is not None:
        tokenizer.chat_template = template_of_file(flags.chat_template)
        logger().info(f"chat template: {flags.chat_template}")
    variables, found = flags.template_variables, tokenizer.chat_template
    if not variables:
        return tokenizer
    if not found:
        raise UserError(f"{VARIABLES_FLAG}: the tokenizer has no chat template; give one with {FLAG}")
    # Some tokenizers have several templates, such as "default" and "tool_use".
    texts = with_variables(found if isinstance(found, dict) else {"default": found}, variables)
    tokenizer.chat_template = texts if isinstance(found, dict) else texts["default"]
    shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
    logger().info(f"chat template: {shown} ({VARIABLES_FLAG})")
    return tokenizer


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja text of a named template for `tokenizer`. Turns end with the template's own token if the tokenizer has
    it, otherwise with EOS. The text starts with BOS if the tokenizer writes BOS before plain text."""
    named, known = NAMED[name], tokenizer.get_vocab()
    has_end = named.end in known
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    head = f"{{%- set start = {'bos_token' if begins else _literal('')} %}}\n"
    head += f"{{%- set end_of_turn = {_literal(named.end) if has_end else 'eos_token'} %}}\n"
    end = named.end if has_end else tokenizer.eos_token
    note = "" if has_end or named.end is None else f", because the tokenizer has no token {named.end}"
    logger().info(f"chat template: {name}; turns end with {end}{note}")
    missing = [token for token in named.tokens if token not in known]
    if missing:
        logger().warning(
            f"{FLAG} {name}: the tokenizer has no token {' or '.join(missing)}, so it becomes several tokens of "
            "plain text"
        )
    return head + _CHECKS.replace("NAME", name) + named.text


def template_of_file(name: str) -> str:
    """The text of a Jinja file, checked: syntax, depth, no numbers of unbounded size, and that it uses `messages`."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{FLAG} {name}: neither a file nor one of {', '.join(NAMED)}")
    with reading(f"{FLAG} {name}: cannot be read as UTF-8 text"):
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    with reading(f"{FLAG} {name}: cannot be parsed"):  # Python's parser and Jinja's limit the nesting
        if has_unbounded_numbers(text):
            raise UserError(f"{FLAG} {name}: {UNBOUNDED}")
        try:
            _JINJA.from_string(text)  # also finds unknown filters, which parsing does not
        except jinja2.TemplateSyntaxError as problem:
            raise UserError(f"{FLAG} {name}, line {problem.lineno}: {problem.message}") from None
        variables = _variables_read(text)
    if "messages" not in variables:
        raise UserError(f"{FLAG} {name}: never uses `messages`, so every conversation would give the same text")
    return text


def with_variables(templates: dict[str, str], variables: dict[str, Any]) -> dict[str, str]:
    """Jinja texts that set `variables` first, each those that it reads, and otherwise render as before. Values that an
    earlier call has set under the same names are replaced. A name that no template reads is refused."""
    result, readable = {}, set[str]()
    for which, text in templates.items():
        for name in variables:
            text = re.sub(rf"\A((?:{_BAKED.format('[A-Za-z_0-9]+')})*?){_BAKED.format(re.escape(name))}", r"\1", text)
        with reading(f"{VARIABLES_FLAG}: the tokenizer's chat template cannot be parsed"):
            read = _variables_read(text) - _GIVEN
        readable |= read
        # In transformers' Jinja the line break after a block is no output, and what follows starts a line, as before.
        lines = [f"{{%- set {name} = {_literal(variables[name])} %}}\n" for name in variables if name in read]
        result[which] = "".join(lines) + text
    for name in variables:
        if name in _GIVEN:
            raise UserError(f"{VARIABLES_FLAG}: '{name}' is set by each rendering; remove it")
        if name not in readable:
            known = f"it reads {', '.join(sorted(readable))}" if readable else "it reads none"
            raise UserError(f"{VARIABLES_FLAG}: the chat template reads no variable '{name}'; {known}")
    return result


def _variables_read(template: str) -> set[str]:
    """Variables that `template` reads without setting them first."""
    return meta.find_undeclared_variables(_JINJA.parse(template))


def _literal(value: Any) -> str:
    """A finite JSON value as a Jinja literal on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{VARIABLES_FLAG}: {value} is not a finite number")
    if value is None or isinstance(value, bool):
        return str(value).lower()
    # Jinja reads the escapes of JSON in texts, except a pair of surrogates.
    return json.dumps(value, ensure_ascii=False)
