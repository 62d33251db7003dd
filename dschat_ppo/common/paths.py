"""Names of the files in an output folder, and paths as a person reads them."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

from dschat_ppo.config.feature_flags import feature_notes

CONFIG = "config.yaml"
RESULT = "result.json"
METRICS = "metrics.jsonl"
STARTS = "starts.jsonl"
MODELS = "models.json"
HEALTH = "health.jsonl"
SAMPLES = "samples.jsonl"
REPORT = "report.html"
LOCK = ".lock"  # held while a run writes to the folder
# of `--validate_only`: inside --output_dir, where no run of training looks for outputs
VALIDATION = "validation"
# folders of the models that step 3 saves, by role
PPO_ROLES = (
    "actor",
    "critic",
    *chain.from_iterable(notes.saved_roles for notes in feature_notes()),
)


def shown_path(path: str | Path) -> str:
    """A path for a message: relative to the working directory if it lies in it."""
    text = str(path)
    return text.removeprefix(os.path.join(os.getcwd(), "")) or text
