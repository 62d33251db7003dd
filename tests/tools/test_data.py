"""The preview of data: what it shows is what training uses."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.data.batches import collate_sft
from dschat_ppo.data.prepare import prepare
from dschat_ppo.tools import data

OPEN, CLOSE = "⟦", "⟧"
THINGS = ("lamp", "chair", "rope", "kite", "jar", "drum", "clock", "scarf")
PLACES = ("hall", "attic", "shed", "garden", "cellar")


def questions(count: int) -> list[tuple[str, str, str]]:
    """(question, good answer, bad answer), all different."""
    pairs = [(thing, place) for place in PLACES for thing in THINGS][:count]
    return [
        (f"Where is the {thing}?", f"In the {place}.", f"Not in the {place}.")
        for thing, place in pairs
    ]


def turns(*contents: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)
    ]


def sharegpt(count: int) -> list[dict[str, Any]]:
    """ShareGPT: `conversations` of `from` and `value`, several turns."""
    return [
        {
            "id": f"c{number}",
            "conversations": [
                {"from": "human", "value": "Hi."},
                {"from": "gpt", "value": "Hello."},
                {"from": "human", "value": question},
                {"from": "gpt", "value": good},
            ],
        }
        for number, (question, good, _) in enumerate(questions(count))
    ]


def hh(count: int) -> list[dict[str, Any]]:
    """Anthropic/hh-rlhf: two transcripts that share all but the last turn."""
    start = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: {}\n\nAssistant: {}"
    return [
        {"chosen": start.format(question, good), "rejected": start.format(question, bad)}
        for question, good, bad in questions(count)
    ]


def verl(count: int, source: str = "openai/gsm8k") -> list[dict[str, Any]]:
    """Rows as verl's preprocessing scripts write them to Parquet."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"What is {number} + 2?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
            "extra_info": {"split": "train", "index": number, "answer": f"#### {number + 2}"},
        }
        for number in range(count)
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write JSONL."""
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write Parquet."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def preview(assets, tmp_path, capsys):
    """(words) -> (exit code, stdout, stderr) of the command with the tokenizer and a cache of its
    own."""

    def run(*words: object, tokenizer: bool = True) -> tuple[int, str, str]:
        known = [
            "--data_output_path",
            str(tmp_path / "cache"),
            *(["--tokenizer", str(assets / "lm")] * tokenizer),
        ]
        code = data.main([*map(str, words), *known])
        found = capsys.readouterr()
        return code, found.out.replace("answers in ⟦ ⟧", "answers"), found.err

    return run


def test_samples_are_the_rows_and_the_loss_mask_of_training(preview, assets, tmp_path):
    path = write_lines(tmp_path / "share.jsonl", sharegpt(6))
    _, found, _ = preview(
        "--step", 1, "--data_path", path, "--data_split", "1,0,0", "--eval_fraction", 0
    )
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    flags = DataFlags([str(path)], data_split="1,0,0", data_output_path=str(tmp_path / "other"))
    rows = prepare(StepData("sft", flags, 512, eval_fraction=0.0, all_turns=True), tokenizer).train
    samples = found.split(": a sample, answers:\n")[1:]
    assert len(samples) == 3
    for number, text in enumerate(samples):
        batch = collate_sft(rows, [number], 0, False)
        assert (
            text.replace(OPEN, "")
            .replace(CLOSE, "")
            .startswith(tokenizer.decode(batch.input_ids[0]))
        )
        trained = tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]])
        assert "".join(re.findall(f"{OPEN}(.*?){CLOSE}", text)) == trained
        assert "Hello." in trained and "Where" not in trained


KTO = [{"prompt": f"Q{n}:", "completion": " answer", "label": n % 2 == 0} for n in range(4)]
MARKED = {  # name -> (words, rows, what is shown, its number of marks)
    "every turn": ("--step sft --data_split 1,0,0", sharegpt(2), rf"{OPEN}Hello\.", 2),
    "the last turn": (
        "--step sft --data_split 1,0,0 --train_on last",
        sharegpt(2),
        rf"[^{OPEN}]Hello\.",
        1,
    ),
    "pairs": (
        "--step 2",
        hh(2),
        rf"{OPEN} In the hall.<\|end\|>{CLOSE}\nor {OPEN} Not in the hall.<",
        2,
    ),
    "DPO": ("--step dpo --objective dpo", hh(2), rf"{CLOSE}\nor {OPEN} Not in the hall.<", 2),
    "labels": (
        "--step 2 --objective kto",
        KTO,
        rf"Q(?=[02].*\n.*1.0|[13].*\n.*0.0)\d:{OPEN} answer.*{CLOSE}\n  label: ",
        1,
    ),
}


@pytest.mark.parametrize("name", MARKED)
def test_what_is_trained_is_marked(preview, tmp_path, name):
    words, rows, shown, count = MARKED[name]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    split = [] if "--data_split" in words else ["--data_split", "0,1,0", "--eval_fraction", 0]
    code, found, _ = preview(*words.split(), "--data_path", path, *split, "--samples", 1)
    assert (code, found.count(OPEN)) == (0, count) and re.search(shown, found), found


def test_routes_are_checked_as_in_training(preview, tmp_path):
    path = write_parquet(tmp_path / "arithmetic.parquet", verl(4))
    words = ("--step", 3, "--data_path", path, "--data_split", "0,0,1", "--reward_function")
    code, _, error = preview(*words, "math=numeric_match")
    assert code == 2 and error.count("\n") == 1
    assert "no prompt has the data source 'math'; there are: openai/gsm8k" in error
    assert preview(*words, "openai/gsm8k=numeric_match")[::2] == (0, "")
    code, shown, _ = preview(*words, "math=numeric_match", "--rows", 2)  # there are more prompts
    assert code == 0 and "none of 2 prompts has the data source 'math'" in shown


def test_a_quick_look_reads_the_first_rows_only(preview, tmp_path):
    rows = [{"prompt": f"{number}:", "response": " yes"} for number in range(9)]
    rows[8]["response"] = None
    path = write_lines(tmp_path / "some.jsonl", rows)
    words = (
        "--step",
        1,
        "--data_path",
        path,
        "--data_split",
        "1,0,0",
        "--eval_fraction",
        0,
        "--rows",
    )
    assert [preview(*words, count)[0] for count in (8, 9)] == [0, 2]
    _, shown, _ = preview(*words, 4, "--samples", 9)
    assert "an epoch has 4 rows" in shown
    assert sorted(re.findall(r"\d(?=:⟦)", shown)) == list("0123")
    code, shown, _ = preview(*words, 1, "--samples", 0)
    assert code == 0 and "an epoch has 1 row" in shown and OPEN not in shown


def test_a_training_command_and_its_configuration_can_be_pasted(preview, assets, tmp_path):
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {assets / 'lm'}\nmax_seq_len: 48\n")
    words = (
        "--step",
        1,
        "--config",
        tmp_path / "run.yaml",
        "--data_path",
        assets / "sft.jsonl",
        "--output_dir",
        "out",
    )
    code, shown, _ = preview(*words, "--zero_stage", 3, "--learning_rate", 1e-5, tokenizer=False)
    assert code == 0 and OPEN in shown
