"""Cases of `fuzz.py` for `tools.evaluate` and `tools.replay`; see `fuzz_cases.py`."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

from fuzz_flags import Flag, flags_of, random_flag
from fuzz_material import BUNDLE, note
from fuzz_mutations import copy_of, mutate_file, mutate_some

_NUMBER, _SMALL = {"type": float}, {"choices": (1, 2, 3)}  # large amounts would only compute for long
_OWN_FLAGS: list[Flag] = [
    ("decoding", {"choices": ("greedy", "sampled", "both")}), ("samples", _SMALL), ("pass_score", _NUMBER),
    ("max_prompts", {"type": int}), ("max_prompt_seq_len", {"type": int}), ("max_seq_len", {"type": int}),
    ("batch_size", {"type": int}), ("max_batch_tokens", {"type": int}),
    ("dtype", {"choices": ("bf16", "fp16", "fp32")}),
    ("json", {"type": str}), ("show", _SMALL), ("model", {"type": str}), ("pairs", {"type": str, "nargs": "*"}),
    ("temperature", _NUMBER), ("top_p", _NUMBER), ("top_k", {"type": int}), ("min_p", _NUMBER),
    ("repetition_penalty", _NUMBER), ("max_tokens", _SMALL), ("seed", {"type": int}),
]  # fmt: skip


def evaluate(rng: random.Random, material: Path, own: Path) -> int:
    """`tools.evaluate` with a mutated model, reward model or data file, or with random flags."""
    from dschat_ppo.config.data_flags import DataFlags
    from dschat_ppo.config.reward_flags import RewardSourceFlags
    from dschat_ppo.tools.evaluate import main

    used = {name: material / name for name in ("model", "reward", "data/prompts.jsonl", "data/pairs.jsonl")}
    changed = rng.choice((*used, "flags", "flags"))
    if changed != "flags":
        used[changed] = copy_of(used[changed], own / Path(changed).name)
        note(mutate_some(rng, used[changed]) if used[changed].is_dir() else mutate_file(rng, used[changed]))
    model, reward, prompts, pairs = map(str, used.values())
    words = ["--model", model, "--data_path", prompts, "--reward_model_name_or_path", reward, "--dtype", "fp32"]
    words += ["--max_tokens", "3", "--max_prompt_seq_len", "32", "--data_output_path", str(own / "cache")]
    words += ["--pairs", pairs, "--max_seq_len", "64"] if changed == "data/pairs.jsonl" or rng.random() < 0.3 else []
    words += rng.choice(([], ["--json", str(own / "found.json")], ["--show", "2"]))
    if changed == "flags":
        known = [*flags_of((DataFlags, RewardSourceFlags)), *_OWN_FLAGS, *_OWN_FLAGS]
        words += [word for _ in range(rng.choice((1, 1, 2, 3))) for word in random_flag(rng, known)]
    note(shlex.join(words)[:2000])
    return main(words)


def replay(rng: random.Random, material: Path, own: Path) -> int:
    """`tools.replay` of a mutated bundle."""
    from dschat_ppo.tools.replay import main

    folder = copy_of(material / BUNDLE, own / "bundle")
    note(mutate_some(rng, folder / "model" if (folder / "model").is_dir() and rng.random() < 0.3 else folder))
    words = [str(folder), *rng.choice(([], [], ["--dtype", rng.choice(("bf16", "fp16", "fp32"))]))]
    note(shlex.join(words))
    code = main(words)
    return 0 if code == 1 else code  # 1: all numbers are finite
