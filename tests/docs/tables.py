"""The Markdown tables of a page."""

import re
from dataclasses import dataclass
from pathlib import Path

_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """A row of a table: the heading above the table, and its cells by the name of their column."""

    heading: str
    cells: dict[str, str]

    def __str__(self) -> str:
        return f"{self.heading}: {next(iter(self.cells.values()))}"


def rows_of(page: Path) -> list[Row]:
    """The rows of all tables of a page, in their order."""
    found, heading, header = [], "", None
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if header is None:
            header = cells
        elif not set("".join(cells)) <= set("-: "):
            assert len(cells) == len(header), f"{page.name}: {line}"
            found.append(Row(heading, dict(zip(header, cells, strict=True))))
    return found


def names_in(cell: str) -> list[str]:
    """The names in code, without dashes and values: "`--a 1`, `b`" holds a and b."""
    return [text.split()[0].lstrip("-") for text in _CODE.findall(cell)]


def flags_in(text: str) -> list[str]:
    """The flags of a text, without dashes."""
    return [flag.rstrip("_") for flag in re.findall(r"`?--([a-z][a-z0-9_.]*)", text)]
