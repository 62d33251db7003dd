"""`--validate_only`: the outputs of a run that evaluates and does not train, separate from those of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.html_report.write_report import report_run
from dschat_ppo.monitor.writers import MetricsWriter, write_result

VALIDATION = "validation"  # inside --output_dir, where no run of training looks for earlier outputs


def write_validation(folder: Path, metrics: dict[str, float], seconds: float) -> dict[str, Any]:
    """Write the metrics as step 0 of `metrics.jsonl`, `result.json` (returned) and the report. Collective."""
    with MetricsWriter(folder, None) as writer:
        writer.write(0, metrics)
    result = {**metrics, "world_size": dist.world_size(), "seconds": round(seconds, 2)}
    write_result(folder, result)
    if dist.is_main():
        report_run(folder)
    logger().info(f"validation: saved to {shown_path(folder)}; nothing was trained")
    return result
