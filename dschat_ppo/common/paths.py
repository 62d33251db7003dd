"""Names of the files in an output folder, and paths as a person reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

CONFIG, RESULT, METRICS, STARTS = "config.yaml", "result.json", "metrics.jsonl", "starts.jsonl"
MODELS, HEALTH, SAMPLES, REPORT = "models.json", "health.jsonl", "samples.jsonl", "report.html"
VALIDATION = "validation"  # of `--validate_only`: inside --output_dir, where no run of training looks for outputs


def short_names(folders: Sequence[Path]) -> list[str]:
    """For each folder the shortest end of its path that no other folder has, without the end that all have in common:
    "ppo" for one folder, "a" and "b" for a/ppo and b/ppo."""
    parts = [folder.resolve().parts for folder in folders]
    while len(parts) > 1 and len({own[-1] for own in parts}) == 1 and min(map(len, parts)) > 2:
        parts = [own[:-1] for own in parts]
    longest = max(map(len, parts))
    for length in range(1, longest):
        names = ["/".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def shown_path(path: str | Path) -> str:
    """A path for a message: relative to the working directory if it lies in it."""
    text = str(path)
    return text.removeprefix(os.path.join(os.getcwd(), "")) or text
