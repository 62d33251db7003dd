"""setup.py declares every library that the package imports, and adds none beyond the settled
ones."""

import ast
import re
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# all others are extras
SETTLED = {"torch", "deepspeed", "transformers", "accelerate", "datasets", "tensorboard"}
NAMES = {  # import -> package
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "math_verify": "math-verify",
    "PIL": "pillow",
    "httpx": "huggingface-hub",
    "httpx2": "huggingface-hub",  # which requires one of them
}
# imported inside a function, after a check that the extra is installed
OPTIONAL = {"PIL", "fastapi", "math_verify", "openai", "peft", "trackio", "uvicorn", "wandb"}


def name_of(requirement: str) -> str:
    """`"PyYAML>=5.1"` -> `"pyyaml"`."""
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """(`install_requires`, `extras_require`), read from the source of setup.py."""
    call = next(
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    return ast.literal_eval(given["install_requires"]), ast.literal_eval(given["extras_require"])


def imported(*folders: str) -> dict[str, tuple[str, bool]]:
    """Library -> (a file and line that imports it, whether some import is at the top of a
    module)."""
    found: dict[str, tuple[str, bool]] = {}
    for path in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            for library in {module.split(".")[0] for module in modules}:
                if library not in sys.stdlib_module_names and library != "dschat_ppo":
                    at_top = node in tree.body or found.get(library, ("", False))[1]
                    found[library] = (f"{path.relative_to(ROOT)}:{node.lineno}", at_top)
    return found


IMPORTED = imported("dschat_ppo", "training")
# torch's builds for GPUs require it
assert IMPORTED.pop("triton")[0].startswith("dschat_ppo/gpu_kernels.py")


@pytest.mark.parametrize("library", sorted(IMPORTED))
def test_an_imported_library_is_declared(library):
    place, at_top = IMPORTED[library]
    required, extras = declared()
    package = NAMES.get(library, library)
    if library in OPTIONAL:
        assert not at_top, f"{place} imports an extra at the top of the module"
        required = [name for names in extras.values() for name in names]
    assert package in map(name_of, required), (
        f"{place} imports {library}, which setup.py does not declare"
    )


def test_every_requirement_is_settled_or_required_by_a_settled_library():
    """The second kind adds nothing to an installation."""
    required = {name_of(requirement) for requirement in declared()[0]}
    assert required >= SETTLED
    theirs = {
        name_of(requirement)
        for library in SETTLED
        for requirement in requires(library) or []
        if "extra" not in requirement
    }
    assert required - SETTLED <= theirs


def test_the_tested_versions_are_within_the_declared_ranges():
    """constraints.txt pins what every bounded requirement installs, but torch and what needs a
    GPU."""
    required, extras = declared()
    bounded = [Requirement(text) for text in [*required, *sum(extras.values(), [])]]
    bounded = [requirement for requirement in bounded if requirement.specifier]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line.partition("#")[0]) for line in lines if not line.startswith("#")]
    assert {r.name for r in bounded} - {pin.name for pin in pinned} == {"torch", "bitsandbytes"}
    for pin in pinned:
        (only,) = pin.specifier
        assert only.operator == "=="
        for requirement in bounded:
            assert requirement.name != pin.name or requirement.specifier.contains(only.version), (
                f"{pin}: {requirement}"
            )


def test_every_torch_that_the_tests_run_with_is_declared_and_no_other_minor_version_beyond_them():
    """Before 2.8 memory pools and expandable segments excluded each other; CUDA graphs of rollouts
    have both."""
    (torch,) = [each for each in map(Requirement, declared()[0]) if each.name == "torch"]
    named = re.findall(
        r"torch==(\d+)\.(\d+)", (ROOT / "tests/versions.sh").read_text(encoding="utf-8")
    )
    versions = [(int(major), int(minor)) for major, minor in named]
    assert (2, 11) in versions and all(
        torch.specifier.contains(f"{major}.{minor}.0") for major, minor in versions
    )
    major, minor = max(versions)
    assert not torch.specifier.contains(f"{major}.{minor + 1}.0") and not torch.specifier.contains(
        "2.7.1"
    )
