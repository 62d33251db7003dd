"""Hashes of the token rows that some rows give with each kind of chat template."""

import hashlib
import json
from dataclasses import replace
from functools import cache

import pyarrow
import torch
from tiny_tokenizers import tokenizer_of

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.data.examples import SPLIT_SEED
from dschat_ppo.data.fitting import Fitted
from dschat_ppo.data.form_choice import detect_form
from dschat_ppo.data.forms import check_flags_used
from dschat_ppo.data.templates import NAMED, named_template
from dschat_ppo.data.tokenise import TokeniseSettings, features_of, tokenise_batch
from dschat_ppo.errors import UserError

INST = (  # without generation marks, and with a space before answers
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content +"
    " eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
THINKS = (  # opens answers with <think>, drops earlier thoughts, renders tools and their calls
    "{% for t in tools or [] %}{{ '<|im_start|>tool\n' + t | tojson + '<|im_end|>\n' }}{% endfor"
    " %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content and"
    " loop.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}{{"
    " m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content"
    " }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor"
    " %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TEMPLATES = {  # name -> kind of tokenizer, template (a name of `NAMED`, Jinja text, or None)
    "none": ("pieces", None),
    "chatml": ("bytes", "chatml"),
    "llama-3": ("bytes with BOS", "llama-3"),
    "zephyr": ("bytes without markers", "zephyr"),
    "human-assistant": ("pieces, space everywhere", "human-assistant"),
    "inst": ("pieces", INST),
    "thinks": ("bytes", THINKS),
}


@cache
def tokenizer_with(template: str):
    kind, text = TEMPLATES[template]
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = named_template(text, tokenizer) if text in NAMED else text
    return tokenizer


def without_nulls(value):
    if isinstance(value, dict):
        return {
            key: without_nulls(inner) for key, inner in sorted(value.items()) if inner is not None
        }
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def hash_of(rows) -> str:
    """Of token rows without `digest` and `untrained_spans`; of a prompt's columns without those
    that are null."""
    left_out = ("digest", "source", "untrained_spans")
    plain = [{name: value for name, value in row.items() if name not in left_out} for row in rows]
    plain = [
        row | ({"row": without_nulls(json.loads(row["row"]))} if "row" in row else {})
        for row in plain
    ]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def tokens_of(given: list[dict], settings: dict, template: str, uses: dict) -> str:
    """For each use of some rows: its name and the hash of its token rows unless it is refused, as
    `prepare` refuses it. Without the files and the cache of `prepare`, which take ten times as
    long. `settings`: of `DataFlags`; `uses`: name -> (use, all turns, limit of tokens, truncation,
    and perhaps settings of the use)."""
    tokenizer, found = tokenizer_with(template), []
    flags = DataFlags(data_path=["d"], **settings)
    columns = list(dict.fromkeys(name for row in given for name in row))
    rows = [dict.fromkeys(columns) | json.loads(json.dumps(row)) for row in given]
    try:
        form = detect_form("d", columns, rows, tokenizer.chat_template is not None, flags)
        check_flags_used([form], flags)
    except UserError:
        return ""
    for name, (use, all_turns, limit, truncation, *more) in uses.items():
        step = StepData(
            use,
            replace(flags, truncation=truncation),
            limit,
            all_turns=all_turns,
            use_settings=more[0] if more else None,
        )
        how = TokeniseSettings(form, "d", columns, tokenizer, step)
        try:
            form.require(use)
        except UserError:  # the form has nothing for this use
            continue
        made = tokenise_batch(rows, [f"d, row {n}" for n in range(len(rows))], how)
        order = torch.randperm(len(rows), generator=shared_generator(SPLIT_SEED)).tolist()
        kept = [
            row
            for number in order
            for row in made
            if row["row_index"] == number and row["fitted"] != Fitted.DROPPED
        ]
        is_bad = any(row["problem"] for row in made)
        if kept and not is_bad and any(row["fitted"] != Fitted.ANSWER_CUT for row in made):
            schema = features_of(step).arrow_schema  # numbers as they are stored
            found.append(f"{name}:{hash_of(pyarrow.Table.from_pylist(kept, schema).to_pylist())}")
    return " ".join(found)
