"""Imports point down the layers, without cycles; no module knows a feature; modules have their own
names and up to 500 lines."""

import ast
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from test_features_can_be_deleted import BUILDS_ON

import dschat_ppo

ROOT = Path(dschat_ppo.__file__).parent
LAYERS = [
    {"errors", "features"},  # every layer may raise its exceptions and ask for hooks
    {"config", "types"},
    {"algorithms", "common"},
    {"cpu_kernels", "gpu_kernels"},
    {"data", "models", "monitor"},
    {"checkpoint", "engine", "html_report", "rewards"},
    {"nonfinite", "rollout", "run"},
    {"planner"},
    {"ppo", "supervised"},
    {"tools"},
    {"commands"},
    {"__main__"},
]
LARGE = ("torch", "deepspeed", "datasets", "transformers", "tokenizers", "numpy")
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MODULES = sorted(
    path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"
)


@cache
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
    """The package of a module, or the module itself if it lies directly under the root."""
    return module.parts[0].removesuffix(".py")


def feature_of(module: Path) -> str | None:
    """The feature to whose folder a module belongs."""
    if module.parts[0] == "features" and len(module.parts) > 2:
        return module.parts[1]
    return None


def dotted(module: Path) -> str:
    return ".".join(("dschat_ppo", *module.with_suffix("").parts)).removesuffix(".__init__")


def wrong_imports(modules: list[Path], is_allowed) -> list[str]:
    """The imports of these modules that `is_allowed(module, name)` refuses."""
    wrong = []
    for module in modules:
        for line, name in imports_of(module):
            if not is_allowed(module, name):
                wrong.append(f"{module}:{line} imports {name}")
    return wrong


def test_a_module_imports_lower_layers_or_its_own_package():
    assert {unit_of(module) for module in MODULES} <= LAYER_OF.keys()

    def is_allowed(module: Path, name: str) -> bool:
        here = unit_of(module)
        layer = LAYER_OF[here]
        if feature_of(module):
            layer = LAYER_OF["commands"]
        root, _, rest = name.partition(".")
        if root != "dschat_ppo" or not rest:  # the package itself holds its version alone
            return True
        there = rest.split(".")[0]
        return there == here or LAYER_OF[there] < layer

    assert wrong_imports(MODULES, is_allowed) == []


def test_a_feature_is_known_to_its_own_folder_and_what_builds_on_it():
    def is_allowed(module: Path, name: str) -> bool:
        here = feature_of(module)
        package, _, feature = name.partition("dschat_ppo.features.")
        if package != "" or feature == "hooks":
            return True
        return feature.split(".")[0] in (here, *BUILDS_ON.get(here, ()))

    assert wrong_imports(MODULES, is_allowed) == []


def test_algorithms_import_torch_and_themselves_alone():
    allowed = (
        "torch",
        "dschat_ppo.algorithms",
        "dschat_ppo.types",  # for types alone
        "__future__",
        "collections",
        "contextlib",
        "dataclasses",
        "math",
        "typing",
    )
    modules = [module for module in MODULES if unit_of(module) == "algorithms"]
    assert len(modules) > 5
    assert wrong_imports(modules, lambda module, name: name.startswith(allowed)) == []


def test_configuration_imports_no_large_library():
    modules = [module for module in MODULES if unit_of(module) in ("config", "errors")]
    assert len(modules) > 5
    assert wrong_imports(modules, lambda module, name: name.split(".")[0] not in LARGE) == []


def test_no_import_cycle():
    known = {dotted(module) for module in MODULES}
    graph = {}
    for module in MODULES:
        names = {name for _, name in imports_of(module)}
        imported = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[dotted(module)] = imported & known - {dotted(module)}
    assert sum(map(len, graph.values())) > len(graph), "the reader of imports sees them"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as problem:
        pytest.fail(f"these modules import each other: {' -> '.join(problem.args[1])}")


def test_every_module_has_its_own_name():
    names = Counter(
        module.stem
        for module in MODULES
        # the modules of features have the names of the hooks in them
        if module.stem not in ("__init__", "__main__") and not feature_of(module)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_file_has_at_most_500_lines():
    lines = {
        str(module): (ROOT / module).read_text(encoding="utf-8").count("\n") for module in MODULES
    }
    assert [name for name, count in lines.items() if count > 500] == []
    assert max(lines.values()) > 200, "the lines are counted"
