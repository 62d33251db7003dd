"""The cases of `fuzz.py`: each mutates something valid and gives it to a real entry point.

First the mutations, of bytes, of JSON values, and of files on the disk; then the valid files: tiny
models, data in every form, and a finished run. A case is a function of (random numbers, folder of
the valid files, its own folder, which is the working directory). It notes what it does, and returns
the exit code, or ends the process."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

# Values in the place of any other value of a configuration.
STRANGE_VALUES: Sequence[Any] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    " ",
    "0",
    "true",
    "none",
    "NaN",
    "../../etc/passwd",
    "/dev/zero",
    "é\u0000\u202e",
    "\ud800",
    "𝔘" * 50,
    "{{ 1 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "x" * 100_000,
    [],
    [[]],
    [None],
    [1, "a", {}],
    {},
    {"a": 1},
    {"": {"": {"": None}}},
    list(range(1000)),
    "org/model",
    "https://example.org/x",
    "torch.float64",
    "gpt2",
    "bfloat16",
)
STRANGE_WORDS = (
    "",
    " ",
    "-",
    "--",
    "0",
    "-1",
    "1",
    "2",
    "0.5",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "1e-40",
    "99999999999999999999",
    "2147483648",
    "0x10",
    "1_000",
    "true",
    "no",
    "None",
    "null",
    "[]",
    "{}",
    '{"a": 1}',
    "[1, 2",
    "a,b,,c",
    ",",
    "1,2,3",
    "é",
    "\u202e",
    "\x07",
    "\udcff",
    "a\nb",
    "x" * 5000,
    "/" * 300,
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "~",
    "..",
    "%s%n",
    "$(id)",
    "data/*",
    "=1",
    "@5",
    "a@b@c",
    "[:10]",
    "model",
)
_INSERTED = (
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\n",
    b"\r",
    b'"',
    b"{",
    b"}",
    b"[",
    b",",
    b"\\u0000",
    b"\\ud800",
    b"9" * 5000,
    b"-",
    b"NaN",
    b"1e999",
    b"\xe2\x80\xa8",
    b"../",
    b"\t",
    b"'",
)
_DEPTH = 100_000
_PLACES = ("missing", "folder", "loop", "dangling", "empty", "locked")


def mutate_bytes(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Changed bytes, and what was done to them."""
    place = rng.randrange(len(content) + 1)
    end = min(len(content), place + rng.choice((1, 4, 50)))
    kind = rng.choice(
        ("flip", "flip", "cut", "insert", "insert", "remove", "double", "nest", "long", "noise")
    )
    if kind == "flip":
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 3, 30)) if content else 0):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed), "bits flipped"
    if kind == "cut":
        return content[:place], f"cut after {place} bytes"
    if kind == "insert":
        added = rng.choice(_INSERTED)
        return content[:place] + added + content[place:], f"{added[:10]!r} inserted at {place}"
    if kind == "remove":
        return content[:place] + content[end:], f"{end - place} bytes removed at {place}"
    if kind == "double":
        return content + content, "doubled"
    if kind == "nest":
        return content[:place] + rng.choice((b"[", b'{"a":', b"{")) * _DEPTH + content[
            place:
        ], f"nested at {place}"
    if kind == "long":
        size = rng.choice((300_000, 3_000_000))
        return content[:place] + b"a" * size + content[place:], f"{size} bytes inserted at {place}"
    return rng.randbytes(rng.choice((1, 8, 300))), "noise"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of a JSON value's parts."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:20])
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, part in inner for place in _places(part, (*path, key)))]


def mutate_json(rng: random.Random, value: Any) -> tuple[Any, str]:
    """A changed copy of a JSON value, and what was changed."""
    changed = copy.deepcopy(value)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = [place for place in _places(changed) if place]
        if not places:
            return rng.choice(STRANGE_VALUES), "replaced"
        shallow = [place for place in places if len(place) == 1]
        place = rng.choice(shallow if rng.random() < 0.7 else places)
        holder = changed
        for key in place[:-1]:
            holder = holder[key]
        name = ".".join(map(str, place))[:80]
        act = rng.choice(("replace", "replace", "replace", "remove", "wrap", "add", "rename"))
        if act == "replace":
            holder[place[-1]] = copy.deepcopy(rng.choice(STRANGE_VALUES))
        elif act == "remove":
            del holder[place[-1]]
        elif act == "wrap":
            holder[place[-1]] = rng.choice(
                ([holder[place[-1]]], {"value": holder[place[-1]]}, str(holder[place[-1]]))
            )
        elif isinstance(holder, dict):
            new = rng.choice(("", "label", "images", f"{place[-1]} ", "é"))
            holder[new] = (
                holder.pop(place[-1])
                if act == "rename"
                else copy.deepcopy(rng.choice(STRANGE_VALUES))
            )
            name = f"{name} -> {new!r}"
        else:
            holder.append(copy.deepcopy(rng.choice(STRANGE_VALUES)))
        done.append(f"{act} {name}")
    return changed, ", ".join(done)


def _mutated_content(rng: random.Random, path: Path) -> tuple[bytes, str]:
    """The changed content of a file: by its form if it is JSON, else by its bytes."""
    content = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.7:
        value, done = mutate_json(rng, json.loads(content))
        return json.dumps(value).encode(), done
    if path.suffix == ".jsonl" and content and rng.random() < 0.6:
        lines = content.splitlines()
        for number in rng.sample(range(len(lines)), min(len(lines), rng.choice((1, 2, 100)))):
            value, done = mutate_json(rng, json.loads(lines[number]))
            lines[number] = json.dumps(value).encode()
        return b"\n".join(lines) + b"\n", f"rows: {done}"
    return mutate_bytes(rng, content)


def mutate_file(rng: random.Random, path: Path) -> str:
    """Change a file, or put something else in its place; returns what was done."""
    kind = "content" if rng.random() < 0.65 else rng.choice(_PLACES)
    if kind == "content":
        content, done = _mutated_content(rng, path)
        path.write_bytes(content)
        return f"{path.name}: {done}"
    if kind == "locked":
        path.chmod(0)
        return f"{path.name}: no permissions"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "empty":
        path.touch()
    return f"{path.name}: {kind}"


def copy_of(source: Path, place: Path) -> Path:
    """A copy of a file or folder, to be mutated."""
    if source.is_dir():
        shutil.copytree(source, place)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    return place


ROOT = Path(__file__).parent.parent
SCRIPTS = {
    "sft": "training/step1_sft/main.py",
    "reward": "training/step2_reward/main.py",
    "dpo": "training/step2_dpo/main.py",
    "ppo": "training/step3_ppo/main.py",
}
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
_ROWS = 12


def make_material(folder: Path) -> None:
    """Write the models and the data into an empty folder."""
    from models import save_tiny_models

    from dschat_ppo.tools.toy import CHAT_TEMPLATE

    save_tiny_models(folder, ("model", "reward"), CHAT_TEMPLATE, **SHAPE)
    _make_data(folder / "data")


def step_words(material: Path, step: str, output: Path) -> list[str]:
    """The flags of a step that has two optimizer steps."""
    words = ["--output_dir", str(output), "--dtype", "fp32", "--data_output_path", f"{output}_data"]
    if step == "ppo":
        words += ["--actor_model_name_or_path", str(material / "model")]
        words += ["--critic_model_name_or_path", str(material / "reward")]
        words += ["--data_path", str(material / "data/prompts.jsonl"), "--data_split", "0,0,1"]
        return [
            *words,
            "--max_prompt_seq_len",
            "32",
            "--max_answer_seq_len",
            "4",
            "--max_steps",
            "2",
        ]
    data = "answers" if step == "sft" else "pairs"
    words += [
        "--model_name_or_path",
        str(material / "model"),
        "--data_path",
        str(material / f"data/{data}.jsonl"),
    ]
    words += [
        "--data_split",
        "1,0,0" if step == "sft" else "0,1,0",
        "--max_seq_len",
        "64",
        "--max_steps",
        "2",
    ]
    return [*words, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]


def _make_data(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    words = [f"word {number} of {number * 7 % 40}" for number in range(_ROWS)]
    rows = {
        "answers": [{"prompt": text, "response": f" it is {text}"} for text in words],
        "pairs": [{"prompt": text, "chosen": f" yes, {text}", "rejected": " no"} for text in words],
        "prompts": [{"prompt": text, "answer": str(number)} for number, text in enumerate(words)],
        "chats": [
            {
                "messages": [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": "yes"},
                ]
            }
            for text in words
        ],
    }
    for name, content in rows.items():
        lines = [json.dumps(row) for row in content]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / f"{name}.json").write_text(json.dumps(content))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), folder / f"{name}.parquet")
    table = "".join(f'"{row["prompt"]}","{row["response"]}"\n' for row in rows["answers"])
    (folder / "answers.csv").write_text(f"prompt,response\n{table}")
    (folder / "texts.txt").write_text("\n".join(words) + "\n")


def note(text: str) -> None:
    """Add a line to `case.txt` in the working directory: what this case does."""
    with Path("case.txt").open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{text}\n")


def run_script(script: str, words: list[str]) -> None:
    """Run a step as the command line does; it ends the process."""
    sys.argv = [str(ROOT / script), *words]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def train_run(material: Path) -> None:
    """Run step 1 into `material/run`; ends the process with its exit code."""
    run_script(
        SCRIPTS["sft"],
        [
            *step_words(material, "sft", material / "run"),
            "--save_steps",
            "1",
            "--keep_final_checkpoint",
        ],
    )


Case = Callable[[random.Random, Path, Path], int]
Flag = tuple[str, dict[str, Any]]  # the name, and what `values_of` says of its values


def run_step_until_models(step: str, words: Sequence[str]) -> int:
    """Run a step by its script, until it would load its models; ends the process."""
    from dschat_ppo.errors import StopRequested
    from dschat_ppo.ppo import train_ppo
    from dschat_ppo.supervised import supervised_run

    def announce(name: str) -> None:
        if name == "load models":
            raise StopRequested("everything before the models is checked")

    for module in (train_ppo, supervised_run):
        vars(module)["announce"] = announce
    note(f"{SCRIPTS[step]} {shlex.join(words)}"[:2000])
    run_script(SCRIPTS[step], list(words))
    raise AssertionError("a script ends the process")


def data_in_step(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated data file in the step that reads it."""
    source = rng.choice(sorted((material / "data").iterdir()))
    step = {"pairs": rng.choice(("reward", "dpo")), "prompts": "ppo"}.get(source.stem, "sft")
    file = copy_of(source, own / source.name)
    note(mutate_file(rng, file))
    words = [*step_words(material, step, own / "trained"), "--data_path", str(file)]
    if rng.random() < 0.2:
        words += ["--eval_data_path", str(file)]
    if rng.random() < 0.2:
        words += ["--streaming", "--streaming_rows", "8"]
    if rng.random() < 0.3:
        words += ["--bad_rows", rng.choice(("skip", "error"))]
    return run_step_until_models(step, words)


# Flags whose legal values compile operators for minutes or write outside of the case's folder.
_LEFT_OUT = {
    "offload",
    "offload_optimizer",
    "offload_reference_model",
    "output_dir",
    "data_output_path",
    "config",
}


def random_flag(rng: random.Random, known: Sequence[Flag]) -> list[str]:
    """One of the flags, most often with a value that it takes."""
    name, how = rng.choice(known)
    if rng.random() < 0.08:
        place = rng.randrange(len(name))
        misspelt = (
            name[:place] + name[place + 1 :],
            name.upper(),
            f"no_{name}",
            f"{name}s",
            name.replace("_", "-"),
        )
        name = rng.choice(misspelt)
    values = [
        _random_word(rng, how)
        for _ in range(rng.choice((0, 1, 2, 5)) if how.get("nargs") == "*" else 1)
    ]
    if how.get("nargs") == "?" and rng.random() < 0.3:
        values = []
    if len(values) == 1 and rng.random() < 0.3:
        return [f"--{name}={values[0]}"]
    return [f"--{name}", *values]


def _random_word(rng: random.Random, how: dict[str, Any]) -> str:
    if rng.random() < 0.15:
        return rng.choice(STRANGE_WORDS)
    if "choices" in how:
        return str(rng.choice(how["choices"]))
    if how.get("nargs") == "?":
        return rng.choice(("true", "false", "True", "0", "y"))
    if how["type"] is int:
        return str(rng.choice((0, 1, 2, 3, 7, 8, 64, 1000, -1, 2**31 - 1)))
    if how["type"] is float:
        return rng.choice(("0", "0.1", "0.5", "1", "1.0", "2", "-1", "1e-6", "1e30", "100"))
    return rng.choice(STRANGE_WORDS)


def flags(rng: random.Random, material: Path, own: Path) -> int:
    """Random values of a step's flags, misspelt names, repeated flags."""
    from dschat_ppo.config.cli import STEPS
    from dschat_ppo.config.flag_parser import values_of
    from dschat_ppo.config.step_config import groups_of

    step = rng.choice(list(SCRIPTS))
    words = step_words(material, step, own / "trained")
    known = [
        (field.name, values_of(get_type_hints(kind)[field.name]))
        for kind in groups_of(STEPS[step])
        for field in dataclasses.fields(kind)
        if field.name not in _LEFT_OUT
    ]
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        words += random_flag(rng, known)
    if rng.random() < 0.05:
        del words[rng.randrange(len(words))]
    return run_step_until_models(step, words)


def _seal(checkpoint: Path) -> None:
    """Make the manifest describe the files as they are."""
    from dschat_ppo.checkpoint import store

    if not (checkpoint / store.MANIFEST).is_file():  # the mutation removed or replaced it
        return
    try:
        content = json.loads((checkpoint / store.MANIFEST).read_bytes())
        content.pop("sha256", None)
        for name in content["files"]:
            if (checkpoint / name).is_file():
                content["files"][name] = store.describe_file(checkpoint / name)
        (checkpoint / store.MANIFEST).write_bytes(
            json.dumps({**content, "sha256": store._seal(content)}).encode()
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
        note("manifest: cannot be sealed")


def checkpoint_resume(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated output folder of a run, found again by the same command."""
    run = copy_of(material / "run", own / "run")
    (run / "result.json").unlink()
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    path = rng.choice([path for path in files if rng.random() < 0.5 or path.suffix != ".pt"])
    note(mutate_file(rng, path))
    if rng.random() < 0.3:
        _seal(newest)
    words = step_words(material, "sft", run)
    words += rng.choice(
        ([], ["--resume", str(newest)], ["--overwrite_output_dir"], ["--resume_force"])
    )
    return run_step_until_models("sft", [*words, "--save_steps", "1"])


KINDS: dict[str, Case] = {  # by turns
    "data file in a step": data_in_step,
    "flags of a step": flags,
    "output folder in a resumed run": checkpoint_resume,
}
