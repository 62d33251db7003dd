"""The hooks that the code asks for are those that features offer and that architecture.md lists."""

import re
from pathlib import Path

import pytest

import dschat_ppo
from dschat_ppo import features
from dschat_ppo.features import FEATURES, hooks

ROOT = Path(dschat_ppo.__file__).parent
PAGE = ROOT.parent / "docs/architecture.md"


def asked() -> set[str]:
    """The hooks that the code asks for."""
    names = set()
    for path in ROOT.rglob("*.py"):
        names |= set(re.findall(r'\bhooks\(\s*"([\w.]+)"', path.read_text(encoding="utf-8")))
    return names


def test_each_hook_is_offered_by_a_feature():
    assert len(asked()) > 5
    assert [name for name in sorted(asked()) if not hooks(name)] == []


def test_architecture_lists_the_hooks():
    section = PAGE.read_text(encoding="utf-8").split("## Features")[1].split("## ")[0]
    listed = set(re.findall(r"`(\w+\.\w+)`", section)) - {"config.of", "rows.extra"}
    named = {name for name in listed if not name.endswith((".py", ".md"))}
    assert asked() - named == set(), "asked for, but not listed"


def test_the_table_names_all_folders_in_order():
    folders = sorted(path.parent.name for path in (ROOT / "features").glob("*/__init__.py"))
    assert sorted(FEATURES) == folders


def test_a_line_without_its_folder_is_named(monkeypatch):
    monkeypatch.setattr(features, "FEATURES", ("router", "no_such_feature"))
    with pytest.raises(ModuleNotFoundError, match="features/no_such_feature is gone.*its line"):
        hooks.__wrapped__("flags.FLAGS")
