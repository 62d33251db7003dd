"""A missing extra is answered by the pip command that installs it."""

import ast
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_dependencies import OPTIONAL, declared

from dschat_ppo.common import extras
from dschat_ppo.common.extras import EXTRAS, how_to_install, is_installed, require_extra
from dschat_ppo.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", sorted(EXTRAS))
def test_a_missing_package_is_answered_by_the_command_that_installs_it(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert not is_installed(module)
    with pytest.raises(UserError) as problem:
        require_extra(module, "--some_flag")
    package, command = EXTRAS[module][0], how_to_install(module)
    assert str(problem.value) == f"--some_flag needs the package {package}: {command}"
    extra, (required, optional) = command.partition("[")[2].partition("]")[0], declared()
    installed = {Requirement(text).name for text in (optional[extra] if extra else required)}
    assert package in installed, f"{command} does not install {package}"


@pytest.mark.parametrize(("module", "inside", "outside"), [
    ("peft", 'pip install -e ".[lora]"', 'pip install "dschat_ppo[lora]"'),
    ("tensorboard", "pip install -e .", "pip install dschat_ppo"),
])  # fmt: skip
def test_the_command_fits_a_checkout_and_an_installed_package(monkeypatch, tmp_path, module, inside, outside):
    assert how_to_install(module) == inside
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert how_to_install(module) == outside


def test_every_optional_import_has_a_command():
    assert set(EXTRAS) >= OPTIONAL


def test_every_module_is_required_somewhere():
    """By name, in a call of `require_extra`, `is_installed` or a table of modules; else its message is never shown."""
    strings = set()
    for path in (ROOT / "dschat_ppo").rglob("*.py"):
        if path.name != "extras.py":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            strings |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert set(EXTRAS) <= strings
