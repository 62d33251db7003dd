"""A folder in which the commands of the documents run as in a clone: the repository's files, a tiny model and data."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from bash_blocks import ROOT
from launch import forked, succeed

LINKED = ("benchmarks", "constraints.txt", "dschat_ppo", "pyproject.toml", "setup.py", "training", "training_scripts")
SUMS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 25)]
CODE = {
    "my_rewards.py": """
def score(response, **columns):
    return float(response.count("e"))

def brevity(response, **columns):
    return 1 / (1 + len(response.split()))

def politeness(response, **columns):
    return float("please" in response)
""",
    "my.py": """
def verify(response, answer, **columns):
    return float(answer in response)
""",
}
OTHER_NAMES = {  # of folders that a page uses -> of those that the README's commands write
    "out/first": "out/ppo", "out/second": "out/grpo", "output/first": "out/ppo", "output/second": "out/grpo",
    "output/step1": "out/sft", "output/step2": "out/reward", "output/step3": "out/ppo",
}  # fmt: skip


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_environment(folder: Path) -> None:
    """`.venv`, whose programs are those of this interpreter's environment, with the mark of a finished setup_venv.sh.

    Its `python` starts this interpreter: an environment at another place would compile DeepSpeed's operators again.
    """
    (folder / "bin").mkdir(parents=True)
    for entry in Path(sys.executable).parent.iterdir():
        if not entry.name.startswith("python"):
            (folder / "bin" / entry.name).symlink_to(entry)
    for name in ("python", "python3"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    words = f"cat {ROOT}/setup.py {ROOT}/constraints.txt | cksum | cut -d' ' -f1"
    digest = subprocess.run(words, shell=True, check=True, capture_output=True, text=True).stdout.strip()
    (folder / f".installed-{digest}-test").touch()


def make_inputs(folder: Path, assets: Path) -> None:
    """The model, the data and the functions that the pages name."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    model = shutil.copytree(assets / "lm", folder / "MODEL")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    pairs = [json.loads(line) for line in (assets / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("pairs.jsonl", "my.jsonl", "helpful.jsonl", "harmless.jsonl"):
        write_rows(folder / name, pairs)
    write_rows(folder / "test_prompts.jsonl", SUMS[:4])
    write_rows(folder / "sums.jsonl", SUMS)
    write_rows(folder / "chat.jsonl", [{"prompt": row["prompt"]} for row in pairs])
    pq.write_table(pa.Table.from_pylist(SUMS), folder / "math.parquet")
    steps = [{"prompt": row["prompt"], "completions": ["Add.", row["answer"]], "labels": [True, False]} for row in SUMS]
    write_rows(folder / "labelled_steps.jsonl", steps)
    for name, code in CODE.items():
        (folder / name).write_text(code)


def make_folder(folder: Path, assets: Path, outputs: Path | None = None) -> Path:
    """A folder for one page; its `out` and `output` start with links to the `outputs` of the README's folder."""
    folder.mkdir()
    make_environment(folder / ".venv")
    make_inputs(folder, assets)
    for name in ("out", "output"):
        (folder / name).mkdir()
        for entry in (outputs / name).iterdir() if outputs else ():
            (folder / name / entry.name).symlink_to(entry)
    if outputs:
        for name, source in OTHER_NAMES.items():
            (folder / name).symlink_to(outputs / source)
    else:  # the quickstart runs in a test of its own
        succeed(
            forked(1, "tests/workers/run_module.py", "dschat_ppo.tools.toy", "output/quickstart/toy", folder=folder)
        )
        for step in ("sft", "reward", "ppo"):
            (folder / "output/quickstart" / step).symlink_to(folder / "out" / step)
    return folder


def free_output(folder: Path, words: list[str]) -> None:
    """Make room for a run: a page's command must not resume the README's run. `--validate_only` continues it."""
    output = folder / words[words.index("--output_dir") + 1]
    if output.is_symlink():
        source = output.resolve()
        output.unlink()
        if "--validate_only" in words:
            shutil.copytree(source, output)
    os.makedirs(output.parent, exist_ok=True)
