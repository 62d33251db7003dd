"""The cases of `fuzz.py`: each mutates something valid and gives it to a real entry point.

A case is a function of (random numbers, folder of the valid files, its own folder, which is the working directory). It
notes what it does, and returns the exit code, or ends the process with it.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from fuzz_material import SCRIPTS, note, run_script, step_words
from fuzz_mutations import STRANGE_WORDS, copy_of, mutate_bytes, mutate_file, mutate_json

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


def model_in_step(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated model, reward model or adapter folder in a step."""
    step = rng.choice(list(SCRIPTS))
    flags = {"ppo": ("--actor_model_name_or_path", "--critic_model_name_or_path")}.get(step, ("--model_name_or_path",))
    flag = rng.choice(flags)
    source = "reward" if flag.startswith("--critic") else rng.choice(("model", "model", "adapter"))
    folder = copy_of(material / source, own / source)
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    for path in rng.sample(files, rng.choice((1, 1, 1, 2))):
        note(mutate_file(rng, path))
    return run_step_until_models(step, [*step_words(material, step, own / "trained"), flag, str(folder)])


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
_LEFT_OUT = {"offload", "offload_optimizer", "offload_reference_model", "output_dir", "data_output_path", "config"}


def random_flag(rng: random.Random, known: Sequence[Flag]) -> list[str]:
    """One of the flags, most often with a value that it takes."""
    name, how = rng.choice(known)
    if rng.random() < 0.08:
        place = rng.randrange(len(name))
        misspelt = (name[:place] + name[place + 1 :], name.upper(), f"no_{name}", f"{name}s", name.replace("_", "-"))
        name = rng.choice(misspelt)
    values = [_random_word(rng, how) for _ in range(rng.choice((0, 1, 2, 5)) if how.get("nargs") == "*" else 1)]
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
        for kind in groups_of(STEPS[step]).values()
        for field in dataclasses.fields(kind) if field.name not in _LEFT_OUT
    ]  # fmt: skip
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        words += random_flag(rng, known)
    if rng.random() < 0.05:
        del words[rng.randrange(len(words))]
    return run_step_until_models(step, words)


def settings_file(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated YAML file of flags, or JSON of DeepSpeed settings."""
    step = rng.choice(list(SCRIPTS))
    if rng.random() < 0.5:
        flag, file = "--config", own / "settings.yaml"
        values = {"num_warmup_steps": 0, "seed": 1, "dtype": "fp32", "data_split": "1,0,0", "weight_decay": 0.1}
        changed, done = mutate_json(rng, values)
        content = yaml.safe_dump(changed, allow_unicode=True).encode(errors="replace")
        if rng.random() < 0.5:
            content, done = mutate_bytes(rng, content)
        if rng.random() < 0.1:
            letters = "abcdefghijk"
            pairs = zip(letters[1:], letters, strict=False)
            lines = [f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for new, old in pairs]
            content, done = ("a: &a [x]\n" + "".join(lines)).encode(), "aliases of aliases"
        file.write_bytes(content)
        note(f"{file.name}: {done}")
    else:
        flag, file = "--deepspeed_config", copy_of(material / "deepspeed.json", own / "deepspeed.json")
        settings = {
            "zero_optimization": {"stage": rng.randrange(4), "overlap_comm": True}, "gradient_clipping": 1.0,
            "bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "train_batch_size": 4,
            "flops_profiler": {"enabled": False}, "comms_logger": {"enabled": False}, "wall_clock_breakdown": True,
        }  # fmt: skip
        kept = rng.sample(sorted(settings), rng.randrange(1, 4))
        file.write_text(json.dumps({name: settings[name] for name in kept}))
        note(mutate_file(rng, file))
    if rng.random() < 0.15:
        file = Path(rng.choice(STRANGE_WORDS))
    return run_step_until_models(step, [*step_words(material, step, own / "trained"), f"{flag}={file}"])


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
        (checkpoint / store.MANIFEST).write_bytes(json.dumps({**content, "sha256": store._seal(content)}).encode())
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
    words += rng.choice(([], ["--resume", str(newest)], ["--overwrite_output_dir"], ["--resume_force"]))
    return run_step_until_models("sft", [*words, "--save_steps", "1"])


# Kind -> (case, how many of each 20 cases).
KINDS: dict[str, tuple[Case, int]] = {
    "model folder in a step": (model_in_step, 5),
    "data file in a step": (data_in_step, 5),
    "flags of a step": (flags, 5),
    "YAML and DeepSpeed settings": (settings_file, 3),
    "output folder in a resumed run": (checkpoint_resume, 2),
}


def kind_of(number: int) -> str:
    """The kind of a case: each 20 cases have the same kinds."""
    names = [name for name, (_, share) in KINDS.items() for _ in range(share)]
    return names[number * 7 % len(names)]  # 7 and 20 have no common divisor, so that few cases have many kinds
