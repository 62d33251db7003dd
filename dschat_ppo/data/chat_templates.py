"""The chat template of a run: `--chat_template` and `--chat_template_kwargs`.

Both become part of the tokenizer's own template text. It is saved with the model, so later steps, generation, the
reward server and plain transformers render the same text without these flags.
"""

from __future__ import annotations

import json
import math
import re
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

# name -> (the token that ends a turn, None for the tokenizer's EOS; further tokens that the template writes)
NAMED: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "chatml": ("<|im_end|>", ("<|im_start|>",)),
    "llama-3": ("<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "zephyr": (None, ()),
    "human-assistant": (None, ()),  # the text of DeepSpeed-Chat's data sets: no line breaks
}
_TEXTS = Path(__file__).parent / "named_templates"  # `checks.jinja` precedes each of them


class _GenerationTag(Extension):
    """`{% generation %}`, by which templates mark the assistant's text; here it only has to parse."""

    tags = {"generation"}  # noqa: RUF012  the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_JINJA = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])


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
    (end, others), known = NAMED[name], tokenizer.get_vocab()
    has_end = end in known
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    head = f"{{%- set start = {'bos_token' if begins else _literal('')} %}}\n"
    head += f"{{%- set end_of_turn = {_literal(end) if has_end else 'eos_token'} %}}\n"
    note = "" if has_end or end is None else f", because the tokenizer has no token {end}"
    logger().info(f"chat template: {name}; turns end with {end if has_end else tokenizer.eos_token}{note}")
    missing = [token for token in others if token not in known]
    if missing:
        logger().warning(
            f"{FLAG} {name}: the tokenizer has no token {' or '.join(missing)}, so it becomes several tokens of "
            "plain text"
        )
    checks, text = (_TEXTS.joinpath(f"{part}.jinja").read_text(encoding="utf-8") for part in ("checks", name))
    return head + checks.replace("NAME", name) + text


def template_of_file(name: str) -> str:
    """The text of a Jinja file, checked: syntax, depth, and that it uses `messages`."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{FLAG} {name}: neither a file nor one of {', '.join(NAMED)}")
    with reading(f"{FLAG} {name}: cannot be read as UTF-8 text"):
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    with reading(f"{FLAG} {name}: cannot be parsed"):  # Python's parser and Jinja's limit the nesting
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
