"""Imports go down only: the layers of the package, read from its sources."""

import ast
from pathlib import Path

import pytest

import dschat_ppo

ROOT = Path(dschat_ppo.__file__).parent
LAYERS = [
    {"errors"},  # every layer may raise its exceptions
    {"config", "types"},
    {"algorithms", "common"},
    {"runtime"},
    {"data", "models", "monitor"},
    {"checkpoint", "engine", "rewards"},
    {"nonfinite", "rollout", "session"},
    {"ppo", "supervised"},
    {"tools"},
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports_of(module: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def unit_of(module: Path) -> str:
    """The package of a module directly under the root, or the module itself."""
    return module.parts[0].removesuffix(".py")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_belongs_to_a_layer(module):
    assert unit_of(module) in LAYER_OF


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_imports_lower_layers_or_its_own_package(module):
    here = unit_of(module)
    for line, name in imports_of(module):
        root, _, rest = name.partition(".")
        if root == "dschat_ppo" and rest:  # the package itself holds its version alone
            there = rest.split(".")[0]
            assert there == here or LAYER_OF[there] < LAYER_OF[here], f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if unit_of(m) == "algorithms"], ids=str)
def test_algorithms_import_torch_and_themselves_alone(module):
    allowed = ("torch", "dschat_ppo.algorithms", "__future__", "dataclasses", "math", "collections", "typing")
    for line, name in imports_of(module):
        assert name.startswith(allowed), f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if unit_of(m) in ("config", "errors")], ids=str)
def test_configuration_imports_no_torch(module):
    for line, name in imports_of(module):
        assert name.split(".")[0] not in ("torch", "deepspeed", "datasets"), f"{module}:{line} imports {name}"


def test_the_reader_of_imports_sees_some():
    names = {name for _, name in imports_of(Path("ppo/components.py"))}
    assert "dschat_ppo.ppo.generate.RolloutGenerator" in names
    assert "torch" in names
    assert len(MODULES) > 40
