"""What the ranks of a real step print: lines of this project, once."""

import re

import pytest
from launch import ROOT, metrics_of, run, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LIBRARY_LINE = re.compile(r"^\[(20\d\d-|rank|transformers\])|built successfully|^ *- |it/s\]")
SCRIPT = ROOT / "training_scripts/ranks.sh"


@pytest.fixture(scope="module")
def printed(assets, tmp_path_factory):
    """(the lines of a run of step 1 on two ranks by `launch` of `ranks.sh`, its folder)."""
    folder = tmp_path_factory.mktemp("console") / "out"
    words = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 --dtype fp32"
    words += f" --output_dir {folder} --zero_stage 3 --per_device_train_batch_size 2 --max_steps 4 --logging_steps 2"
    command = f'source {SCRIPT}; RANKS=2; launch "$top/training/step1_sft/main.py" {words}'
    result = succeed(run(["bash", "-euo", "pipefail", "-c", command]))
    return (result.stdout + result.stderr).splitlines(), folder


def test_only_lines_of_this_project_are_printed_and_once(printed):
    lines, folder = printed
    strange = [line for line in lines if LIBRARY_LINE.search(line)]
    launcher = [line for line in strange if "Setting accelerator to CPU" in line]  # a warning, before a rank exists
    assert strange == launcher and len(launcher) <= 1
    for start in ("step 1: supervised", "expected peak: ", "models", "SFT: batches", "SFT: done", "report: "):
        assert len([line for line in lines if line.startswith(start)]) == 1, start
    assert len(lines) <= 45


def test_step_lines_come_at_both_ends_and_every_logging_steps(printed):
    lines, folder = printed
    shown = [line for line in lines if re.match(r"step \d+/4 ", line)]
    assert [line.split()[1] for line in shown] == ["1/4", "2/4", "4/4"]
    metrics = metrics_of(folder)
    assert f"loss {metrics[-1]['loss']:7.4f}  lr {metrics[-1]['lr']:8.2e}  " in shown[-1]
    assert re.search(r"[\d,]+ tokens/s$", shown[-1]) and re.search(r"tokens/s  \d+:\d\d left$", shown[0])
