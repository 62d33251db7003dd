"""The ```bash blocks of the documents, as commands. A comment directly above a block says who runs it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```bash\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        page: its file, relative to the repository.
        line: number of its first line.
        mark: the text of the comment above it; "" for none.
        text: what is between the fences.
    """

    page: str
    line: int
    mark: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One string for each command: continued lines are joined, comments are removed."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        without = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
        return [line for line in without if line]


def blocks_of(page: Path) -> list[Block]:
    """The bash blocks of a page, in their order."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(name, line, match[1] or "", match[2]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
