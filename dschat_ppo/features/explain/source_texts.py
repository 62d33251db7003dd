"""The text of functions that run, with all that they reach, for a program that stands alone."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dschat_ppo.errors import UserError

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
PACKAGE = "dschat_ppo"


@dataclass(frozen=True)
class SourceFile:
    """A module as text.

    Attributes:
        path: of its file.
        text: of the file.
        definitions: name -> what defines it, of the top level.
        imports: name -> (module, its name there, or "" for the module itself).
    """

    path: Path
    text: str
    definitions: dict[str, Definition]
    imports: dict[str, tuple[str, str]]

    def text_of(self, node: Definition) -> str:
        """The text of a definition, with its decorators."""
        first = node.lineno
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.decorator_list:
            first = node.decorator_list[0].lineno
        assert node.end_lineno is not None
        return "\n".join(self.text.splitlines()[first - 1 : node.end_lineno])


@cache
def source_file(path: Path) -> SourceFile:
    """Read a module. SyntaxError and OSError propagate."""
    text = path.read_text(encoding="utf-8")
    definitions: dict[str, Definition] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            definitions[node.target.id] = node
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                imports[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                imports[alias.asname or alias.name] = (alias.name, "")
    return SourceFile(path, text, definitions, imports)


@cache
def package_file(module: str) -> Path:
    """The file of a module of this package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


Import = tuple[str, str, str]  # (module, name there, name here); "" for the module itself


@dataclass
class Reached:
    """Definitions and all that they reach, in the order in which they are used, breadth first.

    Attributes:
        transform: (name, text of its definition) -> the text that is kept_lines.
        known: names that are defined elsewhere.
        placed: name -> (name of its definition, file), of names that `transform` writes.
        texts: name -> text.
        imports: of what is no part of this package.
    """

    transform: Callable[[str, str], str]
    known: frozenset[str]
    placed: dict[str, tuple[str, Path]]
    texts: dict[str, str] = field(default_factory=dict)
    imports: set[Import] = field(default_factory=set)
    _files: dict[str, Path] = field(default_factory=dict)

    def add(self, names: Sequence[str], path: Path) -> None:
        """Add the definitions of these names in a module. `UserError` if two modules define a name
        that the program needs from both."""
        waiting = [(name, path) for name in names]
        while waiting:
            name, file = waiting.pop(0)
            name, file = self.placed.get(name, (name, file))
            module = source_file(file)
            if name in self.known:
                continue
            if name in module.definitions:
                self._require_one_file(name, file)
                if name in self.texts:
                    continue
                text = self.transform(
                    name, without_details(module.text_of(module.definitions[name]))
                )
                self.texts[name] = text
                waiting += [(used, file) for used in names_read(text)]
            elif name in module.imports:
                origin, original = module.imports[name]
                if origin.split(".")[0] == PACKAGE:
                    waiting.append((original, package_file(origin)))
                else:
                    self.imports.add((origin, original, name))

    def add_imports_of(self, text: str, path: Path) -> None:
        """Add the imports of a text of a module."""
        for name in names_read(text):
            if name in source_file(path).imports:
                origin, original = source_file(path).imports[name]
                if origin.split(".")[0] != PACKAGE:
                    self.imports.add((origin, original, name))

    def _require_one_file(self, name: str, file: Path) -> None:
        if self._files.setdefault(name, file) != file:
            raise UserError(
                f"{file}: {name} is also defined in {self._files[name]}, and one program can hold"
                " one of them; rename it"
            )


def import_lines(imports: Iterable[Import]) -> list[str]:
    """The statements of imports: those of the standard library, an empty line, the others."""
    blocks = []
    for is_standard in (True, False):
        modules = []
        names: dict[str, list[str]] = {}
        for origin, original, name in sorted(imports):
            if (origin.split(".")[0] in sys.stdlib_module_names) != is_standard:
                continue
            renamed = ""
            if name not in (original, origin):
                renamed = f" as {name}"
            if original == "":
                modules.append(f"import {origin}{renamed}")
            else:
                names.setdefault(origin, []).append(f"{original}{renamed}")
        of_names = [f"from {origin} import {', '.join(names[origin])}" for origin in names]
        blocks.append([*modules, *of_names])
    return [*blocks[0], "", *blocks[1]]


def in_order_of_execution(texts: dict[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Definitions by when Python can execute them: constants that read none of the others;
    functions and classes, in their order; constants that read others, each after those."""
    plain = []
    functions_and_classes = []
    last = []
    for name, text in texts.items():
        [*_, node] = ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) or len(ast.parse(text).body) > 1:
            functions_and_classes.append(text)
        elif set(names_read(text)) & set(texts) - {name}:
            last.append(text)
        else:
            plain.append(text)
    return plain, functions_and_classes, last[::-1]


def names_read(text: str) -> list[str]:
    """The names that a text reads, in their order, those of annotations too."""
    names = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            names[node.id] = (node.lineno, node.col_offset)
    return sorted(names, key=lambda name: names[name])


def without_details(text: str) -> str:
    """A definition with each docstring up to its first empty line, and without assertions."""
    lines = text.splitlines()
    removed: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            removed |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        docstring = node.body[0]
        is_string = isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
        if not is_string or ast.get_docstring(node) is None:
            continue
        last = docstring.end_lineno or docstring.lineno
        for line_number in range(docstring.lineno, last):
            if lines[line_number].strip() == "" and line_number + 1 < last:
                removed |= set(range(line_number + 1, last + 1))
                lines[line_number - 1] += '"""'
                break
    kept_lines = [
        line for line_number, line in enumerate(lines, start=1) if line_number not in removed
    ]
    return "\n".join(kept_lines)


def without_dead_branches(text: str, value_of: Callable[[ast.expr], Any]) -> str:
    """A function without the branches that are never taken.

    Args:
        text: of the function.
        value_of: (condition) -> its value, or None if it is not known.
    """
    while True:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.If) and value_of(node.test) is not None:
                text = _with_branch(text, node, bool(value_of(node.test)))
                break
        else:
            return _without_unreachable(text)


def _with_branch(text: str, node: ast.If, is_taken: bool) -> str:
    """The text with one of the branches of a statement in its place."""
    lines = text.splitlines()
    body = node.body if is_taken else node.orelse
    kept_lines: list[str] = []
    if body:
        last = body[-1].end_lineno
        for line in lines[body[0].lineno - 1 : last]:
            kept_lines.append(line.removeprefix("    "))
    assert node.end_lineno is not None
    lines[node.lineno - 1 : node.end_lineno] = kept_lines
    return "\n".join(lines)


def _without_unreachable(text: str) -> str:
    """The function up to its first `return` at the top level."""
    [function] = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    for statement in function.body:
        if isinstance(statement, ast.Return):
            return "\n".join(text.splitlines()[: statement.end_lineno])
    return text


def with_fields(text: str, names: Iterable[str]) -> str:
    """A dataclass with these of its fields; comments above a field go with it."""
    kept_names = set(names)
    [definition] = ast.parse(text).body
    assert isinstance(definition, ast.ClassDef)
    lines = text.splitlines()
    kept_lines = lines[: definition.body[0].end_lineno]  # up to the docstring
    previous = definition.body[0].end_lineno or 0
    body = []
    for statement in definition.body[1:]:
        last = statement.end_lineno or statement.lineno
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.target.id in kept_names:
                body += [line for line in lines[previous:last] if line.strip()]
        previous = last
    return "\n".join([*kept_lines, "", *body])


def replaced_words(text: str, words: dict[str, str]) -> str:
    """A text with other words in the place of some."""
    for word, replacement in words.items():
        text = re.sub(rf"\b{re.escape(word)}\b", replacement, text)
    return text
