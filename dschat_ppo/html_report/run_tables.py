"""Tables that compare runs: flags and versions of libraries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from dschat_ppo.config.retired_flags import RETIRED
from dschat_ppo.config.steps import STEPS
from dschat_ppo.html_report.run_folder import Run

_ABSENT = "-"
_ALGORITHM = {"advantage_estimator": "advantages", "policy_loss": "policy loss", "objective": "objective"}
_DATA = {"data_path": "data", "eval_data_path": "held-out data", "eval_reward_function": "held-out reward"}


def shown_value(value: Any) -> str:
    """A value of YAML or JSON as text: None as "-", a list or mapping as JSON, a long number with four digits."""
    if value is None:
        return _ABSENT
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def described(run: Run) -> dict[str, str]:
    """What a run trains, on what and by what: the label of a row -> its text."""
    given = {name: value for name, value in run.config.items() if value not in (None, [])}
    rewards = [given.get("reward_model_name_or_path", given.get("critic_model_name_or_path"))]
    if not given.get("use_reward_model"):
        rewards = []
    rewards += [*given.get("reward_function", []), given.get("remote_reward_url")]
    algorithm = [f"{given[flag]} {what}" for flag, what in _ALGORITHM.items() if flag in given]
    found = {**run.models, "algorithm": algorithm, "reward": rewards if "actor_model_name_or_path" in given else []}
    found |= {words: given.get(flag) for flag, words in _DATA.items()}
    rows = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
    return {name: text for name, value in rows.items() if (text := ", ".join(str(part) for part in value if part))}


def differing_flags(runs: Sequence[Run]) -> list[list[str]]:
    """(flag, value in each run) of the flags whose values differ; "-" where a run lacks the flag or has no value."""
    names = sorted({flag for run in runs for flag in run.config})
    rows = [[f"--{flag}", *(shown_value(run.config.get(flag)) for run in runs)] for flag in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def changed_flags(run: Run) -> list[list[str]]:
    """(flag, value) of the flags that differ from the defaults of their step, or have no default there; not of flags
    that left (`note_on_retired`)."""
    known = defaults(run.config)
    return [
        [f"--{flag}", shown_value(value)]
        for flag, value in run.config.items()
        if flag not in RETIRED and known.get(flag, MISSING) != value
    ]


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Flag -> default of the step that a configuration belongs to; flags that must be given have none."""
    if "actor_model_name_or_path" in config:
        step = STEPS["ppo"]
    elif "objective" in config:
        step = STEPS["reward" if config["objective"] in ("reward", "process") else "dpo"]
    else:
        step = STEPS["sft"]
    found: dict[str, Any] = {}
    for group in get_type_hints(step.config).values():
        for flag in fields(group):
            if flag.default is not MISSING:
                found[flag.name] = flag.default
            elif flag.default_factory is not MISSING:
                found[flag.name] = flag.default_factory()
    return found | step.defaults


def versions(runs: Sequence[Run]) -> list[list[str]]:
    """(library, version in each run) as `starts.jsonl` records them; "a, then b" where a resumed run changed it."""
    recorded = [[start["versions"] for start in run.starts if isinstance(start.get("versions"), dict)] for run in runs]
    names = list(dict.fromkeys(name for starts in recorded for found in starts for name in found))
    return [
        [name, *(", then ".join(dict.fromkeys(str(found[name]) for found in starts if name in found)) or _ABSENT
                 for starts in recorded)]
        for name in names
    ]  # fmt: skip
