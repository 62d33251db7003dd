"""Names of the files in an output folder, and paths as a person reads them."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG, RESULT, METRICS, STARTS = "config.yaml", "result.json", "metrics.jsonl", "starts.jsonl"
MODELS, HEALTH, SAMPLES, REPORT = "models.json", "health.jsonl", "samples.jsonl", "report.html"
# of `--validate_only`: inside --output_dir, where no run of training looks for outputs
VALIDATION = "validation"


def shown_path(path: str | Path) -> str:
    """A path for a message: relative to the working directory if it lies in it."""
    text = str(path)
    return text.removeprefix(os.path.join(os.getcwd(), "")) or text
