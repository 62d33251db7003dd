"""Nulls in tools and their calls: those of JSON are values, those of Arrow are padding."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset
from prepared import load, write_jsonl

from dschat_ppo.data.messages import (
    read_messages,
    read_tools,
)

CALLS = [{"thing": "lamp", "to": None}, {"thing": "kite", "to": "me", "in": {"hall": None}}]
TO = {"type": ["string", "null"], "default": None}


def tool(parameters):
    return {"type": "function", "function": {"name": "find", "parameters": parameters}}


def row_of(arguments):
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Where?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    return {"messages": messages, "tools": [tool({"properties": {"to": TO}})]}


def read(row):
    """(arguments of the call, the tools) of a row."""
    function = read_messages(row["messages"], "messages")[1]["tool_calls"][0]["function"]
    return function["arguments"], read_tools(row["tools"], "tools")


@pytest.mark.parametrize("as_text", [True, False])
def test_nulls_of_json_are_values(as_text, tmp_path):
    rows = [row_of(json.dumps(arguments) if as_text else arguments) for arguments in CALLS]
    found = load(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows)).train
    for number, arguments in enumerate(CALLS):
        assert read(found[number]) == (arguments, rows[number]["tools"])


def test_null_keys_of_a_tool_that_are_no_values():
    given = {"name": "find", "strict": None, "parameters": {"to": {**TO, "enum": ["a", None]}}}
    expected = {key: value for key, value in given.items() if key != "strict"}
    assert read_tools([given], "tools") == [expected]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved"])
def test_nulls_of_arrow_are_padding(kind, tmp_path):
    """Also those of a second call that has other arguments; other columns keep their nulls."""
    rows = [{**row_of(arguments), "other": {"tool": None}} for arguments in CALLS]
    for row in rows:
        row["tools"][0]["function"]["parameters"]["properties"]["to"] = {"type": "string"}
        row["tools"].append(tool({"properties": {"thing": {"type": "string"}}}))
    if kind == "saved":
        path = tmp_path / "saved"
        Dataset.from_list(rows).save_to_disk(path)
    else:
        path = tmp_path / f"a.{kind}"
        table = pa.Table.from_pylist(rows)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
    found = load(tmp_path, path).train
    told = [read(found[number]) for number in range(2)]
    assert [arguments for arguments, _ in told] == [
        {"thing": "lamp"},
        {"thing": "kite", "to": "me", "in": {}},
    ]
    assert [tools for _, tools in told] == [row["tools"] for row in rows]
    assert found[0]["other"] == {"tool": None}


def test_null_keys_of_a_call_are_none():
    call = {"id": None, "type": "function", "function": {"name": "find", "arguments": None}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    expected = {"type": "function", "function": {"name": "find"}}
    assert read_messages(messages, "messages")[0]["tool_calls"] == [expected]
    assert call["id"] is None and call["function"]["arguments"] is None  # the row is as it was
