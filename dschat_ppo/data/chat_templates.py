"""The chat template of a run: `--chat_template` and `--chat_template_kwargs`.

Both become part of the tokenizer's own template text. It is saved with the model, so later steps, generation, the
reward server and plain transformers render the same text without these flags.
"""

from __future__ import annotations

import json
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
    logger().info(f"chat template: {flags.chat_template_kwargs} ({VARIABLES_FLAG})")
    return tokenizer


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja text of a named template for `tokenizer`. Turns end with the template's own token if the tokenizer has
    it, otherwise with EOS. The text starts with BOS if the tokenizer writes BOS before plain text."""
    (end, others), known = NAMED[name], tokenizer.get_vocab()
    has_end = end in known
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    head = f"{{%- set start = {'bos_token' if begins else repr('')} %}}\n"
    head += f"{{%- set end_of_turn = {repr(end) if has_end else 'eos_token'} %}}\n"
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
    """The text of a Jinja file, whose syntax is checked; `check_rendered` checks what it renders."""
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
    return text


def with_variables(templates: dict[str, str], variables: dict[str, Any]) -> dict[str, str]:
    """Jinja texts that set `variables` first, each those that it reads, and otherwise render as before. Values that an
    earlier call has set under the same names are replaced. A name that no template reads is refused."""
    try:
        json.dumps(variables, allow_nan=False)
    except ValueError:
        raise UserError(f"{VARIABLES_FLAG}: a number is not finite") from None
    result, readable = {}, set[str]()
    for which, text in templates.items():
        for name in variables:
            text = re.sub(rf"\A((?:{_BAKED.format('[A-Za-z_0-9]+')})*?){_BAKED.format(re.escape(name))}", r"\1", text)
        with reading(f"{VARIABLES_FLAG}: the tokenizer's chat template cannot be parsed"):
            read = meta.find_undeclared_variables(_JINJA.parse(text)) - _GIVEN  # without those that it sets itself
        readable |= read
        # Python writes values as Jinja reads them, on one line. In transformers' Jinja the line break after a block is
        # no output, and what follows starts a line, as before.
        lines = [f"{{%- set {name} = {value!r} %}}\n" for name, value in variables.items() if name in read]
        result[which] = "".join(lines) + text
    for name in variables:
        if name not in readable:
            known = f"it reads {', '.join(sorted(readable))}" if readable else "it reads none"
            raise UserError(f"{VARIABLES_FLAG}: the chat template reads no variable '{name}' of yours; {known}")
    return result
