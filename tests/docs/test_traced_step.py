"""docs/architecture.md shows the calls and shapes of a real PPO step on two ranks. `--update-docs`
writes them."""

import json
import re

import pytest
from bash_blocks import ROOT
from launch import forked, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
PAGE = ROOT / "docs" / "architecture.md"
FLAGS = """--per_device_generation_batch_size 4 --per_device_training_batch_size 2
--max_answer_seq_len 6
--min_answer_seq_len 6 --actor_zero_stage 3 --critic_zero_stage 3 --max_steps 1 --num_warmup_steps 0
--data_split 0,0,1"""


@pytest.fixture(scope="module")
def trace(assets, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("trace")
    words = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward"
    words += f" --data_path {assets}/prompts.jsonl --output_dir {folder}/ppo {FLAGS}"
    succeed(forked(2, "tests/workers/trace_step.py", *words.split(), folder / "trace.json"))
    return json.loads((folder / "trace.json").read_text())


def table(trace: dict) -> str:
    """Markdown: a row for each call; the dots show its depth."""
    lines = ["| call | file | result on rank 0 |", "|---|---|---|"]
    for depth, call, file, result in trace["rows"]:
        name, comma, role = call.partition(",")
        lines.append(f"| {'· ' * depth}`{name}`{comma}{role} | {file} | {result} |")
    return "\n".join(lines)


def test_the_page_shows_the_trace(trace, request):
    text = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- trace: begin -->\n\n).*?(\n\n<!-- trace: end -->)", re.S)
    assert marked.search(text)
    now = marked.sub(lambda found: found[1] + table(trace) + found[2], text)
    if request.config.getoption("--update-docs"):
        PAGE.write_text(now, encoding="utf-8")
    assert now == PAGE.read_text(encoding="utf-8"), "pytest --update-docs writes the new trace"
