"""Reading the traces of `--profile`."""

import gzip
import json
from pathlib import Path


def spans_of(file: Path) -> list[dict]:
    """The events of a trace that have a duration, in the order of their begin."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        events = json.load(text)["traceEvents"]
    return sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])


def inside(block: dict, events: list[dict]) -> list[str]:
    """Names of the events of the same thread that begin and end inside the block."""
    begin, end, thread = block["ts"], block["ts"] + block["dur"], (block["pid"], block["tid"])
    within = (event for event in events if event is not block and (event["pid"], event["tid"]) == thread)
    return [event["name"] for event in within if begin <= event["ts"] and event["ts"] + event["dur"] <= end]


def blocks(events: list[dict]) -> list[dict]:
    """The events that the run has named."""
    return [event for event in events if event.get("cat") == "user_annotation" and "Profiler" not in event["name"]]
