"""The cases of `fuzz.py`: each mutates something valid and gives it to a real entry point.

A case is a function of (random numbers, folder of the valid files, its own folder, which is the working directory). It
notes what it does, and returns the exit code, or ends the process with it.
"""

from __future__ import annotations

import json
import os
import random
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_type_hints

import yaml
from fuzz_flags import flags_of, random_flag
from fuzz_material import SCRIPTS, note, run_script, step_words
from fuzz_mutations import STRANGE_WORDS, copy_of, json_bytes, mutate_bytes, mutate_file, mutate_json, mutate_some
from fuzz_requests import ask_reward_server, score_remotely
from fuzz_tools import evaluate, replay

Case = Callable[[random.Random, Path, Path], int]


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
    note(mutate_some(rng, folder))
    return run_step_until_models(step, [*step_words(material, step, own / "trained"), flag, str(folder)])


def model_in_chat(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated model or adapter folder, loaded and asked one message."""
    from dschat_ppo.tools.chat import main

    source = rng.choice(("model", "model", "adapter"))
    folder = copy_of(material / source, own / source)
    note(mutate_some(rng, folder))
    (own / "input").write_text("Hello there\n")
    with (own / "input").open() as file:
        os.dup2(file.fileno(), 0)
    return main(["--model", str(folder), "--max_tokens", "3", "--dtype", "fp32"])


def template(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated chat template, or variables for it."""
    file = copy_of(material / "template.jinja", own / "template.jinja")
    note(mutate_file(rng, file))
    words = [*step_words(material, "sft", own / "trained"), "--data_path", str(material / "data/chats.jsonl")]
    words += ["--chat_template", str(file)]
    if rng.random() < 0.5:
        value, done = mutate_json(rng, {"a": 1, "tools": [{"name": "f"}], "messages": [1]})
        note(done)
        words += ["--chat_template_kwargs", json_bytes(value).decode()[:100_000]]
    return run_step_until_models("sft", words)


def data_in_step(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated data file in the step that reads it."""
    source = rng.choice(sorted((material / "data").iterdir()))
    step = {"pairs": rng.choice(("reward", "dpo")), "prompts": "ppo"}.get(source.stem, "sft")
    file = copy_of(source, own / source.name)
    note(mutate_file(rng, file))
    words = [*step_words(material, step, own / "trained"), "--data_path", str(file)]
    if rng.random() < 0.2:
        words += ["--data_path", str(material / f"data/{source.name}"), str(file)]
    if rng.random() < 0.2:
        words += ["--eval_data_path", str(file)]
    if rng.random() < 0.2:
        words += ["--streaming", "--streaming_rows", "8"]
    if rng.random() < 0.3:
        words += ["--bad_rows", rng.choice(("skip", "error"))]
    return run_step_until_models(step, words)


def data_preview(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated data file in the preview of data."""
    from dschat_ppo.tools.data import main

    source = rng.choice(sorted((material / "data").iterdir()))
    file = copy_of(source, own / source.name)
    note(mutate_file(rng, file))
    words = ["--step", rng.choice(("1", "2", "3")), "--data_path", str(file), "--data_output_path", str(own / "cache")]
    words += ["--tokenizer", str(material / "model"), *rng.choice(([], ["--samples", "9"], ["--rows", "3"]))]
    note(shlex.join(words))
    return main(words)


def flags(rng: random.Random, material: Path, own: Path) -> int:
    """Random values of a step's flags, misspelt names, repeated flags."""
    from dschat_ppo.config.steps import STEPS

    step = rng.choice(list(SCRIPTS))
    words = step_words(material, step, own / "trained")
    known = flags_of(get_type_hints(STEPS[step].config).values())
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


def checkpoint_export(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated checkpoint, exported; its manifest may fit the mutated files again."""
    from dschat_ppo.tools.export import main

    run = copy_of(material / "run", own / "run")
    checkpoint = sorted((run / "checkpoints").glob("step_*"))[-1]
    path = rng.choice([path for path in sorted(checkpoint.rglob("*")) if path.is_file()])
    note(mutate_file(rng, path))
    if rng.random() < 0.7:
        _seal(checkpoint)
    given = rng.choice((checkpoint, run))
    return main([str(given), str(own / "trained"), "--model", str(material / "model")])


def _seal(checkpoint: Path) -> None:
    """Make the manifest describe the files as they are."""
    from dschat_ppo.checkpoint import store

    if not (checkpoint / store.MANIFEST).is_file():  # a pipe or a device
        return
    try:
        content = json.loads((checkpoint / store.MANIFEST).read_bytes())
        content.pop("sha256", None)
        for name in content["files"]:
            if (checkpoint / name).is_file():
                content["files"][name] = store.describe_file(checkpoint / name)
        (checkpoint / store.MANIFEST).write_bytes(json_bytes({**content, "sha256": store._seal(content)}))
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


def report(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated output folder in the report."""
    from dschat_ppo.tools.report.__main__ import main

    run = copy_of(material / "run", own / "run")
    _ppo_outputs(rng, run)
    shown = [run / name for name in ("metrics.jsonl", "samples.jsonl", "health.jsonl", "result.json", "config.yaml")]
    shown += [run / "eval/step_000001.jsonl"]
    for path in rng.sample(shown, rng.choice((1, 1, 2))):
        note(mutate_file(rng, path))
    return main([str(run), "--out", str(own / "report.html")])


def _ppo_outputs(rng: random.Random, run: Path) -> None:
    """What step 3 writes beside the outputs of step 1, with strange numbers."""
    names = ("reward/score_mean", "kl/ref_k1", "policy/entropy", "time/rollout", "memory/train_peak_gib")
    lines = {
        "samples": [{"step": step, "prompt": "a <b>", "answer": "c", "score": 0.5, "scores": {"rule": 1.0},
                     "kl": 0.1, "length": 3, "ended": "eos"}
                    for step in range(3)],
        "health": [{"step": 1, "rule": "kl_high", "message": "KL is high"}],
        "eval/step_000001": [
            {"prompt": "a", "answers": ["b", "c"], "scores": [1.0, None], "lengths": [3, 4], "kl": [0.1, 0.2],
             "ended": ["eos", "length"], "scores_by_source": {"rule": [1.0, 0.0]}}
        ],
    }  # fmt: skip
    if rng.random() < 0.5:
        lines["metrics"] = [
            {"step": step, "time": 1000.0 + step, **{name: rng.choice((0.1, 1e308, None, "NaN", -3)) for name in names}}
            for step in range(1, 5)
        ]
    for name, rows in lines.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


# Kind -> (case, how many of each 30 cases).
KINDS: dict[str, tuple[Case, int]] = {
    "model folder in a step": (model_in_step, 4),
    "model folder in the chat": (model_in_chat, 3),
    "chat template": (template, 1),
    "data file in a step": (data_in_step, 3),
    "data file in the preview": (data_preview, 2),
    "flags of a step": (flags, 4),
    "YAML and DeepSpeed settings": (settings_file, 1),
    "checkpoint in the export": (checkpoint_export, 1),
    "output folder in a resumed run": (checkpoint_resume, 1),
    "output folder in the report": (report, 2),
    "evaluation": (evaluate, 3),
    "repro bundle in the replay": (replay, 2),
    "request to the reward server": (ask_reward_server, 2),
    "reply to the remote reward": (score_remotely, 1),
}


def kind_of(number: int) -> str:
    """The kind of a case: each 30 cases have the same kinds."""
    names = [name for name, (_, share) in KINDS.items() for _ in range(share)]
    return names[number * 7 % len(names)]  # 7 and 30 have no common divisor, so that few cases have many kinds
