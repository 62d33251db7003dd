"""Runs parts of `gpu.sh`: python -m gpu_checks.run_part PART ... [--tiny]. PART.json has what each has found so far."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_checks.parts import PARTS


class Findings:
    """What a part has found so far, in a file that is always whole."""

    def __init__(self, file: Path):
        self.file = file
        self.found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Keep a number, or a dict of them."""
        self.found[name] = value
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.found), encoding="utf-8")
        partial.replace(self.file)

    def measure(self, name: str, run: Callable[[], Any]) -> Any:
        """Keep what `run` returns; if it fails, say so in its place, and let the part continue. Returns that, or {}."""
        try:
            value = run()
        except Exception as problem:  # noqa: BLE001  one number that cannot be had must not cost the others
            traceback.print_exc()
            self.add(name, {"failed": f"{type(problem).__name__}: {problem}"[:300]})
            return {}
        self.add(name, value)
        return value


def main() -> None:
    """Run the parts in order."""
    for name in (word for word in sys.argv[1:] if word != "--tiny"):
        part, started = PARTS[name], time.monotonic()
        function = getattr(importlib.import_module(f"gpu_checks.{part.module}"), part.function)
        findings = Findings(Path(f"{name}.json"))
        function(findings, "--tiny" in sys.argv, *part.arguments)
        findings.add("seconds", round(time.monotonic() - started, 1))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no teardown of DeepSpeed's process groups


if __name__ == "__main__":
    main()
