"""The ```bash blocks of the documents, as commands."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [  # README.md first: other pages use what its commands write
    ROOT / "README.md",
    *sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "README.md"}),
    *sorted((ROOT / "training_scripts/examples").glob("*/README.md")),
]
FLAGS_OF_STEP_3 = "# flags of training/step3_ppo/main.py"  # first line of a block of flags
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        page: its file, relative to the repository.
        line: number of its first line.
        text: what is between the fences.
    """

    page: str
    line: int
    text: str

    @property
    def commands(self) -> list[str]:
        """One string for each command: continued lines are joined, comments are removed."""
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        without = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
        return [re.sub(r"  +", " ", line) for line in without if line]


def blocks_of(page: Path) -> list[Block]:
    """The bash blocks of a page, in their order."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in _BLOCK.finditer(text)
    ]


def files_of(page: Path) -> dict[str, str]:
    """The Python and YAML blocks of a page that begin with the name of a file, by that name."""
    block = r"^```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)^```"
    return dict(re.findall(block, page.read_text(encoding="utf-8"), re.M | re.S))


def templates_of(page: Path) -> dict[str, str]:
    """The Jinja blocks of a page that begin with the name of a file, by that name."""
    block = r"^```jinja\n(\{# (\w+\.jinja) #\}\n.*?)^```"
    text = page.read_text(encoding="utf-8")
    return {name: template for template, name in re.findall(block, text, re.M | re.S)}


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
