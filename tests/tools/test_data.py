"""The preview of data: what it shows is what training uses."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from real_shapes import hh, sharegpt, turns, ultrafeedback, verl, write_lines, write_parquet
from transformers import AutoTokenizer

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.collators import collate_sft
from dschat_ppo.data.examples import ADDED
from dschat_ppo.data.prepare import prepare
from dschat_ppo.tools import data
from dschat_ppo.tools.data_display import CLOSE, OPEN


@pytest.fixture
def preview(assets, tmp_path, capsys):
    """(words) -> (exit code, stdout, stderr) of the command with the tokenizer and a cache of its own."""

    def run(*words: object, tokenizer: bool = True) -> tuple[int, str, str]:
        known = ["--data_output_path", str(tmp_path / "cache"), *(["--tokenizer", str(assets / "lm")] * tokenizer)]
        code = data.main([*map(str, words), *known])
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def in_json(result: tuple[int, str, str]) -> dict:
    return json.loads(result[1])


def test_samples_are_the_rows_and_the_loss_mask_of_training(preview, assets, tmp_path):
    path = write_lines(tmp_path / "share.jsonl", sharegpt(6))
    found = in_json(preview("--step", 1, "--data_path", path, "--data_split", "1,0,0", "--eval_fraction", 0, "--json"))
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    flags = DataFlags([str(path)], data_split="1,0,0", data_output_path=str(tmp_path / "other"))
    rows = prepare("sft", tokenizer, flags, 512, eval_fraction=0.0, all_turns=True).train
    assert len(found["sets"][0]["samples"]) == 3
    for number, sample in enumerate(found["sets"][0]["samples"]):
        batch = collate_sft(rows, [number], 0, False)
        pieces = [piece for _, text in sample["texts"] for piece in text]
        assert "".join(piece["text"] for piece in pieces) == tokenizer.decode(batch.input_ids[0])
        trained = tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]])
        assert "".join(piece["text"] for piece in pieces if piece["trained"]) == trained
        assert "Hello." in trained and "Where" not in trained
        assert sample["tokens"] == {
            "prompt": len(rows[number]["prompt_ids"]),
            "answer": len(rows[number]["answers"][0]),
        }


def test_only_the_last_turn_is_marked_if_only_it_is_trained(preview, tmp_path):
    path = write_lines(tmp_path / "share.jsonl", sharegpt(2))
    words = ("--step", "sft", "--data_path", path, "--data_split", "1,0,0", "--samples", 1)
    _, every, _ = preview(*words)
    _, last, _ = preview(*words, "--train_on", "last")
    assert (every.count(OPEN), last.count(OPEN)) == (2, 1)
    assert f"{OPEN}Hello." in every and "Hello." in last and f"{OPEN}Hello." not in last


def test_pairs_show_what_the_objective_compares(preview, tmp_path):
    path = write_lines(tmp_path / "hh.jsonl", hh(2))
    words = ("--data_path", path, "--data_split", "0,1,0", "--eval_fraction", 0, "--samples", 1)
    _, reward, _ = preview("--step", 2, *words)
    _, dpo, _ = preview("--step", "dpo", *words, "--objective", "dpo")
    assert f" In the hall.{OPEN}<|end|>{CLOSE}" in reward
    assert f" Not in the hall.{OPEN}<|end|>{CLOSE}" in reward
    assert f"{OPEN} In the hall.<|end|>{CLOSE}" in dpo and f"{OPEN} Not in the hall.<|end|>{CLOSE}" in dpo


def test_step_3_shows_prompts_with_what_rules_receive(preview, tmp_path):
    path = write_parquet(tmp_path / "arithmetic.parquet", verl(4))
    code, shown, _ = preview("--step", 3, "--data_path", path, "--data_split", "0,0,1", "--samples", 1)
    assert code == 0
    assert OPEN not in shown
    assert "data_source  | openai/gsm8k" in shown and "ground_truth | " in shown
    assert "reward_model, extra_info" in shown


def test_each_bad_row_is_named_with_its_cause(preview, tmp_path):
    rows = ultrafeedback(10)
    rows[3]["chosen"], rows[7]["rejected"] = None, rows[7]["chosen"]
    path = write_lines(tmp_path / "bad.jsonl", [*rows, rows[0]])
    words = ("--step", 2, "--data_path", path, "--data_split", "0,1,0", "--eval_fraction", 0)
    code, shown, error = preview(*words)
    assert code == 2
    assert error.startswith("error: bad.jsonl: 2 of 11 rows cannot be used") and error.count("\n") == 1
    assert f"{path}, row 4: 'chosen' is null" in error and "row 8" in error and "--bad_rows skip" in error
    assert "2 rows that cannot be used:" in shown
    assert f"    {path}, row 4: 'chosen' is null" in shown
    assert f"    {path}, row 8: chosen and rejected are equal" in shown
    assert "11 rows, 2 cannot be used, 9 examples, 1 repeats an earlier example" in shown
    found = in_json(preview(*words, "--json"))
    assert [problem["where"] for problem in found["sets"][0]["problems"]] == [f"{path}, row 4", f"{path}, row 8"]
    assert found["error"] == found["sets"][0]["error"]
    _, shown, _ = preview(*words, "--problems", 1)
    assert "2 rows that cannot be used, the first 1:" in shown and f"    {path}, row 8:" not in shown


def test_bad_rows_that_training_skips_are_no_error(preview, tmp_path):
    rows = [{"prompt": f"{number}:", "response": " yes"} for number in range(30)]
    rows[5]["response"] = None
    path = write_lines(tmp_path / "some.jsonl", rows)
    words = ("--step", 1, "--data_path", path, "--data_split", "1,0,0", "--eval_fraction", 0, "--bad_rows")
    assert [preview(*words, policy)[0] for policy in ("skip", "error")] == [0, 2]


def with_broken_lines(path, count: int, broken: tuple[int, ...]):
    """A file whose lines with these numbers are not JSON."""
    lines = [json.dumps({"prompt": f"{number}:", "response": " yes"}) for number in range(1, count + 1)]
    for number in broken:
        lines[number - 1] = f'{{"prompt": broken {number}'
    path.parent.mkdir(exist_ok=True)
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.gz"])
@pytest.mark.parametrize("tokenizer", [True, False])
def test_lines_that_cannot_be_read_are_listed(preview, tmp_path, name, tokenizer):
    path = with_broken_lines(tmp_path / name, 60, (8, 31))
    words = ("--step", 1, "--data_path", path, "--data_split", "1,0,0", "--eval_fraction", 0, "--bad_rows", "skip")
    code, shown, _ = preview(*words, tokenizer=tokenizer)
    assert code == 0 and "  rows            58\n" in shown
    assert "  2 lines that cannot be read:\n" in shown
    assert f"    {path}, line 8 is not JSON (" in shown and "broken 31" in shown
    found = in_json(preview(*words, "--json", "--problems", 1, tokenizer=tokenizer))["sets"][0]
    (problem,) = found["problems"]
    assert (found["unreadable"], found["bad_rows"], problem["where"]) == (2, 0, f"{path}, line 8")
    assert problem["reason"].startswith("is not JSON (") and problem["message"].endswith("'{\"prompt\": broken 8'")


def test_lines_that_end_training_are_listed_with_the_bad_rows(preview, tmp_path):
    path = with_broken_lines(tmp_path / "some.jsonl", 60, (8, 9))
    with path.open("a") as file:
        file.write('{"prompt": "61:", "response": null}\n')
    words = ("--step", 1, "--data_path", path, "--data_split", "1,0,0", "--eval_fraction", 0)
    code, shown, error = preview(*words)
    assert code == 2 and "line 8 is not JSON" in error
    assert "  2 lines that cannot be read and 1 row that cannot be used:\n" in shown
    assert f"    {path}, line 9 is not JSON" in shown and f"    {path}, row 61: 'response' is null" in shown
    title = "  2 lines that cannot be read and 1 row that cannot be used, the first 2:\n"
    assert title in preview(*words, "--problems", 2)[1]


@pytest.mark.parametrize("tokenizer", [True, False])
def test_too_many_lines_that_cannot_be_read_are_an_error_with_a_list(preview, tmp_path, tokenizer):
    path = with_broken_lines(tmp_path / "some.jsonl", 20, (3, 5))
    words = ("--step", 1, "--data_path", path, "--data_split", "1,0,0")
    code, shown, error = preview(*words, tokenizer=tokenizer)
    assert code == 2 and "2 of 20 lines cannot be read" in error
    assert f"    {path}, line 3 is not JSON" in shown and f"    {path}, line 5 is not JSON" in shown


def test_lines_are_listed_for_the_files_that_are_used(preview, tmp_path):
    folder = tmp_path / "folder"
    with_broken_lines(folder / "train_sft-00000-of-00001.jsonl", 30, (2,))
    with_broken_lines(folder / "train_gen-00000-of-00001.jsonl", 30, (4,))
    held_out = with_broken_lines(tmp_path / "held_out.jsonl", 30, (6,))
    words = ("--step", 1, "--data_path", f"{folder}[train_sft]", "--eval_data_path", held_out, "--bad_rows", "skip")
    code, shown, error = preview(*words, "--data_split", "1,0,0", "--json")
    assert code == 0, error
    wheres = [[problem["where"] for problem in found["problems"]] for found in json.loads(shown)["sets"]]
    assert wheres == [[f"{folder / 'train_sft-00000-of-00001.jsonl'}, line 2"], [f"{held_out}, line 6"]]


def test_the_share_of_the_step_is_named(preview, assets):
    words = ("--step", 2, "--data_path", assets / "pairs.jsonl")
    _, shown, _ = preview(*words)
    share = "this step uses 16 of 40 rows (--data_split 2,4,4), the others are not checked; "
    share += "--data_split 0,1,0 gives this step all rows"
    assert f"  rows            40; {share}\n" in shown
    found = in_json(preview(*words, "--json"))["sets"][0]
    assert (found["rows"], found["used"], found["share"]) == (40, 16, share)
    _, shown, _ = preview(*words, "--data_split", "0,1,0")
    assert "  rows            40\n" in shown and "this step uses" not in shown


def test_one_is_singular(preview, tmp_path):
    path = write_lines(tmp_path / "one.jsonl", [{"prompt": "1:", "response": " yes"}] * 2)
    held_out = write_lines(tmp_path / "held_out.jsonl", [{"prompt": "1:", "response": " yes"}])
    words = ("--step", 1, "--data_path", path, "--eval_data_path", held_out, "--data_split", "1,1,0")
    _, shown, _ = preview(*words)
    assert "1 row, 1 example, 1 kept whole" in shown
    assert "an epoch has 1 row; 1 row is held out" in shown
    words = ("--step", 1, "--data_path", path, "--eval_fraction", 0, "--data_split", "1,0,0")
    assert "2 rows, 2 examples" in preview(*words)[1]


def test_only_columns_of_the_data_are_shown(preview, tmp_path):
    rows = [{**row, "_own": number} for number, row in enumerate(verl(4))]
    path = write_parquet(tmp_path / "arithmetic.parquet", rows)
    words = ("--step", 3, "--data_path", path, "--data_split", "0,0,1")
    columns = in_json(preview(*words, "--json"))["sets"][0]["samples"][0]["columns"]
    assert {"_own", "reward_model", "ground_truth"} <= set(columns) and not set(ADDED) & set(columns)
    assert ", _own" in preview(*words)[1]


def test_the_routes_of_rewards_are_checked_as_in_training(preview, tmp_path):
    path = write_parquet(tmp_path / "arithmetic.parquet", verl(4))
    words = ("--step", 3, "--data_path", path, "--data_split", "0,0,1", "--reward_function")
    code, _, error = preview(*words, "math=numeric_match")
    assert code == 2 and error.count("\n") == 1
    assert "no training prompt has the data source 'math'; there are: openai/gsm8k" in error
    assert preview(*words, "openai/gsm8k=numeric_match")[::2] == (0, "")
    code, shown, _ = preview(*words, "math=numeric_match", "--rows", 2)  # there are more prompts
    assert code == 0 and "none of 2 training prompts has the data source 'math'" in shown


def test_too_long_rows_are_problems_if_they_end_training(preview, tmp_path):
    rows = [{"prompt": "x" * (40 if number == 2 else 3) + ": ", "response": "yes"} for number in range(5)]
    path = write_lines(tmp_path / "long.jsonl", rows)
    words = ("--step", 1, "--data_path", path, "--data_split", "1,0,0", "--eval_fraction", 0, "--max_seq_len", 20)
    code, shown, error = preview(*words, "--truncation", "error")
    assert code == 2 and f"{path}, row 3: longer than the limit of 20 tokens" in error
    assert "1 dropped" in shown
    code, shown, _ = preview(*words, "--truncation", "left")
    assert code == 0 and "1 prompt cut" in shown and "an epoch has 5 rows" in shown
    _, shown, _ = preview(*words, "--truncation", "drop", "--samples", 5)
    assert "row 2:" in shown and "row 3:" not in shown and "an epoch has 4 rows" in shown


def test_one_unusable_data_set_does_not_hide_another(preview, assets, tmp_path):
    path = write_lines(tmp_path / "share.jsonl", sharegpt(4))
    code, shown, error = preview("--step", 2, "--data_path", path, assets / "pairs.jsonl", "--data_split", "0,1,0")
    assert code == 2 and "share.jsonl" in error and "this step needs" in error
    assert "data set 2 of 2" in shown and shown.count(OPEN) == 6


def test_without_a_tokenizer_rows_are_shown_before_the_rendering(preview, tmp_path):
    path = write_lines(tmp_path / "share.jsonl", sharegpt(4))
    code, shown, _ = preview("--step", 1, "--data_path", path, "--samples", 1, tokenizer=False)
    assert code == 0
    assert "form sharegpt" in shown and "user: Where is the lamp?" in shown and "not rendered" in shown


def test_a_quick_look_reads_the_first_rows_only(preview, tmp_path):
    rows = [{"prompt": f"{number}:", "response": " yes"} for number in range(9)]
    rows[8]["response"] = None
    path = write_lines(tmp_path / "some.jsonl", rows)
    words = ("--step", 1, "--data_path", path, "--data_split", "1,0,0", "--eval_fraction", 0, "--json", "--rows")
    assert [preview(*words, count)[0] for count in (8, 9)] == [0, 2]
    found = in_json(preview(*words, 4, "--samples", 9))
    assert found["sets"][0]["rows"] == 4
    assert sorted(sample["where"] for sample in found["sets"][0]["samples"]) == [
        f"{path}, row {n}" for n in range(1, 5)
    ]


def test_a_mixture_is_shown_as_training_mixes_it(preview, assets, tmp_path):
    more = write_lines(tmp_path / "more.jsonl", [{"prompt": f"{n}:", "response": " yes"} for n in range(10)])
    words = ("--step", 1, "--data_path", f"{assets}/sft.jsonl@10", f"{more}@30", "--data_split", "1,0,0")
    code, shown, _ = preview(*words, "--eval_fraction", 0)
    assert code == 0
    assert "an epoch has 40 rows" in shown and "75.0 %" in shown


def test_the_chat_template_of_the_flags_is_used_and_named(preview, tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [{"messages": turns("Where?", "Here.")}])
    words = ("--step", 1, "--data_path", path, "--data_split", "1,0,0", "--chat_template", "human-assistant")
    code, shown, _ = preview(*words)
    assert code == 0
    assert "chat template: human-assistant" in shown and " Human: Where? Assistant:" in shown


def test_colours_replace_brackets(preview, assets):
    words = ("--step", 1, "--data_path", assets / "sft.jsonl", "--color")
    assert "\x1b[30;42m" in preview(*words, "always")[1]
    assert "\x1b" not in preview(*words, "never")[1] and OPEN in preview(*words, "auto")[1]


@pytest.mark.parametrize(("words", "cause"), [
    ("--step 1 --data_path x.jsonl --no_such_flag 1", "--no_such_flag"),
    ("--step 3 --data_path x.jsonl --max_seq_len 9", "--max_prompt_seq_len"),
    ("--step 1 --data_path x.jsonl --rows 0", "--rows must be at least 1"),
    ("--step 1", "required: --data_path"),
    ("", "required: --step 1, 2, dpo or 3 and --data_path (all flags: --help)"),
    ("--data_path x.jsonl", "required: --step 1, 2, dpo or 3 (all flags: --help)"),
    ("--step 1 --rows many", "--rows many: expected a whole number"),
    ("--step 1 --data_path x.jsonl --streaming --streaming_rows 9", "omit --streaming"),
    ("--step 1 --data_path a.jsonl:2 b.jsonl", "give each data set a weight"),
])  # fmt: skip
def test_a_wrong_command_is_one_line(preview, words, cause):
    code, shown, error = preview(*words.split())
    assert (code, shown) == (2, "")
    assert error.startswith("error: ") and cause in error and error.count("\n") == 1


def test_a_training_command_and_its_configuration_can_be_pasted(preview, assets, tmp_path):
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {assets / 'lm'}\nmax_seq_len: 48\n")
    words = ("--step", 1, "--config", tmp_path / "run.yaml", "--data_path", assets / "sft.jsonl", "--output_dir", "out")
    code, shown, _ = preview(*words, "--zero_stage", 3, "--learning_rate", 1e-5, tokenizer=False)
    assert code == 0 and OPEN in shown


def test_it_starts_without_deepspeed(assets, tmp_path):
    program = "import sys; from dschat_ppo.tools.data import main; code = main(sys.argv[1:])\n"
    program += "assert code == 0 and 'deepspeed' not in sys.modules"
    words = ["--step", "1", "--data_path", str(assets / "sft.jsonl"), "--tokenizer", str(assets / "lm")]
    words += ["--data_output_path", str(tmp_path)]
    found = subprocess.run(
        [sys.executable, "-c", program, *words], env=dict(os.environ), text=True, capture_output=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_labelled_answers_are_shown_alone_with_their_label(preview, tmp_path):
    rows = [{"prompt": f"Q{n}:", "completion": f" answer {n}", "label": n % 2 == 0} for n in range(4)]
    path = write_lines(tmp_path / "kto.jsonl", rows)
    words = ("--step", 2, "--objective", "kto", "--data_path", path, "--data_split", "0,1,0", "--eval_fraction", 0)
    found = in_json(preview(*words, "--json", "--samples", 4))["sets"][0]
    shown = {sample["where"]: sample["columns"] for sample in found["samples"]}
    assert sorted(columns["desirable"] for columns in shown.values()) == [False, False, True, True]
    trained = [piece for sample in found["samples"] for name, pieces in sample["texts"] for piece in pieces
               if name == "answer" and piece["trained"]]  # fmt: skip
    assert len(trained) >= 4, "the answers are trained"


def test_labelled_steps_are_shown_with_the_tokens_that_have_labels(preview, tmp_path):
    rows = [{"prompt": f"Q{n}:", "completions": [" a", " b"], "labels": [True, False]} for n in range(4)]
    path = write_lines(tmp_path / "steps.jsonl", rows)
    words = ("--step", 2, "--objective", "process", "--data_path", path, "--data_split", "0,1,0")
    words += ("--eval_fraction", 0, "--samples", 1)
    found = in_json(preview(*words, "--step_separator", "|", "--json"))["sets"][0]
    [sample] = found["samples"]
    assert sample["columns"]["labels"] == [1.0, 0.0]
    marked = [piece["text"] for name, pieces in sample["texts"] for piece in pieces if piece["trained"]]
    assert marked == ["|", "<|end|>"]
    [unread] = in_json(preview(*words, "--json", tokenizer=False))["sets"][0]["samples"]
    assert [name for name, _ in unread["texts"]] == ["prompt", "answer", "answer"]
