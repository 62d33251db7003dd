"""Variables for the chat template in a column of the rows, as in SmolTalk2."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_tokenizers import EACH, EVERY, opened_by, special_tokenizer
from prepared import flags_for, write_jsonl

from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import MESSAGES, VARIABLES
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.templates import with_template_flags
from dschat_ppo.errors import UserError
from dschat_ppo.rewards.learned_reward import _example_to_score

TEMPLATE = (
    "{% if style %}<|im_start|>system\n{{ style }}<|im_end|>\n{% endif %}"
    + EACH
    + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    + EVERY
    + opened_by("<|im_start|>assistant\n{{ '' if thinks else '<think></think>' }}")
)
ASK = {"role": "user", "content": "Where?"}
THERE = {"role": "assistant", "content": "There."}
QUIET, LOUD = {"thinks": False, "style": "Be quiet."}, {"thinks": True, "style": None}
OPENED = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [f"<|im_start|>system\nBe quiet.<|im_end|>\n{OPENED}<think></think>", OPENED]
ROWS = {
    "sft": {"messages": [ASK, THERE]},
    "preference": {"prompt": [ASK], "chosen": [THERE], "rejected": [{**THERE, "content": "No."}]},
    "prompt": {"prompt": [ASK]},
}


def tokenizer_of(template=TEMPLATE):
    return special_tokenizer(template, "</s>", ("<|im_start|>", "<|im_end|>"))


def prepared(tmp_path, rows, use="sft", kind="jsonl", tokenizer=None, **settings):
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_jsonl(path, rows)
    flags = flags_for(tmp_path, str(path), use=use, apply_chat_template=None, **settings)
    tokenizer = with_template_flags(tokenizer or tokenizer_of(), flags)
    rows = prepare(StepData(use, flags, 200, eval_fraction=0.0, all_turns=True), tokenizer).train
    return [tokenizer.decode(ids) for ids in rows["prompt_ids"]], rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "json text"])
@pytest.mark.parametrize("use", ROWS)
def test_each_row_is_rendered_with_its_variables(use, kind, tmp_path):
    given = [json.dumps(each) if kind == "json text" else each for each in (QUIET, LOUD)]
    rows = [{**ROWS[use], "chat_template_kwargs": each} for each in given]
    prompts, found = prepared(tmp_path, rows, use, "jsonl" if kind == "json text" else kind)
    assert sorted(prompts) == sorted(PROMPTS)
    if use == "prompt":
        told = [json.loads(text)[VARIABLES] for text in found["row"]]
        assert sorted(told, key=len) == [{"thinks": True}, QUIET]


def test_earlier_answers_are_found_with_the_variables_of_the_row(tmp_path):
    talk = {"messages": [ASK, THERE, ASK, THERE], "chat_template_kwargs": QUIET}
    _, rows = prepared(tmp_path, [talk])
    [(start, stop)] = rows[0]["prompt_spans"]
    assert tokenizer_of().decode(rows[0]["prompt_ids"][start:stop]) == "There.<|im_end|>"


def test_a_variable_of_the_flag_goes_first(tmp_path):
    rows = [{"messages": [ASK, THERE], "chat_template_kwargs": QUIET}]
    prompts, _ = prepared(tmp_path, rows, chat_template_kwargs='{"style": "Sing."}')
    assert prompts == [PROMPTS[0].replace("Be quiet.", "Sing.")]


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"tone": "Sing."}, "reads no variable 'tone' of 'chat_template_kwargs'"),
        ({"messages": [1]}, "reads no variable 'messages'"),
        ("loud", "expected an object of variables"),
    ],
)
def test_variables_that_would_be_lost(variables, problem, tmp_path):
    rows = [{"messages": [ASK, THERE], "chat_template_kwargs": variables}]
    with pytest.raises(UserError, match=problem):
        prepared(tmp_path, rows)
    prompts, _ = prepared(tmp_path, rows, ignore_columns=["chat_template_kwargs"])
    assert prompts == [PROMPTS[1] + "<think></think>"]


def test_switches_and_empty_values_may_belong_to_other_templates(tmp_path):
    more = {"python_tools": [], "custom_instructions": "", "enable_thinking": True}
    rows = [{"messages": [ASK, THERE], "chat_template_kwargs": QUIET | more}]
    assert prepared(tmp_path, rows)[0] == PROMPTS[:1]


def test_a_reward_model_reads_them_too():
    tokenizer = tokenizer_of()
    row = {MESSAGES: [ASK], VARIABLES: QUIET | {"other": "x"}}
    ids = encode_example(tokenizer, _example_to_score(tokenizer, "", "There.", row)).prompt
    assert tokenizer.decode(ids) == PROMPTS[0]
